"""The process group of processes that torchrun has restarted.

They are given the store of the first ones, which still holds the addresses of processes that have ended: torch would try to
connect to those. Its keys get a prefix of their own for each attempt.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"


def attempt() -> str:
    """Which start of this process by its launcher this is; "0" is the first."""
    return os.environ.get(_ATTEMPT, "0")


def join(on_cpu: bool, timeout: timedelta) -> None:
    """Join the process group, if this process was started again; else it is joined as usual, by accelerate."""
    shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not shares_store or attempt() == "0" or not dist.is_available() or dist.is_initialized():
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    store = TCPStore(host, port, world_size, is_master=False, timeout=timeout)
    own = PrefixStore(f"attempt/{attempt()}", store)
    backend = "gloo" if on_cpu else None
    dist.init_process_group(backend, store=own, rank=rank, world_size=world_size, timeout=timeout)
