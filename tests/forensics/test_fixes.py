"""A fix names functions that exist, in an expression that can be typed as it stands."""

from __future__ import annotations

import math
import re

import pytest
import torch
from forensic_cases import incident_of
from torch import Tensor, nn

import safetrain
from safetrain import safe
from safetrain.forensics import fixes


def test_every_function_named_in_a_fix_exists() -> None:
    named = {name for text in fixes._SAFE.values() for name in re.findall(r"safe\.(\w+)\(", text)}
    assert len(named) > 10
    assert named <= set(dir(safe))


@pytest.mark.parametrize("operation", ["log", "log2", "log10", "log1p", "rsqrt", "sqrt", "reciprocal"])
def test_the_expression_of_a_fix_is_what_the_operation_was(operation: str) -> None:
    shift = 1 if operation == "log1p" else 0

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return getattr(torch, operation)(model(batch).square() - shift).mean()

    model = nn.Linear(2, 1, bias=False)
    incident = incident_of(model, loss_fn, torch.zeros(3, 2))
    said = re.search(r": use (.*) there", incident.fix)
    assert said is not None
    x = torch.tensor([0.5, 2.0])
    written = eval(said[1], {"safetrain": safetrain, "math": math, "x": x})
    torch.testing.assert_close(written, getattr(torch, operation)(x))


def test_a_remedy_that_leaves_no_gradients_verifies_no_update() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), eps=0.0)
    incident = incident_of(model, lambda model, batch: 0 * model(batch).sum(), torch.ones(3, 2), optimizer=optimizer)
    assert incident.origin.phase == "optimizer"
    assert {remedy.name for remedy in incident.remedies if remedy.finite} == {"optimizer_eps"}


def test_the_proof_of_a_fix_for_half_precision_is_single_precision() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    nn.init.constant_(model[0].weight, 300.0)
    batch = torch.full((4, 4), 300.0)
    incident = incident_of(model, lambda model, batch: model(batch).float().mean(), batch, precision="fp16")
    assert incident.cause.label == "fp16_overflow"
    assert "Verified: with 0 kept in fp32" in incident.fix or "Verified: the whole step in single" in incident.fix


def test_a_parameter_of_zeros_is_named_with_its_initialisation() -> None:
    layer = nn.Linear(3, 2)
    nn.init.zeros_(layer.weight)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(layer))
    incident = incident_of(model, lambda model, batch: model(batch).mean(), torch.ones(4, 3))
    weight = "0.parametrizations.weight.original"
    assert f"{weight}1 and {weight}0 are 0 throughout: change their initialisation. Verified" in incident.fix


def test_data_of_zeros_says_nothing_of_parameters() -> None:
    incident = incident_of(nn.Linear(3, 2), lambda model, batch: (model(batch) / batch.sum()).mean(), torch.zeros(4, 3))
    assert "initialisation" not in incident.fix
