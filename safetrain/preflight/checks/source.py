"""Runs the linter over the user's code that a training step executes."""

from __future__ import annotations

import functools
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ...core.numbers import listed
from ...data.sources import IterableSource, MapSource, StatefulSource
from ...lint import lint_paths
from ..outcome import Outcome, passed, skipped, warned
from ..registry import preflight_check
from ..subject import Subject


@preflight_check(
    looks_at="patterns in your code that may produce NaN later",
    warns="`safetrain lint` finds one",
    fix="the safe form of the line named",
)
def lint(subject: Subject) -> Outcome:
    files = list(dict.fromkeys(path for thing in _parts(subject) if (path := _own_file(thing)) is not None))
    if not files:
        return skipped("no source file of your own was found")
    executed = _executed(subject, files)
    findings = [f for f in lint_paths(files).findings if f.line in executed.get(f.path, ())]
    names = [path.name for path in files]
    if not findings:
        return passed(f"nothing found in what a step runs of {listed(names)}", files=[str(path) for path in files])
    places = [f"{Path(f.path).name}:{f.line} {f.code} {f.message}" for f in findings]
    first = findings[0]
    return warned(
        f"{len(places)} place{'s' if len(places) > 1 else ''} may go NaN later: {listed(places, 2)}",
        f"{(first.safe or first.why).rstrip('.')}; `safetrain lint {Path(first.path).name}` explains each",
        findings=[finding.to_dict() for finding in findings[:64]],
    )


def _executed(subject: Subject, files: list[Path]) -> dict[str, set[int]]:
    """The lines of these files that reading a batch and one step execute: a recipe may hold code that this config does not use."""
    lines: dict[str, set[int]] = {str(path): set() for path in files}

    @functools.cache
    def name_of(filename: str) -> str | None:
        resolved = str(Path(filename).resolve())
        return resolved if resolved in lines else None

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        name = name_of(frame.f_code.co_filename)
        if name is None:
            return None
        lines[name].add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    with subject.clean():
        sys.settrace(trace)
        try:
            batch = next(iter(subject.sample.batches(in_order=True))).batch
            loss = subject.forward(batch)
            torch.autograd.backward(loss)
        except Exception:
            pass  # finite_steps reports it; the lines run so far are known
        finally:
            sys.settrace(before)
    return lines


def _parts(subject: Subject) -> Iterator[Any]:
    trainer = subject.trainer
    yield from (type(module) for module in subject.model.modules())
    loss: Any = trainer.loss_fn
    while isinstance(loss, functools.partial):
        loss = loss.func
    if loss is not None:
        yield loss if inspect.isfunction(loss) or inspect.ismethod(loss) else type(loss)
    yield type(trainer)
    source = trainer.stream.source
    if isinstance(source, (MapSource, IterableSource, StatefulSource)):
        yield source.data if inspect.isfunction(source.data) else type(source.data)


def _own_file(thing: Any) -> Path | None:
    """Where it is defined, unless that is Python, an installed package, or safetrain itself."""
    try:
        name = inspect.getsourcefile(thing)
    except (TypeError, OSError):
        return None
    if name is None:
        return None
    path = Path(name).resolve()
    installed = {Path(sysconfig.get_path(key)).resolve() for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    package = Path(__file__).resolve().parents[2]
    if not path.is_file() or any(path.is_relative_to(root) for root in (*installed, package)):
        return None
    return path
