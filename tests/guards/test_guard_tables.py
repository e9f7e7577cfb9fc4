"""Guards judged with plain numbers, no trainer."""

import itertools
import math

import pytest

from safetrain import Action, Limits, StepView
from safetrain.guards.backoff import Backoff
from safetrain.guards.clip import Clip
from safetrain.guards.finite import Finite
from safetrain.verdict import merge

NAN, INF = math.nan, math.inf
COMMITTED = merge([])


def view(step=200, loss=1.0, grad_norm=1.0, **fields):
    return StepView(step=step, loss=loss, grad_norm=grad_norm, **fields)


@pytest.mark.parametrize(
    ("fields", "action", "signal"),
    [
        ({}, Action.COMMIT, None),
        ({"loss": 1e38, "grad_norm": 1e38}, Action.COMMIT, None),
        ({"loss": NAN}, Action.SKIP, "loss"),
        ({"loss": INF}, Action.SKIP, "loss"),
        ({"loss": -INF}, Action.SKIP, "loss"),
        ({"grad_norm": NAN}, Action.SKIP, "grad_norm"),
        ({"grad_norm": INF}, Action.SKIP, "grad_norm"),
        ({"grad_norm": 1e40, "norm_overflow": True, "limits": Limits(norm=1.0)}, Action.COMMIT, None),
        ({"grad_norm": 1e40, "norm_overflow": True}, Action.SKIP, "grad_norm"),
        ({"signals": {"finite.buffers": NAN}}, Action.SKIP, "buffers"),
        ({"signals": {"finite.state": INF}}, Action.SKIP, "state"),
        ({"lrs": (0.1, NAN)}, Action.SKIP, "lr"),
        ({"loss": NAN, "consecutive_refusals": 8}, Action.SKIP, "loss"),
        ({"loss": NAN, "consecutive_refusals": 9}, Action.ROLLBACK, "loss"),
        ({"loss": NAN, "refused_steps": range(100, 128)}, Action.SKIP, "loss"),
        ({"loss": NAN, "refused_steps": range(100, 129)}, Action.ROLLBACK, "loss"),
        ({"loss": NAN, "refused_steps": range(0, 29)}, Action.SKIP, "loss"),
        ({"consecutive_refusals": 9}, Action.COMMIT, None),
        ({"loss": NAN, "bad_state": lambda: {"fc.weight": "1 NaN of 4 values"}}, Action.ROLLBACK, "loss"),
        ({"scaler_overflow": True, "grad_norm": INF, "loss_scale": 1024.0}, Action.COMMIT, None),
        ({"scaler_overflow": True, "grad_norm": INF, "loss_scale": 0.5}, Action.SKIP, "loss_scale"),
        (
            {"scaler_overflow": True, "grad_norm": NAN, "loss_scale": 64.0, "consecutive_overflows": 21},
            Action.SKIP,
            "loss_scale",
        ),
    ],
)
def test_finite(fields, action, signal):
    verdict = Finite().judge(view(**fields))
    assert (verdict.action, verdict.evidence.get("signal")) == (action, signal)


def test_finite_names_the_bad_state():
    verdict = Finite().judge(view(loss=NAN, bad_state=lambda: {"fc.weight": "1 NaN of 4 values"}))
    assert "fc.weight (1 NaN of 4 values)" in verdict.reason


def test_finite_never_looks_at_the_state_of_a_healthy_step():
    Finite().judge(view(bad_state=lambda: pytest.fail("read the whole state for nothing")))


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ({"mode": "norm", "max_norm": 2.0}, Limits(norm=2.0)),
        ({"mode": "group_norm", "max_norm": 2.0}, Limits(group_norm=2.0)),
        ({"mode": "value", "max_value": 0.5}, Limits(value=0.5)),
        ({"mode": "adaptive"}, Limits()),
    ],
)
def test_clip_limits_before_anything_was_learned(options, limits):
    assert Clip(**options).limits() == limits


def test_adaptive_clip_limits_to_deviations_above_the_recent_norms():
    clip = Clip(mode="adaptive", warmup_steps=10, min_ratio=1.0, z=3.0)
    norms = [1.0, 1.2, 0.8] * 20
    for step, norm in enumerate(norms):
        assert (clip.limits() == Limits()) == (step < 10)
        clip.learn(view(grad_norm=norm, limits=clip.limits()), COMMITTED)
    assert 1.3 < clip.limits().norm < 1.8  # mean 1, deviation 0.16, three of them


def test_adaptive_clip_learns_the_clipped_norm_so_a_spike_does_not_lift_its_limit():
    clip = Clip(mode="adaptive", warmup_steps=10, min_ratio=2.5)
    for _ in range(50):
        clip.learn(view(grad_norm=1.0, limits=clip.limits()), COMMITTED)
    before = clip.limits().norm
    clip.learn(view(grad_norm=1e6, limits=clip.limits()), COMMITTED)
    assert clip.limits().norm < 1.5 * before
    assert before == pytest.approx(2.5)


def test_adaptive_clip_of_a_dead_gradient_does_not_limit_to_zero():
    clip = Clip(mode="adaptive", warmup_steps=1)
    clip.learn(view(grad_norm=0.0), COMMITTED)
    assert clip.limits() == Limits()


def test_clip_never_refuses():
    assert Clip().judge(view(loss=NAN, grad_norm=INF)).action is Action.COMMIT


def test_backoff_halves_at_each_refusal_down_to_the_floor():
    backoff = Backoff(factor=0.5, floor=0.1)
    scales = [backoff.judge(view(consecutive_refusals=n)).lr_scale for n in range(6)]
    assert scales == [1.0, 0.5, 0.25, 0.125, 0.1, 0.1]


def test_backoff_returns_exponentially_over_the_committed_steps_it_is_given():
    backoff = Backoff(factor=0.5, floor=0.01, recovery_steps=100)
    backoff.learn(view(consecutive_refusals=10), COMMITTED)  # first committed step after ten refusals
    scales = []
    while (scale := backoff.judge(view()).lr_scale) < 1.0:
        scales.append(scale)
        backoff.learn(view(), COMMITTED)
    assert len(scales) == 99
    ratios = [later / earlier for earlier, later in itertools.pairwise(scales)]
    assert ratios == pytest.approx([100 ** (1 / 100)] * len(ratios))


def test_backoff_compounds_when_trouble_returns_before_it_has_recovered():
    backoff = Backoff(factor=0.5, floor=0.01, recovery_steps=100)
    backoff.learn(view(consecutive_refusals=1), COMMITTED)
    assert backoff.judge(view(consecutive_refusals=1)).lr_scale == pytest.approx(0.25 * 100 ** (1 / 100))
