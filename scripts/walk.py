"""The walk of one training step, recorded by a profiler: which functions of safetrain are called, in which order, by whom.

A step is one turn of the loop: from taking the batch to what is done after the step. Comprehensions and code that is generated
(the constructors of dataclasses) are not counted; a generator counts once, however often it is resumed.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from safetrain import SafeTrainer

PACKAGE = Path(__file__).resolve().parents[1] / "safetrain"
WARM_UP = 60
"""Steps before the recorded ones: by then every guard judges by its statistics."""
RECORDED = 9
"""Healthy steps that are recorded; the one shown is as long as most of them, so what comes once in n steps is not in it."""
BAD_DEPTH = 3
WIDTH = 120


@dataclass
class Call:
    code: CodeType
    children: list[Call] = field(default_factory=list)

    def all(self) -> Iterator[Call]:
        yield self
        for child in self.children:
            yield from child.all()

    def same_as(self, other: Call) -> bool:
        return self.code is other.code and _same(self.children, other.children)


def _same(left: list[Call], right: list[Call]) -> bool:
    return len(left) == len(right) and all(a.same_as(b) for a, b in zip(left, right, strict=True))


@cache
def is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(f"{PACKAGE}/")


def is_counted(code: CodeType) -> bool:
    return is_ours(code) and (code.co_name[0] != "<" or code.co_name == "<lambda>")


# ---- recording -----------------------------------------------------------------------------------------------------


class Recorder:
    """The data notifies it when a batch is asked for. The loop is the innermost function that is running both times."""

    def __init__(self, num_before: int, num_recorded: int) -> None:
        self.num_before, self.num_recorded = num_before, num_recorded
        self.calls: list[Call] = []
        """What the loop itself has called, since the recording began."""
        self._num_batches = 0
        self._starts: list[int] = []
        """Index in `calls` of what took each batch."""
        self._callers: list[FrameType] = []
        self._loop: FrameType | None = None
        self._stack: list[tuple[FrameType, list[Call]]] = []
        """Running functions, each with the list that what it calls is added to."""
        self._generators: set[FrameType] = set()

    def batch_asked_for(self) -> None:
        self._num_batches += 1
        if self._num_batches == self.num_before - 1:
            self._callers = list(_callers())
        elif self._num_batches == self.num_before:
            self._loop = next(frame for frame in _callers() if frame in self._callers)
            sys.setprofile(self._profile)
        elif self._num_batches == self.num_before + self.num_recorded + 2:
            sys.setprofile(None)
        elif self._loop is not None:
            inside = len(self._stack) > 0 and self._stack[-1][1] is not self.calls
            self._starts.append(len(self.calls) - inside)

    @property
    def steps(self) -> list[list[Call]]:
        return [self.calls[a:b] for a, b in zip(self._starts, self._starts[1:], strict=False)]

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            if self._stack:
                siblings = self._stack[-1][1]
            elif frame.f_back is self._loop:
                siblings = self.calls
            else:
                return
            if is_counted(frame.f_code) and frame not in self._generators:
                call = Call(frame.f_code)
                siblings.append(call)
                siblings = call.children
                if frame.f_code.co_flags & inspect.CO_GENERATOR:
                    self._generators.add(frame)
            self._stack.append((frame, siblings))
        elif event == "return" and self._stack:
            self._stack.pop()


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_ours(frame.f_code) and not frame.f_code.co_flags & inspect.CO_GENERATOR:
            yield frame
        frame = frame.f_back


class Batches:
    """Regression with three inputs; `bad` is the batch whose third sample holds a NaN."""

    def __init__(self, recorder: Recorder, count: int, bad: int | None) -> None:
        self.recorder = recorder
        self.inputs = torch.randn(count, 8, 3)
        self.targets = self.inputs.sum(2, keepdim=True)
        if bad is not None:
            self.inputs[bad, 2] = float("nan")

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in zip(self.inputs, self.targets, strict=True):
            self.recorder.batch_asked_for()
            yield batch


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


def record(bad: bool = False) -> list[Call]:
    """What the loop calls in one step."""
    profiler = sys.getprofile()
    torch.manual_seed(0)
    recorder = Recorder(WARM_UP, RECORDED)
    batches = Batches(recorder, WARM_UP + RECORDED + 4, WARM_UP + RECORDED // 2 if bad else None)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"loop": {"device": "cpu"}, "logging": {"console": "off"}}
    with tempfile.TemporaryDirectory() as directory:
        trainer = SafeTrainer(
            model,
            loss_fn=loss_fn,
            optimizer=optimizer,
            train_data=batches,
            config=config,
            run_dir=f"{directory}/run",
        )
        try:
            result = trainer.fit()
        finally:
            sys.setprofile(profiler)
    assert len(result.incidents) == int(bad), result.summary()
    steps = recorder.steps
    if bad:
        return max(steps, key=num_calls)
    usual, _ = Counter(map(num_calls, steps)).most_common(1)[0]
    return next(step for step in steps if num_calls(step) == usual)


# ---- printing ------------------------------------------------------------------------------------------------------


def num_calls(calls: list[Call]) -> int:
    return sum(1 for call in calls for _ in call.all())


def num_files(calls: list[Call]) -> int:
    return len({each.code.co_filename for call in calls for each in call.all()})


def rendered(calls: list[Call], max_depth: int | None = None, counts: bool = True) -> list[str]:
    """One line for each call: its name, and the first sentence of its docstring."""
    lines = list(_lines(calls, 0, max_depth, counts))
    column = min(max((len(name) for name, _ in lines), default=0), WIDTH // 2) + 2
    width = WIDTH - column
    texts = [(name, text if len(text) <= width else text[: width - 1].rsplit(" ", 1)[0] + " …") for name, text in lines]
    step = [max(calls, key=lambda call: num_calls([call]))]  # the rest gets the batch, saves and evaluates
    of_step = f"{num_calls(step)} in {num_files(step)} of them in {name_of(step[0].code)}"
    total = ["", f"{num_calls(calls)} calls in {num_files(calls)} files; {of_step}"]
    return [*(f"{name:<{column - 2}}  {text}".rstrip() for name, text in texts), *(total if counts else [])]


def _lines(calls: list[Call], depth: int, max_depth: int | None, counts: bool) -> Iterator[tuple[str, str]]:
    index = 0
    while index < len(calls):
        call, times = calls[index], 1
        while index + times < len(calls) and calls[index + times].same_as(call):
            times += 1
        index += times
        is_cut = max_depth is not None and depth + 1 >= max_depth
        name = "  " * depth + name_of(call.code) + (f" ×{times}" if times > 1 else "")
        hidden = num_calls(call.children) if is_cut and counts else 0
        yield name + (f" (+{hidden})" if hidden else ""), purpose_of(call.code)
        if not is_cut:
            yield from _lines(call.children, depth + 1, max_depth, counts)


def name_of(code: CodeType) -> str:
    module = Path(code.co_filename).relative_to(PACKAGE).with_suffix("").as_posix()
    return f"{module}.{_definition(code)[0]}"


def purpose_of(code: CodeType) -> str:
    return _definition(code)[1]


def _definition(code: CodeType) -> tuple[str, str]:
    return _definitions(code.co_filename).get(code.co_firstlineno, (code.co_name, ""))


@cache
def _definitions(filename: str) -> dict[int, tuple[str, str]]:
    """Qualified name and first sentence of the docstring of each function, by the line where it begins."""
    found: dict[int, tuple[str, str]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{prefix}{child.name}."
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min(node.lineno for node in [child, *child.decorator_list])
                doc = " ".join((ast.get_docstring(child) or "").split("\n\n")[0].split())
                found[first] = (inner[:-1], doc.split(". ")[0].removesuffix("."))
            visit(child, inner)

    visit(ast.parse(Path(filename).read_text(encoding="utf-8")), "")
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/walk", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--bad", action="store_true", help="a step with a NaN in its batch: refused, investigated, repaired"
    )
    parser.add_argument("--max-depth", type=int, metavar="N", help=f"show N levels of calls; with --bad {BAD_DEPTH}")
    parser.add_argument(
        "--no-counts", action="store_true", help="without the numbers of calls, which depend on torch's version"
    )
    options = parser.parse_args(arguments)
    depth = options.max_depth or (BAD_DEPTH if options.bad else None)
    print("\n".join(rendered(record(options.bad), depth, not options.no_counts)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
