"""The random state of every source a training step can draw from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch


class RandomState(NamedTuple):
    python: Any
    numpy: Any
    torch_cpu: torch.Tensor
    torch_cuda: list[torch.Tensor]

    @classmethod
    def capture(cls) -> RandomState:
        """Costs about 50 µs, most of it for the tables of Python and NumPy."""
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
        # The long tables as tensors: a hundred times faster to write than as many Python numbers.
        key = torch.from_numpy(self.numpy["state"]["key"].astype(np.int64))
        numpy = {**self.numpy, "state": {**self.numpy["state"], "key": key}}
        version, table, gauss = self.python
        python = {"version": version, "table": _as_tensor(table), "gauss": gauss}
        return {"python": python, "numpy": numpy, "torch_cpu": self.torch_cpu, "torch_cuda": self.torch_cuda}

    @classmethod
    def from_plain(cls, state: dict[str, Any]) -> RandomState:
        key = state["numpy"]["state"]["key"].numpy().astype(np.uint32)
        python = state["python"]
        table = tuple(python["table"].numpy().tolist())
        numpy = {**state["numpy"], "state": {**state["numpy"]["state"], "key": key}}
        return cls((python["version"], table, python["gauss"]), numpy, state["torch_cpu"], state["torch_cuda"])


@lru_cache(maxsize=1)
def _as_tensor(table: tuple[int, ...]) -> torch.Tensor:
    """Read only. Most runs never draw from Python's generator, so the table is the same each time."""
    return torch.from_numpy(np.array(table, dtype=np.int64))


GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def restorer_of_generator(generator: Any) -> Callable[[], None]:
    """What gives a generator the state again that it has now."""
    if isinstance(generator, torch.Generator):
        return partial(_set_torch_state, generator, generator.get_state())
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return partial(generator.set_state, generator.get_state(legacy=False))
    return partial(generator.setstate, generator.getstate())


def _set_torch_state(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


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
