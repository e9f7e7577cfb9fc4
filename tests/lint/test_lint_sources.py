"""Whole files: opt-out comments, syntax errors, paths, and arbitrary Python code."""

from __future__ import annotations

import ast
import random
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import safetrain
from safetrain.errors import UsageError
from safetrain.lint import RULES, SYNTAX_ERROR, check_source, lint_paths
from safetrain.lint.document import document

ROOT = Path(safetrain.__file__).resolve().parent.parent
LINE = "y = torch.log(torch.softmax(x, -1)) / x.norm()"
EXAMPLES = "".join(rule.bad + rule.good for rule in RULES.values())
STDLIB = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def codes(source: str | bytes) -> list[str]:
    return [finding.code for finding in check_source(source)]


# --- opt-outs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("comment", "left"),
    [
        ("", ["ST101", "ST201"]),
        ("# noqa", []),
        ("# NOQA", []),
        ("# noqa: ST101", ["ST201"]),
        ("# noqa: ST101,ST201", []),
        ("# noqa: E501, ST201", ["ST101"]),
        ("# noqa: ST1", ["ST201"]),
        ("# noqa: E501", ["ST101", "ST201"]),
        ("# safetrain: ignore", []),
        ("# safetrain: ignore[ST201]", ["ST101"]),
        ("# safetrain: ignore[ST101, ST201] known to be fine", []),
        ("# type: ignore  # noqa: ST201", ["ST101"]),
        ("# an unrelated comment", ["ST101", "ST201"]),
    ],
)
def test_opt_out_comments(comment: str, left: list[str]) -> None:
    assert sorted(codes(f"import torch\n{LINE}  {comment}\n")) == left


def test_an_opt_out_inside_a_string_does_not_count() -> None:
    assert codes('import torch\ny = torch.log(x.softmax(-1)), "# noqa"\n') == ["ST101"]


@pytest.mark.parametrize("line", [2, 3, 4])
def test_an_opt_out_counts_on_every_line_of_the_expression(line: int) -> None:
    lines = ["import torch", "y = torch.log(", "    torch.softmax(x, -1)", ")"]
    lines[line - 1] += "  # noqa: ST101"
    assert codes("\n".join(lines)) == []


def test_a_whole_file_can_opt_out() -> None:
    assert codes(f"# safetrain: ignore-file\nimport torch\n{LINE}\n") == []
    assert codes(f"# safetrain: ignore-file[ST2]\nimport torch\n{LINE}\n") == ["ST101"]


# --- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source", ["def f(:\n", "x = (\n", "\0", "return\n  x", b"\xff\xfe\x00", b"# coding: nonsense\nx = 1"]
)
def test_a_syntax_error_is_a_finding(source: str | bytes) -> None:
    (finding,) = check_source(source, "a.py")
    assert finding.code == SYNTAX_ERROR
    assert finding.render().startswith("a.py:1:") or finding.line == 2
    assert "cannot be parsed" in finding.message


def test_declared_encodings_are_used() -> None:
    latin = "# coding: latin-1\nimport torch\nname = 'é'\n".encode("latin-1") + LINE.encode()
    assert sorted(codes(latin)) == ["ST101", "ST201"]
    assert sorted(codes(b"\xef\xbb\xbfimport torch\n" + LINE.encode())) == ["ST101", "ST201"]


def test_directories_are_searched_and_each_file_is_checked_once(tmp_path: Path) -> None:
    for name in ("a.py", "sub/b.py", ".hidden/c.py", "sub/__pycache__/d.py", "sub/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"import torch\n{LINE}\n")
    report = lint_paths([tmp_path, tmp_path / "a.py"])
    assert [Path(f.path).name for f in report.findings] == ["a.py", "a.py", "b.py", "b.py"]
    assert (report.num_files, report.num_lines) == (2, 4)
    assert lint_paths([tmp_path / "sub/notes.txt"]).findings  # asked for by name
    with pytest.raises(UsageError, match="To fix"):
        lint_paths([tmp_path / "nothing"])


def test_safetrains_own_sources_are_clean() -> None:
    assert lint_paths([ROOT / "safetrain"]).findings == []


def test_the_fault_of_the_quickstart_is_found_in_its_source() -> None:
    assert "ST201" in {finding.code for finding in lint_paths([ROOT / "recipes/char_gpt.py"]).findings}


# --- never crashes, and fast ---------------------------------------------------------------------------------------


def test_the_standard_library_is_read_without_a_crash() -> None:
    files = random.Random(0).sample(STDLIB, 60)
    report = lint_paths(files)
    assert report.num_files == 60
    assert [finding for finding in report.findings if finding.code == SYNTAX_ERROR] == []


EXPRESSIONS = st.recursive(
    st.sampled_from(["x", "mask", "1", "-1e9", "0.5", "1e-12", "float('-inf')", "eps", "F", "torch", "self.w", "'a'", "None", "[]"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/@%"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(inner, st.sampled_from(["**", ">", "==", "and", "if x else", "&", "<<"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(inner, st.sampled_from(
            ["log", "exp", "sqrt", "sum", "mean", "norm", "std", "softmax", "masked_fill", "where", "clamp", "half", "float", "max", "pow", "acos", "item", "nan_to_num", "topk", "to", "add", "mul", "backward", "step", "zero_grad", "unscale_", "scale", "Sigmoid", "Sequential", "BCELoss", "clip_grad_norm_"]), st.lists(inner, max_size=3),
            st.booleans()).map(lambda t: f"({t[0]}).{t[1]}({', '.join(t[2] + ['dim=-1'] * t[3])})"),
        st.tuples(st.sampled_from(["torch.log", "torch.where", "F.softmax", "torch.div", "torch.max", "max", "abs", "nn.Softmax", "torch.add", "pow", "float", "int", "len"]),
                  st.lists(inner, max_size=3)).map(lambda t: f"{t[0]}({', '.join(t[1])})"),
        st.tuples(inner, inner).map(lambda t: f"({t[0]})[{t[1]}]"),
        inner.map(lambda one: f"(lambda x: {one})"),
        inner.map(lambda one: f"[{one} for x, *mask in y if {one}]"),
    ),
    max_leaves=12,
)  # fmt: skip
STATEMENTS = st.tuples(
    st.sampled_from(["x = {}", "x, mask = {}", "x[mask] = {}", "self.w = {}", "x += {}", "x /= {}", "return {}", "assert {}", "{}",
                     "with torch.autocast({}):\n  x = {}", "if {}:\n  return {}", "for x in {}:\n  x /= {}", "while {}:\n  {}",
                     "try:\n  {}\nexcept E:\n  x = {}", "def g(x, eps={}):\n  return {}", "match {}:\n  case [y]: {}"]),
    EXPRESSIONS,
).map(lambda t: t[0].replace("{}", t[1]))  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(STATEMENTS, min_size=1, max_size=6))
def test_arbitrary_code_does_not_crash(statements: list[str]) -> None:
    body = "\n".join(" " + line for statement in statements for line in statement.splitlines())
    source = f"import torch\nfrom torch import nn\ndef f(self, x, y, mask):\n{body}\n"
    ast.parse(source)
    check_source(source)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=200))
def test_arbitrary_text_does_not_crash(text: str) -> None:
    check_source(text)


def test_a_damaged_file_does_not_crash() -> None:
    chance = random.Random(0)
    source = EXAMPLES.splitlines()
    for _ in range(150):
        lines = list(source)
        for _ in range(chance.randint(1, 4)):
            start = chance.randrange(len(lines))
            del lines[start : start + chance.randint(1, 3)]
        check_source("\n".join(lines))


@pytest.mark.parametrize(
    "source",
    [
        "x = " + "(" * 150 + "1" + ")" * 150,
        "x = " + " + ".join(["x.sum()"] * 3000),
        "x = " + "-" * 900 + "1",
        "x" + ".a()" * 900,
    ],
)
def test_deeply_nested_code_does_not_crash(source: str) -> None:
    check_source("import torch\n" + source)


def test_thousands_of_lines_per_second_without_torch() -> None:
    source = EXAMPLES * 20
    start = time.process_time()
    check_source(source)
    assert source.count("\n") / (time.process_time() - start) > 2000
    code = "import sys, safetrain.lint; assert not {'torch', 'numpy', 'omegaconf'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# --- documentation -------------------------------------------------------------------------------------------------


def test_the_documentation_is_generated_from_the_rules() -> None:
    text = (ROOT / "docs/lint.md").read_text(encoding="utf-8")
    assert text == document(), "run: python -m safetrain.lint.document > docs/lint.md"


@pytest.mark.parametrize("code", RULES)
def test_the_examples_run_and_suggest_functions_that_exist(code: str) -> None:
    rule = RULES[code]
    for example in (rule.bad, rule.good):
        exec(compile(example, code, "exec"), {})
    assert set(re.findall(r"safetrain\.safe\.(\w+)", rule.safe)) <= set(safetrain.safe.__all__)


@pytest.mark.parametrize("code", RULES)
def test_every_rule_explains_itself(code: str) -> None:
    rule = RULES[code]
    assert rule.why.endswith(".")
    assert rule.safe.endswith(".")
    assert len(rule.title) < 80


# --- what functions and modules return ------------------------------------------------------------------------------


def test_values_are_followed_through_functions_modules_and_other_files(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "heads.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def probabilities(logits):\n    return torch.softmax(logits, -1)\n"
        "class Head(nn.Module):\n    def forward(self, x):\n        return torch.sigmoid(x)\n"
    )
    (tmp_path / "train.py").write_text(
        "import torch\nfrom torch import nn\nfrom parts.heads import Head, probabilities\nfrom parts import heads\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.out = nn.Softmax(dim=-1)\n"
        "    def forward(self, x):\n        return self.out(x)\n"
        "net, head = Net(), Head()\n"
        "def loss(x):\n"
        "    a = net(x).log()\n"
        "    b = torch.log(1 - head(x))\n"
        "    c = torch.log(probabilities(x))\n"
        "    d = torch.log(heads.probabilities(x))\n"
        "    return a + b + c + d\n"
    )
    found = lint_paths([tmp_path / "train.py"]).findings
    assert [(finding.line, finding.code) for finding in found] == [(line, "ST101") for line in (13, 14, 15, 16)]
