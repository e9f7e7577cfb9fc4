"""Numbers as people read them: in messages, on the terminal, in reports. A format that two places use is here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def amount(value: float) -> str:
    """Three digits, for a sentence."""
    return f"{value:.3g}"


def exact(value: Any) -> str:
    """Six digits of a float, for evidence; anything else as it is."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def typographic(value: Any) -> str:
    """For a page: thousands apart, a true minus, NaN and Inf by their names; nothing for None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+inf" if value > 0 else "−inf"
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}".replace("-", "−")


def on_axis(value: float) -> str:
    """For the axis of a plot: `0.002`, `1,500`, `3e−8`."""
    if value == 0:
        return "0"
    if 1e-4 <= abs(value) < 1e6:
        return f"{value:,.4g}".replace("-", "−") if abs(value) < 1000 else f"{value:,.0f}".replace("-", "−")
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}".replace("-", "−")


def counted(count: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def listed(items: Sequence[Any], limit: int = 4) -> str:
    """The first few, and how many more there are: `3, 5, 8 and 12 more`."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(map(str, items[:limit])) + more


def of_total(done: int, total: int | None) -> str:
    """How far something has come: `1,200/5,000`; without the total where it is not known."""
    return f"{done:,}" if total is None else f"{done:,}/{total:,}"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole > 0 else "0%"


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f} MB"


def gibibytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def rate(steps_per_second: float) -> str:
    """`12.5 steps/s`, `3.0 s/step`; nothing before it is known."""
    if not steps_per_second > 0:
        return ""
    return f"{steps_per_second:.1f} steps/s" if steps_per_second >= 1 else f"{1 / steps_per_second:.1f} s/step"


def duration(seconds: float) -> str:
    """`0.04 s`, `6.8 s`, `12:05`, `3:10:00`."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    return f"{seconds:.1f} s" if seconds < 60 else clock(seconds)


def duration_in_words(seconds: float) -> str:
    """`6.8 s`, `12 min 05 s`, `3 h 10 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def clock(seconds: float) -> str:
    """`0:05`, `12:05`, `3:10:00`, `2 d 3:10:00`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour}:{minute:02}:{second:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
