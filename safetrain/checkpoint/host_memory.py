"""How much host memory this process may use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def host_memory() -> int | None:
    """Bytes of the machine, or of the container if it is limited, divided by the processes of the run on this machine. None if the
    system does not say."""
    limits = [limit for limit in (_of_machine(), _of_container()) if limit is not None]
    return min(limits) // _num_local_processes() if limits else None


def _of_machine() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _of_container(root: Path = CGROUP, groups: Path = Path("/proc/self/cgroup")) -> int | None:
    """The tightest limit of the control groups that this process is in, and of those around them."""
    places = [root / "memory.max", root / "memory" / "memory.limit_in_bytes"]
    with contextlib.suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            top = root / controllers if controllers else root
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            inside = top / path.lstrip("/")
            places += [directory / name for directory in (inside, *inside.parents) if directory.is_relative_to(top)]
    found = []
    for place in places:
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            found.append(int(place.read_text()))
    return min(found, default=None)


def _num_local_processes() -> int:
    """Of this run on this machine, as launchers say it."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE"):
        with contextlib.suppress(KeyError, ValueError):
            return max(int(os.environ[name]), 1)
    return 1
