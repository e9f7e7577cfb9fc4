"""Tasks that `srun` started without a launcher: rank and rendezvous address, from the variables that it sets."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping


def announce(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what torch's processes are told by a launcher. Nothing is changed where there is one, or a single task."""
    if "RANK" in environment or int(environment.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return
    needed = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST")
    if any(name not in environment for name in needed):
        return
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", "1").partition("(")[0].partition(",")[0]
    environment["RANK"], environment["LOCAL_RANK"] = environment["SLURM_PROCID"], environment["SLURM_LOCALID"]
    environment["WORLD_SIZE"], environment["LOCAL_WORLD_SIZE"] = environment["SLURM_STEP_NUM_TASKS"], per_node
    environment.setdefault("MASTER_ADDR", first_host(environment["SLURM_STEP_NODELIST"]))
    # Two jobs on one machine must not meet at the same port.
    environment.setdefault("MASTER_PORT", str(15_000 + int(environment.get("SLURM_JOB_ID", "0")) % 15_000))


def first_host(hosts: str) -> str:
    """Of a list as Slurm writes it: `gpu[03-05,9],cpu1` begins with `gpu03`."""
    match = re.match(r"([^\[,]+)(?:\[(\w+))?", hosts)
    if match is None:
        return hosts
    return match[1] + (match[2] or "")
