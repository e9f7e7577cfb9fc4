"""Runs a function in several processes that form one process group, as torchrun would start them, and collects the outcomes.

    from process_group import run_ranks

    def train(rank, run_dir):           # at the top level of a test module: every process imports it
        ...
        return losses

    losses_by_rank = run_ranks(train, 2, tmp_path)

The processes are forked from a server that has torch and accelerate imported, so only the first test pays for that. Hanging
ranks are ended after `timeout` seconds, with the stacks of all ranks in the message of the failure.
"""

import contextlib
import faulthandler
import importlib.util
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

PRELOADED = [
    *("process_group", "pytest", "torch", "accelerate", "safetrain.trainer", "torch.utils.tensorboard"),
    # What DDP, FSDP2 and their checkpoints import when they are first used, which takes seconds.
    *("torch._dynamo", "torch.onnx", "torch.profiler", "torch.distributed.fsdp", "torch.distributed.checkpoint"),
]
GRACE = 10.0
"""Seconds for the other ranks to end by themselves after one has failed."""


@dataclass
class Outcome:
    """How one rank ended."""

    value: Any = None
    error: str | None = None
    """Class of the exception, or "Ended" / "Unfinished"; None if the function returned."""
    message: str = ""
    traceback: str = ""
    log: str = ""
    """Its stdout and stderr, with stacks if it had to be ended."""

    def render(self, rank):
        ended = "returned" if self.error is None else f"{self.error}: {self.message}"
        return "\n".join(part for part in (f"--- rank {rank}: {ended}", self.traceback, self.log[-6000:]) if part)


class RanksFailed(AssertionError):
    def __init__(self, outcomes):
        super().__init__("\n" + "\n".join(outcome.render(rank) for rank, outcome in enumerate(outcomes)))
        self.outcomes = outcomes


def run_ranks(function, num_ranks, *args, timeout=60.0):
    """`function(rank, *args)` of each rank, in their order. Raises RanksFailed unless all return."""
    outcomes = outcomes_of(function, num_ranks, *args, timeout=timeout)
    if any(outcome.error is not None for outcome in outcomes):
        raise RanksFailed(outcomes)
    return [outcome.value for outcome in outcomes]


def outcomes_of(function, num_ranks, *args, timeout=60.0):
    """As `run_ranks`, for functions that may raise or end their process."""
    from torch.distributed import TCPStore

    # The store is the parent's, on a port that the system chose: two tests at once cannot get the same one.
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    module = sys.modules[function.__module__]
    where = (function.__module__, module.__file__, function.__qualname__)
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        ranks = [
            _Rank(rank, num_ranks, store.port, where, args, Path(logs) / f"{rank}.log") for rank in range(num_ranks)
        ]
        for rank in ranks:
            stack.callback(rank.end)
        _collect(ranks, time.monotonic() + timeout)
        for rank in ranks:
            rank.outcome.log = rank.log.read_text(errors="replace") if rank.log.exists() else ""
    return [rank.outcome for rank in ranks]


class _Rank:
    """The parent's side of one process."""

    def __init__(self, rank, num_ranks, port, where, args, log):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.outcome, self.log = Outcome(error="Unfinished", message="it had to be ended"), log
        self.pipe, theirs = context.Pipe()
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        child = (theirs, rank, where, args, str(log), environment)
        self._process = context.Process(target=_child, args=child, daemon=True)
        self._process.start()
        theirs.close()

    def receive(self):
        try:
            self.outcome = self.pipe.recv()
        except (EOFError, OSError):
            self._process.join(5.0)
            self.outcome = Outcome(error="Ended", message=f"exit code {self._process.exitcode}")

    def dump_stacks(self):
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGUSR1)

    def end(self):
        """Release a rank that has answered; kill one that has not."""
        with contextlib.suppress(OSError):
            self.pipe.send("go")
        self._process.join(5.0 if self.outcome.error != "Unfinished" else 0.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.pipe.close()


def _collect(ranks, deadline):
    waiting = {rank.pipe: rank for rank in ranks}
    while waiting:
        ready = connection.wait(list(waiting), max(deadline - time.monotonic(), 0.0))
        if not ready:
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            rank.receive()
            if rank.outcome.error is not None:
                deadline = min(deadline, time.monotonic() + GRACE)
    for rank in waiting.values():
        rank.dump_stacks()
    if waiting:
        time.sleep(0.5)  # a rank that hangs cannot say when its stacks are written


def _child(pipe, rank, where, args, log, environment):
    os.environ.update(environment)
    multiprocessing.current_process()._config["daemon"] = False  # it may have loader workers
    # Unbuffered and by descriptor, to keep the output of C++ code and of processes that are killed.
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    try:
        _seed()
        outcome = Outcome(value=_imported(*where)(rank, *args))
    except BaseException as error:
        outcome = Outcome(error=type(error).__name__, message=str(error), traceback=traceback.format_exc())
    try:
        pipe.send(outcome)
    except Exception as error:  # the value cannot be pickled
        pipe.send(Outcome(error=type(error).__name__, message=f"of the returned value: {error}"))
    pipe.recv()  # no rank leaves while another may still wait for its bytes
    os._exit(0)  # without taking the group down, which waits for the others and can hang


def _seed():
    import numpy as np
    import torch

    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _imported(name, file, qualname):
    """A function of a module under the name it has in the parent, so that its classes can be pickled both ways."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module
    for part in qualname.split("."):
        found = getattr(found, part)
    return found
