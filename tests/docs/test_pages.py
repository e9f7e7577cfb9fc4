"""Every command and code block of README and docs/ runs, prints what it says, and every link leads somewhere."""

import re
import shlex
from pathlib import Path
from urllib.parse import unquote

import click
import pytest
from docs_output import differs
from docs_pages import ROOT, page_paths, read_page
from docs_run import PageRun, as_reader

from safetrain.cli.main import COMMANDS, program

PAGES = {page.name: page for page in map(read_page, page_paths())}
RUN, SHOWN = {"python", "bash", "console", "yaml"}, {"text", "diff", "json", "html"}
COMMAND = re.compile(r"\s*(?:\$|safetrain|python|pip|torchrun|accelerate|tensorboard|pytest) |\s*scripts/\w")
MOST_NOT_RUN = 12


def run(page, directory, with_slow):
    with as_reader(directory):
        page_run = PageRun(page, directory, with_slow)
        page_run.run()
    report = "\n\n".join(f"{page.name}:{d.line}: {d.message}\n--- printed\n{d.printed}" for d in page_run.differences)
    assert not report, report
    return page_run


@pytest.mark.parametrize("name", PAGES)
def test_page_runs(name, tmp_path):
    run(PAGES[name], tmp_path, with_slow=False)


SLOW = [name for name, page in PAGES.items() if any("slow" in block.marks for block in page.blocks)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's launcher leaves its logs open
@pytest.mark.parametrize("name", SLOW)
def test_page_runs_with_its_slow_blocks(name, tmp_path):
    run(PAGES[name], tmp_path, with_slow=True)


@pytest.mark.parametrize("name", PAGES)
def test_every_block_is_run_or_says_why_not(name):
    page = PAGES[name]
    problems = list(page.unknown_marks)
    if re.search(r"^(<{7}|>{7}) ", page.path.read_text(encoding="utf-8"), flags=re.MULTILINE):
        problems.append(f"{name}: a merge was left unresolved")
    for block in page.blocks:
        at = f"{name}:{block.line}"
        if block.language not in RUN | SHOWN:
            problems.append(f"{at}: {block.language or 'no language'}: use ``` with one of {sorted(RUN | SHOWN)}")
        if block.language in SHOWN and not block.marks:
            problems.append(f"{at}: say what it is: <!-- output -->, <!-- drawing --> or <!-- file: NAME -->")
        if "drawing" in block.marks and any(map(COMMAND.match, block.text.splitlines())):
            problems.append(f"{at}: a drawing holds no commands; make it a bash or console block")
        if "not run" in block.marks and len(block.marks["not run"]) < 8:
            problems.append(f"{at}: say why it is not run")
        if (file := block.marks.get("file")) and not _is_used(page, file, after=block.line):
            problems.append(f"{at}: nothing after it uses {file}")
    assert problems == []


def _is_used(page, file, after):
    return any(file in block.text or Path(file).stem in block.text for block in page.blocks if block.line > after)


def test_few_blocks_are_not_run():
    not_run = [
        f"{name}:{block.line}: {block.marks['not run']}"
        for name, page in PAGES.items()
        for block in page.blocks
        if "not run" in block.marks and block.language != "diff"  # these are compared by test_hosts.py
    ]
    assert len(not_run) <= MOST_NOT_RUN, "\n".join(not_run)


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    page = PAGES[name]
    lost = [f"{name}:{line}: {href}" for line, href in page.links if not _resolves(page, href)]
    assert lost == []


def _resolves(page, href):
    if href.startswith(("https://", "mailto:")):
        return True
    path, _, anchor = unquote(href).partition("#")
    target = (page.path.parent / path).resolve() if path else page.path
    if not target.exists() or not target.is_relative_to(ROOT):
        return False
    return not anchor or (target.suffix == ".md" and anchor in read_page(target).anchors)


def test_every_page_can_be_reached_from_the_index():
    reached, waiting = set(), [ROOT / "docs" / "index.md"]
    while waiting:
        path = waiting.pop()
        if path in reached or path.suffix != ".md" or not path.exists():
            continue
        reached.add(path)
        hrefs = [unquote(href).partition("#")[0] for _, href in read_page(path).links if not href.startswith("http")]
        waiting += [(path.parent / href).resolve() for href in hrefs if href]
    assert [path.name for path in page_paths() if path not in reached] == []


@pytest.mark.parametrize("name", PAGES)
def test_commands_within_the_text_exist(name):
    """They are not run, but their names and options are checked."""
    problems = []
    for line, code in PAGES[name].spoken:
        if not code.startswith("safetrain ") or code.startswith("safetrain …"):
            continue
        words = [word for word in shlex.split(code.replace("…", "etc"))[1:] if word[0] != "["]
        try:
            _parse(program, words)
        except click.ClickException as error:
            problems.append(f"{name}:{line}: {code}: {error.format_message()}")
    assert problems == []


def _parse(command, words):
    """What click would do before it calls the command; arguments may be missing or placeholders."""
    context = click.Context(command, info_name="safetrain", resilient_parsing=True)
    if isinstance(command, click.Group):
        if not words:
            return
        if words[0].startswith("-"):
            command.parse_args(context, words)
            return
        inner = command.get_command(context, words[0].split("|")[0])
        if inner is None and words[0] not in ("COMMAND", "--help"):
            raise click.UsageError(f"no command {words[0]}")
        return None if inner is None else _parse(inner, words[1:])
    parser = command.make_parser(context)
    parser.parse_args(list(words))


def test_every_command_is_shown_somewhere():
    shown = "\n".join(page.path.read_text(encoding="utf-8") for page in PAGES.values())
    assert [name for name in COMMANDS if f"safetrain {name}" not in shown] == []


# ---- the comparison of output can fail -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("loss 2.30", "loss  2.31", True),
        ("loss 2.30", "loss 2.60", False),
        ("step 40", "step 41", False),
        ("done in 3.1 s", "done in 12.8 s", True),
        ("runs/x-20261118-033909", "runs/x-20270101-000000", True),
        ("a\n…\nz", "a\nb\nc\nz", True),
        ("a\n…\nz", "a\nb\nc", False),
        ("a", "a\nb", False),
        ("the … fox", "the quick brown fox", True),
        ("the … fox", "the dog", False),
        ("nan", "0.5", False),
    ],
)
def test_shown_output_is_compared(shown, printed, same):
    assert (differs(shown, printed) is None) == same
