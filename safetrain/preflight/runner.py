"""Runs the checks on a trainer, and leaves it unchanged."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from ..core.spelling import suggest
from ..distributed.machine import deterministic_algorithms
from ..errors import UsageError
from ..guards import Guard
from .checks import CHECKS
from .outcome import Outcome, Unavailable, skipped
from .registry import Check
from .report import Checked, CheckReport
from .subject import Budget, Subject
from .untouched import Untouched

if TYPE_CHECKING:
    from ..trainer.trainer import SafeTrainer


def check(
    trainer: SafeTrainer,
    only: str | Iterable[str] | None = None,
    budget: float = 10.0,
    tell: Callable[[Checked], None] = lambda checked: None,
) -> CheckReport:
    """Check data, model and first steps of a trainer before `fit()`, without changing any of them.

    `only` names the checks to run; `budget` is roughly how many seconds they may take: of large data only a sample is read.
    `tell` is called with each outcome as soon as it is known.

    >>> data = [(x, x.sum(1, keepdim=True)) for x in torch.randn(20, 8, 3)]
    >>> data[4][0][2, 1] = torch.nan
    >>> trainer = SafeTrainer(torch.nn.Linear(3, 1), loss_fn=torch.nn.MSELoss(), train_data=data, config=QUIET)
    >>> report = check(trainer, only="data_finite,labels")
    >>> report.passed, report["data_finite"].status, report["labels"].status
    (False, 'FAIL', 'PASS')
    >>> report["data_finite"].reason
    "field '0' has NaN in 1 of 160 samples: row 2 of batch 4"
    """
    chosen = _chosen(only)
    if trainer.has_run:
        raise UsageError("fit() was already called on this trainer.\nTo fix: call check before fit().")
    if trainer.machine.world_size > 1:
        raise UsageError(
            f"checks run in one process, and there are {trainer.machine.world_size}.\n"
            "To fix: run `safetrain check` without torchrun, or call it only if WORLD_SIZE is not set."
        )
    allowed = Budget(budget)
    report = CheckReport(trainer.config.name, budget=budget)
    guards = _copied_guards(trainer)
    with _as_in_a_run(trainer):
        untouched = Untouched(trainer)
        try:
            subject = Subject(trainer, allowed, untouched, guards)
            for each in chosen:
                checked = _run(each, subject)
                report.checks.append(checked)
                tell(checked)
        finally:
            untouched.leave()
    report.seconds = allowed.spent
    return report


def _run(each: Check, subject: Subject) -> Checked:
    begin = time.perf_counter()
    if subject.budget.left < 0:
        left = f"the {subject.budget.seconds:g} s of the budget are used up; --budget {4 * subject.budget.seconds:g} gives more"
        return Checked(**vars(skipped(left)), name=each.name, seconds=0.0)
    try:
        outcome: Outcome = each.run(subject)
    except Unavailable as reason:
        outcome = skipped(str(reason))
    except Exception as error:  # a check that fails on a model must not prevent the others
        outcome = skipped(f"the check itself failed: {type(error).__name__}: {error}")
    return Checked(**vars(outcome), name=each.name, seconds=time.perf_counter() - begin)


def _copied_guards(trainer: SafeTrainer) -> list[Guard] | None:
    """Copies for trial runs, made before any guard is attached; None if they cannot be copied."""
    shared: dict[int, object] = {id(module): module for module in trainer.model.modules()}
    try:
        return copy.deepcopy(list(trainer.guards), shared)
    except Exception:  # a guard of the user's may hold anything
        return None


def _as_in_a_run(trainer: SafeTrainer) -> ExitStack:
    """Islands and deterministic algorithms as in a run. Warnings are ignored: they come again in the run."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.enable_grad())
        if trainer.config.loop.deterministic:
            stack.enter_context(deterministic_algorithms())
        stack.enter_context(trainer.rehearsal())
        for guard in trainer.guards:
            if guard.name == "islands" and (remove := guard.attach(trainer.model)) is not None:
                stack.callback(remove)
        return stack.pop_all()


def _chosen(only: str | Iterable[str] | None) -> Sequence[Check]:
    if only is None:
        return CHECKS
    names = [name.strip() for name in (only.split(",") if isinstance(only, str) else only)]
    known = [each.name for each in CHECKS]
    for name in names:
        if name not in known:
            raise UsageError(
                f"there is no check {name!r}{suggest(name, known)}\nTo fix: choose from {', '.join(known)}."
            )
    return [each for each in CHECKS if each.name in names]
