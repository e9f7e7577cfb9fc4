"""The list of causes is closed, and everything that must be said of each is said."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import safetrain
from safetrain.core.causes import CAUSES, UNKNOWN
from safetrain.forensics import causes, raised

PACKAGE = Path(safetrain.__file__).parent
DOCS = PACKAGE.parent / "docs" / "incidents.md"
# Other programs read these out of incident.json: none is renamed or dropped.
LABELS = [
    "division_by_zero", "log_of_nonpositive", "invalid_domain", "singular_gradient", "masked_branch_gradient", "neg_inf_mask",
    "exp_overflow", "fp16_overflow", "fp16_underflow", "empty_reduction", "degenerate_decomposition", "infeasible_target",
    "bad_input_data", "corrupt_parameter", "divergence", "optimizer_numerics", "custom_backward_bug",
    "weights_unchanged", "not_in_optimizer", "not_registered", "not_reached", "loss_mismatch", "wrong_mode", "precision_not_in_effect",
    "schedule_ended", "rate_too_low", "repeated_data", "replicas_differ", "memory_corruption", "no_progress", "oscillation", "vanishing_gradients",
    "dead_network", "unknown",
]  # fmt: skip


def test_no_label_is_renamed_or_dropped() -> None:
    assert list(CAUSES) == LABELS


@pytest.mark.parametrize("label", [label for label in CAUSES if label != UNKNOWN])
def test_a_cause_has_a_meaning_an_advice_and_a_rule(label: str) -> None:
    cause = CAUSES[label]
    assert cause.meaning.endswith(".")
    assert cause.advice  # a part of a sentence: the place follows
    assert not cause.advice.endswith(".")
    assert (label in {known for known, _ in causes.RULES}) is not cause.is_silent


def test_the_documentation_has_a_row_for_each_cause_and_for_nothing_else() -> None:
    section = DOCS.read_text(encoding="utf-8").partition("\n## Causes\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", section, re.MULTILINE)
    assert [label for label, _, _ in rows] == LABELS


def test_every_label_in_the_code_is_one_of_the_list() -> None:
    used = {label for label, _ in causes.RULES} | {label for label, _, _ in raised._MESSAGES}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = ("Cause", "Finding") if path.parent.name == "guards" else ("Cause",)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names and node.args:
                if isinstance(node.args[0], ast.Constant):
                    used.add(node.args[0].value)
    assert used == set(LABELS)


def test_remedies_that_show_an_advice_are_remedies() -> None:
    source = (PACKAGE / "forensics" / "remedies.py").read_text(encoding="utf-8")
    names = {name for cause in CAUSES.values() for name in cause.shown_by}
    assert {name for name in names if f'"{name}"' in source} == names
