"""From a step to a diagnosis. `diagnose` is for loops that know more of the step, `investigate` for any raw loop."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._private.autograd import TRACING
from ..core.incident import Cause, Incident, Link, Origin, Outcome, Remedy, Replay, Trigger
from . import remedies as remedy_trials
from . import samples as sample_search
from .causes import judge
from .exceptions import locate_error
from .finding import Finding, locate, locate_buffer
from .fixes import suggest
from .lineage import lineage_of
from .path import propagation
from .raised import explain_error, is_numeric
from .replay import Replayer, Result, Trace, is_like, is_same_loss
from .samples import Samples
from .step import Effort, Step
from .substitutes import Patch
from .trials import Trials
from .update import locate_in_update, survives_bad_gradients


@dataclass
class Diagnosis:
    """The answers to the five questions, with the names of an incident's fields.

    >>> found = diagnose(Step(torch.nn.Linear(4, 1), lambda model, x: model(x).mean(), [torch.rand(2, 4)]))
    >>> found.healthy, found.signal
    (True, '')
    """

    healthy: bool = False
    signal: str = ""
    """What was non-finite: `loss`, `gradients`, `buffers`, `update`, or `exception`."""
    value: Any = None
    micro_batch: int = 0
    origin: Origin = field(default_factory=Origin)
    cause: Cause = field(default_factory=Cause)
    samples: list[int] = field(default_factory=list)
    propagation: list[str] = field(default_factory=list)
    lineage: list[Link] = field(default_factory=list)
    """From the bad operand back to where its value came from."""
    remedies: list[Remedy] = field(default_factory=list)
    fix: str = ""
    replay: Replay = field(default_factory=Replay)
    error: Exception | None = None
    """What the step itself raised."""
    patch: Patch | None = None
    """The safe variant that kept the step finite: `with diagnosis.patch.active():` around a step puts it in."""
    island: str | None = None
    """The module that, kept in fp32, kept the step finite."""
    anomaly: str = ""
    """What autograd's anomaly mode said, if it was asked; its first line."""
    seconds: float = 0.0

    @property
    def is_error_of_the_program(self) -> bool:
        """The step raised, and neither numbers nor samples have to do with it."""
        return self.error is not None and not is_numeric(self.error) and self.origin.op is None

    def fill(self, incident: Incident) -> None:
        """Put the answers into an incident that a trainer made."""
        for name in ("origin", "cause", "samples", "propagation", "lineage", "remedies", "fix", "replay"):
            setattr(incident, name, getattr(self, name))


def investigate(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    batch: Any,
    optimizer: Optimizer | None = None,
    precision: str = "fp32",
    *,
    loss: Tensor | float | None = None,
    effort: Effort | None = None,
) -> Incident | None:
    """Replay one step and explain what is non-finite in it; None when it is healthy. Leaves everything as it was.

    With an optimizer its update is examined too, and gradients that it copes with are not an incident.
    An exception of the step that has nothing to do with its numbers is raised as it is.

    >>> model, batch = torch.nn.Linear(4, 1), torch.rand(8, 4)
    >>> batch[5] = 0
    >>> incident = investigate(model, lambda model, x: model(x / x.sum(1, keepdim=True)).mean(), batch)
    >>> incident.cause.label, incident.origin.name, incident.samples
    ('division_by_zero', 'div', [5])
    """
    step = Step(model, loss_fn, [batch], optimizer, precision, loss=loss)
    diagnosis = diagnose(step, effort or Effort())
    if diagnosis.error is not None and diagnosis.is_error_of_the_program:
        raise diagnosis.error
    if diagnosis.healthy:
        return None
    incident = Incident(
        step=0,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        trigger=Trigger("investigate", diagnosis.signal, diagnosis.value),
        decision=Outcome("none", [f"non-finite {diagnosis.signal}"]),
    )
    diagnosis.fill(incident)
    return incident


def diagnose(step: Step, effort: Effort | None = None) -> Diagnosis:
    """What is wrong with a step. Never raises: what fails inside becomes a diagnosis that says so.

    >>> step = Step(torch.nn.Linear(4, 1), lambda model, x: model(x).log().mean(), [torch.rand(2, 4), -torch.ones(2, 4)])
    >>> with torch.no_grad():
    ...     healthy_weights = step.model.weight.fill_(1.0)
    >>> found = diagnose(step, Effort(remedies=False))
    >>> found.cause.label, found.micro_batch
    ('log_of_nonpositive', 1)
    """
    started = time.perf_counter()
    try:
        # The step has already warned when it ran for the first time.
        with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not TRACING.works:
                raise RuntimeError(
                    f"operations cannot be traced: {TRACING.failure}; safetrain env says what that needs"
                )
            effort = effort or Effort()
            with Replayer(step, effort.max_seconds) as replayer:
                diagnosis = _diagnose(replayer, effort)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        explanation = (
            f"the investigation itself failed: {type(error).__name__}: {error} ({place.name}, line {place.lineno})"
        )
        diagnosis = Diagnosis(_stays_finite(step), "unknown", cause=Cause("unknown", explanation))
    diagnosis.seconds = time.perf_counter() - started
    return diagnosis


def is_raised_by_numbers(step: Step) -> bool:
    """Of a step that has raised: does its replay raise too, because of its numbers or of some samples?"""
    diagnosis = diagnose(step, Effort(remedies=False, samples=False))
    return diagnosis.error is not None and not diagnosis.is_error_of_the_program


def _stays_finite(step: Step) -> bool:
    """All that can be said when tracing failed."""
    try:
        with Replayer(step) as replayer:
            return replayer.plain().finite
    except Exception:  # whatever the step raises, it is not finite
        return False


def _diagnose(replayer: Replayer, effort: Effort) -> Diagnosis:
    trace = replayer.traced()
    if trace.error is not None and replayer.plain().error is None:
        raise RuntimeError(
            f"the step raises only when traced: {type(trace.error).__name__}: {trace.error}"
        ) from trace.error
    finding, signal = _find(replayer, trace)
    if finding is None and replayer.is_compiled and trace.error is None:
        return _compare_with_compiled(replayer, trace)
    if finding is None:
        healthy = trace.finite or signal == "handled"
        replay = _replay_of(replayer, trace, None)
        diagnosis = Diagnosis(
            healthy, "" if healthy else signal, None, trace.micro_batch, error=trace.error, replay=replay
        )
        if trace.error is not None:
            diagnosis.cause = explain_error(trace.error)
        return diagnosis
    diagnosis = Diagnosis(signal=signal, micro_batch=trace.micro_batch, error=trace.error)
    diagnosis.value = float(trace.loss) if signal == "loss" and trace.loss is not None else finding.sink
    if finding.is_low_precision or remedy_trials.uses_low_precision(replayer):
        finding.finite_in_fp32 = remedy_trials.in_fp32(replayer).finite
    diagnosis.origin = finding.origin()
    diagnosis.cause = judge(finding)
    finding.cause_label = diagnosis.cause.label
    if len(replayer.step.window) > 1:
        diagnosis.cause.explanation += f"; in micro-batch {trace.micro_batch} of {len(replayer.step.window)}"
    diagnosis.propagation = propagation(finding, replayer)
    again = replayer.plain()
    diagnosis.replay = _replay_of(replayer, trace, again)
    if effort.anomaly:
        diagnosis.anomaly = _anomaly(replayer)
    found = Samples([])
    if effort.samples and finding.phase != "params":  # the samples that use a bad parameter did not make it so
        found = _search_samples(replayer, finding, effort)
        diagnosis.samples = found.guilty
        if found.note and (found.guilty or found.failed):
            diagnosis.cause.explanation += f"; samples {found.guilty}: {found.note}"
    if effort.lineage and (effort.samples or effort.remedies) and replayer.has_time():
        diagnosis.lineage = _trace_back(replayer, finding, found.guilty)
    if effort.remedies and not effort.is_known(diagnosis.origin):
        trials = Trials(replayer, finding, found, effort.max_replays // 2)
        diagnosis.remedies = remedy_trials.try_all(trials)
        diagnosis.patch, diagnosis.island = trials.patch, trials.island
    diagnosis.fix = suggest(finding, diagnosis.cause, diagnosis.remedies)
    if not replayer.has_time():
        diagnosis.cause.explanation += (
            f"; the investigation was cut short after {replayer.seconds:.0f} s (forensics.max_seconds)"
        )
    return diagnosis


def _search_samples(replayer: Replayer, finding: Finding, effort: Effort) -> Samples:
    """What is already known must not be lost when a batch is too unusual to be taken apart."""
    try:
        share = 8 if finding.phase == "optimizer" else 2  # an update that overflows is rarely the fault of few samples
        return sample_search.search(replayer, finding, effort.max_replays // share)
    except Exception as error:
        return Samples([], f"the search failed ({type(error).__name__}: {error})", failed=True)


def _trace_back(replayer: Replayer, finding: Finding, samples: list[int]) -> list[Link]:
    """Where a value came from is worth a line; that it cannot be said must not cost the rest of the answer."""
    with suppress(Exception):
        return lineage_of(replayer, finding, samples)
    return []


def _anomaly(replayer: Replayer) -> str:
    error = replayer.plain(changes=[torch.autograd.detect_anomaly()]).error
    return "nothing" if error is None else str(error).splitlines()[0]


def _find(replayer: Replayer, trace: Trace) -> tuple[Finding | None, str]:
    if trace.error is not None:
        return locate_error(trace, replayer), "exception"
    if trace.loss_kind:
        return locate(trace, replayer), "loss"
    if trace.bad_gradients:
        if survives_bad_gradients(replayer):
            return None, "handled"
        return locate(trace, replayer), "gradients"
    finding = locate_buffer(trace, replayer)
    if finding is not None:
        return finding, "buffers"
    return locate_in_update(replayer, trace), "update"


def _replay_of(replayer: Replayer, trace: Trace, again: Result | None) -> Replay:
    loss = trace.losses[0] if len(trace.losses) == 1 else torch.stack(trace.losses).mean() if trace.losses else None
    original = replayer.step.loss
    if trace.error is not None and again is not None and again.error is not None:
        same = (type(again.error), str(again.error)) == (type(trace.error), str(trace.error))
        return Replay(same, same)
    reproduced, bitwise = is_like(loss, original), is_same_loss(loss, original)
    if again is None:
        return Replay(reproduced, bitwise=bitwise)
    # Without the original loss, what was found on one replay is reproduced if another gives the same.
    reproduced = reproduced if original is not None else is_like(again.loss, loss)
    return Replay(reproduced, is_same_loss(again.loss, loss), bitwise)


def _compare_with_compiled(replayer: Replayer, trace: Trace) -> Diagnosis:
    """Eager is healthy. If the compiled model is not, the difference is all that can be said."""
    compiled = replayer.plain(eager=False)
    if compiled.finite:
        return Diagnosis(healthy=True, replay=_replay_of(replayer, trace, compiled))
    loss = float(trace.loss) if trace.loss is not None else None
    return Diagnosis(
        signal="loss",
        value=compiled.loss_value,
        cause=Cause("unknown", "the compiled model gives a non-finite step, the same step in eager mode is finite"),
        remedies=[Remedy("eager", True, loss, "without torch.compile")],
        fix="run without torch.compile, or compile with fewer fusions, and report the difference. Verified: eager is finite.",
        replay=Replay(True, None),
    )
