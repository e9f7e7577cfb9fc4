"""Renders an incident for people: a compact block during a run, a longer one to study, and `report.md`."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.files import relative_to, write_text
from ..core.incident import describe_operand
from ..core.numbers import exact, listed
from ..core.text import printable, prints_to_terminal, source_of_file

if TYPE_CHECKING:
    from ..core.incident import Incident

LABEL = 14
"""Columns that the label of a paragraph takes, after an indent of two."""
NUMBER = 8
"""Columns that the mark and the number of a line of source take."""
NUM_SAMPLES = 12
"""Sample indices that are listed; the rest is counted."""


_INSTALLED = re.compile(r"^.*[\\/](?:site|dist)-packages[\\/]")
_LONG_LIST = re.compile(rf"\[\d+(?:, \d+){{{NUM_SAMPLES},}}\]")


def _shortened(found: re.Match[str]) -> str:
    numbers = found[0][1:-1].split(", ")
    return f"[{', '.join(numbers[:3])}, … {numbers[-1]}: {len(numbers)} in all]"


WIDTH = 100
"""Columns without a terminal."""


def width() -> int:
    """Columns of the terminal, within what reads well."""
    return min(max(shutil.get_terminal_size((WIDTH, 24)).columns, 50), 120)


def compact(incident: Incident, command: str = "", is_repeated: bool = False) -> list[str]:
    """The five questions in about ten lines: one line of source around the blamed one, the inputs in one row.

    `command` is what replays the step. One that `is_repeated` was explained before: only the operation and the cause are shown.
    """
    inputs, more = _inputs(incident) + _plain_divisor(incident), 0 if width() >= 80 else 2
    if is_repeated:
        why = paragraph("WHY", f"{incident.cause.label}, as explained above")
        return [*_first_bad_operation(incident, 0), *why, *_samples(incident), *replay_rows(incident, command)]
    return [
        *_first_bad_operation(incident, context=1),
        *paragraph("WHY", _why(incident), max_lines=2 + more),
        *paragraph("INPUTS", _whose_inputs(incident) + inputs if inputs else "", max_lines=2 + more),
        *came_from(incident, max_lines=3 + more),
        *_samples(incident),
        *paragraph("FIX", _fix(incident), max_lines=4 + more),
        *replay_rows(incident, command),
    ]


def replay_rows(incident: Incident, command: str) -> list[str]:
    """How the replay went, and the command that replays the step, which is never wrapped: it is there to be copied."""
    found = row("REPLAY", f"{replayed(incident)}: {command}" if command else replayed(incident))
    if not command or not prints_to_terminal() or len(found) <= width():
        return [found]
    return [row("REPLAY", replayed(incident)), f"  {printable(command)}"]


def answers(incident: Incident) -> list[str]:
    """The five questions at length, one labelled paragraph each, with the remedies that were tried."""
    lines = [*_first_bad_operation(incident, context=3), *paragraph("WHY", _why(incident))]
    for index, operand in enumerate(incident.origin.inputs[:6]):
        whose = _whose_inputs(incident) if index == 0 else ""
        lines += paragraph("INPUTS" if index == 0 else "", whose + describe_operand(operand))
    lines += [*came_from(incident, max_lines=8), *_samples(incident), *paragraph("FIX", _fix(incident))]
    for index, remedy in enumerate(incident.remedies):
        loss = f", loss {exact(remedy.loss)}" if remedy.finite and remedy.loss is not None else ""
        outcome = f"finite{loss}" if remedy.finite else "still bad"
        lines += paragraph("TRIED" if index == 0 else "", f"{remedy.detail or remedy.name}: {outcome}")
    return [*lines, *paragraph("REPLAY", replayed(incident))]


def row(label: str, text: str) -> str:
    """A labelled line that is never wrapped, for commands."""
    return f"  {label:{LABEL}}{printable(text)}"


def paragraph(label: str, text: str, max_lines: int | None = None) -> list[str]:
    """A labelled paragraph, wrapped at words; longer than `max_lines` it ends in an ellipsis."""
    lines = textwrap.wrap(
        printable(_LONG_LIST.sub(_shortened, text)),
        width() - LABEL - 2,
        max_lines=max_lines,
        placeholder=" …",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [f"  {label if index == 0 else '':{LABEL}}{line}".rstrip() for index, line in enumerate(lines)]


def _first_bad_operation(incident: Incident, context: int) -> list[str]:
    place, *source = source_lines(incident, context) or [""]
    at = "first used at" if incident.origin.phase in ("data", "params") else "at"
    within = f" {incident.origin.library}," if incident.origin.library else ""
    lines = paragraph("FIRST BAD OP", headline(incident) + (f", {at}{within} {place}" if place else ""))
    lines += _indented(source)
    if (caller := incident.origin.called_from) is not None:
        place, *source = _listed_source(caller.file, caller.line, caller.code, context)
        lines += [*paragraph("CALLED FROM", f"{place}, in {caller.function}"), *_indented(source)]
    return lines


def _indented(source: Sequence[str]) -> list[str]:
    indent = " " * (LABEL + 2) if width() >= 80 else "  "
    return [f"{indent}{part}" for line in source for part in _fitted(line, width() - len(indent))]


def _fitted(line: str, columns: int) -> list[str]:
    """A line of source on a narrow terminal: the blamed one is broken and never cut, those around it are cut."""
    if len(line) <= columns or not prints_to_terminal():
        return [line]
    if not line.startswith(">"):
        return [f"{line[: columns - 1]}…"]
    code = line[NUMBER:]
    first = textwrap.wrap(code, columns - NUMBER, break_on_hyphens=False, drop_whitespace=False) or [code]
    return [f"{line[:NUMBER] if index == 0 else ' ' * NUMBER}{part}" for index, part in enumerate(first)]


def headline(incident: Incident) -> str:
    origin = incident.origin
    if origin.phase == "unknown":
        return "not found"
    where = {"<loss>": "in the loss function", "<data>": "in the batch", "": "in the root module"}.get(
        origin.module or "", f"in {origin.module}"
    )
    kind = f" ({origin.module_type})" if origin.module_type else ""
    if origin.phase == "data":
        return "none: the batch itself is bad"
    if origin.phase == "params":
        return f"none: a parameter or buffer {where}{kind} was bad before the step"
    op = f"{origin.name} ({origin.op})" if origin.op and origin.op != origin.name else f"{origin.name or origin.op}"
    if origin.phase == "backward":
        op = f"the derivative of {origin.name} (computed by {origin.op})"
    return f"{op}, {origin.phase}, {where}{kind}"


def source_lines(incident: Incident, context: int = 3) -> list[str]:
    """File and line, then the blamed line in its context, marked; only that line when the file has changed or is gone."""
    origin = incident.origin
    if origin.file is None or origin.line is None:
        return []
    return _listed_source(origin.file, origin.line, origin.code or "", context)


def caller_lines(incident: Incident, context: int = 3) -> list[str]:
    """The same for the line of the user's own code that called the library."""
    caller = incident.origin.called_from
    return [] if caller is None else _listed_source(caller.file, caller.line, caller.code, context)


def _listed_source(file: str, line: int, code: str, context: int) -> list[str]:
    source = source_of_file(file)
    if len(source) < line or source[line - 1].strip() != code:
        shown = [(line, code)]
    else:
        first = max(1, line - context)
        last = min(len(source), line + context)
        if source[line - 1][0].isspace():  # what is not indented any more is another function
            last = next((n for n in range(line, last) if not source[n][0].isspace()), last)
        text = textwrap.dedent("".join(source[first - 1 : last])).splitlines()
        shown = list(enumerate(text, first))
        while not shown[-1][1].strip():
            shown.pop()
        while not shown[0][1].strip():
            shown.pop(0)
    return [
        f"{printable(as_typed(file))}:{line}",
        *(f"{'>' if n == line else ' '} {n:4}  {printable(text)}".rstrip() for n, text in shown),
    ]


def as_typed(file: str) -> str:
    """Relative when it lies below the current directory; an installed file without what leads to its package."""
    file = _INSTALLED.sub("", file)
    below = relative_to(file) if os.path.isabs(file) else file
    return file if below.startswith("..") else below


def _inputs(incident: Incident) -> str:
    return "; ".join(describe_operand(operand) for operand in incident.origin.inputs[:4])


def _whose_inputs(incident: Incident) -> str:
    """In the backward pass they are not the operands of the line that is shown."""
    return "of the derivative: " if incident.origin.phase == "backward" else ""


def _plain_divisor(incident: Incident) -> str:
    """A divisor that is no tensor is not among the operands, and must be what is zero."""
    origin = incident.origin
    is_plain = origin.name == "div" and origin.phase == "forward" and len(origin.inputs) == 1
    return "; other: the number 0" if is_plain and incident.cause.label == "division_by_zero" else ""


def _why(incident: Incident) -> str:
    explanation, inputs = incident.cause.explanation, _inputs(incident)
    if inputs:  # they are listed below
        explanation = explanation.replace(inputs, "the inputs below")
    return f"{incident.cause.label}: {explanation}"


def _samples(incident: Incident) -> list[str]:
    named = f"{listed(incident.samples, NUM_SAMPLES)} of the batch, counted from 0"
    return paragraph("SAMPLES", named) if incident.samples else []


def _fix(incident: Incident) -> str:
    if not incident.fix or "Verified:" in incident.fix or any(remedy.finite for remedy in incident.remedies):
        return incident.fix
    if incident.remedies:
        return f"{incident.fix} (not verified: nothing that was tried kept the step finite)"
    return f"{incident.fix} (not verified: no remedy was tried on this step)"


def came_from(incident: Incident, max_lines: int) -> list[str]:
    """From the bad operand back to where its value came from. The end says most, so what is left out is in the middle."""
    links = [link.text for link in incident.lineage]
    for num_left_out in range(max(len(links) - 1, 1)):
        middle = len(links) - 1 - num_left_out
        shown = links if num_left_out == 0 else [*links[:middle], "…", links[-1]]
        lines = paragraph("CAME FROM", " ← ".join(shown))
        if len(lines) <= max_lines:
            return lines
    return paragraph("CAME FROM", " ← ".join([*links[:1], "…", *links[-1:]]), max_lines=max_lines)


def replayed(incident: Incident) -> str:
    reproduced = {
        True: "reproduced",
        False: "not reproduced: a transient fault",
        None: "not compared with the original",
    }
    deterministic = {True: ", twice the same", False: ", but not twice the same", None: ""}
    replay = incident.replay
    if replay.reproduced and replay.bitwise is False:
        return "reproduced, but for the last bits of the loss"
    return reproduced[replay.reproduced] + deterministic[replay.deterministic]


# ---- report.md ------------------------------------------------------------------------------------------------------


def write_report(incident: Incident, directory: Path) -> Path:
    path = directory / "report.md"
    write_text(path, markdown(incident))
    return path


def markdown(incident: Incident) -> str:
    """`report.md`: readable as plain text and on GitHub. What comes from user code cannot turn into markup."""
    origin, cause, trigger = incident.origin, incident.cause, incident.trigger
    signal = f" ({_prose(trigger.signal)} = {_prose(exact(trigger.value))})" if trigger.signal else ""
    parts = [
        f"# Step {incident.step}: {_title(incident)}",
        f"Caught by {_code(trigger.guard)}{signal} at {incident.time}. "
        f"Decision: **{incident.decision.action}**, because",
        "\n".join(f"- {_prose(reason)}" for reason in incident.decision.reasons),
        "## First bad operation",
        f"{_prose(headline(incident))}." if incident.was_investigated else "",
        _listing(source_lines(incident, context=4)),
        "## Called from",
        _called_from(incident),
        "## Root cause",
        f"{_code(cause.label)}: {_prose(cause.explanation)}.",
        "## Inputs of the operation",
        _operand_table([*origin.inputs, *origin.outputs]),
        f"Samples of the batch: {listed(incident.samples, NUM_SAMPLES)}." if incident.samples else "",
        "## Where the value came from",
        _lineage(incident),
        "## Way of the bad value",
        " → ".join(_code(step) for step in incident.propagation),
        "## Fix",
        _prose(_fix(incident)),
        _remedy_table(incident),
        "## Verification",
        f"Replay: {replayed(incident)}.",
        f"Again: {_code(f'safetrain replay {incident.path}')}, from the directory of the run." if incident.path else "",
    ]
    return "\n\n".join(part for part in _without_empty_sections(parts)) + "\n"


def _called_from(incident: Incident) -> str:
    caller = incident.origin.called_from
    if caller is None:
        return ""
    library = incident.origin.library or "a library"
    text = f"The operation is inside {_prose(library)}; your own code called it in {_code(caller.function)}:"
    return f"{text}\n\n{_listing(caller_lines(incident, context=2))}"


def _lineage(incident: Incident) -> str:
    lines = []
    for number, link in enumerate(incident.lineage, 1):
        where = (
            f", {_code(link.code)} ({_code(f'{as_typed(link.file)}:{link.line}')})" if link.file and link.code else ""
        )
        lines.append(f"{number}. {_prose(link.text)}{where}")
    return "\n".join(lines)


def _title(incident: Incident) -> str:
    if not incident.was_investigated:
        return f"caught by {_prose(incident.trigger.guard)}"
    return f"{_prose(incident.origin.name or 'unknown operation')}, {incident.cause.label}"


def _without_empty_sections(parts: list[str]) -> list[str]:
    filled = [part for part in parts if part]
    return [
        part
        for part, following in zip(filled, [*filled[1:], "#"], strict=True)
        if not (part.startswith("## ") and following.startswith("#"))
    ]


def _prose(text: str) -> str:
    """Text that markdown shows as it is. Only what could become markup is escaped, so that it still reads well as text."""
    text = printable(" ".join(str(text).split()))
    text = re.sub(r"([\\`*<>|~])", r"\\\1", text)
    text = re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)  # inside a word it is harmless
    return re.sub(r"\](?=[(\[:])", r"\\]", text)


def _code(text: str) -> str:
    text = printable(" ".join(str(text).split()))
    fence = "`" * (_longest_run(text) + 1)
    padding = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{padding}{text}{padding}{fence}" if text else ""


def _listing(lines: list[str]) -> str:
    if not lines:
        return ""
    fence = "`" * max(3, _longest_run("\n".join(lines)) + 1)
    return "\n".join([_code(lines[0]), "", f"{fence}python", *lines[1:], fence])


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


_COLUMNS = ("name", "shape", "dtype", "min", "max", "zeros", "negatives", "nan", "inf", "neg_inf")


def _operand_table(operands: list[dict[str, Any]]) -> str:
    return _table(_COLUMNS, [[operand.get(column) for column in _COLUMNS] for operand in operands])


def _remedy_table(incident: Incident) -> str:
    tried = [
        [remedy.name, "yes" if remedy.finite else "no", remedy.loss, remedy.detail] for remedy in incident.remedies
    ]
    return _table(("tried", "finite", "loss", "what"), tried)


def _table(columns: Sequence[str], rows: list[list[Any]]) -> str:
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*head, *(f"| {' | '.join(map(_cell, row))} |" for row in rows)]) if rows else ""


def _cell(value: Any) -> str:
    return "" if value is None else _prose(exact(value))
