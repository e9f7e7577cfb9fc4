"""How values are spread: every one is counted once, and what is kept stays small."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from safetrain.forensics import investigate
from safetrain.forensics.histogram import histogram

VALUES = st.lists(st.floats(width=32) | st.sampled_from([0.0, 1e-45, 3e38, -3e38]), min_size=1, max_size=200)


@settings(max_examples=200, deadline=None)
@given(VALUES, st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_every_finite_value_but_zero_is_counted_once(values, dtype):
    tensor = torch.tensor(values, dtype=dtype)
    bad = tensor > 1
    found = histogram(tensor, bad)
    countable = torch.isfinite(tensor) & (tensor != 0)
    assert sum(found["counts"]) == int(countable.sum())
    assert sum(found["at_bad"]) == int((countable & bad).sum())
    assert found["zeros_at_bad"] == 0
    assert all(part <= whole for part, whole in zip(found["at_bad"], found["counts"], strict=True))
    edges = found["edges"]
    assert len(edges) == len(found["counts"]) + bool(found["counts"])
    assert all(map(math.isfinite, edges))
    assert edges == sorted(edges)
    assert len(json.dumps(found)) < 2000


def test_bins_follow_orders_of_magnitude_only_where_values_do():
    torch.manual_seed(0)
    assert histogram(torch.randn(1000))["scale"] == "linear"
    assert histogram(torch.rand(1000).pow(30))["scale"] == "log"


def test_an_operand_that_is_broadcast_is_counted_at_the_bad_positions():
    bad = torch.zeros(4, 3, dtype=torch.bool)
    bad[1] = True
    found = histogram(torch.tensor([[1.0], [0.0], [2.0], [3.0]]), bad)
    assert found["zeros_at_bad"] == 3
    assert sum(found["at_bad"]) == 0
    assert "at_bad" not in histogram(torch.ones(7), bad)


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.arange(3), torch.ones(2, dtype=torch.complex64)])
def test_what_has_no_order_has_no_histogram(tensor):
    assert histogram(tensor) is None


def test_a_large_operand_is_sampled(monkeypatch):
    monkeypatch.setattr("safetrain.forensics.histogram.LARGEST", 100)
    found = histogram(torch.ones(1000))
    assert (found["every"], sum(found["counts"])) == (10, 100)


def test_an_incident_has_the_histogram_of_what_was_bad_before_the_step():
    model = nn.Linear(4, 1)
    batch = torch.randn(8, 4)
    batch[3, 1] = math.nan
    (field,) = investigate(model, lambda m, x: m(x).mean(), batch).origin.inputs
    assert (field["name"], field["nan"], sum(field["histogram"]["counts"])) == ("batch", 1, 31)
    with torch.no_grad():
        model.weight[0, 2] = math.inf
    (weight,) = investigate(model, lambda m, x: m(x).mean(), torch.ones(8, 4)).origin.inputs
    assert (weight["name"], weight["inf"], sum(weight["histogram"]["counts"])) == ("weight", 1, 3)


def test_an_incident_has_the_histograms_of_the_operands_of_its_operation():
    model = nn.Linear(4, 1)
    batch = torch.rand(8, 4) + 1
    batch[5] = 0
    incident = investigate(model, lambda m, x: m(x / x.sum(1, keepdim=True)).mean(), batch)
    divisor = next(operand for operand in incident.origin.inputs if operand["name"] == "other")
    assert divisor["histogram"]["zeros_at_bad"] == 4
