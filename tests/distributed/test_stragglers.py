"""Which rank is slow, from the seconds that each has spent by itself."""

import numpy as np
import pytest

from safetrain.distributed.stragglers import WINDOW, Stragglers


def found(own, step, windows=1):
    """Of ranks that spend these seconds on data and on their forward pass, in steps of this length."""
    watch, all_found = Stragglers(len(own)), []
    for index in range(windows * WINDOW):
        all_found += watch.add(np.array(own), index * step)
    return [(slow.rank, slow.phase) for slow in all_found]


@pytest.mark.parametrize(
    ("own", "step", "slow"),
    [
        ([[0.01, 0.1]] * 4, 0.3, []),
        ([[0.01, 0.1]] * 3 + [[0.01, 0.25]], 0.4, [(3, "forward")]),
        ([[0.2, 0.1]] + [[0.01, 0.1]] * 3, 0.4, [(0, "data")]),
        ([[0.01, 0.1], [0.01, 0.13]], 0.4, []),
        ([[0.0001, 0.1], [0.001, 0.1], [0.0001, 0.1]], 0.3, []),
    ],
    ids=["alike", "forward", "data", "a little", "many times nothing"],
)
def test_a_slow_rank_is_named_with_its_phase(own, step, slow):
    assert found(own, step) == slow


def test_it_is_named_once():
    assert found([[0.0, 0.1], [0.0, 0.1], [0.0, 0.5]], 0.6, windows=3) == [(2, "forward")]
