"""The random state of every source a training step can draw from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class RandomState:
    python: Any
    numpy: Any
    torch_cpu: torch.Tensor
    torch_cuda: list[torch.Tensor]

    @classmethod
    def capture(cls) -> RandomState:
        """Costs about 50 µs, nearly all of it NumPy's and Python's."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        return cls(random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state(), cuda)

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda:
            torch.cuda.set_rng_state_all(self.torch_cuda)

    def to_plain(self) -> dict[str, Any]:
        """Out of types that `torch.load(weights_only=True)` accepts."""
        numpy = {**self.numpy, "state": {**self.numpy["state"], "key": self.numpy["state"]["key"].tolist()}}
        return {"python": self.python, "numpy": numpy, "torch_cpu": self.torch_cpu, "torch_cuda": self.torch_cuda}

    @classmethod
    def from_plain(cls, state: dict[str, Any]) -> RandomState:
        key = np.asarray(state["numpy"]["state"]["key"], dtype=np.uint32)
        numpy = {**state["numpy"], "state": {**state["numpy"]["state"], "key": key}}
        return cls(state["python"], numpy, state["torch_cpu"], state["torch_cuda"])


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def undisturbed_rng() -> Iterator[None]:
    """Whatever is drawn inside leaves the random state outside as it was."""
    state = RandomState.capture()
    try:
        yield
    finally:
        state.restore()
