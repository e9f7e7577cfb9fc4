"""The state of every random generator that a training step can draw from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from . import devices


class RandomState(NamedTuple):
    python: Any
    """Of the `random` module; None if it was not captured, and is left alone when the others are restored."""
    numpy: Any
    """Of NumPy's global generator; None likewise."""
    torch_cpu: torch.Tensor
    torch_devices: dict[str, torch.Tensor]
    """By the name of each device that is in use."""

    @classmethod
    def capture(cls, with_host: bool = True) -> RandomState:
        """`with_host`: also the generators of Python and NumPy, whose tables take about 75 µs to copy."""
        python, numpy = (random.getstate(), np.random.get_state(legacy=False)) if with_host else (None, None)
        return cls(python, numpy, torch.get_rng_state(), devices.random_states())

    def restore(self) -> None:
        if self.python is not None:
            random.setstate(self.python)
            np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch_cpu)
        if self.torch_devices:
            devices.set_random_states(self.torch_devices)

    def same_of_torch(self, other: RandomState) -> bool:
        """The same state of torch's generators, on the host and on the devices in use."""
        ours, theirs = self.torch_devices, other.torch_devices
        same = ours.keys() == theirs.keys() and all(torch.equal(state, theirs[name]) for name, state in ours.items())
        return same and torch.equal(self.torch_cpu, other.torch_cpu)

    def unplaced(self) -> list[str]:
        """Devices with a state of which there is no such kind here: random numbers drawn there (dropout masks) will differ."""
        return devices.unplaced(self.torch_devices)

    def to_plain(self) -> dict[str, Any]:
        """Out of types that `torch.load(weights_only=True)` accepts."""
        plain = {"python": None, "numpy": None, "torch_cpu": self.torch_cpu, "torch_devices": self.torch_devices}
        if self.python is None:
            return plain
        # The long tables as tensors: a hundred times faster to write than as many Python numbers.
        numpy = _with_arrays(self.numpy, lambda array: torch.from_numpy(array.astype(np.int64)), np.ndarray)
        version, table, gauss = self.python
        python = {"version": version, "table": torch.tensor(table), "gauss": gauss}
        return plain | {"python": python, "numpy": numpy}

    @classmethod
    def from_plain(cls, state: dict[str, Any]) -> RandomState:
        of_devices = state.get("torch_devices")
        if of_devices is None:  # version 0.1.0 kept those of every visible GPU
            of_devices = {f"cuda:{index}": each for index, each in enumerate(state.get("torch_cuda", ()))}
        if state["python"] is None:
            return cls(None, None, state["torch_cpu"], of_devices)
        python = state["python"]
        table = tuple(python["table"].numpy().tolist())
        # As int64 they hold every bit of what NumPy keeps in words of 32 and 64.
        kind = np.uint32 if state["numpy"]["bit_generator"] == "MT19937" else np.uint64
        numpy = _with_arrays(state["numpy"], lambda tensor: tensor.numpy().astype(kind), torch.Tensor)
        return cls((python["version"], table, python["gauss"]), numpy, state["torch_cpu"], of_devices)


def _with_arrays(state: Any, convert: Callable[[Any], Any], kind: type) -> Any:
    """The state of a NumPy generator, whichever it is, with its arrays converted."""
    if isinstance(state, dict):
        return {name: _with_arrays(value, convert, kind) for name, value in state.items()}
    return convert(state) if isinstance(state, kind) else state


class RandomBeforeStep:
    """The random state before each step of a run.

    Few steps draw from Python's or NumPy's generator. These are captured before the first steps and before every
    `EVERY`th; once a step was seen to draw from them, before each. Until then a replay of a step that draws from them for the
    first time uses other numbers than the step did.
    """

    FIRST, EVERY = 3, 50

    def __init__(self) -> None:
        self._num_captured = 0
        self._draws_on_host = False

    def capture(self) -> RandomState:
        looks = self._num_captured < self.FIRST or self._num_captured % self.EVERY == 0
        self._num_captured += 1
        return RandomState.capture(with_host=self._draws_on_host or looks)

    def compare(self, before: RandomState) -> None:
        """After a step of which the host's generators were captured: has it drawn from them?"""
        if not self._draws_on_host:
            same_python = random.getstate() == before.python
            self._draws_on_host = not (same_python and _same(np.random.get_state(legacy=False), before.numpy))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    return bool(np.array_equal(one, other))


GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def state_of_generator(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False) if isinstance(generator, np.random.RandomState) else generator.getstate()


def restore_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def restorer_of_generator(generator: Any) -> Callable[[], None]:
    """What gives a generator the state again that it has now."""
    return partial(restore_generator, generator, state_of_generator(generator))


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
