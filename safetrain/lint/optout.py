"""Comments that disable rules: `# noqa`, `# noqa: ST101`, `# safetrain: ignore`, `# safetrain: ignore[ST101]`."""

from __future__ import annotations

import ast
import io
import re
import tokenize

_COMMENT = re.compile(
    r"#\s*(?:noqa(?:\s*:\s*(?P<noqa>[A-Z]+\d+(?:[\s,]+[A-Z]+\d+)*))?|"
    r"safetrain:\s*ignore(?P<file>-file)?(?:\[(?P<codes>[^\]]*)\])?)",
    re.I,
)
EVERYTHING = frozenset({"ST"})
FILE = 0
"""Stands for the whole file in place of a line number."""


def opt_outs(source: str) -> dict[int, frozenset[str]]:
    """Prefixes of the disabled codes by line; `# safetrain: ignore-file` is line 0."""
    if "noqa" not in source.lower() and "safetrain" not in source.lower():
        return {}
    found: dict[int, frozenset[str]] = {}
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                for match in _COMMENT.finditer(token.string):
                    codes = match["noqa"] or match["codes"]
                    prefixes = frozenset(re.findall(r"[A-Z]+\d*", codes.upper())) if codes else EVERYTHING
                    line = FILE if match["file"] else token.start[0]
                    found[line] = found.get(line, frozenset()) | prefixes
    except (tokenize.TokenError, SyntaxError):
        pass  # the parser accepts a few texts that the tokenizer does not: nothing is disabled in them
    return found


def is_opted_out(outs: dict[int, frozenset[str]], node: ast.AST, statement_start: int, code: str) -> bool:
    """A comment applies on any line of the expression, and on the first line of its statement."""
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0) or 0
    lines = {FILE, statement_start, *range(first, last + 1)}
    return any(code.startswith(prefix) for line in lines & outs.keys() for prefix in outs[line])
