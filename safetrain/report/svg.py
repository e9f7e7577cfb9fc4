"""Renders matplotlib figures as SVG that takes its colours and font from the surrounding page."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from ..errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Placeholders: matplotlib needs colours, the page has CSS variables, which replace these in the SVG.
_NAMES = ("ink", "muted", "line", "panel", "good", "warn", "bad", "first", "second")
COLOURS = {name: f"#{index:02x}{index:02x}{index:02x}" for index, name in enumerate(_NAMES, 1)}
INK, MUTED, LINE, PANEL = (COLOURS[name] for name in ("ink", "muted", "line", "panel"))
_VARIABLE = {colour: f"var(--{name})" for name, colour in COLOURS.items()}
_COLOUR = re.compile("|".join(_VARIABLE))
_BOLD = "font-weight: bold; "
_FONT = re.compile(r"font: ([\w ]*?)([\d.]+)px [^;\"]*")
_NOISE = re.compile(
    r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", re.DOTALL
)

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: small, selectable, in the font of the page
    "font.size": 12,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.facecolor": "none",
    "axes.linewidth": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "path.simplify": False,  # series are downsampled already
    "text.parse_math": False,  # a $ in a name is not math
    "axes.unicode_minus": True,
}


def figure(width: int, height: int) -> Figure:
    """An empty figure of `width` × `height` pixels. Create and fill it within `style()`."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width / 72, height / 72), dpi=72, facecolor="none")


@contextmanager
def style() -> Iterator[None]:
    """matplotlib settings for the figures, independent of the user's."""
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError(
            f"the plots of a report need matplotlib, which cannot be imported ({error}).\n"
            "To fix: pip install matplotlib, or pip install --upgrade --force-reinstall safetrain."
        ) from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def render(drawn: Figure, name: str, title: str) -> str:
    """The `<svg>` element. `name` prefixes its ids, which must be unique on the page; `title` is for screen readers."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        drawn.savefig(
            out, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    text = _NOISE.sub("", out.getvalue()).strip()
    text = text.replace(' target="_blank"', "")  # links point to the same page
    text = _COLOUR.sub(lambda found: _VARIABLE[found[0]], text)
    text = _FONT.sub(lambda found: f"{_BOLD if 'bold' in found[1] else ''}font-size: {found[2]}px", text)
    text = re.sub(r'\b(id="|url\(#|href="#)(?!incident)', rf"\g<1>{name}-", text)
    labelled = f'role="img" aria-label="{escape(title)}"'
    text = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', lambda found: f"{found[1]} {labelled}", text, count=1)
    text = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", text, count=1)
    return re.sub(r"\s*\n\s*", "\n", text)
