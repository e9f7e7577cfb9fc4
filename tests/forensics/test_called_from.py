"""An operation inside an installed library: its line, the library's name, and the line of the user's own code that called it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from forensic_cases import Tiny, incident_of, without_bias
from torch import Tensor, nn

from safetrain.forensics.ownership import LIBRARY, OWN, PYTHON, SAFETRAIN, library_of, owner_of
from safetrain.incidents.render import markdown

SOURCE = """
import torch
from torch import nn


def share(x):
    total = x.sum(1, keepdim=True)
    return _divided(x, total)


def _divided(x, total):
    return x / total


class Length(nn.Module):
    def forward(self, x):
        return x.square().sum(1).sqrt()
"""


@pytest.fixture
def shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """An installed package, version 1.2."""
    site = tmp_path / "lib" / "site-packages"
    (site / "sharelib").mkdir(parents=True)
    (site / "sharelib" / "__init__.py").write_text(SOURCE)
    (site / "sharelib-1.2.dist-info").mkdir()
    (site / "sharelib-1.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: sharelib\nVersion: 1.2\n")
    monkeypatch.syspath_prepend(str(site))
    yield importlib.import_module("sharelib")
    del sys.modules["sharelib"]


def batch() -> Tensor:
    x = torch.rand(4, 4) + 0.1
    x[2] = 0
    return x


def test_forward(shares: ModuleType) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        parts = shares.share(model(x).abs())  # here
        return parts.mean()

    incident = incident_of(without_bias(Tiny()), loss_fn, batch())
    origin = incident.origin
    assert (origin.code, origin.library) == ("return x / total", "sharelib 1.2")
    assert origin.called_from is not None
    assert origin.called_from.file == __file__
    assert "# here" in origin.called_from.code
    assert origin.called_from.function == "loss_fn"
    assert [frame["function"] for frame in origin.frames] == ["loss_fn", "share", "_divided"]
    text = incident.render()
    assert "sharelib 1.2, sharelib/__init__.py:12" in " ".join(text.split())
    assert "CALLED FROM" in text
    assert "# here" in text
    assert "# here" in markdown(incident)


def test_backward_has_the_frames_of_the_forward_call(shares: ModuleType) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.length = nn.Linear(4, 3, bias=False), shares.Length()

        def forward(self, x: Tensor) -> Tensor:
            return self.length(self.body(x))  # here

    incident = incident_of(Model(), lambda model, x: model(x).mean(), batch())
    assert (incident.origin.phase, incident.origin.library) == ("backward", "sharelib 1.2")
    assert incident.origin.called_from is not None
    assert "# here" in incident.origin.called_from.code


def test_own_line_has_no_caller() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).abs().sum(1).log().mean()

    incident = incident_of(without_bias(Tiny()), loss_fn, batch())
    assert incident.origin.called_from is None
    assert incident.origin.library is None
    assert "CALLED FROM" not in incident.render()


def test_whose_code_it_is(tmp_path: Path) -> None:
    assert owner_of(str(tmp_path / "train.py")) == OWN
    assert owner_of(str(tmp_path / "site-packages" / "lib" / "a.py")) == LIBRARY
    assert owner_of(importlib.__file__ or "") == PYTHON
    assert owner_of(importlib.import_module("safetrain.step.step").__file__ or "") == SAFETRAIN
    assert owner_of(torch.__file__) == LIBRARY
    assert library_of(torch.__file__) == f"torch {torch.__version__}"
    assert library_of(str(tmp_path / "train.py")) is None
