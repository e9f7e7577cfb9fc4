"""Failures inside libraries that nobody tuned anything on, each where that library is installed: its line, the user's line, where the
value came from, and a change of the user's own source."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forensic_cases import Tiny, incident_of, without_bias
from torch import Tensor, nn

from safetrain.core.incident import Incident
from safetrain.fixes import propose
from safetrain.forensics import Step


def check(incident: Incident, library: str, samples: list[int] | None = None) -> None:
    origin = incident.origin
    assert (origin.library or "").startswith(f"{library} "), incident.render()
    assert origin.called_from is not None
    assert origin.called_from.file == __file__
    assert "# here" in origin.called_from.code
    assert incident.lineage
    assert origin.called_from.code.split("#")[0].strip() in " ".join(str(frame["code"]) for frame in origin.frames)
    if samples is not None:
        assert incident.samples == samples


def test_metric_learning_with_a_zero_embedding() -> None:
    distances = pytest.importorskip("pytorch_metric_learning.distances")
    measure = distances.SNRDistance()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return measure(model(x)).mean()  # here

    x = torch.randn(6, 4)
    x[4] = 0
    incident = incident_of(without_bias(Tiny()), loss_fn, x)
    check(incident, "pytorch_metric_learning", [4])


def test_graph_library_with_an_isolated_node() -> None:
    pytest.importorskip("torch_geometric")
    from torch_geometric.nn.norm import GraphNorm  # type: ignore[import-not-found, unused-ignore]

    norm = GraphNorm(3, eps=0.0)

    def loss_fn(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return norm(model(batch["x"]), batch["graph"]).square().mean()  # here

    graph = torch.tensor([0, 0, 1, 2, 2, 2])
    incident = incident_of(Tiny(), loss_fn, {"x": torch.randn(6, 4), "graph": graph})
    check(incident, "torch_geometric")


def test_a_call_into_a_metric_is_made_harmless_in_the_users_line() -> None:
    functional = pytest.importorskip("torchmetrics.functional")

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return functional.kl_divergence(model(x).abs(), x[:, :3])  # here

    x = torch.rand(6, 4) + 0.2
    x[3] = 0
    incident = incident_of(Tiny(), loss_fn, x)
    check(incident, "torchmetrics", [3])
    found = propose(Step(Tiny(), loss_fn, [x]), incident)
    assert all(proposal.file in ("", __file__) for proposal in found)
