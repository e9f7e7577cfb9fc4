"""Compares what a page shows as output with what was printed."""

import math
import re

# Different in every run: times of day in names of runs, durations, speeds, shares of time, sizes of memory.
VOLATILE = re.compile(
    r"\d{8}-\d{6}(?:-\d+)?"
    r"|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\+\d\d:\d\d)?"
    r"|\b\d[\d.,]*(?=\s+(?:s/step|steps/s|s|ms|µs|MB|KB|GB)\b)"
    r"|\b\d[\d:]*(?=\s+left\b)"
    r"|\b\d[\d.]*%(?=\)\s+lost\b|\s+of\s+the\s+time\b)"
)
NUMBER = re.compile(r"[-+]?\d+\.\d+(?:e[-+]?\d+)?|[-+]?\d+e[-+]?\d+")
GAP = "…"


def differs(shown, printed, tolerance=0.05):
    """What was shown and not printed, or None.

    `…` alone stands for any words, within a word for any letters. Numbers with a decimal point may differ by `tolerance`; times, speeds
    and sizes may be anything. Space and line ends do not count: where a line is wrapped depends on the length of a path.
    """
    actual, position, may_skip = _words(printed), 0, False
    for part in re.split(rf"(?<!\S){GAP}(?!\S)", shown):
        expected = _words(part)
        starts = range(position, len(actual) + 1) if may_skip else [position]
        lengths = {start: _common(expected, actual[start:], tolerance) for start in starts}
        best = max(lengths, key=lambda start: lengths[start])
        if lengths[best] < len(expected):
            at = lengths[best]
            context = " ".join(expected[max(at - 6, 0) : at + 6])
            return f"shown:   … {context} …\nprinted: … {' '.join(actual[best + max(at - 6, 0) : best + at + 6])} …"
        position, may_skip = best + len(expected), True
    if position < len(actual) and not re.search(rf"(?<!\S){GAP}\s*$", shown):
        return f"printed, but not shown: {' '.join(actual[position : position + 12])}"
    return None


def _words(text):
    return VOLATILE.sub("<any>", text).split()


def _common(expected, actual, tolerance):
    """How many words they begin with in common."""
    pairs = zip(expected, actual, strict=False)
    return next((n for n, pair in enumerate(pairs) if not _same(*pair, tolerance)), min(len(expected), len(actual)))


def _same(shown, printed, tolerance):
    numbers = [float(text) for text in NUMBER.findall(shown)]
    parts = [re.escape(part) for part in NUMBER.sub("\0", shown).split(GAP)]
    match = re.fullmatch(".*".join(parts).replace(re.escape("\0"), r"([-+]?\d[\d.]*(?:e[-+]?\d+)?)"), printed)
    if match is None:
        return False
    pairs = zip(numbers, map(float, match.groups()), strict=True)
    return all(math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-12) for a, b in pairs)
