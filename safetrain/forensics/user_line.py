"""Remedies for an operation inside a library: changes of the user's own line that calls it, and of the arguments, not
of the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from ..core import progress
from ..core.incident import Remedy
from .library_call import Option
from .source import IDENTICAL, Bench, Candidate, Change, candidates
from .trials import Trials

MAX_TRIED = 16
OPTION = 1e-6


def changed_line(trials: Trials) -> Iterator[Remedy]:
    """The call into the library with an argument made harmless; only what leaves a healthy step as it is."""
    finding = trials.finding
    caller = finding.call_place
    if caller is None or finding.phase == "optimizer" or finding.place is None:
        return
    try:
        source = Path(caller.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return
    found = candidates(source, caller.line, "", finding.cause_label)
    if not found:
        return
    bench = Bench(trials.replayer, trials.samples.guilty)
    best: Change | None = None
    for number, candidate in enumerate(sorted(found, key=lambda each: not _is_of_argument(each, trials))[:MAX_TRIED]):
        if not trials.has_budget or (best is not None and number > MAX_TRIED // 2):
            break
        progress.note("changes of the line that calls the library", number)
        change = bench.tried(caller.file, source, candidate)
        if change is not None and (best is None or change.on_healthy == IDENTICAL):
            best = change
            if change.on_healthy == IDENTICAL:
                break
    if best is None:
        return
    finding.changed_line = best.text
    where = f"{Path(best.file).name}:{best.line}"
    yield Remedy("changed_line", True, best.loss, f"with `{best.text}` at {where}")


def _is_of_argument(candidate: Candidate, trials: Trials) -> bool:
    carried = trials.finding.carried
    if carried is None:
        return False
    return candidate.what.split(":")[0] in (f"argument {carried.number}", f"argument {carried.name}")


def library_option(trials: Trials) -> Iterator[Remedy]:
    """A constant such as `eps` that the library was made with, and that is 0."""
    for option in trials.finding.options[:3]:
        detail = f"with {option.text.format(OPTION)} instead of {option.value:g}"
        remedy = trials.replay("library_option", detail, _set(option, OPTION))
        yield remedy
        if remedy.finite:
            trials.finding.options = [option]
            return
    trials.finding.options = []


@contextmanager
def _set(option: Option, value: float) -> Iterator[None]:
    setattr(option.owner, option.attribute, value)
    try:
        yield
    finally:
        setattr(option.owner, option.attribute, option.value)


def parameter_in_range(trials: Trials) -> Iterator[Remedy]:
    """The parameter that the fatal value comes from, with ordinary numbers: no exponent above 10, no exact 0."""
    finding, name = trials.finding, trials.finding.source_tensor
    parameter = trials.replayer.parameters.get(name)
    if parameter is None or finding.phase not in ("forward", "backward"):
        return
    if finding.cause_label == "exp_overflow":
        yield trials.replay("parameter_in_range", f"with {name} clamped to [-10, 10]", _changed(parameter, _bounded))
    elif finding.cause_label in ("division_by_zero", "singular_gradient", "log_of_nonpositive"):
        detail = f"with 0.001 instead of the zeros of {name}"
        yield trials.replay("parameter_in_range", detail, _changed(parameter, _without_zeros))


def _bounded(values: Tensor) -> Tensor:
    return values.clamp(-10, 10)


def _without_zeros(values: Tensor) -> Tensor:
    return torch.where(values == 0, 1e-3, values)


@contextmanager
def _changed(parameter: nn.Parameter, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    before = parameter.detach().clone()
    with torch.no_grad():
        parameter.copy_(change(before))
    try:
        yield
    finally:
        with torch.no_grad():
            parameter.copy_(before)
