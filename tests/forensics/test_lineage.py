"""Where the fatal value came from: the walk back from the bad operand to the batch, a parameter, a constant or a cancellation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forensic_cases import Tiny, incident_of, without_bias
from torch import Tensor, nn
from torch.nn import functional as F

from safetrain.core.incident import Incident, Link
from safetrain.incidents.bundle import incident_from
from safetrain.incidents.render import markdown


def last(incident: Incident) -> Link:
    assert incident.lineage, incident.cause
    return incident.lineage[-1]


def test_data_through_reduction_comparison_and_cast() -> None:
    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        real = (batch["tokens"] != 0).float()
        scores = model(batch["x"]).square().mean(1)
        return (scores * real.sum(1) / real.sum(1)).mean()

    tokens = torch.randint(1, 9, (6, 5))
    tokens[4] = 0
    incident = incident_of(Tiny(), loss_fn, {"x": torch.randn(6, 4), "tokens": tokens})
    texts = [link.text for link in incident.lineage]
    assert texts[0] == "divisor of div[4] = 0"
    assert texts[1] == "sum of [4, :]: 5 values, all 0"
    assert texts[2] == "ne of [4, :]: 5 values, all 0"
    end = last(incident)
    assert (end.kind, end.name, end.index, end.rows) == ("data", "batch['tokens']", "[4, :]", [4])
    assert "real.sum(1)" in (incident.lineage[0].code or "")


def test_same_value_twice_cancels_whatever_the_input() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        return (y / (y - y.clone())).mean()

    end = last(incident_of(Tiny(), loss_fn, torch.randn(4, 4)))
    assert end.kind == "cancellation"
    assert "always 0 whatever the input" in end.text


def test_parameter() -> None:
    model = Tiny()
    model.scale = nn.Parameter(torch.tensor([1.0, 0.0, 2.0]))
    end = last(incident_of(model, lambda m, x: (m(x) / m.scale).mean(), torch.randn(4, 4)))
    assert (end.kind, end.name, end.index) == ("parameter", "scale", "[1]")


def test_constant_of_the_code() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) / torch.zeros(3)).mean()

    end = last(incident_of(Tiny(), loss_fn, torch.randn(4, 4)))
    assert end.kind == "constant"
    assert end.code is not None
    assert "torch.zeros(3)" in end.code


def test_weights_that_amplify_step_by_step() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.rec = nn.Linear(4, 8), nn.Linear(8, 8, bias=False)
            nn.init.eye_(self.rec.weight)
            with torch.no_grad():
                self.rec.weight.mul_(50)

        def forward(self, x: Tensor) -> Tensor:
            h = self.inp(x)
            for _ in range(30):
                h = self.rec(h)
            return h

    incident = incident_of(Loop(), lambda m, x: m(x).square().mean(), torch.randn(4, 4))
    assert (last(incident).kind, last(incident).name) == ("parameter", "rec.weight")
    assert "amplified" in last(incident).text


def test_backward_starts_at_the_forward_operand() -> None:
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, weight = batch
        return (model(x).square().sum(1) * weight).sqrt().mean()

    weight = torch.ones(5)
    weight[3] = 0
    incident = incident_of(Tiny(), loss_fn, (torch.randn(5, 4), weight))
    assert (incident.origin.phase, incident.origin.name) == ("backward", "sqrt")
    assert incident.lineage[0].text == "operand of sqrt[3] = 0"
    assert (last(incident).name, last(incident).rows) == ("batch[1]", [3])


def test_empty_selection_leads_to_its_mask() -> None:
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, valid = batch
        return model(x)[valid > 0].mean()

    incident = incident_of(Tiny(), loss_fn, (torch.randn(5, 4), torch.zeros(5)))
    assert incident.cause.label == "empty_reduction"
    assert (last(incident).kind, last(incident).name) == ("data", "batch[1]")


def test_fully_masked_row_leads_to_the_padding() -> None:
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, ids = batch
        scores = model(x).masked_fill(ids == 0, float("-inf"))
        return F.softmax(scores, -1).square().mean()

    ids = torch.ones(5, 3)
    ids[2] = 0
    incident = incident_of(Tiny(), loss_fn, (torch.randn(5, 4), ids))
    assert (last(incident).name, last(incident).rows) == ("batch[1]", [2])


def test_bad_data_names_the_element() -> None:
    batch = torch.randn(6, 4)
    batch[4, 2] = float("nan")
    end = last(incident_of(Tiny(), lambda m, x: m(x).mean(), batch))
    assert (end.kind, end.name, end.index, end.rows) == ("data", "batch", "[4, 2]", [4])


@pytest.mark.parametrize("in_place", [False, True])
def test_slices_that_were_written_one_by_one(in_place: bool) -> None:
    """The latest op that wrote into the memory need not be the one that wrote this element of it."""

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, first, second = batch
        total = torch.empty(4, 2)
        total[:, 0] = first
        total[:, 1] = second
        if in_place:
            total.mul_(2.0)
        return (model(x)[:, :2] / total).mean()

    zero = torch.tensor([1.0, 0.0, 1.0, 1.0])
    incident = incident_of(Tiny(), loss_fn, (torch.randn(4, 4), zero, torch.ones(4)))
    assert (last(incident).name, last(incident).index) == ("batch[1]", "[1]")


def test_it_is_shown_and_kept() -> None:
    batch = torch.randn(4, 4)
    batch[2] = 0
    incident = incident_of(without_bias(Tiny()), lambda m, x: m(x).abs().sum(1).log().mean(), batch)
    assert "CAME FROM     operand of log[2] = 0 ←" in incident.render()
    assert "## Where the value came from" in markdown(incident)
    fields: dict[str, Any] = incident.to_dict()
    assert fields["lineage"][-1]["rows"] == [2]
    assert incident_from(fields).lineage == incident.lineage


def test_of_a_large_model_only_what_is_near_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetrain.forensics.lineage.recording.MAX_KEPT", 40)
    batch = torch.randn(4, 4)
    batch[2] = 0
    incident = incident_of(without_bias(Tiny()), lambda m, x: m(x).abs().sum(1).log().mean(), batch)
    assert incident.lineage[0].text == "operand of log[2] = 0"
    assert last(incident).kind == "unknown"
