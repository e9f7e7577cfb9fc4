"""The anomaly guard judged with plain numbers."""

import math

import pytest
import torch

from safetrain import Action, StepView, UsageError
from safetrain.guards.anomaly import Anomaly

ERROR = RuntimeError("Function 'SqrtBackward0' returned nan values in its 0th output.")


def view(loss=1.0, grad_norm=1.0, **fields):
    return StepView(step=7, loss=loss, grad_norm=grad_norm, **fields)


@pytest.mark.parametrize(
    ("fields", "asks"),
    [
        ({}, False),
        ({"loss": math.nan}, True),
        ({"grad_norm": math.inf}, True),
        ({"grad_norm": math.inf, "scaler_overflow": True}, False),
        ({"error": IndexError("x")}, True),
    ],
)
def test_replay_asks_for_anomaly_mode_when_a_step_is_in_trouble_and_never_refuses(fields, asks):
    verdict = Anomaly().judge(view(**fields))
    assert verdict.action is Action.COMMIT
    assert verdict.detect_anomaly is asks


def test_replay_installs_nothing():
    assert Anomaly().attach(torch.nn.Linear(1, 1)) is None
    assert not torch.is_anomaly_enabled()


def test_always_explains_what_anomaly_mode_raises_and_nothing_else():
    guard = Anomaly(mode="always")
    raised = view(loss=math.nan, grad_norm=math.nan, error=ERROR)
    assert guard.explains(raised)
    verdict = guard.judge(raised)
    assert verdict.action is Action.SKIP
    assert verdict.evidence == {"signal": "backward", "value": str(ERROR)}
    for error in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError(str(ERROR))):
        assert not guard.explains(view(error=error))
        assert guard.judge(view(error=error)).action is Action.COMMIT
    assert not Anomaly().explains(raised)


def test_always_restores_the_setting_it_found():
    remove = Anomaly(mode="always").attach(torch.nn.Linear(1, 1))
    assert torch.is_anomaly_enabled()
    remove()
    assert not torch.is_anomaly_enabled()
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        Anomaly(mode="always").attach(torch.nn.Linear(1, 1))()
        assert torch.is_anomaly_enabled()
        assert not torch.is_anomaly_check_nan_enabled()


def test_always_under_the_loss_scaler_cannot_tell_an_overflow_from_a_fault():
    with pytest.raises(UsageError, match=r"returned nan values(.|\n)*mode=replay"):
        Anomaly(mode="always").explains(view(error=ERROR, loss_scale=65536.0))
