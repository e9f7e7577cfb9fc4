"""Faults × policies × tasks, against the run without the fault with the same seed. See scripts/faultbench."""

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
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.char_gpt import CharGPT, Documents, document_loss
from recipes.shared.datasets import read_columns
from safetrain import SafeTrainer, TrainingStopped

STEPS = 300
K = 120
"""The step at which faults strike."""


# ---- tasks ---------------------------------------------------------------------------------------------------------


@dataclass
class Task:
    model: nn.Module
    loss: Callable[[nn.Module, Any], Any]
    batches: list[Any]
    evaluation: Any
    lr: float
    inputs: Callable[[Any], Tensor]
    """The floating-point or token tensor of a batch that faults are planted in."""
    spoil: Callable[[Any], Any]
    """A batch that is finite and wrong."""


class Scaled(nn.Module):
    """Computes what the inner layer computes, by way of numbers that half precision cannot hold."""

    def __init__(self, inner: nn.Module, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * self.factor) / self.factor


def mlp(seed: int, overflowing: bool) -> Task:
    random = torch.Generator().manual_seed(seed)
    directions = torch.randn(16, 2, generator=random) / 4

    def batch(size: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, 16, generator=random)
        return x, torch.tanh(x @ directions).sum(1, keepdim=True) + 0.5 * torch.randn(size, 1, generator=random)

    torch.manual_seed(seed)
    middle: nn.Module = nn.Linear(64, 64)
    middle = Scaled(middle, 1e6) if overflowing else middle
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), middle, nn.ReLU(), nn.Linear(64, 1))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]).float(), batch[1])

    def spoil(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0], 20.0 - 20.0 * batch[1]

    return Task(model, loss, [batch(64) for _ in range(STEPS)], batch(4096), 5e-3, lambda b: b[0], spoil)


def convnet(seed: int, overflowing: bool) -> Task:
    columns = read_columns("digits")
    images, labels = (
        torch.from_numpy(columns["images"]).float().reshape(-1, 1, 8, 8) / 16,
        torch.from_numpy(columns["labels"]).long(),
    )
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=random)
    train, held_out = order[:1437], order[1437:]

    def batch(indices: Tensor) -> tuple[Tensor, Tensor]:
        return images[indices].clone(), labels[indices].clone()

    torch.manual_seed(seed)
    last: nn.Module = nn.Linear(32 * 4, 10)
    last = Scaled(last, 1e6) if overflowing else last
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), last),
    )

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).float(), batch[1], label_smoothing=0.1)

    def spoil(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0] * 8.0, (batch[1] + 3) % 10

    batches = [batch(train[torch.randint(len(train), (48,), generator=random)]) for _ in range(STEPS)]
    return Task(model, loss, batches, batch(held_out), 3e-3, lambda b: b[0], spoil)


class EmbeddedGPT(CharGPT):
    """The GPT with a scale on its embeddings, so that faults can be planted in floating-point inputs."""

    def forward(self, tokens: Tensor, scale: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens)
        x = (x if scale is None else x * scale[:, None, None]) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(seed: int, overflowing: bool) -> Task:
    context, size = 32, 24
    train, held_out = Documents("train", context, size * STEPS), Documents("eval", context, 256)
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(train), generator=random).tolist()

    def batch(data: Documents, indices: Any) -> dict[str, Tensor]:
        tokens = torch.stack([data[i]["tokens"] for i in indices])
        return {"tokens": tokens, "scale": torch.ones(len(tokens))}

    torch.manual_seed(seed)
    model = EmbeddedGPT(context, width=32)
    if overflowing:
        model.blocks[1].mlp[2] = Scaled(model.blocks[1].mlp[2], 1e6)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        def scaled(tokens: Tensor) -> Tensor:
            return model(tokens, batch["scale"]).float()

        return document_loss(scaled, batch)["loss"]  # type: ignore[arg-type]

    def spoil(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            **batch,
            "tokens": torch.randint(1, 96, batch["tokens"].shape, generator=random),
            "scale": batch["scale"],
        }

    batches = [batch(train, order[i * size : (i + 1) * size]) for i in range(STEPS)]
    return Task(model, loss, batches, batch(held_out, range(256)), 3e-3, lambda b: b["scale"], spoil)


TASKS = {"gpt": gpt, "mlp": mlp, "convnet": convnet}


# ---- faults --------------------------------------------------------------------------------------------------------


@dataclass
class Fault:
    """What is done to a run. `batches` is changed before it, `after` runs after each committed step, by attempted step."""

    batches: Callable[[Task], None] = lambda task: None
    after: Callable[[SafeTrainer, int], None] = lambda trainer, step: None
    lr: Callable[[int], float] = lambda step: 1.0
    """Factor on the learning rate, by attempted step."""
    loss: Callable[[int, Tensor], Tensor] = lambda step, loss: loss
    precision: str = "fp32"
    overflowing: bool = False
    dies_at: int | None = None
    within: float = 0.02
    """How much worse than without the fault the run may end, with the default policy."""
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
        task.batches[index] = task.spoil(task.batches[index])


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
    """A NaN that comes once and does not come again when the same step is repeated."""

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


class Afflicted(SafeTrainer):
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


def _trainer(task: Task, model: nn.Module, fault: Fault, policy: dict[str, Any], directory: Path) -> Afflicted:
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    config = {
        **policy,
        "seed": 0,
        "loop": {"max_steps": STEPS, "precision": fault.precision},
        "logging": {"console": "off", "tensorboard": False},
    }
    trainer = Afflicted(
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
    """Final evaluation loss against the run without a fault: the worst seed of each."""
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
