"""The HTML report of a run: `safetrain report RUN`, or `write_report` in Python.

run.py         reads a run's directory: journal, incidents, checkpoints, config
series.py      curves and marks of any length in bounded memory
incidents.py   the incidents, and which of them are kept whole
verdict.py     how it went, in a sentence and a few numbers
settings.py    the config, and what differs between two
svg.py         figures that take colours and font from the page
timeline.py    loss, gradient norm, learning rate, and what happened
spread.py      the histogram of an operand
views.py       an incident in the pieces that its part of the page shows
page.py        all of it in one file
templates/     the page, its style, and its script
"""

from __future__ import annotations

from .page import Written, write_incident_page, write_report

__all__ = ["Written", "write_incident_page", "write_report"]
