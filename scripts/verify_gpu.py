"""Checks on a machine with an accelerator what the test suite can only check on a test device. Prints a table and writes one JSON.

    scripts/verify_gpu                       every check, each in a process of its own
    scripts/verify_gpu --only waits,resume   some of them
    scripts/verify_gpu --device cuda:1 --json report.json

Exit code 0: every check passed or could not be made here (the table says why); 1: some failed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from safetrain import SafeTrainer, TrainingStopped
from safetrain.errors import DeviceLost
from safetrain.tensors import devices

QUIET = {"console": "off", "tensorboard": False}
TIMEOUT_SECONDS = 600


@dataclass
class Row:
    check: str
    expected: str
    found: str
    outcome: str
    """`pass`, `FAIL` or `skipped`."""
    seconds: float = 0.0


class Skipped(Exception):
    """The check cannot be made on this machine; why."""


class Bench:
    """The device, and what differs between kinds of devices."""

    def __init__(self, device: str | None, setup: str | None) -> None:
        self.setup: Any = None
        if setup is not None:
            sys.path.insert(0, str(Path(setup).parent))
            self.setup = importlib.import_module(Path(setup).name)
            self.setup.install()
        if device is None:
            found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            if found is None:
                raise SystemExit(
                    "there is no accelerator here.\nTo fix: run it on a machine with one, or give --device."
                )
            device = found.type
        self.device = devices.with_index(torch.device(device))
        self.module = devices.module_of(self.device)

    @contextmanager
    def waits(self) -> Iterator[list[str]]:
        """Filled with what made the host wait inside."""
        found: list[str] = []
        if self.setup is not None:
            with self.setup.counted() as counter:
                yield found
            found += [f"{what} at {place}" for (what, place), count in counter.items() for _ in range(count)]
        elif hasattr(self.module, "set_sync_debug_mode"):
            self.module.set_sync_debug_mode("warn")
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    yield found
            finally:
                self.module.set_sync_debug_mode("default")
            found += [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
        else:
            raise Skipped(f"torch cannot count the waits of {self.device.type}")

    @contextmanager
    def memory_limit(self, num_bytes: int) -> Iterator[None]:
        """No more than this many bytes may be in use."""
        if self.setup is not None:
            self.setup.KNOBS.memory_limit = num_bytes
            yield
            self.setup.KNOBS.memory_limit = None
        elif hasattr(self.module, "set_per_process_memory_fraction"):
            devices.free_cached_memory(self.device)
            total = devices.memory(self.device)["total"]
            self.module.set_per_process_memory_fraction(num_bytes / total, self.device)
            yield
            self.module.set_per_process_memory_fraction(1.0, self.device)
        else:
            raise Skipped(f"the memory of {self.device.type} cannot be limited")

    @property
    def used(self) -> int:
        gc.collect()
        if "used" not in (numbers := devices.memory(self.device)):
            raise Skipped(f"{self.device.type} does not say how much memory is in use")
        return numbers["used"]

    def peak_of(self, action: Callable[[], object]) -> int:
        if self.setup is not None:
            self.setup.LEDGER.reset_peak()
        else:
            self.module.reset_peak_memory_stats(self.device)
        action()
        return devices.memory(self.device)["peak"]

    def trainer(
        self, model: nn.Module | None = None, cls: type[SafeTrainer] = SafeTrainer, **parts: Any
    ) -> SafeTrainer:
        torch.manual_seed(0)
        model = net() if model is None else model
        config = parts.pop("config", {})
        loop = {"device": str(self.device), **config.pop("loop", {})}
        parts = {"loss_fn": mse, "run_dir": Path(tempfile.mkdtemp()) / "run", **parts}
        parts.setdefault("optimizer", torch.optim.AdamW(model.parameters(), lr=1e-3))
        return cls(model, config={"loop": loop, "logging": QUIET, **config}, **parts)


def net(width: int = 64, depth: int = 2) -> nn.Module:
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), *hidden, nn.Dropout(0.1), nn.Linear(width, 1))


def batches(count: int, size: int = 16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(size, 8, generator=generator) for _ in range(count)]
    return [(x, x.sum(1, keepdim=True)) for x in inputs]


def mse(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


# ---- the checks: each returns what was expected, what was found, and whether that is right -----------------------------


def waits(bench: Bench) -> tuple[str, str, bool]:
    trainer = bench.trainer(train_data=batches(20))
    run_step, counts, places = trainer.run_step, [], []

    def counting(window: Any) -> None:
        with bench.waits() as found:
            run_step(window)
        counts.append(len(found))
        places.append(found)

    trainer.run_step = counting  # type: ignore[method-assign]
    trainer.fit()
    most = max(counts[3:])
    return "1 wait of the host per healthy step", f"{most}" + ("" if most == 1 else f": {places[-1][:4]}"), most == 1


def waits_for_batches(bench: Bench) -> tuple[str, str, bool]:
    trainer = bench.trainer(train_data=batches(8))
    with bench.waits() as found:
        for _ in range(8):
            trainer.stream.take(1)
    return "0 waits for a batch", f"{len(found)}", not found


def bits(bench: Bench) -> tuple[str, str, bool]:
    data, results = batches(20), []
    for plainly in (True, False):
        torch.manual_seed(0)
        model = net().to(bench.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(5)
        if plainly:
            for x, y in data:
                optimizer.zero_grad()
                F.mse_loss(model(x.to(bench.device)), y.to(bench.device)).backward()
                optimizer.step()
        else:
            trainer = bench.trainer(
                model, optimizer=optimizer, train_data=data, config={"guards": {"clip": None}, "seed": None}
            )
            torch.manual_seed(5)
            trainer.fit()
        results.append(state_of(model))
    return "the weights of a plain loop, bit for bit", "equal" if same(*results) else "other bits", same(*results)


def bad_sample(bench: Bench) -> tuple[str, str, bool]:
    data = batches(20)
    data[12][0][3] = math.nan
    incidents = bench.trainer(train_data=data).fit().incidents
    found = [(i.step, i.decision.action, i.samples) for i in incidents]
    return "step 12 without sample 3", str(found), found == [(12, "commit", [3])]


def bad_gradient_with_atomics(bench: Bench) -> tuple[str, str, bool]:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(50, 16), nn.Linear(16, 1)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.out(self.table(words).mean(1))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        y = model(batch[0])
        return (y - y.detach() + batch[1]).square().sum(1).sqrt().mean()

    if bench.setup is not None:
        bench.setup.KNOBS.noise = True
    data = [(torch.randint(50, (16, 64)), torch.ones(16, 1)) for _ in range(14)]
    data[9][1][3] = 0.0
    incidents = bench.trainer(Words(), loss_fn=loss, train_data=data).fit().incidents
    found = [(i.origin.name, i.replay.reproduced, i.samples) for i in incidents]
    return "sqrt, reproduced, sample 3", str(found), found == [("sqrt", True, [3])]


def corrupt_weight(bench: Bench) -> tuple[str, str, bool]:
    class Corrupting(SafeTrainer):
        def on_commit(self, view: Any) -> None:
            if view.step == 20:
                with torch.no_grad():
                    self.model[0].weight[0, 0] = math.nan  # type: ignore[index]

    trainer = bench.trainer(
        cls=Corrupting, train_data=batches(40), config={"checkpoint": {"snapshot_every": 5, "trust_after": 3}}
    )
    result = trainer.fit()
    sound = all(t.isfinite().all() for t in state_of(trainer.model).values())
    return (
        "1 rollback, finite weights",
        f"{result.rollbacks} rollbacks, {'finite' if sound else 'bad'} weights",
        sound and result.rollbacks == 1,
    )


def spike(bench: Bench) -> tuple[str, str, bool]:
    data = batches(80)
    data[60] = (data[60][0], data[60][1] + 1e4)
    result = bench.trainer(train_data=data).fit()
    refused = [incident.step for incident in result.incidents]
    bounded = refused == [60] or (not refused and result.num_clipped > 0)
    found = f"refused {refused}, {result.num_clipped} clipped, loss {result.losses[59]:.3g} before and {result.final_loss:.3g} at the end"
    return (
        "step 60 is clipped or refused, and does no harm",
        found,
        bounded and result.final_loss < 2 * result.losses[59],
    )


def resume(bench: Bench) -> tuple[str, str, bool]:
    data = batches(20)
    whole = bench.trainer(train_data=data)
    whole.fit()
    part = bench.trainer(train_data=data, config={"loop": {"max_steps": 9}})
    part.fit()
    rest = bench.trainer(train_data=data, run_dir=part.run.dir)
    torch.randn(7, device=bench.device)
    rest.fit(resume="force")
    equal = same(state_of(whole.model), state_of(rest.model))
    return "the bits of the uninterrupted run", "equal" if equal else "other bits", equal


def resume_on_another_device(bench: Bench) -> tuple[str, str, bool]:
    if bench.setup is not None or torch.accelerator.device_count() < 2:
        raise Skipped("there is one device")
    data = batches(20)
    whole = bench.trainer(train_data=data)
    whole.fit()
    part = bench.trainer(train_data=data, config={"loop": {"max_steps": 9}})
    part.fit()
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "weights.pt"
        other = f"{bench.device.type}:{1 - (bench.device.index or 0)}"
        run_check("_resumed", bench, ["--device", other, "--run", str(part.run.dir), "--out", str(out)])
        equal = same(state_of(whole.model), torch.load(out, map_location="cpu", weights_only=True))
    return "the same dropout masks on another device", "equal" if equal else "other bits", equal


def rollback_memory(bench: Bench) -> tuple[str, str, bool]:
    trainer = bench.trainer(
        net(512, 4), train_data=batches(12), config={"checkpoint": {"snapshot_every": 4, "trust_after": 2}}
    )
    ratios = []

    def on_commit(view: Any) -> None:
        if view.step == 10:
            used = bench.used
            with bench.memory_limit(int(used * 1.05)):
                ratios.append(bench.peak_of(trainer.rollback) / used)

    trainer.on_commit = on_commit  # type: ignore[method-assign]
    trainer.fit()
    return "no memory more than is in use", f"{ratios[0]:.2f} x", ratios[0] <= 1.05


def out_of_memory(bench: Bench) -> tuple[str, str, bool]:
    data = batches(10)
    data[6] = batches(1, size=200_000)[0] if bench.setup is None else batches(1, size=2_000)[0]
    trainer = bench.trainer(train_data=data, config={"loop": {"on_out_of_memory": "halves"}})
    run_step = trainer.run_step
    needed: list[int] = []

    def limited(window: Any) -> None:
        if trainer.stepper.next_index != 6:
            return run_step(window)
        used, size = bench.used, window[0][0].shape[0]
        with bench.memory_limit(used + int(size * 64 * 4 * 8.5)):
            run_step(window)
        needed.append(used)

    trainer.run_step = limited  # type: ignore[method-assign]
    steps = trainer.fit().steps
    return "10 steps, one of them in halves", f"{steps} steps", steps == 10


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(20, 8), nn.Linear(8, 5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(words).mean(1))


def labelled(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randint(20, (8, 3)), torch.randint(5, (8,))) for _ in range(count)]


def label_out_of_range(bench: Bench) -> tuple[str, str, bool]:
    if bench.setup is not None:
        bench.setup.KNOBS.poisons = True
    data = labelled(12)
    data[7][1][4] = 9
    loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    incidents = bench.trainer(Labelled(), loss_fn=loss, train_data=data).fit().incidents
    found = [(i.step, i.decision.action, i.samples) for i in incidents]
    return "step 7 without sample 4, the device lives", str(found), found == [(7, "commit", [4])]


def lost_device(bench: Bench) -> tuple[str, str, bool]:
    if bench.setup is not None:
        bench.setup.KNOBS.poisons = True
    elif bench.device.type != "cuda":
        raise Skipped(f"an index out of range does not end {bench.device.type}")
    data = labelled(30)
    data[17][0][4] = 99
    loss = lambda model, batch: F.cross_entropy(model(batch[0] * 1), batch[1])  # noqa: E731
    checkpoint = {"snapshot_every": 4, "trust_after": 2, "every_steps": None}
    trainer = bench.trainer(Labelled(), loss_fn=loss, train_data=data, config={"checkpoint": checkpoint})
    try:
        trainer.fit()
    except DeviceLost:
        newest = sorted(p.name for p in (trainer.run.dir / "checkpoints").glob("step-*"))[-1]  # type: ignore[operator]
        return "DeviceLost, and a checkpoint of step 12 or later", newest, int(newest.split("-")[1]) >= 12
    return "DeviceLost", "no exception", False


def snapshots(bench: Bench) -> tuple[str, str, bool]:
    model = net(1024 if bench.setup is None else 128, 8)
    data, seconds = batches(60), {}
    for every in (None, 10):
        trainer = bench.trainer(
            copy.deepcopy(model), train_data=data, config={"checkpoint": {"snapshot_every": every, "enabled": False}}
        )
        start = time.perf_counter()
        result = trainer.fit()
        devices.synchronize(bench.device)
        seconds[every] = time.perf_counter() - start
    found = result.snapshots
    stall = (found or {}).get("seconds", 0.0) / max((found or {}).get("num_taken", 1), 1)
    return (
        "(a number)",
        f"{1000 * stall:.1f} ms blocked per snapshot, {seconds[10] / seconds[None]:.2f} x the time without",
        True,
    )


def compile_modes(bench: Bench) -> tuple[str, str, bool]:
    if bench.setup is not None:
        raise Skipped("the test device has no compiler")
    found, data = [], batches(12)
    data[8][0][3] = math.nan
    for mode in ("default", "reduce-overhead", "max-autotune-no-cudagraphs"):
        result = bench.trainer(
            train_data=data, config={"loop": {"compile": True, "compile_mode": mode, "grad_accum": 1}}
        ).fit()
        found.append(
            (mode, [(i.step, i.samples) for i in result.incidents], all(map(math.isfinite, result.losses[:8])))
        )
    return "sample 3 of step 8 in each", str(found), all(each[1] == [(8, [3])] and each[2] for each in found)


def two_processes(bench: Bench, *options: str) -> tuple[str, str, bool]:
    if bench.setup is not None or torch.accelerator.device_count() < 2:
        raise Skipped("it takes two devices")
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable,
            "-m",
            "safetrain",
            "fit",
            "char_gpt",
            "--nproc",
            "2",
            "--out",
            directory,
            "loop.max_steps=20",
            *options,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    return "exit code 0", f"{done.returncode} {done.stderr[-200:] if done.returncode else ''}", done.returncode == 0


def ddp(bench: Bench) -> tuple[str, str, bool]:
    return two_processes(bench)


def fsdp(bench: Bench) -> tuple[str, str, bool]:
    return two_processes(bench, "loop.strategy=fsdp")


def speed(bench: Bench) -> tuple[str, str, bool]:
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, dropout=0.0)
    small = bench.setup is not None
    models = {"MLP": (net(64 if small else 1024, 4), batches(30, 16 if small else 256), mse)}
    if not small:
        gpt = nn.Sequential(nn.Linear(8, 768), nn.TransformerEncoder(layer, 12), nn.Linear(768, 1))
        models["GPT-2 small"] = gpt, [(torch.randn(4, 256, 8), torch.randn(4, 256, 1)) for _ in range(20)], mse
        try:
            from torchvision.models import resnet50

            images = [(torch.randn(32, 3, 224, 224), torch.randint(1000, (32,))) for _ in range(12)]
            models["ResNet-50"] = resnet50(), images, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
        except ImportError:
            pass
    found = {}
    for name, (model, data, loss) in models.items():
        seconds = []
        for plainly in (True, False):
            own = copy.deepcopy(model).to(bench.device)
            optimizer = torch.optim.AdamW(own.parameters(), lr=1e-4)
            marks: list[float] = []

            def mark(*_: object, marks: list[float] = marks) -> None:
                devices.synchronize(bench.device)
                marks.append(time.perf_counter())

            if plainly:
                for batch in data:
                    optimizer.zero_grad()
                    loss(own, [t.to(bench.device, non_blocking=True) for t in batch]).backward()
                    nn.utils.clip_grad_norm_(own.parameters(), 1.0)
                    optimizer.step()
                    mark()
            else:
                trainer = bench.trainer(own, optimizer=optimizer, loss_fn=loss, train_data=data)
                trainer.on_commit = mark  # type: ignore[method-assign]
                trainer.fit()
            seconds.append(min(b - a for a, b in itertools.pairwise(marks[3:])))
        found[name] = round(seconds[1] / seconds[0], 3)
    return (
        "(a number)",
        "time of a plain loop with clipping: " + ", ".join(f"{n} {r} x" for n, r in found.items()),
        True,
    )


CHECKS = (
    waits,
    waits_for_batches,
    bits,
    bad_sample,
    bad_gradient_with_atomics,
    corrupt_weight,
    spike,
    resume,
    resume_on_another_device,
)
CHECKS += (rollback_memory, out_of_memory, label_out_of_range, lost_device, snapshots, compile_modes, ddp, fsdp, speed)
BY_NAME = {check.__name__: check for check in CHECKS}


# ---- running them ------------------------------------------------------------------------------------------------------


def run_check(name: str, bench: Bench, options: list[str]) -> Row:
    """In a process of its own: a device that fails takes only its check with it."""
    setup = ["--setup", str(Path(bench.setup.__file__).parent)] if bench.setup is not None else []
    command = [sys.executable, __file__, "--check", name, *setup, *(options or ["--device", str(bench.device)])]
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
    except subprocess.TimeoutExpired:
        return Row(name, "", f"no end after {TIMEOUT_SECONDS} s", "FAIL", TIMEOUT_SECONDS)
    seconds = round(time.perf_counter() - start, 1)
    try:
        return Row(**json.loads(done.stdout.strip().splitlines()[-1]), seconds=seconds)
    except (IndexError, ValueError, TypeError):
        return Row(name, "", (done.stderr.strip() or "nothing was printed")[-400:], "FAIL", seconds)


def check_here(name: str, bench: Bench, arguments: argparse.Namespace) -> None:
    if name == "_resumed":
        trainer = bench.trainer(train_data=batches(20), run_dir=arguments.run)
        trainer.fit(resume="force")
        torch.save(state_of(trainer.model), arguments.out)
        return
    try:
        expected, found, passed = BY_NAME[name](bench)
        row = {"check": name, "expected": expected, "found": found, "outcome": "pass" if passed else "FAIL"}
    except Skipped as why:
        row = {"check": name, "expected": "", "found": str(why), "outcome": "skipped"}
    except (Exception, TrainingStopped) as error:
        row = {"check": name, "expected": "", "found": f"{type(error).__name__}: {str(error)[:400]}", "outcome": "FAIL"}
    print(json.dumps(row))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cuda, cuda:1, xpu, …; default: the accelerator of this machine")
    parser.add_argument("--only", help=f"names separated by commas: {', '.join(BY_NAME)}")
    parser.add_argument(
        "--json", type=Path, default=Path("verify_gpu.json"), help="where to write the report (default: %(default)s)"
    )
    parser.add_argument("--setup", help="a package to import first, whose install() provides the device")
    for hidden in ("--check", "--run", "--out"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(arguments.device, arguments.setup)
    if arguments.check:
        check_here(arguments.check, bench, arguments)
        return 0
    names = list(BY_NAME) if arguments.only is None else arguments.only.split(",")
    if unknown := [name for name in names if name not in BY_NAME]:
        parser.error(f"there is no check {unknown[0]!r}; there are {', '.join(BY_NAME)}")
    rows = []
    for name in names:
        rows.append(row := run_check(name, bench, []))
        print(
            f"{row.outcome:8} {row.check:28} expected {row.expected or '-'}; found {row.found}  ({row.seconds} s)",
            flush=True,
        )
    from safetrain.telemetry.environment import environment

    report = {"device": str(bench.device), "environment": environment(), "rows": [asdict(row) for row in rows]}
    arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    failed = [row.check for row in rows if row.outcome == "FAIL"]
    print(f"\n{len(rows) - len(failed)} of {len(rows)} without a failure; the report is in {arguments.json}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
