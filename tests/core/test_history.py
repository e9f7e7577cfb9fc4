"""Running statistics equal those of the values themselves."""

import math

from hypothesis import given
from hypothesis import strategies as st

from safetrain.core.history import Recent

NUMBERS = st.lists(st.floats(allow_nan=False) | st.integers(-3, 3).map(float), max_size=60)


@given(st.integers(1, 8), NUMBERS, NUMBERS)
def test_the_largest_is_known_at_any_time(size, first, more):
    recent = Recent(size, first)
    for value in more:
        recent.add(value)
        assert recent.largest == max(recent)
    recent.clear()
    assert recent.largest == -math.inf
    for value in more:
        recent.add(value)
        assert recent.largest == max(recent)


def test_nan_is_no_largest_value():
    recent = Recent(3, [1.0, 5.0])
    recent.add(math.nan)
    assert recent.largest == 5.0
    for value in (2.0, 3.0):
        recent.add(value)
    recent.add(4.0)
    assert recent.largest == 4.0
