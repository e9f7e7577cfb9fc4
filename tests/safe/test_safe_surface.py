"""What holds for every safe operation: compile, vmap, autocast, documentation, imports."""

import doctest
import importlib
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safe_cases import CASES, HEALTHY, every

from safetrain import safe
from safetrain.forensics import find_bad_batches

FUNCTIONS = [name for name in safe.__all__ if name.islower() and name != "find_bad_batches"]
OPERATIONS = [name for name in FUNCTIONS if not name.startswith("check_")]
DOCS = Path(__file__).parents[2] / "docs" / "safe.md"


def test_the_cases_cover_every_operation():
    assert {case.name.split()[0] for case in HEALTHY} == set(OPERATIONS)


@pytest.mark.parametrize("module", ["checks", "elementwise", "probabilities", "reductions"])
def test_examples_in_docstrings(module):
    tests = doctest.DocTestFinder().find(
        importlib.import_module(f"safetrain.safe.{module}"), globs={"torch": torch, "safe": safe}
    )
    runner = doctest.DocTestRunner()
    for test in tests:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_an_example_and_is_in_the_documented_table(name):
    assert ">>> " in getattr(safe, name).__doc__
    assert re.search(rf"^\| `safe\.{name}\(", DOCS.read_text(), re.MULTILINE)


@every(HEALTHY)
def test_compiles_to_one_graph(case):
    torch._dynamo.reset()
    inputs = case.inputs(torch.float32)
    out = torch.compile(case.safe, backend="eager", fullgraph=True)(*inputs)
    assert torch.equal(out, case.safe(*inputs))


@every([case for case in CASES if not case.name.startswith(("masked_mean", "bce"))])
def test_vmap_over_rows(case):
    rows = [torch.stack([each.detach(), each.detach() / 2]) for each in case.inputs(torch.float32)]
    out = torch.vmap(case.safe)(*rows)
    for i in range(2):
        torch.testing.assert_close(out[i], case.safe(*(row[i] for row in rows)))


@every(CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_agrees_with_torch_and_stays_finite(case, dtype):
    with torch.autocast("cpu", dtype):
        healthy = case.inputs(torch.float32)
        ours, theirs = case.safe(*healthy), case.plain(*healthy)
        half = case.inputs(dtype, healthy=False)
        out = case.safe(*half)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), half))


def test_the_where_trap_is_avoided():
    """Selecting with `where` after the operation is not enough."""
    x = torch.tensor([0.0, 4.0], requires_grad=True)
    naive = torch.where(x > 0, x.sqrt(), 0.0)
    assert torch.autograd.grad(naive.sum(), x)[0][0].isnan()
    assert torch.autograd.grad(safe.sqrt(x).sum(), x)[0].tolist() == [0, 0.25]


def test_an_angle_between_equal_vectors_can_be_learned():
    a = torch.tensor([[1.0, 2.0], [0.0, 0.0], [1.0, 0.0]], requires_grad=True)
    b = torch.tensor([[1.0, 2.0], [1.0, 0.0], [0.0, 1.0]])
    angle = safe.acos(safe.cosine_similarity(a, b))
    angle.sum().backward()
    torch.testing.assert_close(angle, torch.tensor([0.0, math.pi / 2, math.pi / 2]), atol=1e-3, rtol=0)
    assert a.grad.isfinite().all()
    torch.testing.assert_close(a.grad[2], torch.tensor([0.0, -1.0]))


def test_importing_safetrain_does_not_import_torch_and_safe_is_an_attribute():
    code = (
        "import sys, safetrain; assert 'torch' not in sys.modules; safetrain.safe.log; assert 'torch' in sys.modules; "
        "assert 'safetrain.forensics' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names():
    assert "find_bad_batches" in dir(safe)
    assert safe.find_bad_batches is find_bad_batches
    with pytest.raises(AttributeError, match="has no attribute 'logg'"):
        safe.logg  # noqa: B018
