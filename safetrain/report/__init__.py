"""The HTML report of a run: `safetrain report RUN`, or `write_report` in Python.

run.py         reads a run's directory: journal, incidents, checkpoints, config
series.py      curves and marks of any length in bounded memory
incidents.py   the incidents, and which of them are shown in full
verdict.py     how the run went, in a sentence and a few numbers
settings.py    the config, and the differences between two
svg.py         matplotlib figures that take colours and font from the page
timeline.py    the plot of loss, gradient norm and learning rate
lanes.py       the rows below it: refused steps, rollbacks, resumes, checkpoints
histogram.py   the histogram of an operand
rewriting.py   the blamed line of source with the safe operation
views.py       what the template needs of an incident
page.py        puts it all into one file
templates/     HTML, CSS and JavaScript
"""

from __future__ import annotations

from .page import Written, write_incident_page, write_report

__all__ = ["Written", "write_incident_page", "write_report"]
