"""Guards judged with plain numbers, no trainer."""

import itertools
import math
import re

import pytest

from safetrain import Action, Limits, StepView, UsageError
from safetrain.core.verdict import Doubt, merge
from safetrain.guards.backoff import Backoff
from safetrain.guards.clip import Clip, ClipConfig
from safetrain.guards.finite import Finite
from safetrain.guards.rollback import Rollback
from safetrain.guards.spike import Spike
from safetrain.guards.stall import Stall

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


def test_backoff_halves_once_for_refusals_that_belong_together():
    backoff = Backoff(factor=0.5, floor=0.1, merge_steps=10)
    for steps, scale in (((), 1.0), ((5,), 0.5), ((5, 6, 14, 15), 0.5), ((5, 16), 0.25), ((5, 16, 27, 38, 49), 0.1)):
        assert backoff.judge(view(dynamics_steps=steps)).lr_scale == pytest.approx(scale)


def test_backoff_returns_exponentially_over_the_committed_steps_it_is_given():
    backoff = Backoff(factor=0.01, floor=0.01, recovery_steps=100)
    scales = []
    while (scale := backoff.judge(view(dynamics_steps=(3,))).lr_scale) < 1.0:
        scales.append(scale)
        backoff.learn(view(dynamics_steps=(3,)), COMMITTED)
    assert len(scales) == 100
    ratios = [later / earlier for earlier, later in itertools.pairwise(scales)]
    assert ratios == pytest.approx([100 ** (1 / 100)] * len(ratios))


def test_backoff_lowers_for_every_rollback_however_soon():
    lowered = view(dynamics_steps=(5, 7, 9), rollback_steps=(7, 9))
    assert Backoff(factor=0.5).judge(lowered).lr_scale == pytest.approx(0.125)


def test_backoff_is_not_lowered_by_faults_of_the_data():
    refused = view(consecutive_refusals=3, refused_steps=(197, 198, 199))
    assert Backoff().judge(refused).lr_scale == 1.0


def test_backoff_does_not_return_to_a_rate_that_keeps_causing_trouble():
    backoff = Backoff(factor=0.5, recovery_steps=10)
    for steps, ceiling in (((5,), 1.0), ((5, 50), 0.5), ((5, 50, 100), 0.25)):
        for _ in range(30):
            backoff.learn(view(dynamics_steps=steps), COMMITTED)
        assert backoff.judge(view(dynamics_steps=steps)).lr_scale == pytest.approx(ceiling)


def test_backoff_that_was_rolled_back_accounts_for_the_incidents_again():
    backoff = Backoff(factor=0.5)
    before = backoff.state_dict()
    backoff.learn(view(dynamics_steps=(5,)), COMMITTED)
    backoff.load_state_dict(before)
    assert backoff.judge(view(dynamics_steps=(5, 30))).lr_scale == pytest.approx(0.25)


def test_backoff_stays_low_after_a_restart():
    backoff = Backoff(restart_factor=0.1, recovery_steps=5)
    for _ in range(50):
        backoff.learn(view(num_restarts=1), COMMITTED)
    assert backoff.judge(view(num_restarts=1)).lr_scale == pytest.approx(0.1)


def test_backoff_lifts_a_lowered_ceiling_after_a_calm_time():
    backoff, scales = Backoff(restart_factor=0.1, recovery_steps=5, lift_after=20), []
    for _ in range(200):
        scales.append(backoff.judge(view(num_restarts=1)).lr_scale)
        backoff.learn(view(num_restarts=1), COMMITTED)
    assert scales[15] == pytest.approx(0.1)
    assert scales[30] == pytest.approx(0.2)
    assert scales[-1] == 1.0


def test_backoff_uses_the_rate_that_a_trial_found():
    backoff = Backoff(factor=0.5)
    assert backoff.judge(view(dynamics_steps=(5,), lr_shares={5: 0.1})).lr_scale == pytest.approx(0.1)


def taught(guard, losses, norms=None):
    for step, loss in enumerate(losses):
        norm = 1.0 if norms is None else norms[step]
        guard.learn(view(step=step, loss=loss, grad_norm=norm), COMMITTED)
    return guard


STEADY = [4.0] + [2.0 + 0.1 * (step % 3) for step in range(60)]


@pytest.mark.parametrize(
    ("history", "fields", "action"),
    [
        (STEADY, {"loss": 2.2}, Action.COMMIT),
        (STEADY, {"loss": 2.5}, Action.COMMIT),
        (STEADY, {"loss": 400.0}, Action.SKIP),
        (STEADY, {"loss": -400.0}, Action.COMMIT),
        (STEADY, {"loss": NAN}, Action.COMMIT),  # the business of `finite`
        (STEADY, {"loss": 400.0, "consecutive_refusals": 3}, Action.SKIP),
        (STEADY, {"loss": 400.0, "consecutive_refusals": 4}, Action.ROLLBACK),
        (STEADY, {"loss": 400.0, "consecutive_refusals": 60}, Action.COMMIT),
        (STEADY, {"loss": 2.6}, Action.COMMIT),  # a single one
        ([*STEADY, 2.6, 2.6], {"loss": 2.6}, Action.SKIP),  # three in a row
        (STEADY, {"loss": 2.2, "grad_norm": 29.0}, Action.COMMIT),
        (STEADY, {"loss": 2.2, "grad_norm": 31.0}, Action.SKIP),
        (STEADY[:10], {"loss": 400.0}, Action.COMMIT),  # still watching
        (STEADY[:10], {"loss": 1e5}, Action.SKIP),  # extreme
        ([2.3] + [1e-3] * 60, {"loss": 1.05e-3}, Action.COMMIT),
        ([2.3] + [1e-3] * 60, {"loss": 9.0}, Action.SKIP),
        ([-50.0 - step for step in range(60)], {"loss": -105.0}, Action.COMMIT),
        ([-50.0 - step for step in range(60)], {"loss": 4e3}, Action.SKIP),
        ([], {"loss": 1e9}, Action.COMMIT),
        ([2.0] + [(step % 10) ** 2 / 30 + 0.001 for step in range(60)], {"loss": 12.0}, Action.COMMIT),  # a long tail
        ([2.0] + [(step % 10) ** 2 / 30 + 0.001 for step in range(60)], {"loss": 1e6}, Action.SKIP),
    ],
)
def test_spike(history, fields, action):
    verdict = taught(Spike(), history).judge(view(**fields))
    assert verdict.action is action


def test_every_spike_is_doubtful():
    for history, loss in ((STEADY[:4], 1e5), (STEADY[:10], 1e5), (STEADY, 400.0)):
        assert taught(Spike(), history).judge(view(loss=loss)).doubt is Doubt.TRIAL


def test_suspects_that_were_tried_and_did_no_harm_make_suspicion_rarer_for_a_while():
    spike, tried = taught(Spike(), STEADY), 0
    for step in range(500):
        odd = view(
            step=step, loss=2.0 + 0.1 * (step % 3), grad_norm=100.0 * 100.0 ** (tried + 1) if step % 5 == 0 else 1.0
        )
        decision = merge([("spike", spike.judge(odd))])
        tried += decision.action is Action.SKIP
        spike.learn(odd, decision.tried)
    assert tried == 4  # of a hundred
    assert 2.0 < spike.num_harmless < 4.0


def test_a_large_update_is_suspect_before_the_loss_shows_it():
    spike = Spike()
    for step in range(40):
        spike.learn(view(step=step, signals={"spike.update": 0.01}), COMMITTED)
    assert spike.judge(view(signals={"spike.update": 0.09})).action is Action.COMMIT
    assert spike.judge(view(signals={"spike.update": 0.11})).evidence["signal"] == "update"


def test_spike_reports_that_it_accepts_a_new_level_and_learns_it_from_scratch():
    spike = taught(Spike(accept_after=8), STEADY)
    accepted = view(loss=50.0, consecutive_refusals=8)
    assert "accepted as a new level" in spike.judge(accepted).reason
    spike.learn(accepted, COMMITTED)
    for _ in range(30):
        assert spike.judge(view(loss=51.0)).action is Action.COMMIT
        spike.learn(view(loss=51.0), COMMITTED)


CLIMBING = [4.0 - 0.05 * step for step in range(60)] + [1.0 + 0.05 * step for step in range(60)]


@pytest.mark.parametrize(
    ("losses", "action"),
    [
        (CLIMBING[:60], Action.COMMIT),
        (CLIMBING[:70], Action.COMMIT),
        (CLIMBING, Action.ROLLBACK),
        ([4.0 - 0.05 * step for step in range(60)] + [1.05] * 100, Action.COMMIT),
        ([2.0 + (0.8 if step % 2 else -0.8) for step in range(200)], Action.COMMIT),
        ([-1.0 - 0.1 * step for step in range(60)] + [-6.9 + 0.1 * step for step in range(60)], Action.ROLLBACK),
    ],
)
def test_rollback_is_asked_for_when_the_loss_climbs_away(losses, action):
    assert taught(Rollback(), losses).judge(view()).action is action


def test_rollback_accepts_a_level_that_going_back_did_not_change():
    guard = taught(Rollback(), CLIMBING)
    helpless = view(step=500, rollback_steps=(200, 300, 400))
    verdict = guard.judge(helpless)
    assert verdict.action is Action.COMMIT
    assert "accepted" in verdict.reason
    guard.learn(helpless, COMMITTED)
    assert guard.judge(view(step=501)).action is Action.COMMIT


@pytest.mark.parametrize(
    ("losses", "norms", "action", "word"),
    [
        ([2.0] * 30, [1.0] * 30, Action.COMMIT, ""),
        ([2.0] * 30, [1.0] * 10 + [0.0] * 20, Action.ROLLBACK, "dead"),
        ([2.0] * 30, [1.0] * 10 + [1e-12] * 20, Action.ROLLBACK, "dead"),
        ([2.0] * 30, [0.0] * 30, Action.ROLLBACK, "dead"),
        ([2.0] * 60, [1.0] * 10 + [1e27] + [8.0] * 49, Action.COMMIT, ""),  # one outlier does not make the rest vanish
        ([0.0] * 30, [0.0] * 30, Action.COMMIT, ""),  # a margin that every sample satisfies
        ([1.0] * 20 + [9.5] * 41, [1.0] * 61, Action.ROLLBACK, "exactly 9.5"),
        ([1.0 + step for step in range(60)], [1.0] * 60, Action.ROLLBACK, "never below its start"),
        ([1.0 + step for step in range(61)], [1.0] * 61, Action.COMMIT, ""),  # asked once
        ([1.0, 0.5] + [9.0 + step for step in range(58)], [1.0] * 60, Action.COMMIT, ""),
        ([1.0] + [1.2 - 0.01 * (step % 7) for step in range(59)], [1.0] * 60, Action.COMMIT, ""),
    ],
)
def test_stall(losses, norms, action, word):
    verdict = taught(Stall(), losses, norms).judge(view())
    assert verdict.action is action
    assert word in verdict.reason
    assert verdict.restart == (word == "never below its start")


@pytest.mark.parametrize(
    ("losses", "size", "restart"),
    [
        ([2.0] + [2.6] * 7, 1.6, True),
        ([2.0] + [2.6] * 7, 1.4, False),  # an easy first batch: the weights have hardly moved
        ([2.0] + [2.4] * 7, 1.6, False),
        ([2.0] + [2.6] * 6, 1.6, False),
        ([2.0] + [2.6] * 8, 1.6, False),  # asked once
        ([-2.0] + [-1.4] * 7, 1.6, True),
    ],
)
def test_early_steps_that_raise_the_loss_ask_for_a_restart(losses, size, restart):
    guard = Stall()
    for step, loss in enumerate(losses):
        guard.learn(view(step=step, loss=loss, signals={"stall.weight_size": 1.0} if step == 0 else {}), COMMITTED)
    verdict = guard.judge(view(step=len(losses), signals={"stall.weight_size": size}))
    assert (verdict.doubt is Doubt.SINCE_START) == restart
    assert (verdict.action is Action.ROLLBACK) == restart


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Clip(mode="global_norm"), "guard clip: mode: 'global_norm' is not accepted"),
        (lambda: Clip(max_norm=-1), "guard clip: max_norm: -1.0 is out of range"),
        (lambda: Clip(max_nrom=1), "has no option 'max_nrom', did you mean 'max_norm'"),
        (lambda: Clip({"max_norm": 1.0}), "was given a dict as its config"),
        (lambda: Clip(ClipConfig(decay=2.0)), "decay: 2.0 is out of range"),
    ],
)
def test_options_given_in_python_are_checked_as_those_of_a_config(make, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        make()
