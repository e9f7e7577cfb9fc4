"""The pages of the documentation, taken apart: code blocks with their marks, headings, links, commands in the text.

A mark is a comment on the line above a block. It is not shown to readers, and every one is counted by a test:

    <!-- not run: needs a GPU -->   the block cannot run here; without this mark it is run
    <!-- file: train.py -->         the block is the content of this file, for the commands and configs after it
    <!-- output -->                 the block is what the block before it prints
    <!-- exit: 4 -->                the exit code of the last command of the block, when it is not 0
    <!-- slow -->                   the block is only run together with the tests marked slow
    <!-- lint: ST101 -->            the block is given to `safetrain lint`, which finds this and nothing else
    <!-- lint: clean -->            … or finds nothing
    <!-- drawing -->                the block is a drawing, a directory or the like: nothing that runs
"""

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
MARKS = {"not run", "file", "output", "exit", "slow", "lint", "drawing"}
SECTIONS = {"generated", "end generated", "measured"}
"""Around what `scripts/docs` writes, and where results of `scripts/bench` belong; they mark no block."""


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int
    """Of its first line, in the page, from 1."""
    marks: dict[str, str]


@dataclass
class Page:
    path: Path
    blocks: list[Block] = field(default_factory=list)
    links: list[tuple[int, str]] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    spoken: list[tuple[int, str]] = field(default_factory=list)
    """Code within the text, with its line."""
    unknown_marks: list[str] = field(default_factory=list)

    @property
    def name(self):
        return self.path.relative_to(ROOT).as_posix()


def page_paths():
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@cache
def read_page(path):
    page = Page(path)
    marks = {}
    seen = {}
    tokens = MarkdownIt("commonmark").enable("table").parse(path.read_text(encoding="utf-8"))
    line = 1
    for index, token in enumerate(tokens):
        line = token.map[0] + 1 if token.map else line
        if token.type == "html_block":
            marks |= _marks(page, token.content, line)
        elif token.type in ("fence", "code_block"):
            language = token.info.strip() if token.type == "fence" else "indented"
            first = line + 1 if token.type == "fence" else line
            page.blocks.append(Block(language, token.content, first, marks))
            marks = {}
        elif token.type == "heading_open":
            page.anchors.add(_anchor(tokens[index + 1].content, seen))
        elif token.type == "inline":
            _read_text(page, token, line)
        if marks and token.type not in ("html_block",):
            page.unknown_marks.append(f"{page.name}:{line}: the mark {marks} has no block below it")
            marks = {}
    return page


def _marks(page, text, line):
    found = dict(re.findall(r"<!-- ([\w ]+?)(?:: (.*?))? -->", text))
    page.unknown_marks += [f"{page.name}:{line}: unknown mark {name!r}" for name in found.keys() - MARKS - SECTIONS]
    return {name: value for name, value in found.items() if name in MARKS}


def _anchor(heading, seen):
    """As forges make it: lower case, no punctuation, dashes for spaces, a number behind one that was there already."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
    seen[anchor] = seen.get(anchor, -1) + 1
    return anchor if seen[anchor] == 0 else f"{anchor}-{seen[anchor]}"


def _read_text(page, token, line):
    for child in token.children or []:
        if child.type == "link_open":
            page.links.append((line, str(child.attrs["href"])))
        elif child.type == "code_inline":
            page.spoken.append((line, child.content))
