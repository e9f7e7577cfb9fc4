"""Faults × policies × tasks, compared with the same run without the fault. See scripts/faultbench."""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Some virtual machines announce AMX and then kill the process at its first use.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
from torch import Tensor, nn

from safetrain import SafeTrainer, TrainingStopped
from scripts.faultbench_tasks import STEPS, TASKS, Task

K = 120
"""The step at which faults are injected."""


# ---- faults --------------------------------------------------------------------------------------------------------


@dataclass
class Fault:
    """What is injected. `batches` changes the data before the run; `after` is called after each committed step."""

    batches: Callable[[Task], None] = lambda task: None
    after: Callable[[SafeTrainer, int], None] = lambda trainer, step: None
    lr: Callable[[int], float] = lambda step: 1.0
    """Factor on the learning rate, by attempted step."""
    loss: Callable[[int, Tensor], Tensor] = lambda step, loss: loss
    precision: str = "fp32"
    overflowing: bool = False
    dies_at: int | None = None
    within: float = 0.02
    """How much worse the run may end than without the fault, with the default policy."""
    state: dict[str, Any] = field(default_factory=dict)


def nan_batch(task: Task) -> None:
    task.inputs(task.batches[K]).fill_(math.nan)


def nan_samples(task: Task) -> None:
    for index in range(10, STEPS, 20):
        task.inputs(task.batches[index])[3] = math.nan


def outlier(task: Task) -> None:
    task.inputs(task.batches[K]).mul_(1e4)


def poisoned(task: Task) -> None:
    for index in range(K, K + 20):
        task.batches[index] = task.corrupt(task.batches[index])


def flip(value: float) -> Callable[[SafeTrainer, int], None]:
    @torch.no_grad()
    def after(trainer: SafeTrainer, step: int) -> None:
        if step == K:
            next(p for p in trainer.model.parameters() if p.dim() > 1).view(-1)[7] = value

    return after


def moment(value: float) -> Callable[[SafeTrainer, int], None]:
    @torch.no_grad()
    def after(trainer: SafeTrainer, step: int) -> None:
        if step == K:
            weight = next(p for p in trainer.model.parameters() if p.dim() > 1)
            trainer.optimizer.state[weight]["exp_avg_sq"].view(-1)[:50] = value

    return after


class Once:
    """A transient NaN, which does not reproduce when the step is repeated."""

    def __init__(self) -> None:
        self.is_over = False

    def __call__(self, step: int, loss: Tensor) -> Tensor:
        if step == K and not self.is_over:
            self.is_over = True
            return loss * math.nan
        return loss


FAULTS: dict[str, Callable[[], Fault]] = {
    "nan_batch": lambda: Fault(nan_batch),
    "nan_samples": lambda: Fault(nan_samples),
    "outlier": lambda: Fault(outlier),
    "lr_spike": lambda: Fault(lr=lambda step: 100.0 if K <= step < K + 3 else 1.0),
    "lr_too_high": lambda: Fault(lr=lambda step: 100.0, within=0.2),
    "weight_1e30": lambda: Fault(after=flip(1e30)),
    "weight_nan": lambda: Fault(after=flip(math.nan)),
    "moment_negative": lambda: Fault(after=moment(-1.0)),
    "moment_huge": lambda: Fault(after=moment(1e30)),
    "fp16_overflow": lambda: Fault(precision="fp16", overflowing=True),
    "poisoned": lambda: Fault(poisoned),
    "slow_divergence": lambda: Fault(lr=lambda step: min(max(1.0, 1.04 ** (step - K)), 50.0), within=0.2),
    "killed": lambda: Fault(dies_at=K + 7),
    "transient_nan": lambda: Fault(loss=Once()),
}
OFF = {"snapshot_every": None, "every_steps": 50}
POLICIES: dict[str, dict[str, Any]] = {
    "no guards": {"guards": None, "checkpoint": OFF, "forensics": {"enabled": False}, "recovery": {"ladder": []}},
    "skip only": {
        "guards": {"spike": None, "rollback": None, "stall": None, "backoff": None},
        "checkpoint": OFF,
        "forensics": {"enabled": False},
        "recovery": {"ladder": ["skip"], "heal": []},
    },
    "default": {},
}


# ---- a run ---------------------------------------------------------------------------------------------------------


class Died(Exception):
    pass


class FaultyTrainer(SafeTrainer):
    fault: Fault
    task: Task

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        if self.step == self.fault.dies_at and "died" not in self.fault.state:
            self.fault.state["died"] = True
            raise Died
        return self.fault.loss(self.step, self.task.loss(model, batch))

    def on_commit(self, view: Any) -> None:
        self.fault.after(self, view.step)


@dataclass
class Outcome:
    loss: float
    note: str
    num_incidents: int
    seconds: float


def run(task_name: str, fault: Fault, policy: dict[str, Any], seed: int) -> Outcome:
    logging.disable(logging.WARNING)
    task = TASKS[task_name](seed, fault.overflowing)
    fault.batches(task)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        result, note = None, ""
        for resume in (False, True):
            trainer = _trainer(task, copy.deepcopy(task.model), fault, policy, Path(directory) / "run")
            try:
                result = trainer.fit(resume=resume)
            except TrainingStopped as stopped:
                result, note = stopped.result, "stopped"
            except Died:
                continue
            break
    assert result is not None
    with torch.no_grad():
        trainer.model.eval()
        loss = float(task.loss(trainer.model, task.evaluation))
    return Outcome(loss, note, len(result.incidents), time.perf_counter() - begin)


def _trainer(task: Task, model: nn.Module, fault: Fault, policy: dict[str, Any], directory: Path) -> FaultyTrainer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    config = {
        **policy,
        "seed": 0,
        "loop": {"max_steps": STEPS, "precision": fault.precision},
        "logging": {"console": "off", "tensorboard": False},
    }
    trainer = FaultyTrainer(
        model, optimizer=optimizer, scheduler=scheduler, train_data=task.batches, config=config, run_dir=directory
    )
    trainer.fault, trainer.task = fault, task

    def before(opt: Any, *_: Any) -> None:
        for group in opt.param_groups:
            group["lr"] *= fault.lr(trainer.step)

    def after(opt: Any, *_: Any) -> None:
        for group in opt.param_groups:
            group["lr"] /= fault.lr(trainer.step)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return trainer


# ---- the table -----------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(prog="faultbench", description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every run's outcome to this file")
    parser.add_argument("--plot", type=Path, help="draw the table to this image")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = list(_rows(options))
    print(_table(rows, options.policies))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.plot:
        _plot(rows, options.policies, options.plot)
    failed = [row for row in rows if row["policy"] == "default" and not row["ok"]]
    for row in failed:
        print(f"beyond its limit: {row['task']} {row['fault']} seed {row['seed']}: {row['worse']:+.1%} {row['note']}")
    return 1 if failed else 0


def _rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for task in options.tasks:
        for seed in range(options.seeds):
            healthy = run(task, Fault(), POLICIES["default"], seed)
            unguarded = run(task, Fault(), POLICIES["no guards"], seed)
            yield _row(task, "none", "default", seed, healthy, healthy.loss, ok=healthy.num_incidents == 0)
            yield _row(task, "none", "no guards", seed, unguarded, healthy.loss)
            for fault in options.faults:
                for policy in options.policies:
                    outcome = run(task, FAULTS[fault](), POLICIES[policy], seed)
                    row = _row(task, fault, policy, seed, outcome, healthy.loss)
                    row["ok"] = (
                        math.isfinite(outcome.loss) and row["worse"] <= FAULTS[fault]().within and not outcome.note
                    )
                    print(
                        f"{task} {seed} {fault} {policy}: {row['worse']:+.1%} {outcome.note}",
                        file=sys.stderr,
                        flush=True,
                    )
                    yield row


def _row(
    task: str, fault: str, policy: str, seed: int, outcome: Outcome, healthy: float, ok: bool | None = None
) -> dict[str, Any]:
    worse = outcome.loss / healthy - 1.0
    return {"task": task, "fault": fault, "policy": policy, "seed": seed, "worse": worse, "ok": ok, **vars(outcome)}


def _table(rows: list[dict[str, Any]], policies: list[str]) -> str:
    """Final evaluation loss relative to the run without the fault, for the worst seed."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lines = [
        "| fault | " + " | ".join(f"{task}: {policy}" for task in tasks for policy in policies) + " |",
        "|---|" + "---|" * (len(tasks) * len(policies)),
    ]
    for fault in dict.fromkeys(row["fault"] for row in rows):
        cells = []
        for task in tasks:
            for policy in policies:
                found = [r for r in rows if (r["task"], r["fault"], r["policy"]) == (task, fault, policy)]
                cells.append(_cell(found))
        lines.append(f"| {fault} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    if any(math.isnan(row["worse"]) for row in rows):
        return "NaN"
    worst = max(row["worse"] for row in rows)
    text = f"{worst:+.1%}" if worst < 10 else f"{worst + 1:.3g}x"
    return text + (" stopped" if any(row["note"] for row in rows) else "")


def _plot(rows: list[dict[str, Any]], policies: list[str], path: Path) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        sys.exit("--plot needs matplotlib. To fix: pip install matplotlib")
    faults = [fault for fault in dict.fromkeys(row["fault"] for row in rows) if fault != "none"]
    figure, axes = plt.subplots(figsize=(11, 5), layout="constrained")
    for index, policy in enumerate(policies):
        heights = []
        for fault in faults:
            found = [r["worse"] for r in rows if (r["fault"], r["policy"]) == (fault, policy)]
            finite = [min(max(v, 1e-4), 1e4) for v in found if math.isfinite(v)]
            heights.append(1e4 if len(finite) < len(found) else statistics.median(finite or [1e-4]))
        positions = [i + (index - 1) * 0.27 for i in range(len(faults))]
        axes.bar(positions, heights, width=0.25, label=policy)
    axes.set(yscale="log", ylabel="final loss above the run without the fault", ylim=(1e-4, 3e4))
    ticks = {1e-4: "0.01%", 1e-3: "0.1%", 1e-2: "1%", 1e-1: "10%", 1.0: "100%", 1e2: "100x", 1e4: "NaN"}
    axes.set_yticks(list(ticks), list(ticks.values()), minor=False)
    axes.set_xticks(range(len(faults)), faults, rotation=30, ha="right")
    axes.axhline(0.02, color="grey", linestyle=":")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(policies), frameon=False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
