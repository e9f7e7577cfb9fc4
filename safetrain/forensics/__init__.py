"""Forensics: replay a step that went bad and say which operation did it, why, for which samples, and what would help.

Works in any training loop: of safetrain it imports errors, core, _private, tensors and precision, and nothing above them.

step.py           what is given: the step, and how much may be spent
sandbox.py        captures and restores everything a replay may disturb
replay.py         runs the step again, plainly or traced
tracer.py         records every op: finite or not, and who wrote which memory
storages.py       which memory a tensor lies in
api_names.py      how an op was typed
schemas.py        what an op reads and writes
values.py         finite, Inf or NaN; statistics
histogram.py      histogram of the values of an operand
facts.py          operand statistics at the ops that make bad values
provenance.py     walks the record back from a bad loss or gradient to where it began
finding.py        op, phase, module and line of the origin
frames.py         from Python frames to modules and user lines
ownership.py      whose code a file is: the user's, a library's, Python's
update.py         the same for the optimizer's step
raised.py         exceptions that are raised because of numbers, by what they say
exceptions.py     the same by replay: is it a number, some samples, or the program?
causes.py         the table of rules that name the cause; the closed list of causes is core/causes.py
lineage/          from the fatal value back to where it came from
samples.py        which elements of the batch
samples_of.py     a batch as a row of samples
remedies.py       what would have kept the step finite, tried
substitutes.py    safe variants of ops, for one line
patches.py        safe variants that stay in until the source is fixed
backward_functions.py  the same for the backward of a custom function
fixes.py          what to write at that line
path.py           from the origin to the loss, by module
investigation.py  all of it, in order
scan.py           a whole data set
"""

from __future__ import annotations

from .investigation import Diagnosis, diagnose, investigate
from .scan import find_bad_batches
from .step import Effort, Step

__all__ = ["Diagnosis", "Effort", "Step", "diagnose", "find_bad_batches", "investigate"]
