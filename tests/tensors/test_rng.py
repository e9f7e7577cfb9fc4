"""The captured random state is that of this moment, for every generator."""

import random

import numpy as np
import pytest
import torch

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


def test_another_generator_of_numpy_is_followed():
    known = np.random.get_bit_generator()
    try:
        for generator in (np.random.MT19937(3), np.random.PCG64(3)):
            np.random.set_bit_generator(generator)
            for _ in range(3):
                assert repr(RandomState.capture().numpy) == repr(np.random.get_state(legacy=False))
                np.random.rand()
    finally:
        np.random.set_bit_generator(known)
    assert repr(RandomState.capture().numpy) == repr(np.random.get_state(legacy=False))
