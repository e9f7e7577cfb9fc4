"""Findings of guards although every number is finite: a warning, or the cause of an incident."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.causes import CAUSES
from ..core.incident import Cause, Incident
from ..core.result import FitResult
from ..core.verdict import Decision, Finding


def findings_of(decision: Decision) -> list[Finding]:
    return [finding for _, verdict in decision.by_severity() for finding in verdict.findings]


def note_warnings(result: FitResult, findings: Iterable[Finding], step: int) -> list[str]:
    """Put them on the record; each with its advice, for people."""
    texts = []
    for finding in findings:
        advice = CAUSES[finding.label].advice
        entry = {"step": step, "label": finding.label, "text": finding.text, "advice": advice}
        result.warnings.append({**entry, "names": list(finding.names)})
        texts.append(f"step {step}: {finding.label}: {finding.text}.\nTo fix: {advice}.")
    return texts


def explained_by_findings(incident: Incident, decision: Decision) -> Incident:
    """The incident, with its cause if a guard that refused the step knows it."""
    found = [f for _, verdict in decision.by_severity() if verdict.action is decision.action for f in verdict.findings]
    found.sort(key=lambda finding: finding.label == "replicas_differ")  # stable; that is what the others lead to
    if found:
        incident.cause = Cause(found[0].label, found[0].text)
        incident.fix = f"{CAUSES[found[0].label].advice}."
    return incident
