"""Which rank caused a refused step: every rank looks for the origin in its own micro-batches, and all agree on one
finding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.incident import Cause
from ..distributed.agreement import LocalBlame, RankReports
from ..distributed.comm import name_ranks
from ..forensics import Diagnosis
from ..step.joint import JointExchange
from ..step.step import Step
from ..tensors.nest import num_samples
from .refused_step import RefusedStep


@dataclass
class Finding:
    """What one rank found about its own part of a step."""

    diagnosis: Diagnosis | None
    droppable: dict[int, list[int]]
    rows: dict[int, list[int]]
    can_drop: bool

    @property
    def is_guilty(self) -> bool:
        return self.diagnosis is not None and not self.diagnosis.healthy


def attribute(case: RefusedStep, step: Step, own: Diagnosis | None) -> Diagnosis | None:
    """The finding of the guilty rank, on every rank; notes whose it is, and what it means for this rank's window."""
    joint = step.exchange
    if not isinstance(joint, JointExchange):
        return own
    reports, rank = joint.reports, joint.rank
    findings: list[Finding] = joint.link.gather(
        _finding(case, joint, own), "waiting for the other ranks' investigation"
    )
    if any(finding.diagnosis is not None for finding in findings):
        joint.renew(step)
    guilty = [r for r in reports.suspects if findings[r].is_guilty]
    chosen = (*guilty, *case.blamed_ranks, reports.suspects[0])[0]
    incident = case.incident
    incident.rank = chosen
    incident.ranks = _rank_records(reports, findings, guilty)
    mine = findings[rank]
    samples = {index: set(rows) for index, rows in mine.rows.items()}
    for index, rows in mine.droppable.items():
        samples.setdefault(index, set()).update(rows)
    dropping = [finding for finding in findings if finding.is_guilty]
    case.local_blame = LocalBlame(
        {index: sorted(rows) for index, rows in samples.items()},
        mine.droppable,
        bool(dropping) and all(finding.can_drop for finding in dropping),
    )
    diagnosis = findings[chosen].diagnosis
    if diagnosis is None:
        return None
    if guilty:
        others = (
            f" ({name_ranks(guilty[1:])} too, on {'their' if len(guilty) > 2 else 'its'} own)" if guilty[1:] else ""
        )
        innocent = [r for r in range(len(findings)) if r not in guilty]
        arrived = f"; {name_ranks(innocent)} received the value from there" if innocent else ""
        diagnosis.cause.explanation += f"; on rank {chosen}{others}{arrived}"
    else:
        diagnosis.cause = Cause("unknown", _not_reproduced(reports, diagnosis))
    return diagnosis


def _finding(case: RefusedStep, joint: JointExchange, own: Diagnosis | None) -> Finding:
    rows: dict[int, list[int]] = {}
    decision = joint.own_decision
    for verdict in decision.verdicts.values() if decision is not None else ():
        for index, found in verdict.bad_samples.items():
            rows.setdefault(index, []).extend(found)
    if own is None:
        return Finding(None, {}, rows, False)
    droppable = {own.micro_batch: list(own.samples)} if own.samples and not own.healthy else {}
    # Where most of a batch is guilty, it is the computation that is wrong, and little would be left to learn from.
    can_drop = bool(droppable) and 2 * len(own.samples) <= num_samples(case.window[own.micro_batch])
    # Exceptions may not survive the way to another process.
    return Finding(dataclasses.replace(own, error=None), droppable if can_drop else {}, rows, can_drop)


def _rank_records(reports: RankReports, findings: Sequence[Finding], guilty: Sequence[int]) -> list[dict[str, Any]]:
    """For the record: each rank's loss, and what it says of its own part."""
    losses = reports.losses or [math.nan] * len(findings)
    about = []
    for rank, finding in enumerate(findings):
        diagnosis = finding.diagnosis
        entry: dict[str, Any] = {"rank": rank, "loss": losses[rank]}
        if rank in guilty and diagnosis is not None:
            origin = diagnosis.origin
            entry |= {"guilty": True, "micro_batch": diagnosis.micro_batch, "samples": diagnosis.samples}
            entry |= {"cause": diagnosis.cause.label, "op": origin.op, "file": origin.file, "line": origin.line}
        elif diagnosis is not None:
            entry |= {"guilty": False, "says": "its own part is finite: the value came from another rank"}
        about.append(entry)
    return about


def _not_reproduced(reports: RankReports, diagnosis: Diagnosis) -> str:
    bad = [rank for rank, loss in enumerate(reports.losses) if not math.isfinite(loss)]
    where = f" (it was on {name_ranks(bad)})" if bad else ""
    return f"no rank's part of the step is non-finite when it is run again{where}: the fault did not reproduce"
