"""Random state that is taken anew only when it has changed is always the one of now."""

import random

import numpy as np
import pytest
import torch

from safetrain._private.rng_memory import NumpySource, PythonSource
from safetrain.tensors.rng import RandomState

DRAWS = {
    "python random": random.random,
    "python bits": lambda: random.getrandbits(1),
    "python gauss": lambda: random.gauss(0, 1),
    "python gauss twice": lambda: (random.gauss(0, 1), random.gauss(0, 1)),
    "python seed": lambda: random.seed(5),
    "python setstate": lambda: random.setstate(random.Random(9).getstate()),
    "python shuffle": lambda: random.shuffle([1, 2, 3]),
    "python whole tables": lambda: [random.getrandbits(32) for _ in range(2 * 624)],
    "numpy whole tables": lambda: np.random.bytes(3 * 624 * 4),
    "numpy rand": lambda: np.random.rand(),
    "numpy normal": lambda: np.random.randn(),
    "numpy normal twice": lambda: np.random.randn(2),
    "numpy seed": lambda: np.random.seed(5),
    "numpy permutation": lambda: np.random.permutation(3),
    "numpy bytes": lambda: np.random.bytes(1),
    "torch": lambda: torch.rand(1),
    "nothing": lambda: None,
}


def plain(state):
    return [repr(state.python), repr(state.numpy), state.torch_cpu.tolist()]


def now():
    return [repr(random.getstate()), repr(np.random.get_state(legacy=False)), torch.get_rng_state().tolist()]


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_what_is_captured_is_the_state_of_now(draw):
    for _ in range(5):
        assert plain(RandomState.capture()) == now()
        draw()
    assert plain(RandomState.capture()) == now()


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_captured_state_gives_the_same_numbers_again(draw):
    np.random.randn()  # keeps a second number
    random.gauss(0, 1)
    state = RandomState.capture()
    draw()
    first = (random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand(), torch.rand(()).item())
    state.restore()
    draw()
    assert first == (random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand(), torch.rand(()).item())


def test_the_tables_are_copied_only_after_a_draw():
    python, numpy = PythonSource(), NumpySource()
    np.random.seed(0)
    before = python.state(), numpy.state()
    assert python.state() is before[0]
    assert numpy.state() is before[1]
    random.random()
    np.random.rand()
    assert python.state() is not before[0]
    assert numpy.state() is not before[1]


def test_a_generator_whose_memory_is_unknown_is_asked_each_time(monkeypatch):
    class Unknown:
        state: object = None

    monkeypatch.setattr("safetrain._private.rng_memory._GENERATOR", Unknown)
    numpy = NumpySource()
    for _ in range(3):
        assert repr(numpy.state()) == repr(np.random.get_state(legacy=False))
        np.random.rand()


def test_another_generator_of_numpy_is_followed():
    numpy, known = NumpySource(), np.random.get_bit_generator()
    try:
        for generator in (np.random.MT19937(3), np.random.PCG64(3)):
            np.random.set_bit_generator(generator)
            for _ in range(3):
                assert repr(numpy.state()) == repr(np.random.get_state(legacy=False))
                np.random.rand()
    finally:
        np.random.set_bit_generator(known)
    assert repr(numpy.state()) == repr(np.random.get_state(legacy=False))
