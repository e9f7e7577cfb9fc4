"""docs/architecture.md shows the tree as it is: every package, in the order in which they may import each other, and no name that is gone."""

import ast
import re

import pytest
from docs_pages import ROOT, read_page

PATH = ROOT / "docs" / "architecture.md"
TEXT = PATH.read_text(encoding="utf-8")


def section(heading):
    return TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def rows(heading):
    table = [line for line in section(heading).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[1:]]


PACKAGES = [re.match(r"\[(\w+)\]", cells[0]).group(1) for cells in rows("What each package holds")]


def test_every_package_has_its_row_and_nothing_else_lies_beside_them():
    there = {p.stem for p in (ROOT / "safetrain").iterdir()} - {"__init__", "__main__", "__pycache__", "py"}
    assert sorted(PACKAGES) == sorted(there)


def test_the_drawing_has_the_packages_in_the_order_of_the_table():
    drawing = read_page(PATH).blocks[1].text
    floors = [re.split(r"\s{4,}", line.strip())[0].split() for line in drawing.splitlines()]
    assert [name for floor in reversed(floors) for name in floor] == PACKAGES


def test_links_of_a_package_are_into_it():
    for name, cells in zip(PACKAGES, rows("What each package holds"), strict=True):
        for module, path in re.findall(r"\[(\w+)\]\(\.\./safetrain/([\w/.]+)\)", cells[-1]):
            assert path in (f"{name}/{module}", f"{name}/{module}.py")


PLACES = re.findall(r"\[`([\w.]+)`\]\(\.\./(safetrain/[\w/]+\.py)\)", section("Where things live"))


@pytest.mark.parametrize(("name", "path"), PLACES)
def test_what_is_said_to_live_in_a_file_is_defined_there(name, path):
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    for part in name.split("."):
        body = defined(body, part)
        assert body is not None, f"{path} defines no {name}"


def defined(body, name):
    """What a class or function of this name holds; [] for a constant; None if there is nothing of this name."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node.body
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return []
    return None


def test_every_question_has_a_place():
    questions = rows("Where things live")
    assert len(questions) >= 6
    assert [question for question, answer in questions if not re.search(r"\[`[\w.]+`\]\(", answer)] == []
