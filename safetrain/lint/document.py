"""The documentation of the rules, made from the rules: `python -m safetrain.lint.document > docs/lint.md`."""

from __future__ import annotations

from . import RULES

HEAD = """\
# safetrain lint

`safetrain lint PATH…` reads training code, without running or importing it, and points at the patterns that go NaN later.

    safetrain lint train.py models/            look at files, and below directories
    safetrain lint . --select ST1,ST4          only some rules: codes or prefixes
    safetrain lint . --ignore ST404            all but some
    safetrain lint . --json                    for other programs
    safetrain lint --rules                     the list below

A finding is `file:line:col: CODE what`, then why it goes wrong and the safe form. The exit code is 0 if nothing was found, 2 for a
mistake in the command, and 3 if there were findings or a file could not be parsed (`ST001`).

It follows values through assignments, branches and the attributes that `__init__` sets, knows `import … as` and both the function and
the method form of an operation, and takes `+ eps`, `clamp`, `max(n, 1)`, `where`, `if n > 0:` and the like for the guards they are.
Without evidence that a value can be 0 it stays silent: `a / b` alone is no finding. Code under `torch.no_grad()` is spared the rules
about gradients, and files that compute with NumPy, JAX or TensorFlow and do not import torch are not looked at.

To accept a finding, say so on its line; the reason can follow:

    scale = x / x.norm()      # noqa: ST201
    scale = x / x.norm()      # safetrain: ignore[ST201] never zero: rows are one-hot
    # safetrain: ignore-file  anywhere in a file leaves all of it out

From Python: `safetrain.lint.check_source(text)` and `safetrain.lint.lint_paths(paths)` return the findings.

"""
MEASURED = """\
## How much it says

Findings in the sources of well-known packages, none of which was written with it in mind:

| package | lines | findings | per 1,000 lines |
|---|---|---|---|
{rows}

Of a random sample of 40 findings read one by one, {sample}
"""


def document() -> str:
    """The whole page, in Markdown."""
    table = ["| rule | pattern |", "|---|---|"]
    table += [f"| [{code}](#{code.lower()}) | {rule.title} |" for code, rule in sorted(RULES.items())]
    return HEAD + "\n".join(table) + "\n\n" + "\n".join(_section(code) for code in sorted(RULES))


def _section(code: str) -> str:
    rule = RULES[code]
    return (
        f"## {code}\n\n**{rule.title[0].upper()}{rule.title[1:]}.** {rule.why}\n\n"
        f"```python\n{rule.bad}```\n\nSafe: {rule.safe}\n\n```python\n{rule.good}```\n"
    )


if __name__ == "__main__":
    print(document(), end="")
