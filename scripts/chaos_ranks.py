"""Faults on one rank of several processes: how soon the rank is named, how all ranks end, and whether a resume is exact."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

GUILTY, STEP, NUM_STEPS = 1, 12, 24
LIMIT = 10.0
"""Seconds in which a fault must have been named."""


@dataclass(frozen=True)
class Fault:
    name: str
    expects: str
    """`refused`: the step is repaired or skipped and the run goes on; `ended`: all ranks end with the same message; `goes on`: as if nothing had
    been, and it is reported; `saved`: all save and end."""
    silent: bool = False
    """It takes the watchdog to notice it."""


FAULTS = (
    Fault("nan", "refused"),
    Fault("raise in forward", "ended"),
    Fault("raise in backward", "ended"),
    Fault("raise in data", "ended"),
    Fault("raise in evaluation", "ended"),
    Fault("raise in hook", "ended"),
    Fault("killed", "ended"),
    Fault("hang", "ended", silent=True),
    Fault("hang in data", "ended", silent=True),
    Fault("stopped for 12 s", "goes on", silent=True),
    Fault("slow", "goes on", silent=True),
    Fault("sigterm", "saved"),
    Fault("disk full on rank 0", "goes on"),
    Fault("other config", "ended"),
)


class Samples(torch.utils.data.Dataset[Any]):
    fault = ""

    def __len__(self) -> int:
        return 2 * 4 * NUM_STEPS * 4

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if os.environ["RANK"] == str(GUILTY) and Samples.due():
            note_fault()
            if Samples.fault == "raise in data":
                raise OSError("a sample cannot be read")
            threading.Event().wait(300)
        inputs = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return inputs, inputs.sum().reshape(1)

    calls = 0

    @classmethod
    def due(cls) -> bool:
        if cls.fault not in ("raise in data", "hang in data"):
            return False
        cls.calls += 1
        return cls.calls == 4 * STEP + 1


_noted: dict[str, Path] = {}


def note_fault() -> None:
    """When the fault happened, in a file that survives the process."""
    path = _noted["at"]
    if not path.exists():
        path.write_text(repr(time.time()))


def trainer_class() -> type:
    from safetrain import SafeTrainer

    class Faulty(SafeTrainer):
        fault = ""

        @property
        def is_due(self) -> bool:
            return self.machine.rank == GUILTY and self.step == STEP

        def training_step(self, model: nn.Module, batch: Any) -> Any:
            loss = nn.functional.mse_loss(model(batch[0]), batch[1])
            if not self.is_due or _noted["at"].exists():
                return loss * math.nan if self.fault == "nan" and self.is_due else loss
            if self.fault in (
                "nan",
                "raise in forward",
                "killed",
                "hang",
                "stopped for 12 s",
                "slow",
                "sigterm",
                "raise in backward",
            ):
                note_fault()
            if self.fault == "nan":
                return loss * math.nan
            if self.fault == "raise in forward":
                raise KeyError("a mistake in forward")
            if self.fault == "raise in backward":
                loss.register_hook(raise_in_backward)
            if self.fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "hang":
                threading.Event().wait(300)
            if self.fault == "slow":
                time.sleep(12)
            if self.fault == "stopped for 12 s":
                continue_later(12)
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.fault == "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
            return loss

        def evaluation_step(self, model: nn.Module, batch: Any) -> Any:
            if self.fault == "raise in evaluation" and self.machine.rank == GUILTY and self.run.result.steps >= STEP:
                note_fault()
                raise KeyError("a mistake in the evaluation")
            return nn.functional.mse_loss(model(batch[0]), batch[1])

        def on_commit(self, view: Any) -> None:
            if self.fault == "raise in hook" and self.machine.rank == GUILTY and view.step == STEP:
                note_fault()
                raise LookupError("a mistake in a hook")
            if self.fault == "disk full on rank 0" and self.machine.rank == 0 and view.step == STEP:
                note_fault()
                import resource

                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            if self.fault == "disk full on rank 0" and self.machine.rank == 0 and view.step == STEP + 6:
                import resource

                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    return Faulty


def raise_in_backward(gradient: Any) -> None:
    raise KeyError("a mistake in backward")


def continue_later(seconds: float) -> None:
    import subprocess

    code = f"import os, signal, time; time.sleep({seconds}); os.kill({os.getpid()}, signal.SIGCONT)"
    subprocess.Popen([sys.executable, "-S", "-c", code])


def train(rank: int, fault: str, strategy: str, run_dir: Path, resume: bool) -> tuple[str, str, dict[str, Any]]:
    """How it ended, what it said, and the weights."""
    from safetrain import TrainingStopped
    from safetrain.errors import Interrupted
    from safetrain.tensors.sharded import full_tensor

    torch.set_num_threads(1)
    _noted["at"] = run_dir.parent / f"{run_dir.name}.fault"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    kind = trainer_class()
    kind.fault = Samples.fault = "" if resume else fault  # type: ignore[attr-defined]
    max_steps = NUM_STEPS + 1 if fault == "other config" and rank == GUILTY and not resume else NUM_STEPS
    made = kind(
        model,
        train_data=Samples(),
        eval_data=[(torch.zeros(4, 8), torch.zeros(4, 1))] * 4,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        config={
            "seed": 1,
            "data": {"batch_size": 4},
            "loop": {
                "device": "cpu",
                "strategy": strategy,
                "max_steps": max_steps,
                "eval_every": STEP,
                "rank_timeout_seconds": 20.0,
            },
            "guards": {"islands": None},
            "checkpoint": {"every_steps": 4},
            "logging": {"console": "off", "tensorboard": False},
        },
        run_dir=run_dir,
    )
    try:
        made.fit(resume="auto" if resume else False)
        ended, said = "done", ""
    except Interrupted as error:
        ended, said = "saved", str(error)
    except TrainingStopped as error:
        ended, said = "stopped", str(error)
    except Exception as error:
        ended, said = type(error).__name__, str(error)
    weights = (
        {}
        if ended not in ("done", "saved")
        else {n: full_tensor(p.detach()).clone().numpy() for n, p in model.named_parameters()}
    )
    return ended, said, weights


def child(rank: int, world: int, port: int, pipe: Any, arguments: tuple[Any, ...]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    log = os.open(str(arguments[2]) + f".{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    outcome = train(rank, *arguments)
    pipe.send((*outcome, time.time()))
    os._exit(0)  # as a program that ends, without taking the group down


def run_all(world: int, arguments: tuple[Any, ...], seconds: float = 120.0) -> list[tuple[Any, ...]]:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "accelerate", "safetrain.trainer", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
    )
    pipes, ranks = [], []
    for rank in range(world):
        ours, theirs = context.Pipe()
        process = context.Process(target=child, args=(rank, world, store.port, theirs, arguments))
        process.start()
        theirs.close()
        pipes.append(ours)
        ranks.append(process)
    deadline, outcomes = time.monotonic() + seconds, []
    for pipe in pipes:
        try:
            outcomes.append(
                pipe.recv() if pipe.poll(max(deadline - time.monotonic(), 0.1)) else ("unfinished", "", {}, time.time())
            )
        except (EOFError, OSError):
            outcomes.append(("died", "", {}, time.time()))
    for pipe, process in zip(pipes, ranks, strict=True):
        with contextlib.suppress(OSError):
            pipe.send("go")
        process.join(5.0)
        if process.is_alive():
            process.kill()
            process.join()
    return outcomes


@dataclass
class Row:
    fault: Fault
    strategy: str
    seconds: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def examine(fault: Fault, strategy: str, world: int, directory: Path, reference: dict[str, Any], row: Row) -> None:
    run_dir = directory / f"{fault.name.replace(' ', '-')}-{strategy}-{len(row.seconds)}"
    outcomes = run_all(world, (fault.name, strategy, run_dir, False))
    noted = Path(f"{run_dir}.fault")
    began = float(noted.read_text()) if noted.exists() else outcomes[0][3]
    lines = (
        [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()] if run_dir.exists() else []
    )
    hangs = [line for line in lines if line["event"] == "hang" and not line.get("over")]
    said = "\n".join(outcome[1] for outcome in outcomes)
    ended = [outcome[0] for outcome in outcomes]
    survivors = [name for rank, name in enumerate(ended) if not (fault.name == "killed" and rank == GUILTY)]
    problems = row.problems
    if "unfinished" in ended:
        problems.append(f"ranks did not end: {ended}")
    if fault.silent:
        if not hangs:
            problems.append("not reported")
        else:
            row.seconds.append(hangs[0]["seconds"])
            if hangs[0]["ranks"] != [GUILTY]:
                problems.append(f"named {hangs[0]['ranks']}")
    else:
        last = max(outcome[3] for outcome in outcomes) if fault.expects in ("ended", "saved") else began
        row.seconds.append(max(last - began, 0.0))
        if fault.expects == "ended" and f"rank {GUILTY}" not in said:
            problems.append("no rank named")
    if fault.expects in ("goes on", "refused") and set(ended) != {"done"}:
        problems.append(f"ended as {ended}: {said[:200]}")
    if fault.expects == "refused" and [line["rank"] for line in lines if line["event"] == "incident"] != [GUILTY]:
        problems.append("the incident names another rank")
    if fault.expects == "ended" and "done" in survivors:
        problems.append(f"ended as {ended}")
    if fault.expects == "saved" and set(ended) != {"saved"}:
        problems.append(f"ended as {ended}")
    if fault.expects != "refused":
        resumed = run_all(world, (fault.name, strategy, run_dir, True))
        same = all(r[0] == "done" and all(np.array_equal(r[2][n], reference[n]) for n in reference) for r in resumed)
        if not same:
            problems.append(f"the resume is not exact: {[(r[0], r[1][:200]) for r in resumed]}")


def table(directory: Path, world: int, rounds: int, strategies: list[str], only: list[str]) -> bool:
    """Prints a row for each fault; False if any of them has a problem, or was named too late."""
    print(f"{world} processes; seconds from the fault to its name: median (max) of {rounds}")
    good = True
    for strategy in strategies:
        (directory / strategy).mkdir(parents=True)
        reference = run_all(world, ("", strategy, directory / strategy / "reference", False))[0][2]
        for fault in FAULTS:
            if only and fault.name not in only:
                continue
            row = Row(fault, strategy)
            for _ in range(rounds):
                examine(fault, strategy, world, directory / strategy, reference, row)
            times = row.seconds or [math.nan]
            late = not max(times) <= LIMIT
            verdict = "; ".join(dict.fromkeys(row.problems)) or ("TOO LATE" if late else fault.expects)
            good = good and not row.problems and not late
            print(
                f"  {strategy:5} {fault.name:22} {statistics.median(times):6.1f} ({max(times):5.1f})   {verdict}",
                flush=True,
            )
    return good
