"""A captured random state gives the same numbers again, for every generator."""

import random

import numpy as np
import pytest
import torch

from safetrain.tensors.rng import RandomBeforeStep, RandomState

DRAWS = {
    "python": random.random,
    "python gauss": lambda: random.gauss(0, 1),
    "python seed": lambda: random.seed(5),
    "python whole tables": lambda: [random.getrandbits(32) for _ in range(2 * 624)],
    "numpy": np.random.rand,
    "numpy normal": np.random.randn,
    "numpy seed": lambda: np.random.seed(5),
    "numpy whole tables": lambda: np.random.bytes(3 * 624 * 4),
    "torch": lambda: torch.rand(1),
    "nothing": lambda: None,
}


def numbers():
    return random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand(), torch.rand(()).item()


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_captured_state_gives_the_same_numbers_again(draw):
    np.random.randn()  # keeps a second number
    random.gauss(0, 1)
    state = RandomState.capture()
    draw()
    first = numbers()
    for saved in (state, RandomState.from_plain(state.to_plain())):
        saved.restore()
        draw()
        assert numbers() == first


def test_another_generator_of_numpy_is_followed():
    known = np.random.get_bit_generator()
    try:
        for generator in (np.random.MT19937(3), np.random.PCG64(3)):
            np.random.set_bit_generator(generator)
            state = RandomState.capture()
            first = numbers()
            state.restore()
            assert numbers() == first
    finally:
        np.random.set_bit_generator(known)


def test_generators_of_the_host_are_captured_before_each_step_once_a_step_drew_from_them():
    before, captured = RandomBeforeStep(), []
    for step in range(60):
        state = before.capture()
        captured.append(state.python is not None)
        if step == 50:
            random.random()
        if captured[-1]:
            before.compare(state)
    assert captured == [step < 3 or step >= 50 for step in range(60)]
