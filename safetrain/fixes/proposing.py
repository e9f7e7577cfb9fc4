"""Tries changes of the source on a replay of the bad step, and ranks those that keep it finite and change nothing else."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..core import progress
from ..core.causes import CAUSES
from ..core.incident import Incident
from ..forensics.ownership import is_own
from ..forensics.replay import Replayer, Result
from ..forensics.samples_of import batch_size, select
from ..forensics.step import Step
from ..forensics.update import update_is_finite
from ..forensics.values import kind_of
from ..tensors.nest import map_tensors
from .patching import as_if_changed, functions_of
from .rewriting import Candidate, candidates

IDENTICAL, CLOSE = "identical", "close"
SAME_LOSS, SAME_DIRECTION = 1e-3, 0.999
MAX_LINES = 4
ENOUGH = 3
"""Proven changes after which no more are looked for."""


@dataclass
class Proposal:
    """A change of one line that was proven, or a change of config or data, for which there is no line."""

    kind: str
    """`source`, `config` or `data`."""
    what: str
    file: str = ""
    diff: str = ""
    loss: float | None = None
    """Of the bad step with the change."""
    on_healthy: str = ""
    """What the change does to a healthy step: `identical` or `close` loss and gradients; empty if none could be made to compare."""
    changed: str = field(default="", repr=False)
    """The source of the whole file with the change."""

    def apply(self) -> None:
        Path(self.file).write_text(self.changed, encoding="utf-8")


def propose(step: Step, incident: Incident, max_seconds: float = 60.0) -> list[Proposal]:
    """Changes that keep the step finite, the best first; where the source is not what is wrong, of config or data."""
    found: list[Proposal] = []
    deadline = time.monotonic() + max_seconds
    if incident.cause.label not in _NOT_IN_SOURCE:
        with torch.inference_mode(False), torch.enable_grad(), Replayer(step) as replayer:
            found = _of_source(replayer, incident, deadline)
    return found or _of_settings(incident)


_NOT_IN_SOURCE = {"divergence", "corrupt_parameter", "bad_input_data"}


def _of_source(replayer: Replayer, incident: Incident, deadline: float) -> list[Proposal]:
    bench = _Bench(replayer, incident)
    found: list[Proposal] = []
    if bench.is_good(replayer.plain()):
        return []  # what is wrong does not show on a replay, so nothing can be proven
    for file, line, operation in _places(incident):
        try:
            source = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        for number, candidate in enumerate(candidates(source, line, operation, incident.cause.label)):
            progress.note("changes of the source tried", number)
            if time.monotonic() > deadline or len(found) >= ENOUGH:
                break
            proposal = bench.tried(file, source, candidate)
            if proposal is not None:
                found.append(proposal)
                if proposal.on_healthy == IDENTICAL:
                    break
    return sorted(found, key=lambda proposal: (proposal.on_healthy != IDENTICAL, proposal.on_healthy != CLOSE))


def _places(incident: Incident) -> Iterator[tuple[str, int, str]]:
    """Lines of the user's own that may be changed: of the operation, of the call into the library, and where the value was made."""
    origin = incident.origin
    seen: set[tuple[str, int]] = set()
    lines = [(origin.file, origin.line, origin.name or "")]
    if origin.called_from is not None:
        lines.append((origin.called_from.file, origin.called_from.line, ""))
    lines += [(link.file, link.line, link.name.rpartition(" of ")[2]) for link in incident.lineage]
    for file, line, operation in lines:
        if (
            file is not None
            and line is not None
            and is_own(file)
            and (file, line) not in seen
            and len(seen) < MAX_LINES
        ):
            seen.add((file, line))
            yield file, line, operation


class _Bench:
    """The bad step, and a healthy one made from it to compare with."""

    def __init__(self, replayer: Replayer, incident: Incident) -> None:
        self._replayer = replayer
        self._incident = incident
        self._is_update = incident.origin.phase == "optimizer"
        if incident.trigger.signal == "buffers":
            named = dict(replayer.model.named_buffers())
            replayer.watched_buffers = {name for name, buffer in named.items() if not kind_of(buffer)}
        self._functions: dict[str, list[FunctionType]] = {}
        self._healthy = self._healthy_window()
        self._reference: tuple[float, list[Tensor]] | None = None
        if self._healthy is not None:
            self._reference = self._measured(replayer.plain(window=self._healthy))

    def tried(self, file: str, source: str, candidate: Candidate) -> Proposal | None:
        def change() -> AbstractContextManager[int]:
            if file not in self._functions:
                self._functions[file] = functions_of(file)
            return as_if_changed(self._functions[file], file, source, candidate.source, candidate.line, _known_names())

        try:
            with change() as count:
                if not count:
                    return None
                result = self._replayer.plain()
                if not self.is_good(result):
                    return None
                if (
                    candidate.replaces_call and result.loss_value == 0
                ):  # the whole loss was thrown away with the bad value
                    return None
                on_healthy = self._compared(self._replayer)
        except Exception:  # a change that cannot be run is none
            return None
        if on_healthy is None:
            return None
        changed = _with_imports(candidate)
        name = Path(file).name
        diff = "".join(
            difflib.unified_diff(source.splitlines(True), changed.splitlines(True), f"a/{name}", f"b/{name}")
        )
        return Proposal("source", candidate.what, file, diff, result.loss_value, on_healthy, changed)

    def is_good(self, result: Result) -> bool:
        """Everything finite, also after the update where that went wrong, and a loss like that of a healthy step."""
        if not result.finite or not self._is_sensible(result):
            return False
        return not self._is_update or update_is_finite(self._replayer)

    def _is_sensible(self, result: Result) -> bool:
        loss = result.loss_value
        if loss is None or self._reference is None:
            return loss is not None
        return abs(loss) <= 1e3 * (abs(self._reference[0]) + 1)

    def _compared(self, replayer: Replayer) -> str | None:
        """`identical`, `close`, nothing if there is no healthy step; None if the change alters a healthy step."""
        if self._healthy is None or self._reference is None:
            return ""
        now = self._measured(replayer.plain(window=self._healthy))
        if now is None:
            return None
        (loss, gradients), (new_loss, new_gradients) = self._reference, now
        if loss == new_loss and all(torch.equal(a, b) for a, b in zip(gradients, new_gradients, strict=True)):
            return IDENTICAL
        a, b = (torch.cat([g.reshape(-1).double() for g in each]) for each in (gradients, new_gradients))
        norms = a.norm() * b.norm()
        is_same_direction = float(norms) == 0 or float(a @ b / norms) > SAME_DIRECTION
        is_close = abs(loss - new_loss) <= SAME_LOSS * max(abs(loss), 1e-3)
        return CLOSE if is_close and is_same_direction else None

    def _measured(self, result: Result) -> tuple[float, list[Tensor]] | None:
        if not result.finite or result.loss_value is None:
            return None
        parameters = self._replayer.parameters.values()
        return result.loss_value, [torch.zeros(1) if p.grad is None else p.grad.detach().clone() for p in parameters]

    def _healthy_window(self) -> list[Any] | None:
        """The window without the samples that are to blame, or with small noise on its numbers: singular points are single points."""
        window = list(self._replayer.step.window)
        if self._incident.samples and len(window) == 1:
            size = batch_size(window[0])
            keep = [i for i in range(size) if i not in self._incident.samples]
            attempts: list[Callable[[], Any]] = [lambda: select(window[0], keep, size)]
        else:
            attempts = []
        attempts += [partial(map_tensors, window[0], _noisy(scale)) for scale in (1e-3, 0.1, 1.0)]
        for attempt in attempts:
            try:
                changed = [attempt(), *window[1:]]
                if self._replayer.plain(window=changed).finite:
                    return changed
            except Exception:  # a batch that cannot be taken apart or changed
                continue
        return None


def _noisy(scale: float) -> Callable[[Any], Any]:
    generator = torch.Generator().manual_seed(0)

    def change(item: Any) -> Any:
        if not isinstance(item, Tensor) or not item.is_floating_point():
            return item
        noise = torch.rand(item.shape, generator=generator).to(item)
        return torch.nan_to_num(item, posinf=1.0, neginf=-1.0) + scale * (noise + 0.1)

    return change


def _known_names() -> dict[str, object]:
    from .. import safe

    return {"safe": safe, "torch": torch}


def _with_imports(candidate: Candidate) -> str:
    """Below the docstring, `from __future__` and, if there are any, after the first imports."""
    source = candidate.source
    for text in candidate.imports:
        lines = source.splitlines(keepends=True)
        end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
        lines.insert(_line_for_import(source), text + end)
        source = "".join(lines)
    return source


def _line_for_import(source: str) -> int:
    import ast

    last = 0
    for node in ast.parse(source).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and last == 0
        if not is_docstring and not isinstance(node, (ast.Import, ast.ImportFrom)):
            break
        last = node.end_lineno or last
    return last


def _of_settings(incident: Incident) -> list[Proposal]:
    """What else to change: with what a remedy on the replay has shown, if one has."""
    label = incident.cause.label
    worked = [remedy for remedy in incident.remedies if remedy.finite]
    found = []
    if label in ("fp16_overflow", "fp16_underflow"):
        module = incident.origin.module or ""
        island = f"guards.islands.modules=[{module}]" if module and not module.startswith("<") else "precision=bf16"
        found.append(Proposal("config", f"{island}, or precision=bf16: {CAUSES[label].advice}"))
    elif label in ("divergence", "optimizer_numerics"):
        what = "a smaller optimizer.lr, or guards.clip.max_norm=1.0"
        eps = next((r.detail for r in worked if r.name == "optimizer_eps"), "")
        found.append(Proposal("config", eps.removeprefix("with ") or what))
    if incident.samples and any(remedy.name == "drop_samples" for remedy in worked):
        found.append(
            Proposal("data", f"leave samples {incident.samples} of this batch out of the data, or repair them")
        )
    elif label == "bad_input_data":
        found.append(Proposal("data", CAUSES[label].advice))
    if not found:
        found.append(Proposal("config", incident.fix or CAUSES[label].advice))
    return [replace(each, loss=next((r.loss for r in worked), None)) for each in found]
