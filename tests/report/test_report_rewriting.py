"""The blamed line rewritten with the safe operation: equivalent, or left alone."""

from __future__ import annotations

import math

import pytest
import torch

from safetrain import safe
from safetrain.report.rewriting import rewritten

LINES = [
    ("y = (a * b).sum(1) / b.sum(1)", "div", "y = safe.div((a * b).sum(1), b.sum(1))"),
    ("y = 1 - a / b", "div", "y = 1 - safe.div(a, b)"),
    ("y = a.div(b)", "div", "y = safe.div(a, b)"),
    ("y = 10 * torch.log10(a)", "log10", "y = 10 * (safe.log(a) / math.log(10))"),
    ("y = -torch.log2(a).mean()", "log2", "y = -(safe.log(a) / math.log(2)).mean()"),
    ("y = a.log().mean()  # why?", "log", "y = safe.log(a).mean()  # why?"),
    ("y = torch.log1p(-a / 9)", "log1p", "y = safe.log(1 + (-a / 9))"),
    ("y = torch.sqrt((a ** 2).sum(1))", "sqrt", "y = safe.sqrt((a ** 2).sum(1))"),
    ("y = a.rsqrt() * b", "rsqrt", "y = (1 / safe.sqrt(a)) * b"),
    ("y = 1 / a", "reciprocal", "y = safe.div(1, a)"),
    ("y = a ** 0.5", "pow", "y = safe.pow(a, 0.5)"),
    ("y = torch.acos(a.clamp(-1, 1))", "acos", "y = safe.acos(a.clamp(-1, 1))"),
]


@pytest.mark.parametrize(("line", "operation", "expected"), LINES)
def test_rewritten_lines_are_equivalent_where_both_are_defined(line: str, operation: str, expected: str) -> None:
    assert rewritten(line, operation) == expected
    a, results = torch.rand(3, 4) + 0.1, []
    for code in (line, expected):
        names = {"torch": torch, "math": math, "safe": safe, "a": a, "b": a.flip(0)}
        exec(code, names)
        results.append(names["y"])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("line", "operation"),
    [
        ("y = a / b / c", "div"),  # ambiguous
        ("y = f(a /", "div"),  # part of a statement
        ("y = torch.exp(a)", "exp"),
        ("y = torch.sqrt(a, out=b)", "sqrt"),
        ("y = F.cross_entropy(a, b)", "cross_entropy"),
        ("y /= a", "div"),
        ("größe = a / b", "div"),
        ("", "div"),
        ("y = (" * 500, "div"),
    ],
)
def test_ambiguous_lines_are_left_alone(line: str, operation: str) -> None:
    assert rewritten(line, operation) == ""
