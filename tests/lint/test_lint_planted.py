"""A file with every pattern in it, and its corrected twin."""

from __future__ import annotations

import re
from pathlib import Path

from safetrain.lint import RULES, check_source

HERE = Path(__file__).parent


def expected(source: str) -> list[tuple[int, str]]:
    marks = ((number, re.search(r"# ((?:ST\d+ ?)+)$", line)) for number, line in enumerate(source.splitlines(), 1))
    return [(number, code) for number, mark in marks if mark for code in mark[1].split()]


def test_everything_planted_is_found_and_nothing_else() -> None:
    source = (HERE / "planted.py").read_text(encoding="utf-8")
    found = [(finding.line, finding.code) for finding in check_source(source)]
    assert sorted(found) == sorted(expected(source))


def test_every_rule_is_planted() -> None:
    assert {code for _, code in expected((HERE / "planted.py").read_text(encoding="utf-8"))} == set(RULES)


def test_nothing_is_found_in_the_corrected_twin() -> None:
    assert check_source((HERE / "corrected.py").read_bytes()) == []
