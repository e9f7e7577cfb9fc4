"""What the pages take from the code is up to date and complete: options, API reference, commands, rules."""

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest
from docs_pages import ROOT, read_page

from safetrain.config.schema import Config
from safetrain.core.fields import fields_of
from safetrain.guards import REGISTRY

DOCUMENTED = (
    "safetrain",
    "safetrain.safe",
    "safetrain.forensics",
    "safetrain.guards",
    "safetrain.recovery",
    "safetrain.lint",
)
OURS = [name for name, guard in REGISTRY.items() if guard.__module__.startswith("safetrain.guards.")]


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts" / "docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_up_to_date(generator):
    stale = [path.name for path, text in generator.pages() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run: scripts/docs"


def test_a_change_of_the_code_would_be_noticed(generator, monkeypatch):
    monkeypatch.setattr(generator, "field_docs", lambda cls: {})
    stale = [path.name for path, text in generator.pages() if path.read_text(encoding="utf-8") != text]
    assert {"configuration.md", "clip.md", "api.md"} <= set(stale)


@pytest.mark.parametrize("page", ["configuration.md", *(f"guards/{name}.md" for name in OURS)])
def test_every_section_has_its_table(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    tables = set(re.findall(r"<!-- generated: options (\S+) -->", text))
    if page == "configuration.md":
        sections = {name for name, field in fields_of(Config).items() if field.section is not None}
        assert tables == {".", *sections, *(f"guards.{name}" for name in OURS)}
    else:
        assert tables == {f"guards.{Path(page).stem}"}


@pytest.mark.parametrize("name", OURS)
def test_the_guide_of_a_guard_has_every_part(name):
    page = read_page(ROOT / "docs" / "guards" / f"{name}.md")
    assert page.anchors >= {"example", "options", "cost"}
    assert page.blocks[0].language == "python"
    assert any("output" in block.marks for block in page.blocks)
    text = page.path.read_text(encoding="utf-8")
    assert "**What it sees.**" in text
    assert "**What it does.**" in text
    assert f"({name}.md)" in (ROOT / "docs" / "guards" / "index.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("module_name", DOCUMENTED)
def test_every_public_name_is_described_and_has_an_example(module_name):
    """In a section of its own, or in one that its name is used in."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: part for part in re.split(r"^#{2,3} ", text, flags=re.MULTILINE)[1:]}
    shown = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[1:])  # the first only imports
    missing = []
    for name in importlib.import_module(module_name).__all__:
        own = sections.get(name, "")
        if not (own or re.search(rf"`{name}`|### .*\b{name}\b", text)):
            missing.append(f"{name}: not described")
        if "```python" not in own and not re.search(rf"\b{name}\b", shown):
            missing.append(f"{name}: no example")
    assert missing == []


def test_every_command_is_described():
    from safetrain.cli.main import COMMANDS

    anchors = read_page(ROOT / "docs" / "commands.md").anchors
    assert [name for name in COMMANDS if f"safetrain-{name}" not in anchors] == []


def test_the_tree_of_errors_is_that_of_the_code():
    from safetrain import errors

    assert errors.__doc__ is not None
    drawn = "\n".join(block.text for block in read_page(ROOT / "docs" / "api.md").blocks if "drawing" in block.marks)
    tree = [line.strip() for line in errors.__doc__.splitlines() if "──" in line]
    assert tree
    assert [line for line in tree if line not in drawn] == []


@pytest.mark.slow
def test_the_generator_runs_as_a_script():
    import subprocess

    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "docs.py", "--check"], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "")
