"""`safetrain lint`: what it prints, how it is limited, and its exit codes."""

import json
from pathlib import Path

import pytest

from safetrain.cli.main import run
from safetrain.lint import RULES

SOURCE = """\
import torch

def f(x):
    return torch.log(torch.softmax(x, -1)) / x.norm()
"""


@pytest.fixture(autouse=True)
def _sources():
    Path("bad.py").write_text(SOURCE)
    Path("good.py").write_text("import torch\n\ndef f(x):\n    return torch.log_softmax(x, -1)\n")


def test_findings_are_printed_with_why_and_the_safe_form(capsys):
    assert run(["lint", "bad.py"]) == 3
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == "bad.py:4:12: ST101 log of softmax"
    assert lines[3].startswith("bad.py:4:12: ST201 division by a value that can be 0")
    assert sum(line.startswith("    why: ") for line in lines) == 2
    assert any(line.startswith("    safe: ") and "safetrain.safe.div" in line for line in lines)
    assert "2 findings in 1 file" in captured.err


def test_nothing_found_exits_with_0(capsys):
    assert run(["lint", "good.py"]) == 0
    assert capsys.readouterr().out == "ok: nothing found in 1 file\n"


def test_quiet_prints_one_line_per_finding(capsys):
    assert run(["lint", "-q", "."]) == 3
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 2
    assert captured.err == ""


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--select", "ST1"], ["ST101"]),
        (["--select", "st201"], ["ST201"]),
        (["--select", "ST101,ST2"], ["ST101", "ST201"]),
        (["--ignore", "ST2"], ["ST101"]),
        (["--select", "ST1,ST2", "--ignore", "ST101"], ["ST201"]),
        (["--ignore", "ST"], []),
        (["--select", "ST7"], []),
    ],
)
def test_rules_are_selected_by_prefix(options, left, capsys):
    assert run(["lint", "bad.py", "--json", *options]) == (3 if left else 0)
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert sorted(finding["code"] for finding in findings) == left


def test_json_holds_everything(capsys):
    assert run(["lint", ".", "--json"]) == 3
    data = json.loads(capsys.readouterr().out)
    assert (data["schema"], data["files"], data["lines"]) == (1, 2, 8)
    (finding,) = (finding for finding in data["findings"] if finding["code"] == "ST101")
    assert (finding["path"], finding["line"], finding["column"]) == ("bad.py", 4, 12)
    assert finding["message"]
    assert finding["why"] == RULES["ST101"].why
    assert finding["safe"] == RULES["ST101"].safe


def test_a_file_that_cannot_be_parsed_is_reported_and_the_others_are_read(capsys):
    Path("broken.py").write_text("def f(:\n")
    assert run(["lint", ".", "-q"]) == 3
    out = capsys.readouterr().out
    assert "broken.py:1:7: ST001 cannot be parsed: " in out
    assert "bad.py:4:12: ST101" in out
    assert run(["lint", "broken.py", "--ignore", "ST001"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument 'PATH...'"),
        (["nowhere.py"], "there is no file or directory nowhere.py"),
        (["bad.py", "--select", "XX1"], "--select XX1: there is no such rule"),
        (["bad.py", "--ignore", "ST999"], "--ignore ST999: there is no such rule"),
    ],
)
def test_mistakes_exit_with_2(arguments, message, capsys):
    assert run(["lint", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_rules_are_listed(capsys):
    assert run(["lint", "--rules"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(RULES)
    assert run(["lint", "--rules", "--select", "ST7"]) == 0
    assert all(line.startswith("ST7") for line in capsys.readouterr().out.splitlines())
