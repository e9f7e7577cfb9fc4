"""The rules as docs/lint.md explains them: each with an example that it finds, and the same code written safely."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "lint.md").read_text(encoding="utf-8")
_SECTION = re.compile(r"^## (ST\d+)\n.*?```python\n(.*?)```.*?```python\n(.*?)```", re.MULTILINE | re.DOTALL)
EXAMPLES = {code: (bad, good) for code, bad, good in _SECTION.findall(PAGE)}
