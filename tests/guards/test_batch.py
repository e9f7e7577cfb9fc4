"""The batch guard: what it finds, where, and what it answers. No trainer."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from safetrain import Action, StepView
from safetrain.core.verdict import merge
from safetrain.core.view import DeviceStep
from safetrain.guards.batch import Batch
from safetrain.guards.batch_checks import Checks

NAN, INF = math.nan, math.inf


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    target: torch.Tensor


def pair(value=None, row=2):
    x, y = torch.randn(4, 3), torch.arange(4)
    if value is not None:
        x[row, 1] = value
    return x, y


def num_bad(guard, window):
    loss = torch.zeros(())
    signals = guard.measure(DeviceStep(0, loss, loss, [], lambda: None, lambda: None, window))
    return float(signals["bad"])


def view(guard, window, loss=NAN, **fields):
    signals = {"batch.bad": num_bad(guard, window)}
    return StepView(step=5, loss=loss, grad_norm=loss, signals=signals, window=lambda: window, **fields)


@pytest.mark.parametrize(
    ("window", "kind", "samples", "rows"),
    [
        ([pair(NAN)], "nonfinite", [2], {0: [2]}),
        ([pair(INF)], "nonfinite", [2], {0: [2]}),
        ([pair(), pair(-INF, row=3)], "nonfinite", [7], {1: [3]}),
        ([pair(NAN, row=0), pair(NAN, row=1)], "nonfinite", [0, 5], {0: [0], 1: [1]}),
        ([{"x": torch.tensor([1.0, NAN]), "scale": torch.tensor(INF)}], "nonfinite", [1], {0: [1]}),
        ([Sample(torch.tensor([[1.0], [NAN]]), torch.ones(2))], "nonfinite", [1], {0: [1]}),
        ([torch.tensor([1.0, 2.0, NAN], dtype=torch.float64)], "nonfinite", [2], {0: [2]}),
        ([torch.tensor([NAN, 2.0], dtype=torch.float16)], "nonfinite", [0], {0: [0]}),
        ([(torch.zeros(0, 3), torch.zeros(0))], "empty", [], {0: []}),
    ],
)
def test_bad_data_of_a_step_in_trouble_is_refused_with_its_rows(window, kind, samples, rows):
    guard = Batch()
    verdict = guard.judge(view(guard, window))
    assert verdict.action is Action.SKIP
    assert verdict.evidence["signal"] == kind
    assert verdict.evidence["samples"] == samples
    assert verdict.evidence["rows"] == rows
    assert verdict.evidence["drop"] is True


def test_the_reason_names_field_count_and_rows():
    guard = Batch()
    x, y = pair(NAN)
    x[0, :] = NAN
    assert guard.judge(view(guard, [(x, y)])).reason == "field '0' holds 4 NaN in row 0, 2"


@pytest.mark.parametrize("window", [[pair()], [pair(1e38)], [torch.tensor([1, 2])], [{"text": "no tensor"}], []])
def test_healthy_data_of_a_step_in_trouble_is_not_refused(window):
    guard = Batch()
    assert num_bad(guard, window) == 0
    assert guard.judge(view(guard, window)).action is Action.COMMIT


@pytest.mark.parametrize(
    ("options", "action", "drop"),
    [
        ({}, Action.COMMIT, None),
        ({"only_if_bad": False}, Action.SKIP, True),
        ({"only_if_bad": False, "action": "skip"}, Action.SKIP, False),
        ({"only_if_bad": False, "action": "warn"}, Action.COMMIT, False),
    ],
)
def test_bad_data_that_the_model_coped_with(options, action, drop):
    guard = Batch(**options)
    verdict = guard.judge(view(guard, [pair(NAN)], loss=1.0))
    assert verdict.action is action
    assert verdict.evidence.get("drop") is drop


@pytest.mark.parametrize("glob", ["target*", "*.target", "batch.*"])
def test_fields_that_hold_nan_on_purpose_are_ignored_by_name(glob):
    guard = Batch(ignore=[glob])
    window = [{"x": torch.ones(2), "batch": {"target": torch.tensor([NAN, 1.0])}}]
    assert num_bad(guard, window) == 0
    assert guard.judge(view(guard, window)).action is Action.COMMIT


def test_a_warning_is_given_when_the_step_is_committed():
    guard = Batch(action="warn", only_if_bad=False)
    bad = view(guard, [pair(NAN)], loss=1.0)
    decision = merge([("batch", guard.judge(bad))])
    with pytest.warns(RuntimeWarning, match="step 5: field '0' holds 1 NaN in row 2"):
        guard.learn(bad, decision)


# ---- labels --------------------------------------------------------------------------------------------------------


def logits(*shape):
    class Model(nn.Module):
        def forward(self, x):
            return {"logits": torch.zeros(*shape)}

    return Model()


@pytest.mark.parametrize(
    ("shape", "labels", "rows"),
    [
        ((4, 3), [0, 1, 2, 0], []),
        ((4, 3), [0, 1, 3, 0], [2]),
        ((4, 3), [0, -1, 2, 7], [1, 3]),
        ((4, 3), [0, -100, 2, 0], []),
        ((2, 3, 5), [[0, 4, 1], [0, 1, 5]], [1]),
        ((2, 5, 3), [[0, 4, 1], [0, 1, 5]], [1]),
        ((4, 1), [0, 1, 1, 0], []),  # one output per sample: no classes to compare with
        ((4, 7, 9), [0, 99, 1, 0], []),  # fits no shape
    ],
)
def test_labels_are_compared_with_the_class_dimension_of_the_output(shape, labels, rows):
    guard, model = Batch(), logits(*shape)
    remove = guard.attach(model)
    guard.begin(0, 0)
    model(None)
    window = [(torch.ones(len(labels)), torch.tensor(labels))]
    assert (num_bad(guard, window) > 0) == bool(rows)
    verdict = guard.judge(view(guard, window))
    assert verdict.evidence.get("samples", []) == rows
    if rows:
        assert verdict.evidence["signal"] == "labels"
        assert "outside the" in verdict.reason
    remove()
    assert not model._forward_hooks


def test_only_integer_fields_that_are_called_labels_are_compared():
    guard, model = Batch(), logits(2, 3)
    guard.attach(model)
    model(None)
    index = torch.tensor([5, 9])
    assert num_bad(guard, [{"index": index}]) == 0
    assert num_bad(guard, [{"target": index.float()}]) == 0
    assert num_bad(guard, [{"target": index}]) == 2
    assert num_bad(Batch(labels=[]), [{"target": index}]) == 0
    assert Batch(labels=[]).attach(model) is None


# ---- types and errors ----------------------------------------------------------------------------------------------


def test_a_field_whose_type_differs_from_the_committed_batches_is_found():
    guard = Batch()
    x, y = pair()
    assert num_bad(guard, [(x.double(), y)]) == 0  # nothing known yet
    healthy = view(guard, [(x, y)], loss=1.0)
    guard.learn(healthy, merge([]))
    window = [(x.double(), y)]
    verdict = guard.judge(view(guard, window))
    assert (verdict.action, verdict.evidence["signal"]) == (Action.SKIP, "dtype")
    assert "is float64, in healthy batches float32" in verdict.reason
    twin = Batch()
    twin.load_state_dict(guard.state_dict())
    assert num_bad(twin, window) == 1


@pytest.mark.parametrize(
    ("error", "window", "options", "explained"),
    [
        (ValueError("Expected parameter loc"), [pair(NAN)], {}, True),
        (IndexError("Target 9 is out of bounds."), [pair(NAN)], {}, True),
        (ValueError("Expected parameter loc"), [pair()], {}, False),
        (KeyError("x"), [pair(NAN)], {}, False),
        (ValueError("Expected parameter loc"), [pair(NAN)], {"action": "warn"}, False),
    ],
)
def test_an_exception_is_explained_only_by_bad_data(error, window, options, explained):
    guard = Batch(**options)
    raised = StepView(step=0, loss=NAN, grad_norm=NAN, error=error, window=lambda: window)
    assert guard.explains(raised) is explained
    assert (guard.judge(raised).action is Action.SKIP) == (explained or isinstance(error, KeyError))


def test_a_rank_without_bad_data_refuses_with_the_others():
    verdict = Batch().judge(StepView(step=0, loss=NAN, grad_norm=NAN, signals={"batch.bad": 0.5}))
    assert verdict.action is Action.SKIP
    assert verdict.reason == "bad data on another rank"


def test_values_that_cannot_be_checked_are_left_alone():
    window = [{"sparse": torch.eye(3).to_sparse(), "small": torch.ones(2).to(torch.float8_e5m2), "none": None}]
    assert Checks().problems(window) == []
    assert float(Checks().num_bad(window, torch.zeros(()))) == 0
