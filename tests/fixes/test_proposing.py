"""A proposed change keeps the bad step finite, leaves healthy steps as they are, and is of the user's own source only."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from forensic_cases import Tiny, without_bias
from torch import Tensor

from safetrain.fixes import Proposal, propose
from safetrain.forensics import Step, investigate
from safetrain.forensics.source import candidates

Load = Callable[..., ModuleType]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Imports source text from a file, as a module of the user or of an installed library."""

    def loaded(source: str, name: str = "users", directory: str = "") -> ModuleType:
        path = tmp_path / directory / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return loaded


def proposals(module: ModuleType, batch: object) -> list[Proposal]:
    model = without_bias(Tiny())
    incident = investigate(model, module.loss_fn, batch)
    assert incident is not None
    return propose(Step(model, module.loss_fn, [batch]), incident)


def zero_row() -> Tensor:
    x = torch.rand(6, 4) + 0.1
    x[2] = 0
    return x


DIVISION = """
import torch


def loss_fn(model, x):
    y = model(x / x.sum(1, keepdim=True))
    return y.square().mean()
"""


def test_the_operation_itself(load: Load) -> None:
    module = load(DIVISION)
    best = proposals(module, zero_row())[0]
    assert (best.kind, best.on_healthy) == ("source", "identical")
    assert "-    y = model(x / x.sum(1, keepdim=True))" in best.diff
    assert "+    y = model(safe.div(x, x.sum(1, keepdim=True)))" in best.diff
    before = Path(best.file).read_text()
    assert before == DIVISION  # nothing is written unless it is asked for
    best.apply()
    changed = load(Path(best.file).read_text(), "changed")
    assert investigate(without_bias(Tiny()), changed.loss_fn, zero_row()) is None


LIBRARY = """
import torch


def log_share(x):
    return torch.log(x) - torch.log(x.sum(1, keepdim=True))
"""

USER = """
import torch
import sharelog


def loss_fn(model, x):
    weights = x.abs()
    return (model(x).mean(1) * sharelog.log_share(weights).mean(1)).mean()
"""


def test_of_a_library_the_call_is_changed(load: Load) -> None:
    library = load(LIBRARY, "sharelog", "site-packages")
    best = proposals(load(USER), zero_row())[0]
    assert best.kind == "source"
    assert Path(best.file).name == "users.py"
    assert "sharelog.log_share(" in best.diff
    assert Path(library.__file__ or "").read_text() == LIBRARY


def test_data_is_not_repaired_in_the_source(load: Load) -> None:
    module = load("def loss_fn(model, x):\n    return model(x).square().mean()\n")
    x = torch.rand(6, 4)
    x[3, 1] = float("nan")
    kinds = {p.kind for p in proposals(module, x)}
    assert kinds == {"data"}


def test_a_change_that_alters_healthy_steps_is_none(load: Load) -> None:
    """Every form of this line that is finite gives another loss for ordinary values."""
    module = load("def loss_fn(model, x):\n    return (model(x).square().mean() + 1) / (x.numel() - 24)\n")
    assert all(p.kind != "source" or p.on_healthy != "" for p in proposals(module, torch.rand(6, 4)) if p.diff)


def test_functions_have_their_own_code_again(load: Load) -> None:
    module = load(DIVISION)
    code = module.loss_fn.__code__
    proposals(module, zero_row())
    assert module.loss_fn.__code__ is code
    assert "safe" not in vars(module)


@pytest.mark.parametrize(
    ("line", "operation", "cause", "expected"),
    [
        ("y = a + b / c.sum()", "div", "division_by_zero", "y = a + safe.div(b, c.sum())"),
        ("y = torch.log(a + b)", "log", "log_of_nonpositive", "y = safe.log(a + b)"),
        ("y = a.sqrt() * b", "sqrt", "singular_gradient", "y = safe.sqrt(a) * b"),
        ("y = f(a, b=c)", "", "invalid_domain", "y = f(a, b=c.clamp(-1 + 1e-6, 1 - 1e-6))"),
        (
            "y = F.ctc_loss(a, b, c, d)",
            "ctc_loss",
            "infeasible_target",
            "y = F.ctc_loss(a, b, c, d, zero_infinity=True)",
        ),
        ("ä = x.exp()", "exp", "exp_overflow", "ä = torch.exp(x.clamp(max=30.0))"),
        ("y = f(s)", "", "exp_overflow", "s = s.clamp(max=30.0)\ny = f(s)"),
        ("a, s = g(x)", "", "exp_overflow", "a, s = g(x)\ns = s.clamp(-10.0, 10.0)"),
        ("y = x.std(dim=-1)", "std", "empty_reduction", "y = safe.std(x, dim=-1)"),
        ("y = f(x)", "", "division_by_zero", "y = f(x.masked_fill(x == 0, 1e-6))"),
        ("g = torch.empty(3)", "", "custom_backward_bug", "g = torch.zeros(3)"),
        (
            "y, w = attend(x, key_padding_mask=pad)",
            "",
            "neg_inf_mask",
            "y, w = attend(x, key_padding_mask=pad, need_weights=False)",
        ),
    ],
)
def test_forms_of_a_line(line: str, operation: str, cause: str, expected: str) -> None:
    assert expected in [candidate.source.strip() for candidate in candidates(line + "\n", 1, operation, cause)]


def test_an_expression_is_not_computed_twice() -> None:
    sources = [candidate.source for candidate in candidates("y = f(g(x))\n", 1, "", "division_by_zero")]
    assert sources
    assert all(source.count("g(") == 1 for source in sources)


def test_other_batches_must_stay_as_they_are(load: Load) -> None:
    """Below 1 is where this batch lies; a clamp there would change the next one."""
    module = load(
        "import torch\n\n\ndef loss_fn(model, x):\n    y = x + 0\n    return (model(x).mean(1) * torch.log(y).mean(1)).mean()\n"
    )
    model, bad, other = without_bias(Tiny()), zero_row() / 2, torch.rand(6, 4) * 5 + 0.5
    incident = investigate(model, module.loss_fn, bad)
    assert incident is not None
    found = propose(Step(model, module.loss_fn, [bad]), incident, others=[other])
    assert found[0].kind == "source"
    best = load(found[0].changed, "changed")
    assert torch.equal(best.loss_fn(model, other), module.loss_fn(model, other))


def test_source_that_cannot_be_parsed_has_no_candidates() -> None:
    assert candidates("y = (", 1, "div", "division_by_zero") == []
