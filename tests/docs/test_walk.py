"""`scripts/walk` shows every call of a step, and a healthy step stays a short walk."""

import re
import subprocess
import sys

import pytest
from docs_pages import ROOT

MOST_CALLS, MOST_FILES = 178, 50
MOST_CALLS_IN_STEP = 154


def walk(*options):
    command = [sys.executable, ROOT / "scripts" / "walk.py", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *lines, blank, total = done.stdout.splitlines()
    assert blank == ""
    return lines, *map(int, re.match(r"(\d+) calls in (\d+) files; (\d+) in", total).groups())


def count(lines):
    """Calls that the lines stand for, and the modules they are in."""
    calls, modules, factors = 0, set(), []
    for line in lines:
        indent, module, times, hidden = re.match(r"((?:  )*)([\w/]+)\.\S+(?: ×(\d+))?(?: \(\+(\d+)\))?", line).groups()
        del factors[len(indent) // 2 :]
        factors.append(int(times or 1) * (factors[-1] if factors else 1))
        calls += factors[-1] * (1 + int(hidden or 0))
        modules.add(module)
    return calls, modules


@pytest.fixture(scope="module")
def healthy():
    return walk()


def test_a_healthy_step_is_a_short_walk(healthy):
    _, num_calls, num_files, num_in_step = healthy
    assert num_calls <= MOST_CALLS
    assert num_in_step <= MOST_CALLS_IN_STEP
    assert num_files <= MOST_FILES


def test_every_call_is_shown(healthy):
    lines, num_calls, num_files, _ = healthy
    shown, modules = count(lines)
    assert (shown, len(modules)) == (num_calls, num_files)
    assert [module for module in modules if not (ROOT / "safetrain" / f"{module}.py").is_file()] == []


def test_it_begins_with_the_data_and_holds_what_a_step_is(healthy):
    names = [line.split()[0] for line in healthy[0]]
    assert any("data/" in name for name in names[:3])
    order = [".begin", ".backward", "finite.Finite.judge", "spike.Spike.learn"]
    positions = [next(index for index, name in enumerate(names) if name.endswith(part)) for part in order]
    assert positions == sorted(positions)


def test_of_a_bad_step_the_outer_calls_are_shown_and_the_others_counted():
    lines, num_calls, *_ = walk("--bad", "--max-depth", "2")
    assert max(len(re.match(" *", line).group()) for line in lines) == 2
    assert num_calls > 1000  # the replays of the investigation
    assert count(lines)[0] == num_calls
