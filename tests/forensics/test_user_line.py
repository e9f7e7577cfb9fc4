"""For an operation inside a library: the argument that carries the bad value into it, and a change of the user's own line."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from forensic_cases import Tiny, incident_of, without_bias
from torch import Tensor, nn

from safetrain.forensics import Effort, Step, diagnose, investigate

LIBRARY = """
import torch
from torch import nn


def share(values, total):
    return values / total


class Scaled(nn.Module):
    def __init__(self, eps=0.0):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return x / (x.abs().sum(1, keepdim=True) + self.eps)


def solved(function, y):
    step = 1.0
    while True:
        new = y + step * function(y)
        if bool(torch.isfinite(new).all()) and float(new.abs().max()) < 2:
            return new
        step = step / 2
        if step < 1e-3:
            raise AssertionError(f"underflow in dt {step}")
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = tmp_path / "site-packages" / "sharing.py"
    path.parent.mkdir()
    path.write_text(LIBRARY)
    spec = importlib.util.spec_from_file_location("sharing", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "sharing", module)
    spec.loader.exec_module(module)
    return module


def batch() -> Tensor:
    x = torch.rand(6, 4) + 0.1
    x[2] = 0
    return x


def test_the_argument_is_named_and_the_line_changed(library: ModuleType) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        total = x.sum(1, keepdim=True)
        return library.share(x * model(x).sum(1, keepdim=True), total).square().mean()

    incident = incident_of(Tiny(), loss_fn, batch())
    assert "the 2nd argument of `share`, `total`: total[2, 0] = 0" in incident.fix
    changed = next(remedy for remedy in incident.remedies if remedy.name == "changed_line")
    assert changed.finite
    assert "total.clamp_min(1e-6)).square()" in incident.fix
    assert "Verified: with that line" in incident.fix
    assert "safetrain.safe" not in incident.fix  # nothing of that name is on a line that can be changed


def test_an_eps_of_the_library_is_tried(library: ModuleType) -> None:
    scaled = library.Scaled()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return scaled(model(x)).square().mean()

    incident = incident_of(without_bias(Tiny()), loss_fn, batch())
    assert "Scaled(eps=1e-06)" in incident.fix
    assert scaled.eps == 0.0
    assert any(r.finite for r in incident.remedies if r.name == "library_option")


def test_a_value_that_is_not_passed_in_is_said_to_be_elsewhere(library: ModuleType) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(6, 1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    model = Model()
    incident = incident_of(model, lambda model, x: library.share(x, model(x)).mean(), torch.rand(6, 4) + 0.1)
    assert incident.lineage[-1].name == "scale"
    assert any(r.finite and "scale" in r.detail for r in incident.remedies if r.name == "parameter_in_range")
    assert float(model.scale.detach().abs().max()) == 0.0


def test_an_exception_of_a_solver_that_runs_a_bad_line_many_times(library: ModuleType) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return library.solved(lambda y: model(y) / (y.sum() - y.sum()), x).mean()  # here

    incident = incident_of(Tiny(4, 4), loss_fn, torch.rand(3, 4))
    assert (incident.cause.label, incident.origin.name) == ("division_by_zero", "div")
    assert incident.replay.reproduced
    assert "# here" in (incident.origin.code or "")


def test_an_exponent_that_is_a_parameter_is_not_verified_at_an_absurd_loss() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.logit_scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(100.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) * self.logit_scale.exp()

    incident = incident_of(Model(), lambda model, x: model(x).square().mean().sqrt(), torch.rand(6, 4))
    by_name = {remedy.name: remedy for remedy in incident.remedies}
    assert not by_name["fp64"].finite
    assert by_name["parameter_in_range"].finite
    assert "logit_scale" in incident.fix


def test_no_replay_begins_after_the_time(library: ModuleType) -> None:
    step = Step(Tiny(), lambda model, x: library.share(model(x), x.sum(1, keepdim=True)).mean(), [batch()])
    found = diagnose(step, Effort(max_seconds=1e-9))
    assert (found.cause.label, found.samples, found.remedies, found.lineage) == ("division_by_zero", [], [], [])
    assert "cut short" in found.cause.explanation
    assert investigate(step.model, step.loss_fn, batch()).samples == [2]  # type: ignore[union-attr]
