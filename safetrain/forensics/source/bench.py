"""Runs the bad step and a healthy one as if the source had been changed. A change is proven if the bad one stays
finite and the healthy one is unchanged."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ...tensors.nest import map_tensors, tensors_in
from ..replay import Replayer, Result
from ..samples_of import batch_size, select
from ..update import update_is_finite
from ..values import kind_of
from .patching import as_if_changed, functions_of
from .rewriting import Candidate

IDENTICAL, CLOSE = "identical", "close"
SAME_LOSS, SAME_DIRECTION = 1e-3, 0.999


@dataclass
class Change:
    """A change of one line that was proven."""

    what: str
    file: str
    line: int
    """Of the first line that is different, without imports."""
    text: str
    """What stands there with the change."""
    diff: str
    loss: float | None
    """Of the bad step with the change."""
    on_healthy: str
    """What the change does to a healthy step: `identical` or `close` loss and gradients; empty if none could be made to compare."""
    source: str
    """Of the whole file with the change."""
    num_healthy: int = 0
    """Steps that it was compared on."""


class Bench:
    """The bad step, and a healthy one made from it to compare with."""

    def __init__(
        self,
        replayer: Replayer,
        samples: Sequence[int],
        is_update: bool = False,
        watches_buffers: bool = False,
        others: Sequence[Any] = (),
        names: Mapping[str, object] | None = None,
    ) -> None:
        """`samples` are to blame. `names` may be used in changed lines besides torch. `others` are further batches; those on which the step is finite must stay as they are too."""
        self._replayer = replayer
        self._samples = list(samples)
        self._is_update = is_update
        self._names = {"torch": torch, **(names or {})}
        if watches_buffers:
            named = dict(replayer.model.named_buffers())
            replayer.watched_buffers = {name for name, buffer in named.items() if not kind_of(buffer)}
        self._functions: dict[str, list[FunctionType]] = {}
        self._healthy = [(window, found) for window in self._windows(others) if (found := self._measured(window))]

    def tried(self, file: str, source: str, candidate: Candidate) -> Change | None:
        def change() -> AbstractContextManager[int]:
            if file not in self._functions:
                self._functions[file] = functions_of(file)
            return as_if_changed(self._functions[file], file, source, candidate.source, candidate.line, self._names)

        try:
            with change() as count:
                if not count:
                    return None
                result = self._replayer.plain()
                if not self.is_good(result):
                    return None
                if candidate.replaces_call and result.loss_value == 0:
                    return None  # the whole loss was thrown away with the bad value
                on_healthy = self._compared()
        except Exception:  # a change that cannot be run is none
            return None
        if on_healthy is None:
            return None
        before, after = source.splitlines(True), candidate.source.splitlines(True)
        line = next((n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), 0)
        changed = _with_imports(candidate)
        name = Path(file).name
        diff = "".join(difflib.unified_diff(before, changed.splitlines(True), f"a/{name}", f"b/{name}"))
        loss = result.loss_value
        text = after[line].strip()
        return Change(candidate.what, file, line + 1, text, diff, loss, on_healthy, changed, len(self._healthy))

    def is_good(self, result: Result) -> bool:
        """Everything finite, also after the update where that went wrong, and a loss like that of a healthy step."""
        if not result.finite or not self._is_sensible(result):
            return False
        return not self._is_update or update_is_finite(self._replayer)

    def _is_sensible(self, result: Result) -> bool:
        loss = result.loss_value
        if loss is None or not self._healthy:
            return loss is not None
        largest = max(map(_largest, tensors_in(self._replayer.step.window)), default=0.0)
        return abs(loss) <= max(1e3 * (abs(self._healthy[0][1][0]) + 1), 10 * (1 + largest**2))

    def _compared(self) -> str | None:
        """`identical`, `close`, nothing if there is no healthy step; None if the change alters a healthy step."""
        worst = ""
        for window, (loss, gradients) in self._healthy:
            now = self._measured(window)
            if now is None:
                return None
            new_loss, new_gradients = now
            if loss == new_loss and all(torch.equal(a, b) for a, b in zip(gradients, new_gradients, strict=True)):
                worst = worst or IDENTICAL
                continue
            a, b = (torch.cat([g.reshape(-1).double() for g in each]) for each in (gradients, new_gradients))
            norms = a.norm() * b.norm()
            is_same_direction = float(norms) == 0 or float(a @ b / norms) > SAME_DIRECTION
            if abs(loss - new_loss) > SAME_LOSS * max(abs(loss), 1e-3) or not is_same_direction:
                return None
            worst = CLOSE
        return worst

    def _measured(self, window: Sequence[Any]) -> tuple[float, list[Tensor]] | None:
        try:
            result = self._replayer.plain(window=window)
        except Exception:  # a batch that cannot be taken apart or changed
            return None
        if not result.finite or result.loss_value is None:
            return None
        parameters = self._replayer.parameters.values()
        return result.loss_value, [torch.zeros(1) if p.grad is None else p.grad.detach().clone() for p in parameters]

    def _windows(self, others: Sequence[Any]) -> Iterator[list[Any]]:
        """The window without the samples that are to blame, or with small noise on its numbers: singular points are single points."""
        yield from self._made()
        for batch in others:
            yield [batch, *self._replayer.step.window[1:]]

    def _made(self) -> Iterator[list[Any]]:
        window = list(self._replayer.step.window)
        attempts: list[Callable[[], Any]] = []
        if self._samples and len(window) == 1:
            size = batch_size(window[0])
            keep = [i for i in range(size) if i not in self._samples]
            attempts = [lambda: select(window[0], keep, size)]
        attempts += [partial(map_tensors, window[0], _noisy(scale)) for scale in (1e-3, 0.1, 1.0)]
        for attempt in attempts:
            try:
                changed = [attempt(), *window[1:]]
                is_finite = self._replayer.plain(window=changed).finite
            except Exception:  # a batch that cannot be taken apart or changed
                continue
            if is_finite:
                yield changed
                return


def _largest(tensor: Tensor) -> float:
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    return float(torch.nan_to_num(tensor.detach(), posinf=0.0, neginf=0.0).abs().max())


def _noisy(scale: float) -> Callable[[Any], Any]:
    generator = torch.Generator().manual_seed(0)

    def change(item: Any) -> Any:
        if not isinstance(item, Tensor) or not item.is_floating_point():
            return item
        noise = torch.rand(item.shape, generator=generator).to(item)
        return torch.nan_to_num(item, posinf=1.0, neginf=-1.0) + scale * (noise + 0.1)

    return change


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
    last = 0
    for node in ast.parse(source).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and last == 0
        if not is_docstring and not isinstance(node, (ast.Import, ast.ImportFrom)):
            break
        last = node.end_lineno or last
    return last
