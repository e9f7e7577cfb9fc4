"""A run is stopped at each of its system calls that write, and resumed from what is on disk at that moment, as after a kill there.

One traced run gives all of the moments: while a thread is held before a system call, no other can begin one, so a copy of the run's
directory is what a SIGKILL would have left. Of each `write` there is a copy with half of it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from safetrain import Action, Guard, Verdict
from scripts.chaos_runs import Samples, Trainer, finish, in_child

WRITING = {
    1: "write", 18: "pwrite", 20: "writev", 257: "openat", 82: "rename", 264: "renameat", 316: "renameat2", 87: "unlink",
    263: "unlinkat", 84: "rmdir", 83: "mkdir", 258: "mkdirat", 86: "link", 265: "linkat", 88: "symlink", 266: "symlinkat", 76: "truncate",
    77: "ftruncate", 74: "fsync", 75: "fdatasync", 285: "fallocate", 326: "copy_file_range", 40: "sendfile",
}  # fmt: skip
"""Of x86-64."""
_TRACEME, _SYSCALL, _SETOPTIONS, _SYSCALL_INFO = 0, 24, 0x4200, 0x420E
_OPTIONS = (
    1 | 8 | 0x100000
)  # stops of system calls are told apart; threads are traced too; the child dies with the tracer
_ENTRY, _WALL = 1, 0x40000000


class _Info(ctypes.Structure):
    _fields_ = (
        ("op", ctypes.c_uint8), ("arch", ctypes.c_uint32), ("ip", ctypes.c_uint64), ("sp", ctypes.c_uint64),
        ("number", ctypes.c_uint64), ("arguments", ctypes.c_uint64 * 6), ("more", ctypes.c_uint64 * 4),
    )  # fmt: skip


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    libc.ptrace.restype = ctypes.c_long
    return libc


def _ptrace(request: int, pid: int, address: int = 0, data: Any = 0) -> None:
    if _libc().ptrace(request, pid, address, data) == -1:
        raise OSError(ctypes.get_errno(), f"ptrace {request:#x}")


def can_trace() -> bool:
    if not (sys.platform == "linux" and platform.machine() == "x86_64"):
        return False
    return finish(in_child(lambda: _ptrace(_TRACEME, 0))) == 0


def traced(work: Callable[[], None], at_call: Callable[[str, int, list[int]], None]) -> int:
    """Run `work` in a child; `at_call` gets the name of each writing system call, the process and its arguments, before it is
    made. Returns the child's exit code."""

    def child_work() -> None:
        _ptrace(_TRACEME, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        work()

    child = in_child(child_work)
    os.waitpid(child, _WALL)
    _ptrace(_SETOPTIONS, child, 0, _OPTIONS)
    _ptrace(_SYSCALL, child)
    while True:
        thread, status = os.waitpid(-1, _WALL)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            if thread == child:
                return os.waitstatus_to_exitcode(status)
            continue
        deliver = 0
        stop = os.WSTOPSIG(status)
        if stop == signal.SIGTRAP | 0x80:
            _at_stop(thread, child, at_call)
        elif stop not in (signal.SIGTRAP, signal.SIGSTOP):
            deliver = stop
        with contextlib.suppress(ProcessLookupError):
            _ptrace(_SYSCALL, thread, 0, deliver)


def _at_stop(thread: int, child: int, at_call: Callable[[str, int, list[int]], None]) -> None:
    info = _Info()
    with contextlib.suppress(ProcessLookupError):
        _ptrace(_SYSCALL_INFO, thread, ctypes.sizeof(info), ctypes.addressof(info))
        name = WRITING.get(info.number) if info.op == _ENTRY else None
        is_read_only = name == "openat" and not info.arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if name is not None and not is_read_only:
            at_call(name, child, list(info.arguments))
            # Until it is over nothing else is looked at, so that it is the only one.
            _ptrace(_SYSCALL, thread)
            os.waitpid(thread, _WALL)


@dataclass(frozen=True)
class Moment:
    """What a run's directory held before a call."""

    before: str
    entries: tuple[tuple[str, int, str], ...]
    """Each path with its inode, by which hard links are known, and what is there: a digest, `-> target` of a link, `/` for a directory."""

    def restore(self, run_dir: Path, contents: dict[str, bytes]) -> None:
        run_dir.mkdir(parents=True)
        made: dict[int, Path] = {}
        for name, inode, what in self.entries:
            path = run_dir / name
            if what == "/":
                path.mkdir()
            elif what.startswith("-> "):
                path.symlink_to(what[3:])
            elif inode in made:
                os.link(made[inode], path)
            else:
                path.write_bytes(contents[what])
                made[inode] = path


class Moments:
    """Every different content that a run's directory has before its calls."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.found: dict[tuple[tuple[str, int, str], ...], Moment] = {}
        self.contents: dict[str, bytes] = {}
        self._digests: dict[tuple[int, int, int], str] = {}
        self.num_calls = 0

    def at_call(self, name: str, process: int, arguments: list[int]) -> None:
        self.num_calls += 1
        if not self._run_dir.is_dir():
            return
        entries = self._entries()
        self._keep(name, entries)
        if name == "write" and arguments[2] > 1 and (path := self._written_to(process, arguments[0])) is not None:
            with open(f"/proc/{process}/mem", "rb") as memory:
                memory.seek(arguments[1])
                half = memory.read(arguments[2] // 2)
            at = int(Path(f"/proc/{process}/fdinfo/{arguments[0]}").read_text().split()[1])
            old = (self._run_dir / path).read_bytes()
            torn = self._digest(old[:at] + half + old[at + len(half) :])
            self._keep(
                f"the second half of a write to {path}",
                tuple((n, inode, torn if n == str(path) else what) for n, inode, what in entries),
            )

    def _written_to(self, process: int, descriptor: int) -> Path | None:
        with contextlib.suppress(OSError, ValueError):
            return Path(os.readlink(f"/proc/{process}/fd/{descriptor}")).relative_to(self._run_dir)
        return None

    def _keep(self, before: str, entries: tuple[tuple[str, int, str], ...]) -> None:
        self.found.setdefault(entries, Moment(before, entries))

    def _entries(self) -> tuple[tuple[str, int, str], ...]:
        return tuple((name, inode, what) for name, inode, what in self._walk(self._run_dir, ""))

    def _walk(self, directory: Path, prefix: str) -> Iterator[tuple[str, int, str]]:
        for entry in sorted(os.scandir(directory), key=lambda each: each.name):
            name, about = prefix + entry.name, entry.stat(follow_symlinks=False)
            if entry.is_symlink():
                yield name, 0, f"-> {os.readlink(entry.path)}"
            elif entry.is_dir():
                yield name, 0, "/"
                yield from self._walk(Path(entry.path), f"{name}/")
            else:
                key = about.st_ino, about.st_size, about.st_mtime_ns
                if key not in self._digests:
                    self._digests[key] = self._digest(Path(entry.path).read_bytes())
                yield name, about.st_ino, self._digests[key]

    def _digest(self, content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        self.contents[digest] = content
        return digest


# ---- the runs ---------------------------------------------------------------------------------------------------------


class Troubled(Guard):
    """Asks for rollbacks, as trouble does that comes back."""

    name = "troubled"

    def judge(self, view: Any) -> Verdict:
        if view.step not in (5, 6):
            return Verdict()
        evidence = {"signal": "loss", "value": view.loss}
        return Verdict(Action.ROLLBACK, reason="asked for", evidence=evidence, bad_state={"x": "bad"})


class Small(Trainer):
    width = 8

    def build_data(self) -> Any:
        return Samples(48, bad=(9,)), Samples(8, bad=())


class Adam(Small):
    def build_optimizer(self, model: torch.nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rollbacks": {"troubled": True},
    "background": {"troubled": True, "checkpoint.async": True},
    "every-step": {"troubled": True, "checkpoint.every_steps": 1, "checkpoint.keep_last": 1},
    "snapshots": {"troubled": True, "checkpoint.every_steps": 5, "checkpoint.snapshot_every": 2},
    "fp16": {"troubled": True, "loop.precision": "fp16"},
    "no-snapshots": {"troubled": True, "checkpoint.save_snapshots": False, "checkpoint.snapshot_every": None},
    "best": {"checkpoint.keep_best": 1, "checkpoint.keep_last": 1, "loop.eval_every": 3},
    "tensorboard": {"logging.tensorboard": True, "loop.grad_accum": 1},
    "workers": {"data.num_workers": 1, "adam": True, "loop.host_read_every": 2},
}  # fmt: skip


def run(run_dir: Path, name: str) -> None:
    changes = dict(CONFIGS[name])
    guards = [Troubled()] if changes.pop("troubled", False) else []
    cls: Any = Adam if changes.pop("adam", False) else Small
    config = {
        "seed": 3,
        "data.batch_size": 2,
        "loop.max_steps": 12,
        "loop.grad_accum": 2,
        "loop.ema": 0.9,
        "loop.eval_every": 10,
        "loop.device": "cpu",
        "guards.finite.state_every": 5,
        "checkpoint.every_steps": 3,
        "checkpoint.snapshot_every": 3,
        "checkpoint.trust_after": 1,
        "checkpoint.keep_last": 2,
        "recovery.max_rollbacks": 20,
        "logging.console": "off",
        "logging.tensorboard": False,
        **changes,
    }
    cls(config=_nested(config), guards=guards, run_dir=run_dir).fit(resume="auto")


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def system_calls(
    directory: Path,
    per_config: int,
    names: list[str],
    seed: int,
    differences: Callable[[Path, Path], list[str]],
) -> bool:
    """Whether the run of each config, resumed from `per_config` of its moments (0: from all), ends with the bits of the
    uninterrupted run."""
    if not can_trace():
        print("syscalls: not tried, because this machine or user cannot trace system calls (Linux on x86-64)")
        return True
    good = True
    for name in names or CONFIGS:
        good = one_config(directory / f"syscalls-{name}", name, per_config, seed, differences) and good
    return good


def one_config(
    where: Path, name: str, per_config: int, seed: int, differences: Callable[[Path, Path], list[str]]
) -> bool:
    reference, live, resumed = (where / kind / "run" for kind in ("reference", "live", "resumed"))
    for run_dir in (reference, live):
        run_dir.parent.mkdir(parents=True)
    run(where / "imports" / "run", name)  # so that children have all modules loaded
    if code := finish(in_child(lambda: run(reference, name))):
        raise SystemExit(f"the uninterrupted run ended with exit code {code}")
    moments = Moments(live)
    if code := traced(lambda: run(live, name), moments.at_call):
        raise SystemExit(f"the traced run ended with exit code {code}")
    wrong = [f"the traced run: {what}" for what in differences(reference, live)]
    chosen = list(moments.found.values())
    if 0 < per_config < len(chosen):
        chosen = random.Random(seed).sample(chosen, per_config)
    for moment in chosen:
        moment.restore(resumed, moments.contents)
        if found := list(_differences_of_resumed(resumed, name, reference, differences)):
            kept = resumed.parent.rename(where / f"wrong-{len(wrong)}")
            wrong.append(f"before {moment.before} ({kept.name}): {', '.join(found[:4])}")
        else:
            shutil.rmtree(resumed.parent)
    print(
        f"syscalls: {name}: {moments.num_calls} calls that write, {len(moments.found)} different directories, {len(chosen)} of "
        f"them resumed, {'all bit-identical' if not wrong else 'DIFFERENT: ' + '; '.join(wrong[:8])}",
        flush=True,
    )
    return not wrong


def _differences_of_resumed(
    run_dir: Path, name: str, reference: Path, differences: Callable[[Path, Path], list[str]]
) -> Iterator[str]:
    if code := finish(in_child(lambda: run(run_dir, name))):
        yield f"exit code {code}"
        return
    yield from differences(reference, run_dir)
    if left := [str(path.relative_to(run_dir)) for path in run_dir.rglob("*.tmp")]:
        yield f"left over: {', '.join(left)}"
