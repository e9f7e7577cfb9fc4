"""A check is one decorated function in a module of `preflight.checks`; nothing else has to know of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from preflight_cases import make_trainer

from safetrain import check
from safetrain.preflight import CHECKS, runner
from safetrain.preflight.checks import collect

ROOT = Path(__file__).parents[2]
NEW = '''
"""A module that nothing else names."""

from safetrain.preflight.outcome import Outcome, passed, warned
from safetrain.preflight.registry import preflight_check
from safetrain.preflight.subject import Subject


@preflight_check(looks_at="the number of weights", warns="it is odd", fix="add one")
def even_weights(subject: Subject) -> Outcome:
    count = sum(p.numel() for p in subject.model.parameters())
    return passed(f"{count}") if count % 2 == 0 else warned(f"{count} is odd", "add one")


@preflight_check(looks_at="nothing", fix="none")
def always(subject: Subject) -> Outcome:
    return passed("fine")
'''


def test_the_checks_of_a_new_module_are_collected_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counted.py").write_text(NEW, encoding="utf-8")
    name = "safetrain.preflight.checks"
    package = sys.modules[name]
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    found = collect()
    monkeypatch.delitem(sys.modules, f"{name}.counted")
    monkeypatch.delattr(package, "counted")
    assert found[: len(CHECKS)] == CHECKS
    assert [each.name for each in found[len(CHECKS) :]] == ["even_weights", "always"]
    monkeypatch.setattr(runner, "CHECKS", found)
    report = check(make_trainer(), only="even_weights,always")
    assert [(each.name, each.status) for each in report.checks] == [("even_weights", "WARN"), ("always", "PASS")]


def test_every_decorated_function_is_a_check_once() -> None:
    names = [each.name for each in CHECKS]
    assert len(set(names)) == len(names)
    assert [each.run.__name__ for each in CHECKS] == names
    files = (ROOT / "safetrain" / "preflight" / "checks").glob("*.py")
    assert sum(file.read_text(encoding="utf-8").count("\n@preflight_check(") for file in files) == len(names)


def test_a_check_says_what_it_looks_at_and_what_to_do() -> None:
    assert [each.name for each in CHECKS if not (each.looks_at and each.fix and (each.fails or each.warns))] == []


def test_every_check_is_documented_in_the_order_in_which_they_run() -> None:
    page = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    table = page.partition("<!-- generated: checks -->")[2].partition("<!-- end generated -->")[0]
    assert [row.split("`")[1] for row in table.splitlines() if row.startswith("| `")] == [each.name for each in CHECKS]
