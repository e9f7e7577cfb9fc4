"""The result of a run in a few labelled lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ..core.incident import Incident
from ..core.numbers import counted, duration, megabytes, percent
from ..core.result import FitResult
from ..incidents.render import as_typed

NUM_STEPS = 8
"""Steps of incidents that are listed for each cause; the rest is counted."""


def headline(result: FitResult) -> str:
    """`done: 180 steps committed, 0 skipped, final loss 2.3003, 6.8 s`."""
    numbers = f"{result.steps} {'step' if result.steps == 1 else 'steps'} committed, {result.skipped} skipped"
    if result.overflows:
        numbers += f" ({result.overflows} of them fp16 scaler overflows)"
    is_in_vain = result.status == "done" and result.skipped - result.overflows > result.steps
    status = "ended, but most steps were refused" if is_in_vain else result.status
    return f"{status}: {numbers}, final loss {result.final_loss:.5g}, {duration(result.seconds)}"


def summary_rows(result: FitResult) -> list[tuple[str, str]]:
    """Labels and texts; a row without a label continues the one before."""
    if _has_nothing(result):  # what stopped it is all there is to say
        return list(_incidents(result)) if result.incidents else []
    parts = (_stop, _best, _clipped, _incidents, _recovery, _interruptions, _permanent, _cost, _checkpoint)
    return [row for part in parts for row in part(result)]


def _has_nothing(result: FitResult) -> bool:
    """It ended before its first committed step: there is nothing to resume or to look at."""
    return result.status in ("error", "stopped") and result.steps == result.steps_undone == 0 and not result.resumes


def next_commands(result: FitResult) -> list[tuple[str, str]]:
    """Commands to run next, and their purpose."""
    run = result.run_dir
    if run is None:
        return []
    commands = []
    if result.status in ("paused", "interrupted", "error") and result.checkpoints.get("newest"):
        commands.append((f"safetrain resume {run}", "go on exactly where it was"))
    if result.incidents:
        commands.append((f"safetrain diagnose {run}", "the incidents at length, newest first"))
    if _has_nothing(result):
        return commands[-1:] if result.incidents else []
    return [
        *commands,
        (f"safetrain report {run}", "the whole run as one HTML page"),
        (f"tensorboard --logdir {run}", "loss, gradient norm and incidents as curves"),
    ]


def _stop(result: FitResult) -> Iterator[tuple[str, str]]:
    if result.stop_reason is not None:
        yield "ended", f"before its last step: {result.stop_reason}"


def _clipped(result: FitResult) -> Iterator[tuple[str, str]]:
    if result.num_clipped:
        share = percent(result.num_clipped, result.steps)
        yield (
            "clipped",
            f"{counted(result.num_clipped, 'step')} ({share}), the most to {result.most_clipped:.2g} of its gradient",
        )


def _best(result: FitResult) -> Iterator[tuple[str, str]]:
    if result.best is not None:
        metrics = ", ".join(f"{name} {value:.5g}" for name, value in result.best.items() if name != "step")
        yield "best", f"{metrics} (evaluated at step {int(result.best['step'])})"


def _incidents(result: FitResult) -> Iterator[tuple[str, str]]:
    """By cause and place, the most frequent first."""
    if not result.incidents:
        yield "incidents", "none"
        return
    groups: dict[str, list[Incident]] = {}
    for incident in result.incidents:
        groups.setdefault(_kind(incident), []).append(incident)
    steps = ", ".join(str(incident.step) for incident in result.incidents[:NUM_STEPS])
    steps += ", …" if len(result.incidents) > NUM_STEPS else ""
    num_kept = sum(incident.path is not None for incident in result.incidents)
    kept = (
        "each kept" if num_kept == len(result.incidents) else f"the first {num_kept} kept" if num_kept else "none kept"
    )
    where = f" in {result.run_dir}/incidents" if num_kept else ""
    yield "incidents", f"{len(result.incidents)} (at step {steps}), {kept}{where}"
    for kind, incidents in sorted(groups.items(), key=lambda item: -len(item[1])):
        outcomes = Counter(_OUTCOMES[incident.decision.action] for incident in incidents)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        yield "", f"{len(incidents)} x {kind}: {counts}"


_OUTCOMES = {
    "none": "examined",
    "commit": "repaired",
    "skip": "skipped",
    "rollback": "rolled back",
    "stop": "stopped the run",
}


def _kind(incident: Incident) -> str:
    origin = incident.origin
    place = f" at {as_typed(origin.file)}:{origin.line}" if origin.file is not None and origin.line is not None else ""
    label = incident.cause.label if incident.cause.label != "unknown" else f"caught by {incident.trigger.guard}"
    return f"{label}{place}"


def _recovery(result: FitResult) -> Iterator[tuple[str, str]]:
    seconds = result.timing.get("recovery", 0.0)
    if not result.incidents and not result.rollbacks:
        return
    undone = f", {counted(result.steps_undone, 'committed step')} undone" if result.rollbacks else ""
    share = f" ({percent(seconds, result.seconds)})" if result.seconds > 0 else ""
    lost = f"{duration(seconds)}{share} lost to recovery"
    yield "recovery", f"{counted(result.rollbacks, 'rollback')}{undone}, {lost}"


def _interruptions(result: FitResult) -> Iterator[tuple[str, str]]:
    """Hangs, and what it cost to go on in another process."""
    if result.resumes:
        repeated = sum(each["steps_repeated"] for each in result.resumes)
        seconds = sum(each["seconds"] or 0.0 for each in result.resumes)
        until = f"{duration(seconds)} from the last sign of life to the next committed step"
        yield "resumed", f"{counted(len(result.resumes), 'time')}, {counted(repeated, 'step')} made again, {until}"
    if result.hangs:
        longest = max(result.hangs, key=lambda each: each["seconds"])
        ranks = f", rank {', '.join(map(str, longest['ranks']))}" if longest["ranks"] else ""
        where = f"the longest at step {longest['step']}{ranks}: {duration(longest['seconds'])}"
        yield "hangs", f"{counted(len(result.hangs), 'time')}, {where}"


def _permanent(result: FitResult) -> Iterator[tuple[str, str]]:
    """What recovery has changed, and how to keep it."""
    if result.islands:
        yield "float32", "kept in float32 by recovery; to make it permanent, add to the config:"
        for line in result.islands["yaml"].rstrip().splitlines():
            yield "", f"  {line}"
    for patch in result.patches:
        names = ", ".join(patch["operations"] or ["what is unsafe"])
        yield (
            "patched",
            f"{names} at {patch['file']}:{patch['line']} ran as its safe variant, {patch['num_uses']} times",
        )
        yield "", f"  {patch['code']}"
        yield "", f"  to make it permanent: {patch['fix']}"
    if result.quarantined:
        samples = counted(len(result.quarantined), "sample")
        yield "quarantine", f"{samples} left out, listed in {result.run_dir}/quarantine.jsonl"


def _cost(result: FitResult) -> Iterator[tuple[str, str]]:
    spent = {name: seconds for name, seconds in result.timing.items() if name in ("evaluation", "saving")}
    parts = [f"guards {percent(result.timing.get('guards', 0.0), result.seconds)} of the time"]
    parts += [f"{name} {duration(seconds)}" for name, seconds in spent.items()]
    if kept := result.snapshots:
        copies = counted(int(kept["num_taken"]), "snapshot")
        parts.append(f"{copies} {duration(kept['seconds'])} ({megabytes(kept['bytes'])} of memory)")
    yield "cost", ", ".join(parts)


def _checkpoint(result: FitResult) -> Iterator[tuple[str, str]]:
    if newest := result.checkpoints.get("newest"):
        sound = "verified" if result.checkpoints.get("verified") else "DAMAGED: it differs from what was written"
        yield "checkpoint", f"{result.run_dir}/checkpoints/{newest}, {sound}"
