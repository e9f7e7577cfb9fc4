"""Fault injection against checkpoints: kills, damaged files, full disks. See `scripts/chaos --help`."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from safetrain import CheckpointError
from safetrain.checkpoint import CheckpointStore
from safetrain.checkpoint.state import TrainState
from scripts.chaos_forged import forged
from scripts.chaos_runs import Trainer, finish, in_child, kill, train
from scripts.chaos_syscalls import CONFIGS, system_calls

ACKNOWLEDGED = "acknowledged.txt"


# ---- kills ------------------------------------------------------------------------------------------------------------


def log_saves(run_dir: Path) -> None:
    """Makes this process log each checkpoint whose save has returned, in a file that survives the process."""
    write = CheckpointStore.write

    def logged(self: CheckpointStore, *arguments: Any) -> Path:
        path = write(self, *arguments)
        descriptor = os.open(run_dir.parent / ACKNOWLEDGED, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(descriptor, f"{path.name}\n".encode())
        os.close(descriptor)
        return path

    CheckpointStore.write = logged  # type: ignore[method-assign]


def killed_run(run_dir: Path, variant: tuple[Any, ...], num_kills: int, rng: random.Random) -> dict[str, int]:
    """Train with `num_kills` SIGKILLs, then to the end. Every other kill waits until a save is in progress."""
    store = CheckpointStore(run_dir / "checkpoints")
    counts = {"kills": 0, "while_saving": 0, "too_late": 0, "unloadable": 0, "lost": 0}

    def work() -> None:
        log_saves(run_dir)
        train(run_dir, *variant)

    while counts["kills"] < num_kills:
        child = in_child(work)
        saving = counts["kills"] % 2 == 1
        deadline = time.monotonic() + 20
        while saving and time.monotonic() < deadline and os.waitpid(child, os.WNOHANG) == (0, 0):
            with contextlib.suppress(FileNotFoundError):
                if any(name.endswith(f".{child}.tmp") for name in os.listdir(store.directory)):
                    break
        time.sleep(rng.uniform(0, 0.004) if saving else rng.uniform(0.02, 0.5))
        kill(child)
        with contextlib.suppress(ChildProcessError):
            counts["too_late"] += os.WIFEXITED(os.waitpid(child, 0)[1])
        counts["while_saving"] += any(store.directory.glob(f".step-*.{child}.tmp"))  # unfinished temporary directories
        counts["kills"] += 1
        log = run_dir.parent / ACKNOWLEDGED
        acknowledged = log.read_text().split() if log.exists() else []
        try:
            newest = store.load_newest()
        except CheckpointError as error:
            print(error, file=sys.stderr)
            counts["unloadable"] += 1
            continue
        if acknowledged and (newest is None or newest.path.name < acknowledged[-1]):
            counts["lost"] += 1
    if code := finish(in_child(work)):
        raise SystemExit(f"the last resume ended with exit code {code}")
    return counts


def differences(one: Path, other: Path) -> list[str]:
    """The differences between two finished runs that must be identical."""
    states = []
    for run_dir in (one, other):
        loaded = CheckpointStore(run_dir / "checkpoints").load_newest()
        assert loaded is not None
        states.append(loaded.state)
    found = _state_differences(*states)
    journals = [
        [line for line in (run_dir / "journal.jsonl").read_text().splitlines() if '"event": "step"' in line or '"event": "eval"' in line]
        for run_dir in (one, other)
    ]  # fmt: skip
    for line in journals[0] + journals[1]:
        json.loads(line)
    if journals[0] != journals[1]:
        found.append(f"the journals ({len(journals[0])} and {len(journals[1])} lines)")
    for name in ("final.safetensors", "final_ema.safetensors"):
        if (one / "checkpoints" / name).read_bytes() != (other / "checkpoints" / name).read_bytes():
            found.append(name)
    return found


def _state_differences(one: TrainState, other: TrainState) -> list[str]:
    found = list(one.tensors.keys() ^ other.tensors.keys())
    for name in one.tensors.keys() & other.tensors.keys():
        left, right = one.tensors[name], other.tensors[name]
        if left.dtype != right.dtype or left.shape != right.shape or not _same_bits(left, right):
            found.append(name)
    values = _value_differences(one.rest, other.rest, "rest")
    # Which snapshots a rollback has used already differs after a resume; where it goes back to, and all numbers, do not.
    return found + [each for each in values if not each.startswith("rest.ring.used")]


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(
        left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8)
    )


def _value_differences(left: Any, right: Any, path: str) -> Iterator[str]:
    if path.endswith((".seconds", ".journal_position", ".time", ".resumes")) or ".timing." in path:
        return  # times, the resumes, and the size of the journal, which also records each of them
    if isinstance(left, torch.Tensor):
        if not _same_bits(left, right):
            yield path
    elif isinstance(left, dict):
        if left.keys() != right.keys():
            yield f"{path} ({left.keys() ^ right.keys()})"
        for key in left.keys() & right.keys():
            yield from _value_differences(left[key], right[key], f"{path}.{key}")
    elif isinstance(left, (list, tuple)):
        if len(left) != len(right):
            yield path
        for index, (a, b) in enumerate(zip(left, right, strict=False)):
            yield from _value_differences(a, b, f"{path}[{index}]")
    elif repr(left) != repr(right):
        yield path


def kills(directory: Path, num_kills: int, seed: int, max_steps: int) -> bool:
    variants = [(2, "fp32", False), (0, "fp16", True), (0, "fp32", False)]
    good = True
    for index, variant in enumerate(variants):
        where = directory / f"kills-{index}"
        reference, killed = where / "reference" / "run", where / "killed" / "run"
        for run_dir in (reference, killed):
            run_dir.parent.mkdir(parents=True)
        if code := finish(in_child(lambda r=reference, v=variant: train(r, *v, max_steps))):  # type: ignore[misc]
            raise SystemExit(f"the uninterrupted run ended with exit code {code}")
        share = num_kills // len(variants) + (index < num_kills % len(variants))
        counts = killed_run(killed, (*variant, max_steps), share, random.Random(seed + index))
        differing = differences(reference, killed)
        workers, precision, background = variant
        print(
            f"kills: {workers} workers, {precision}, {'async' if background else 'sync'}: {counts['kills']} kills "
            f"({counts['while_saving']} while saving, {counts['too_late']} after the end), {counts['unloadable']} unloadable, {counts['lost']} acknowledged saves lost, "
            f"final state {'bit-identical' if not differing else 'DIFFERS in ' + ', '.join(differing[:8])}"
        )
        good = good and not (counts["unloadable"] or counts["lost"] or differing)
    return good


# ---- damage -----------------------------------------------------------------------------------------------------------


def damage(directory: Path, num_flips: int, seed: int) -> bool:
    run_dir = directory / "damage"
    if code := finish(in_child(lambda: train(run_dir, 0, "fp32", False, 12))):
        raise SystemExit(f"the run to damage ended with exit code {code}")
    store = CheckpointStore(run_dir / "checkpoints")
    older, newest = store.paths()[-2:]
    files = sorted(newest.iterdir())
    rng = random.Random(seed)
    tried: dict[str, int] = {}
    missed: list[str] = []

    def expect_fallback(what: str, path: Path, content: bytes | None) -> None:
        original = path.read_bytes()
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        loaded = store.load_newest()
        if loaded is None or loaded.path != older or newest.name not in loaded.passed_over:
            missed.append(f"{what} in {path.name}")
        path.write_bytes(original)
        tried[what] = tried.get(what, 0) + 1

    for index in range(num_flips):
        path = files[index % len(files)]
        content = bytearray(path.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        expect_fallback("bit flip", path, bytes(content))
    for path in files:
        content = path.read_bytes()
        for length in {0, len(content) - 1, *(rng.randrange(len(content)) for _ in range(4))}:
            expect_fallback("truncation", path, content[:length])
        expect_fallback("extension", path, content + b"\0")
        expect_fallback("deletion", path, None)
    assert store.load(newest)
    summary = ", ".join(f"{count} {what}s" for what, count in tried.items())
    print(
        f"damage: {summary} in {len(files)} files: {len(missed)} not detected{': ' + '; '.join(missed[:5]) if missed else ''}"
    )
    return not missed


# ---- full disks -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(directory: Path, megabytes: int) -> Iterator[bool]:
    """A file system of `megabytes` at `directory`, if this user may mount one."""
    directory.mkdir(parents=True)
    options = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(directory)]
    mounted = bool(shutil.which("mount")) and subprocess.run(options, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            # lazy: tensors may still be mapped from its files
            subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill(directory: Path, leave: int) -> Path:
    """A file that leaves `leave` bytes free."""
    filler = directory / "filler"
    free = shutil.disk_usage(directory).free
    with open(filler, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(free - leave, 1))
    return filler


def full_disk(directory: Path, num_stages: int) -> bool:
    """Saves with less and less free space, on a small file system or, where none can be mounted, with a file size limit."""
    good, outcomes = True, {"written": 0, "refused": 0}
    with small_disk(directory / "full", 24) as mounted:
        run_dir = directory / "full" / "run"
        if code := finish(in_child(lambda: train(run_dir, 0, "fp32", False, 8))):
            raise SystemExit(f"the run on the small disk ended with exit code {code}")
        store = CheckpointStore(run_dir / "checkpoints")
        loaded = store.load_newest()
        assert loaded is not None
        size = sum(path.stat().st_size for path in loaded.path.iterdir()) + 65536
        for stage in range(num_stages):
            leave = size * stage // (num_stages - 1)
            before = [path.name for path in store.paths()]
            code = _save_with_space(store, loaded.state, leave, mounted, directory / "full")
            outcomes["written" if code == 0 else "refused"] += 1
            after = store.load_newest()
            lost = set(before) - {path.name for path in store.paths()}
            left_over = list(store.directory.glob(".*.tmp"))
            if code not in (0, 7) or lost or left_over or after is None or after.passed_over:
                print(f"with {leave} bytes free: exit code {code}, lost {lost}, left over {left_over}", file=sys.stderr)
                good = False
        good = _trains_through_a_full_disk(directory / "full", mounted) and good
    how = "a small file system" if mounted else "a file size limit"
    print(
        f"full disk ({how}): {outcomes['refused']} saves refused, {outcomes['written']} written, {'nothing lost' if good else 'FAILED'}"
    )
    return good


def _save_with_space(store: CheckpointStore, state: TrainState, leave: int, mounted: bool, disk: Path) -> int:
    """0: written. 7: an OSError was raised. In a child, because a file size limit cannot be raised again."""
    filler = fill(disk, leave) if mounted else None

    def work() -> None:
        if not mounted:
            limit_file_sizes(leave)
        about = {"step": 1000 + leave, "num_committed": 1, "epoch": 0, "time": "", "version": "chaos", "metric": None}
        try:
            store.write(state, about)
        except OSError:
            os._exit(7)

    code = finish(in_child(work))
    if filler is not None:
        filler.unlink()
    for path in store.paths():
        if path.name.startswith("step-") and int(path.name.split("-")[1]) >= 1000:
            assert store.load(path)
            shutil.rmtree(path)
    return code


def limit_file_sizes(num_bytes: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def _trains_through_a_full_disk(disk: Path, mounted: bool) -> bool:
    """Training continues while the disk is full, and saves again when there is space; no step is missing."""
    run_dir = disk / "through"
    reports = disk.parent / "through.txt"

    def work() -> None:
        messages = io.StringIO()  # not a file, because the disk is full
        logging.basicConfig(stream=messages)

        class Filling(Trainer):
            filler: Path | None = None

            def on_commit(self, view: Any) -> None:
                if view.step == 9:
                    if mounted:
                        self.filler = fill(disk, 0)
                    else:
                        limit_file_sizes(1)
                if view.step == 21:
                    if self.filler is not None:
                        self.filler.unlink()
                    else:
                        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

        train(run_dir, 0, "fp32", False, 30, Filling)
        reports.write_text(messages.getvalue())

    code = finish(in_child(work))
    text = (run_dir / "journal.jsonl").read_text()
    steps = [json.loads(line)["step"] for line in text.splitlines() if '"event": "step"' in line]
    warned = "could not be written" in reports.read_text()
    good = code == 0 and steps == list(range(len(steps))) and warned
    if not good:
        print(f"training on a full disk: exit code {code}, warned {warned}, steps {steps}", file=sys.stderr)
    return good


STAGES = ["kills", "syscalls", "damage", "full-disk", "forged"]


def main() -> None:
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a fork must not print it once more
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("what", nargs="*", choices=[*STAGES, []], help="default: all of them")
    parser.add_argument(
        "--kills", type=int, default=36, help="number of SIGKILLs, half of them while a checkpoint is written"
    )
    parser.add_argument(
        "--moments", type=int, default=30, help="moments between system calls to resume from, of each config; 0: all"
    )
    parser.add_argument(
        "--configs", nargs="+", default=[], choices=list(CONFIGS), help="of these runs; default: of all"
    )
    parser.add_argument(
        "--flips", type=int, default=300, help="random bit flips, distributed over the files of a checkpoint"
    )
    parser.add_argument("--stages", type=int, default=40, help="amounts of free space to save with")
    parser.add_argument(
        "--forged", type=int, default=1000, help="runs to forge, and to give to the commands that read runs"
    )
    parser.add_argument("--steps", type=int, default=120, help="length of the runs that are killed")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--ranks", type=int, default=0, metavar="N", help="only: faults on one of N processes")
    parser.add_argument("--rounds", type=int, default=1, help="of each fault on one of several processes")
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp"], help="ddp, fsdp")
    parser.add_argument("--faults", nargs="+", default=[], help="names of the table's rows; default: all")
    parser.add_argument(
        "--directory", type=Path, help="where to work (default: a temporary directory, removed on success)"
    )
    arguments = parser.parse_args()
    what = arguments.what or STAGES
    directory = arguments.directory or Path(tempfile.mkdtemp(prefix="safetrain-chaos-"))
    torch.set_num_threads(1)
    print(f"seed {arguments.seed}, in {directory}", flush=True)
    good = True
    if arguments.ranks:
        from scripts.chaos_ranks import table

        what = []
        good = table(directory, arguments.ranks, arguments.rounds, arguments.strategies, arguments.faults)
    if "kills" in what:
        good = kills(directory, arguments.kills, arguments.seed, arguments.steps) and good
    if "syscalls" in what:
        good = system_calls(directory, arguments.moments, arguments.configs, arguments.seed, differences) and good
    if "damage" in what:
        good = damage(directory, arguments.flips, arguments.seed) and good
    if "full-disk" in what:
        good = full_disk(directory, arguments.stages) and good
    if "forged" in what:
        good = forged(directory, arguments.forged, arguments.seed) and good
    if good and arguments.directory is None:
        shutil.rmtree(directory)
    print("nothing was lost" if good else "FAILED")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
