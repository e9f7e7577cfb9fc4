"""Runs a page as a reader would: in an empty directory, from top to bottom.

    python tests/helpers/docs_run.py docs/quickstart.md            says which output shown is not what is printed
    python tests/helpers/docs_run.py docs/quickstart.md --write    and puts what is printed into the page, where nothing is left out by `…`

The Python blocks of a page share their names. Commands run in this process where they can, because importing torch takes seconds.
"""

import contextlib
import doctest
import importlib
import io
import linecache
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from docs_output import differs
from docs_pages import ROOT, Page, read_page

GIVEN = ROOT / "tests" / "docs" / "given"
"""Files that a page takes for granted, in a directory of its name."""
SHELL = re.compile(r"[|<>;&$*`]")


@dataclass(frozen=True)
class Difference:
    """What a page shows against what was printed there."""

    line: int
    message: str
    shown: str
    printed: str


class PageError(AssertionError):
    """A block failed; says which."""


@dataclass
class PageRun:
    page: Page
    directory: Path
    with_slow: bool = False
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__page__"})
    printed: str = ""
    """By the last block that ran."""
    differences: list[Difference] = field(default_factory=list)
    num_run: int = 0
    _source: str = ""

    def run(self):
        """All blocks in order. Raises PageError at the first that fails; output that differs is collected."""
        if (given := GIVEN / self.page.name.replace("/", "_")).is_dir():
            shutil.copytree(given, self.directory, dirs_exist_ok=True)
        (self.directory / "docs").symlink_to(ROOT / "docs")
        was_run = True
        for block in self.page.blocks:
            if "output" in block.marks:
                if was_run:
                    self._compare(block.line, block.text, self.printed)
                continue
            was_run = "not run" not in block.marks and (self.with_slow or "slow" not in block.marks)
            if was_run:
                self._run(block)

    def _run(self, block):
        if name := block.marks.get("file"):
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(block.text, encoding="utf-8")
            importlib.invalidate_caches()
        if rule := block.marks.get("lint"):
            self._lint(block, rule)
        elif block.language == "python" and name is None:
            self._python(block)
        elif block.language in ("bash", "console"):
            self._commands(block)
        elif block.language == "yaml":
            self._config(block)
        else:
            return
        self.num_run += 1

    # ---- Python ----------------------------------------------------------------------------------------------------

    def _python(self, block):
        if block.text.startswith(">>> "):
            return self._doctest(block)
        # The page's Python so far is a file, as it would be for a reader, because forensics shows lines of it.
        path = Path.cwd() / f"{self.page.path.stem}.py"
        offset = self._source.count("\n")
        self._source += block.text + "\n"
        path.write_text(self._source, encoding="utf-8")
        linecache.checkcache(str(path))
        with self._printing(block):
            exec(compile("\n" * offset + block.text, str(path), "exec"), self.names)

    def _doctest(self, block):
        test = doctest.DocTestParser().get_doctest(
            block.text, self.names, self.page.name, self.page.name, block.line - 1
        )
        test.globs = self.names  # the parser has made a copy
        report = io.StringIO()
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        failed = doctest.DocTestRunner(optionflags=flags).run(test, out=report.write, clear_globs=False).failed
        if failed:
            raise PageError(f"{self._at(block)}: {report.getvalue()}")

    # ---- commands --------------------------------------------------------------------------------------------------

    def _commands(self, block):
        steps = _dialogue(block)
        expected_code = int(block.marks.get("exit", 0))
        for index, (line, command, shown) in enumerate(steps):
            with self._printing(block, line):
                code = self._command(command)
            wanted = expected_code if index == len(steps) - 1 else 0
            if code != wanted:
                raise PageError(
                    f"{self.page.name}:{line}: {command}\nexit code {code}, not {wanted}; it printed:\n{self.printed}"
                )
            if shown is not None:
                self._compare(line + 1, shown, self.printed)

    def _command(self, command):
        words = shlex.split(command, comments=True)
        if not words:
            return 0
        if words[0] == "cd":
            os.chdir(words[1])
            return 0
        if not SHELL.search(re.sub(r"'[^']*'", "", command.split("  #")[0])):
            if words[0] == "safetrain" or words[:3] == ["python", "-m", "safetrain"]:
                from safetrain.cli.main import run

                forget_modules(self.directory)
                return run(words[3:] if words[0] == "python" else words[1:])
            if words[0] == "python" and words[1].endswith(".py"):
                return _run_file(words[1:])
        return self._shell(command)

    def _shell(self, command):
        bin_directory = self.directory.parent / f"{self.directory.name}-bin"
        bin_directory.mkdir(exist_ok=True)
        for name, arguments in (("safetrain", "-m safetrain"), ("python", ""), ("pytest", "-m pytest")):
            script = bin_directory / name
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
            script.chmod(0o755)
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PATH": f"{bin_directory}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": paths}
        environment |= {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            ["bash", "-c", command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        print(done.stdout, end="")
        return done.returncode

    # ---- the rest --------------------------------------------------------------------------------------------------

    def _config(self, block):
        from safetrain.config import load_config

        path = Path(block.marks.get("file", "block.yaml"))
        path.write_text(block.text, encoding="utf-8")
        with self._printing(block):
            load_config(path)

    def _lint(self, block, rule):
        from safetrain.lint import check_source

        found = {finding.code for finding in check_source(block.text)}
        if found != (set() if rule == "clean" else {rule}):
            raise PageError(f"{self._at(block)}: lint finds {sorted(found)}, the page says {rule}")

    def _compare(self, line, shown, printed):
        if (message := differs(shown, printed)) is not None:
            self.differences.append(Difference(line, message, shown, printed))

    @contextlib.contextmanager
    def _printing(self, block, line=None):
        """Collects what is printed; an exception says where in the page it came from."""
        collected = io.StringIO()
        try:
            with contextlib.redirect_stdout(collected), contextlib.redirect_stderr(collected):
                yield
        except Exception as error:
            where = f"{self.page.name}:{line}" if line else self._at(block)
            raise PageError(
                f"{where}: {traceback.format_exc()}\nprinted until then:\n{collected.getvalue()}"
            ) from error
        finally:
            self.printed = collected.getvalue().replace(f"{self.directory}/", "").replace(f"{ROOT}/", "")

    def _at(self, block):
        return f"{self.page.name}:{block.line}"


def _dialogue(block):
    """Line, command and shown output (None: nothing is shown) of each command of a block."""
    steps = []
    lines = iter(enumerate(block.text.splitlines(), block.line))
    for number, line in lines:
        if block.language == "console" and not line.startswith("$ "):
            if not steps:
                raise PageError(f"line {number}: a console block begins with a command, `$ …`")
            at, command, shown = steps[-1]
            steps[-1] = (at, command, f"{shown or ''}{line}\n")
            continue
        command = line.removeprefix("$ ") if block.language == "console" else line
        while command.endswith("\\"):
            command = command[:-1] + next(lines)[1]
        if command.strip() and not command.lstrip().startswith("#"):
            steps.append((number, command, None))
    return steps


def _run_file(words):
    arguments, sys.argv = sys.argv, words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.argv = arguments
        del sys.path[0]
    return 0


@contextlib.contextmanager
def as_reader(directory):
    """In that directory, with known random numbers; what a page defines is forgotten afterwards."""
    import logging
    import random

    import torch

    from safetrain.guards import REGISTRY

    before, registered, path = Path.cwd(), dict(REGISTRY), list(sys.path)
    writes_no_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # files change within a second
    last_resort, logging.lastResort = logging.lastResort, None  # warnings of the log are not part of what a page shows
    os.chdir(directory)
    sys.path.insert(0, str(directory))
    torch.set_num_threads(1)
    random.seed(0)
    torch.manual_seed(0)
    try:
        yield
    finally:
        logging.lastResort = last_resort
        os.chdir(before)
        sys.path[:] = path
        REGISTRY.clear()
        REGISTRY.update(registered)
        sys.dont_write_bytecode = writes_no_bytecode
        forget_modules(directory)


def forget_modules(directory):
    """A command starts in a new process, where what it imports is as it is on disk."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(f"{directory}/"):
            del sys.modules[name]
    linecache.checkcache()


def rewritten(page, differences):
    """The page with what is printed in place of what it shows, except where something is left out."""
    lines = page.path.read_text(encoding="utf-8").splitlines()
    for difference in reversed(differences):
        if "…" not in difference.shown:
            first = difference.line - 1
            lines[first : first + difference.shown.count("\n")] = difference.printed.rstrip().splitlines()
    return "\n".join(lines) + "\n"


def main(arguments):
    import tempfile

    code = 0
    for name in arguments:
        if name == "--write":
            continue
        page = read_page((ROOT / name).resolve())
        with tempfile.TemporaryDirectory() as directory, as_reader(Path(directory)):
            run = PageRun(page, Path(directory).resolve(), with_slow=True)
            run.run()
        for difference in run.differences:
            print(f"{page.name}:{difference.line}: {difference.message}\n--- printed\n{difference.printed}")
            code = 1
        if "--write" in arguments:
            page.path.write_text(rewritten(page, run.differences), encoding="utf-8")
        print(f"{page.name}: {run.num_run} blocks run, {len(run.differences)} differ")
    return code


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
