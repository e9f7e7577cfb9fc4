"""The merge rule: commutative, associative in effect, severe wins, nothing is lost."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safetrain import Action, Verdict
from safetrain.core.verdict import merge

verdicts = st.builds(
    lambda action, lr_scale, reason: Verdict(
        action, lr_scale, reason or "because" if action > Action.COMMIT else reason
    ),
    st.sampled_from(Action),
    st.floats(0.0, 1.0),
    st.text(max_size=5),
)
by_guard = st.dictionaries(st.text(min_size=1, max_size=5), verdicts, max_size=6)


@given(by_guard, st.randoms())
def test_order_means_nothing(given_verdicts, random):
    items = list(given_verdicts.items())
    shuffled = random.sample(items, len(items))
    one, other = merge(items), merge(shuffled)
    for name in ("action", "lr_scale", "reasons", "verdicts"):
        assert getattr(one, name) == getattr(other, name)
    if items:
        assert one.decisive == other.decisive


@given(by_guard)
def test_most_severe_action_and_smallest_scale_win_and_every_reason_is_kept(given_verdicts):
    decision = merge(given_verdicts.items())
    assert decision.action == max([v.action for v in given_verdicts.values()], default=Action.COMMIT)
    assert decision.lr_scale == min([v.lr_scale for v in given_verdicts.values()], default=1.0)
    assert sorted(decision.reasons) == sorted(f"{g}: {v.reason}" for g, v in given_verdicts.items() if v.reason)


@given(by_guard, by_guard)
def test_merging_in_two_parts_changes_nothing(first, second):
    second = {f"second {name}": v for name, v in second.items()}
    whole = merge([*first.items(), *second.items()])
    merged = [merge(part.items()) for part in (first, second)]
    parts = merge(
        [(name, Verdict(part.action, part.lr_scale, "merged")) for name, part in zip("ab", merged, strict=True)]
    )
    assert (whole.action, whole.lr_scale) == (parts.action, parts.lr_scale)


def test_severity_order():
    assert Action.COMMIT < Action.SKIP < Action.ROLLBACK < Action.STOP
    assert [str(a) for a in Action] == ["commit", "skip", "rollback", "stop"]


@pytest.mark.parametrize("lr_scale", [math.nan, math.inf, -0.1])
def test_a_learning_rate_scale_that_makes_no_sense_is_an_error(lr_scale):
    with pytest.raises(ValueError, match="lr_scale"):
        Verdict(lr_scale=lr_scale)


def test_a_refusal_needs_a_reason():
    with pytest.raises(ValueError, match="reason"):
        Verdict(Action.SKIP)


def test_salvage_needs_every_refusing_guard_to_agree():
    yes = Verdict(Action.SKIP, reason="r", salvage=True)
    no = Verdict(Action.SKIP, reason="r")
    assert merge([("a", yes), ("b", Verdict())]).salvage
    assert not merge([("a", yes), ("b", no)]).salvage
