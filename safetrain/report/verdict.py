"""The verdict on a run: a sentence or two, and the numbers of the summary."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass

from ..core.files import as_number
from ..core.numbers import duration_in_words, typographic
from .run import RunHistory


@dataclass(frozen=True)
class RunVerdict:
    tone: str
    """`good`, `warn`, `bad`, or `calm` while it is running."""
    word: str
    sentence: str
    next: str = ""
    """The command to continue with."""


def verdict(run: RunHistory) -> RunVerdict:
    committed = f"{run.num_committed:,} step{'s' * (run.num_committed != 1)} committed"
    incidents = _incidents(run)
    if run.status == "done":
        if not run.incidents:
            return RunVerdict("good", "Healthy", f"{committed}, none refused{_overflows(run)}{_final_loss(run)}.")
        return RunVerdict("warn", "Finished", f"{committed}, with {incidents}{_final_loss(run)}.")
    if run.status == "stopped":
        last = run.incidents.last
        why = f": {'; '.join(last.decision.reasons)}" if last is not None and last.decision.reasons else ""
        at = f" at step {last.step:,}" if last is not None else ""
        return RunVerdict("bad", "Stopped", f"A guard stopped the run{at}{why}. {committed}, with {incidents}.")
    progress = f"{committed}, with {incidents}{_final_loss(run, 'last')}."
    if run.status == "running":
        return RunVerdict("calm", "Running", f"Still running: {progress}")
    tone, word, what = _ENDS.get(run.status, _KILLED)
    return RunVerdict(tone, word, f"{what}. {progress}", f"safetrain resume {shlex.quote(str(run.directory))}")


_ENDS = {
    "interrupted": ("warn", "Interrupted", "A signal ended the run, and its state was saved"),
    "paused": ("warn", "Paused", "The time limit (loop.max_hours) was reached, and the state was saved"),
    "error": ("bad", "Failed", "An exception in the model, the data or the loss ended the run"),
}
_KILLED = ("bad", "Cut off", "The process was killed, or the machine went down")


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def _incidents(run: RunHistory) -> str:
    """`3 incidents (2 repaired, 1 skipped): division_by_zero at model.py:12 (2×) and …`."""
    if not run.incidents:
        return "no incidents"
    causes: Counter[str] = Counter()
    for (label, place), count in run.incidents.by_cause.items():
        causes[f"{label}{f' at {place}' if place else ''}"] += count
    most = [f"{cause}{f' ({count:,}×)' if count > 1 else ''}" for cause, count in causes.most_common(4)]
    more = f" and {len(causes) - 4} more" if len(causes) > 4 else ""
    plural = "s" * (run.incidents.count != 1)
    return f"{run.incidents.count:,} incident{plural} ({_by_action(run)}): {', '.join(most)}{more}"


def _overflows(run: RunHistory) -> str:
    count = run.outcomes["overflow"]
    return f" but for {count:,} that the fp16 loss scaler skipped while it adjusted its scale" if count else ""


def _final_loss(run: RunHistory, word: str = "final") -> str:
    value = as_number(run.end.get("final_loss", run.loss.last))
    return f"; {word} loss {typographic(value)}" if isinstance(value, (int, float)) and (run.loss or run.end) else ""


@dataclass(frozen=True)
class Figure:
    """A number of the summary."""

    label: str
    value: str
    hint: str = ""
    tone: str = ""


def figures(run: RunHistory) -> list[Figure]:
    best = _best(run)
    skipped, overflows = run.num_skipped, run.outcomes["overflow"]
    by_scaler = f"{overflows:,} by the fp16 scaler" if overflows else ""
    shown = [
        Figure("steps committed", f"{run.num_committed:,}", f"of {run.num_attempted:,} attempted"),
        Figure("incidents", f"{run.incidents.count:,}", _by_action(run), "bad" if run.incidents else "good"),
        Figure("skipped", f"{skipped:,}", by_scaler, "warn" if skipped > overflows else ""),
        Figure("rollbacks", f"{run.num_rollbacks:,}", "", "bad" if run.num_rollbacks else ""),
        Figure(
            "final loss", typographic(as_number(run.end.get("final_loss", run.loss.last))), "of the last committed step"
        ),
    ]
    if best:
        shown.append(best)
    if run.lowest_lr_scale < 1.0:
        shown.append(Figure("learning rate", f"×{run.lowest_lr_scale:.3g}", "at its lowest, by backoff", "warn"))
    if isinstance(seconds := run.end.get("seconds"), (int, float)) and 0 <= seconds < 1e12:
        shown.append(
            Figure("time", duration_in_words(seconds), f"{run.num_attempted / max(seconds, 1e-9):,.3g} steps/s")
        )
    return shown


def _by_action(run: RunHistory) -> str:
    words = {"commit": "repaired", "skip": "skipped", "rollback": "rolled back", "stop": "fatal"}
    return ", ".join(f"{count:,} {words.get(action, action)}" for action, count in run.incidents.actions.most_common())


def _best(run: RunHistory) -> Figure | None:
    record = next((evaluation for evaluation in reversed(run.evaluations) if evaluation.get("best")), None)
    if record is None:
        return None
    metrics = {name: as_number(value) for name, value in record.items() if name not in ("step", "best")}
    name = next(iter(metrics), None)
    if name is None:
        return None
    return Figure(f"best eval {name}", typographic(metrics[name]), f"at step {record['step']:,}")
