"""An incident for people: a short block for the terminal, and `report.md`."""

from __future__ import annotations

import linecache
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import write_text

if TYPE_CHECKING:
    from .incident import Incident

CONTEXT = 2
"""Source lines shown before and after the blamed one."""


def answers(incident: Incident) -> list[str]:
    """The five questions, one labelled paragraph each."""
    origin = incident.origin
    lines = [_labelled("FIRST BAD OP", _headline(incident))]
    lines += [_labelled("", line) for line in source_lines(incident)]
    lines.append(_labelled("WHY", f"{incident.cause.label}: {incident.cause.explanation}"))
    for index, operand in enumerate(origin.inputs[:4]):
        lines.append(_labelled("INPUTS" if index == 0 else "", describe_operand(operand)))
    if incident.samples:
        lines.append(_labelled("SAMPLES", ", ".join(map(str, incident.samples))))
    if incident.fix:
        verified = any(remedy.finite for remedy in incident.remedies)
        lines.append(_labelled("FIX", incident.fix if verified else f"{incident.fix} (not verified)"))
    lines.append(_labelled("REPLAY", _replay(incident)))
    return lines


def _labelled(label: str, text: str) -> str:
    return f"  {label:13} {text}".rstrip()


def _headline(incident: Incident) -> str:
    origin = incident.origin
    if origin.phase == "unknown":
        return "not found"
    where = {"<loss>": "in the loss function", "<data>": "in the batch", "": "in the root module"}.get(
        origin.module or "", f"in {origin.module}"
    )
    kind = f" ({origin.module_type})" if origin.module_type else ""
    op = f"{origin.name} ({origin.op})" if origin.op and origin.op != origin.name else f"{origin.name}"
    if origin.phase == "backward":
        op = f"the derivative of {origin.name} (computed by {origin.op})"
    return f"{op}, {origin.phase}, {where}{kind}"


def source_lines(incident: Incident, context: int = CONTEXT) -> list[str]:
    """The blamed line in its context, marked; only the line itself when the file is not there any more."""
    origin = incident.origin
    if origin.file is None or origin.line is None:
        return []
    lines = [f"{origin.file}:{origin.line}"]
    source = linecache.getlines(origin.file)
    if len(source) < origin.line or source[origin.line - 1].strip() != (origin.code or ""):
        return [*lines, f"> {origin.line:4}  {origin.code or ''}"]
    first = max(1, origin.line - context)
    for number in range(first, min(len(source), origin.line + context) + 1):
        marker = ">" if number == origin.line else " "
        lines.append(f"{marker} {number:4}  {source[number - 1].rstrip()}")
    return lines


def _replay(incident: Incident) -> str:
    reproduced = {
        True: "reproduced",
        False: "not reproduced: a transient fault",
        None: "not compared with the original",
    }
    deterministic = {True: ", twice the same", False: ", but not twice the same", None: ""}
    return reproduced[incident.replay.reproduced] + deterministic[incident.replay.deterministic]


def describe_operand(operand: dict[str, Any]) -> str:
    """`self: 12 zeros, 3 negative of 4096 values in [-1, 2], smallest magnitude 3e-39`."""
    if "count" not in operand:
        bounds = f" in [{operand['min']}, {operand['max']}]" if "min" in operand else ""
        return f"{operand['name']}: {operand['dtype']} {operand['shape']}{bounds}"
    words = (("zeros", "zero"), ("negatives", "negative"), ("nan", "NaN"), ("inf", "+inf"), ("neg_inf", "-inf"))
    special = ", ".join(f"{operand[key]} {word}" for key, word in words if operand[key])
    text = f"{operand['name']}: {special + ' of ' if special else ''}{operand['count']} values"
    if "min" in operand:
        text += f" in [{operand['min']:.4g}, {operand['max']:.4g}]"
    smallest = operand.get("smallest", math.inf)
    return text + (f", smallest magnitude {smallest:.3g}" if smallest < 1e-6 else "")


def write_report(incident: Incident, directory: Path) -> Path:
    path = directory / "report.md"
    write_text(path, markdown(incident))
    return path


def markdown(incident: Incident) -> str:
    """`report.md`: readable as plain text and on a forge."""
    origin, cause = incident.origin, incident.cause
    parts = [
        f"# Step {incident.step}: {origin.name or 'unknown operation'}, {cause.label}",
        f"Caught by `{incident.trigger.guard}` ({incident.trigger.signal} = {incident.trigger.value}). "
        f"Decision: **{incident.decision.action}**: {'; '.join(incident.decision.reasons)}.",
        "## First bad operation",
        f"{_headline(incident)}.",
        _code(source_lines(incident, context=4)),
        "## Root cause",
        f"`{cause.label}`: {cause.explanation}.",
        "## Inputs of the operation",
        _operand_table([*origin.inputs, *origin.outputs]),
        f"Samples of the batch: {', '.join(map(str, incident.samples))}." if incident.samples else "",
        "## Way of the bad value",
        " → ".join(incident.propagation),
        "## Fix",
        incident.fix,
        _remedy_table(incident),
        "## Verification",
        f"Replay: {_replay(incident)}.",
    ]
    return "\n\n".join(part for part in _without_empty_sections(parts)) + "\n"


def _without_empty_sections(parts: list[str]) -> list[str]:
    filled = [part for part in parts if part]
    return [
        part
        for part, following in zip(filled, [*filled[1:], "#"], strict=True)
        if not (part.startswith("## ") and following.startswith("#"))
    ]


def _code(lines: list[str]) -> str:
    return "\n".join([f"`{lines[0]}`", "", "```python", *lines[1:], "```"]) if lines else ""


_COLUMNS = ("name", "shape", "dtype", "min", "max", "zeros", "negatives", "nan", "inf", "neg_inf")


def _operand_table(operands: list[dict[str, Any]]) -> str:
    if not operands:
        return ""
    rows = [" | ".join(_cell(operand.get(column)) for column in _COLUMNS) for operand in operands]
    return "\n".join([f"| {' | '.join(_COLUMNS)} |", f"|{'---|' * len(_COLUMNS)}", *(f"| {row} |" for row in rows)])


def _remedy_table(incident: Incident) -> str:
    if not incident.remedies:
        return ""
    rows = [
        f"| {r.name} | {'yes' if r.finite else 'no'} | {_cell(r.loss)} | {_cell(r.detail)} |" for r in incident.remedies
    ]
    return "\n".join(["| tried | finite | loss | what |", "|---|---|---|---|", *rows])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value).replace("|", "\\|")
