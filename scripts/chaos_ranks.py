"""Faults on one rank of several processes: how soon the rank is named, how all ranks end, and whether a resume is exact.

Every rank runs `safetrain fit`, as a launcher would start it: what is looked at are exit codes, messages and files.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from .chaos_victim import GUILTY, NETWORK, NUM_STEPS, STEP

LIMIT = 10.0
"""Seconds in which a fault must have been named."""
RANK_TIMEOUT = 20.0
DISK_MEGABYTES = 4
SIDES = ("safetrain-chaos-0", "safetrain-chaos-1")
"""Network namespaces, while the network is cut."""
ADDRESS = "10.97.13.{}"


@dataclass(frozen=True)
class Fault:
    name: str
    code: int
    """Exit code of the ranks."""
    silent: bool = False
    """It takes the watchdog to notice it."""
    gone: bool = False
    """The rank at fault does not come to its own end."""
    ddp_only: bool = False
    needs_root: bool = False
    repaired: bool = False
    """The run goes on, with other numbers than if nothing had been."""


FAULTS = (
    Fault("nan", 0, repaired=True),
    Fault("raise in forward", 1),
    Fault("raise in backward", 1),
    Fault("raise in data", 1),
    Fault("raise in evaluation", 1),
    Fault("raise in hook", 1),
    Fault("killed", 1, gone=True),
    Fault("hang", 1, silent=True),
    Fault("hang in data", 1, silent=True),
    Fault("stopped for ever", 1, silent=True, gone=True),
    Fault("stopped for 20 s", 0, silent=True),
    Fault("slow", 0, silent=True),
    Fault("sigterm", 143),
    Fault("network cut", 1, silent=True, needs_root=True),
    Fault("disk full on rank 0", 0, needs_root=True),
    Fault("bit flip", 0, ddp_only=True, repaired=True),
    Fault("other config", 2),
)


@dataclass(frozen=True)
class Place:
    """Where a run takes place."""

    run_dir: Path
    strategy: str
    world: int

    @property
    def noted(self) -> Path:
        return Path(f"{self.run_dir}.fault")

    def log(self, rank: int) -> Path:
        return Path(f"{self.run_dir}.{rank}.log")


@dataclass(frozen=True)
class Ended:
    code: int | None
    """None: it did not end by itself."""
    time: float
    said: str


def config_of(place: Place, fault: str, rank: int) -> dict[str, Any]:
    is_other = fault == "other config" and rank == GUILTY
    patient = 3 * RANK_TIMEOUT if fault in ("slow", "stopped for 20 s") else RANK_TIMEOUT
    return {
        "seed": 1,
        "trainer": {"_target_": "scripts.chaos_victim.Victim"},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.02 if is_other else 0.01, "momentum": 0.9},
        "data": {"batch_size": 4},
        "loop": {
            "device": "cpu",
            "strategy": place.strategy,
            "max_steps": NUM_STEPS,
            "eval_every": STEP,
            "rank_timeout_seconds": patient,
        },
        "guards": {"islands": None, "sanity": {"look_every": 4}},
        "checkpoint": {"every_steps": 4, "snapshot_every": 2, "trust_after": 2},
        "logging": {"console": "off", "tensorboard": False},
    }


def child(rank: int, place: Place, port: int, fault: str, is_cut: bool) -> None:
    os.setsid()  # what it leaves behind is found by its session
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(place.world),
        "LOCAL_WORLD_SIZE": str(place.world),
        "MASTER_ADDR": ADDRESS.format(1) if is_cut else "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": NETWORK if is_cut else "lo",
    }
    if is_cut:
        enter(SIDES[rank == GUILTY])
    log = os.open(place.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    from safetrain.cli.main import main

    from . import chaos_victim

    chaos_victim.fault, chaos_victim.noted = fault, str(place.noted)
    file = place.log(rank).with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config_of(place, fault, rank)))
    if fault == "other config" and rank == GUILTY:
        chaos_victim.note()
    main(["fit", str(file), "--out", str(place.run_dir), "--resume", "auto"])


def enter(namespace: str) -> None:
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def hold_store(pipe: Any, is_cut: bool) -> None:
    """As the agent of a launcher does, on the side of rank 0."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if is_cut:
        enter(SIDES[0])
    store = TCPStore("0.0.0.0", 0, None, True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def run_all(place: Place, fault: str, is_cut: bool = False, seconds: float = 120.0) -> tuple[list[Ended], list[str]]:
    """How each rank ended, and the processes that were left."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "accelerate", "safetrain.trainer", "safetrain.cli.fit", "torch.distributed.fsdp", "yaml"]
    )
    ours, theirs = context.Pipe()
    holder = context.Process(target=hold_store, args=(theirs, is_cut))
    holder.start()
    port = ours.recv()
    ranks = [context.Process(target=child, args=(r, place, port, fault, is_cut)) for r in range(place.world)]
    for process in ranks:
        process.start()
    deadline, times = time.monotonic() + seconds, {}
    gone = {fault.name for fault in FAULTS if fault.gone}
    expected = {r for r in range(place.world) if not (fault in gone and r == GUILTY)}
    while not expected <= times.keys() and time.monotonic() < deadline:
        for rank, process in enumerate(ranks):
            if rank not in times and process.exitcode is not None:
                times[rank] = time.time()
        time.sleep(0.05)
    sessions = [process.pid for process in ranks]
    time.sleep(0.5)
    left = [line for line in in_sessions(sessions) if line.split()[0] not in {str(p.pid) for p in ranks}]
    ended = [
        Ended(process.exitcode, times.get(rank, time.time()), _text(place.log(rank)))
        for rank, process in enumerate(ranks)
    ]
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join()
    ours.send("end")
    holder.join()
    return ended, left


def in_sessions(sessions: list[int | None]) -> list[str]:
    """Processes that a rank has started, and that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            head, _, rest = path.read_text().rpartition(")")
            state, _, _, session = rest.split()[:4]
            if int(session) in sessions and state != "Z":
                found.append(head + ")")
    return found


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


@contextmanager
def surroundings(fault: Fault, run_dir: Path) -> Iterator[None]:
    """What the machine is like for this fault."""
    if fault.name == "hang in data":
        os.mkfifo(f"{run_dir}.fault.fifo")
    if fault.name == "disk full on rank 0":
        run_dir.parent.mkdir(parents=True)
        _do(f"mount -t tmpfs -o size={DISK_MEGABYTES}m tmpfs {run_dir.parent}")
    if fault.name == "network cut":
        with contextlib.suppress(subprocess.CalledProcessError):
            _remove_sides()
        for name in SIDES:
            _do(f"ip netns add {name}", f"ip -n {name} link set lo up")
        _do(f"ip link add {NETWORK} netns {SIDES[0]} type veth peer name {NETWORK} netns {SIDES[1]}")
        for index, name in enumerate(SIDES, 1):
            _do(f"ip -n {name} addr add {ADDRESS.format(index)}/24 dev {NETWORK}")
            _do(f"ip -n {name} link set {NETWORK} up")
    try:
        yield
    finally:
        if fault.name == "disk full on rank 0":
            _do(f"umount -l {run_dir.parent}")
        if fault.name == "network cut":
            _remove_sides()


def _remove_sides() -> None:
    for name in SIDES:
        _do(f"ip netns del {name}")


def _do(*commands: str) -> None:
    for command in commands:
        subprocess.run(command.split(), check=True, capture_output=True)


@dataclass
class Row:
    fault: Fault
    strategy: str
    seconds: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def examine(fault: Fault, strategy: str, world: int, directory: Path, reference: dict[str, Any], row: Row) -> None:
    name = f"{fault.name.replace(' ', '-')}-{strategy}-{len(row.seconds)}"
    inner = directory / name / "disk" if fault.name == "disk full on rank 0" else directory
    place = Place(inner / name, strategy, world)
    with surroundings(fault, place.run_dir):
        is_cut = fault.name == "network cut"
        began = time.time()
        ended, left = run_all(place, fault.name, is_cut)
        if place.noted.exists():
            began = float(place.noted.read_text())
        row.seconds.append(seconds_to_name(fault, place, began, ended))
        others = [each for rank, each in enumerate(ended) if rank != GUILTY]
        looked_at = others if fault.gone else ended
        problems = row.problems
        if any(each.code is None for each in looked_at):
            problems.append(f"ranks did not end: {[each.code for each in ended]}")
        elif {each.code for each in looked_at} != {fault.code}:
            problems.append(f"exit codes {[each.code for each in ended]}: {others[0].said.strip()[-200:]}")
        if fault.code in (1, 2) and not all(f"rank {GUILTY}" in each.said for each in others):
            problems.append("a rank does not name it")
        if left:
            problems.append(f"processes left: {left}")
        problems += wrong_in_journal(fault, place)
        if fault.repaired:
            return
        if is_cut:
            _do(f"ip -n {SIDES[1]} link set {NETWORK} up")
        if fault.code != 0:
            ended, _ = run_all(place, "", is_cut)
        final = weights_of(place.run_dir)
        if {each.code for each in ended} != {0} or final.keys() != reference.keys():
            problems.append(f"the resume did not end: {[(each.code, each.said[-200:]) for each in ended]}")
        elif not all(torch.equal(final[key], reference[key]) for key in reference):
            problems.append("the weights are not those of an uninterrupted run")


def seconds_to_name(fault: Fault, place: Place, began: float, ended: list[Ended]) -> float:
    if fault.silent:
        hangs = hangs_of(place)
        return float(hangs[0]["seconds"]) if hangs else math.nan
    if fault.repaired:
        written = (path.stat().st_mtime for path in place.run_dir.glob("incidents/*/incident.json"))
        return max((each - began for each in written), default=math.nan)
    if fault.code == 0:
        return 0.0
    return max(each.time for rank, each in enumerate(ended) if not (fault.gone and rank == GUILTY)) - began


def wrong_in_journal(fault: Fault, place: Place) -> Iterator[str]:
    hangs = hangs_of(place)
    if fault.silent and not hangs:
        yield "not reported"
    elif hangs and (not fault.silent or hangs[0]["ranks"] != [GUILTY]):
        yield f"hang of ranks {hangs[0]['ranks']}"
    incidents = [line for line in journal(place.run_dir) if line["event"] == "incident"]
    if fault.repaired:
        if [line["rank"] for line in incidents] != [GUILTY]:
            yield f"incidents name ranks {[line['rank'] for line in incidents]}"
    elif incidents:
        yield f"{len(incidents)} incidents"


def hangs_of(place: Place) -> list[dict[str, Any]]:
    return [line for line in journal(place.run_dir) if line["event"] == "hang" and not line.get("over")]


def journal(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "journal.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    path = run_dir / "checkpoints" / "final.safetensors"
    return load_file(path) if path.exists() else {}


def table(directory: Path, world: int, rounds: int, strategies: list[str], only: list[str]) -> bool:
    """Prints a row for each fault; False if any of them has a problem, or was named too late."""
    print(f"{world} processes; seconds from the fault to its name: median (max) of {rounds}; exit code of the ranks")
    good = True
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that namespaces and mounts are removed
    for strategy in strategies:
        (directory / strategy).mkdir(parents=True)
        run_all(place := Place(directory / strategy / "reference", strategy, world), "")
        reference = weights_of(place.run_dir)
        for fault in FAULTS:
            if (only and fault.name not in only) or (fault.ddp_only and strategy != "ddp"):
                continue
            if fault.needs_root and (os.geteuid() != 0 or not Path("/usr/sbin/ip").exists()):
                print(f"  {strategy:5} {fault.name:20} not run: it needs root and iproute2")
                continue
            row = Row(fault, strategy)
            for _ in range(rounds):
                examine(fault, strategy, world, directory / strategy, reference, row)
            late = not max(row.seconds) <= LIMIT
            fine = "named, repaired" if fault.repaired else "named, all ended alike, exact"
            verdict = "; ".join(dict.fromkeys(row.problems)) or ("TOO LATE" if late else fine)
            good = good and not row.problems and not late
            print(
                f"  {strategy:5} {fault.name:20} {statistics.median(row.seconds):6.1f} ({max(row.seconds):5.1f}) "
                f"{fault.code:5}   {verdict}",
                flush=True,
            )
    return good
