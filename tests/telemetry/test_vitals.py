"""How a run is at a moment, in plain numbers."""

import math

import pytest

from safetrain.core.verdict import Verdict, merge
from safetrain.core.view import Limits, StepView
from safetrain.telemetry.scalars import hyperparameters, step_scalars
from safetrain.telemetry.sink import StepRecord
from safetrain.telemetry.vitals import HEALTHY, RECOVERING, REFUSED, ROLLED_BACK, STOPPED, Vitals


def record(step, loss=1.0, outcome="commit", grad_norm=0.5, lr_scale=1.0, refused_loss=None, **view):
    view = StepView(step, loss, grad_norm, lrs=(0.1,), refused_loss=refused_loss, **view)
    return StepRecord(view, merge([("guard", Verdict(lr_scale=lr_scale))]), outcome, step + 1)


def vitals_after(*records):
    vitals = Vitals()
    for each in records:
        vitals.add(each)
    return vitals


@pytest.mark.parametrize(
    ("records", "status"),
    [
        ([], HEALTHY),
        ([record(0)], HEALTHY),
        ([record(0, lr_scale=0.5)], RECOVERING),
        ([record(0, math.nan, "skip")], REFUSED),
        ([record(0, outcome="rollback")], ROLLED_BACK),
        ([record(0, outcome="stop")], STOPPED),
        ([record(0, math.nan, "skip"), record(1)], RECOVERING),
        ([record(0, math.nan, "skip"), record(101)], HEALTHY),
        ([record(0, refused_loss=math.nan)], RECOVERING),
        ([record(0, refused_loss=math.nan), record(1)], HEALTHY),
    ],
)
def test_status(records, status):
    assert vitals_after(*records).status == status


def test_counts():
    vitals = vitals_after(
        record(0),
        record(1, math.nan, "skip", grad_norm=math.nan),
        record(2, 2.0, refused_loss=math.inf),
        record(3, 3.0, "overflow", grad_norm=math.inf, scaler_overflow=True),
        record(4, math.nan),  # without guards
    )
    assert (vitals.num_skipped, vitals.num_overflows, vitals.num_repaired) == (2, 1, 1)
    assert (vitals.num_bad_losses, vitals.num_bad_gradients) == (3, 1)


def test_percentiles_and_clipping_are_of_committed_steps():
    records = [record(step, grad_norm=float(step), limits=Limits(norm=89.5)) for step in range(100)]
    vitals = vitals_after(*records, record(100, outcome="skip", grad_norm=1e9), record(101, grad_norm=math.nan))
    assert vitals.grad_norm_percentiles() == {50: 50.0, 95: 95.0, 99: 99.0}
    assert vitals.clip_fraction == 0.1


def test_the_loss_in_deviations():
    losses = [1.0, 1.2] * 20
    vitals = vitals_after(*(record(step, loss) for step, loss in enumerate(losses)))
    vitals.add(record(40, 2.1, "skip"))
    assert vitals.loss_z == pytest.approx(1.0 / (1.4826 * 0.1), rel=0.01)
    vitals.add(record(41, math.nan, "skip"))
    assert math.isnan(vitals.loss_z)
    steady = vitals_after(*(record(step) for step in range(20)))
    assert steady.loss_z == 0.0
    steady.add(record(20, 2.0, "skip"))
    assert steady.loss_z == math.inf


def test_nan_is_logged():
    vitals = vitals_after(*(record(step) for step in range(20)), record(20, math.nan, "skip", grad_norm=math.nan))
    values = step_scalars(vitals.last, vitals)
    assert [tag for tag, value in values.items() if math.isnan(value)] == [
        "health/grad_norm",
        "loss/train",
        "health/loss_z",
    ]
    assert values["health/status"] == REFUSED
    assert values["health/nonfinite_losses"] == 1


def test_health_comes_first():
    vitals = vitals_after(*(record(step, metrics={"accuracy": 0.5}, loss_scale=2.0) for step in range(20)))
    vitals.gauges["perf/unknown_yet"] = lambda: math.nan
    groups = list(dict.fromkeys(tag.split("/")[0] for tag in sorted(step_scalars(vitals.last, vitals))))
    assert groups == ["health", "loss", "metric", "optim", "precision"]


def test_hyperparameters_are_the_sections_that_define_a_training():
    settings = {
        "name": "x",
        "seed": 3,
        "model": {"_target_": "a.B", "width": 4, "deep": {"dropout": 0.1}},
        "loop": {"log_every": 10, "compile": False, "max_steps": None},
        "logging": {"console": "off"},
    }
    assert hyperparameters(settings) == {
        "seed": 3,
        "model._target_": "a.B",
        "model.width": 4,
        "model.deep.dropout": 0.1,
        "loop.compile": "false",
    }
