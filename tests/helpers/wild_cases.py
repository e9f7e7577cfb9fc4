"""Failures inside libraries that nothing was tuned on, with the truth about each, and healthy steps through the same libraries."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from forensic_cases import incident_of
from torch import nn

from safetrain.forensics import Effort, investigate

Build = Callable[[], tuple[nn.Module, Callable[..., Any], Any]]


class Net(nn.Module):
    def __init__(self, width=4, out=3, bias=True):
        super().__init__()
        self.body = nn.Linear(width, 8, bias=bias)
        self.head = nn.Linear(8, out, bias=bias)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


@dataclass
class Failure:
    """The user's line carries the comment `# here`. `inside` is the file of the library that has the line of the operation;
    empty when the operation is the user's own."""

    build: Build
    library: str
    inside: str
    op: str
    cause: str
    samples: list[int] | None
    came_from: str | None
    """How the last link of the lineage begins; None when no operand has a history."""

    @property
    def id(self):
        return self.build.__name__


class Wild:
    """The failures and the healthy steps of a group of libraries. A function returns model, loss function and batch."""

    def __init__(self):
        self.failures = []
        self.healthy = []

    def fails(self, library, inside, op, cause, samples=None, came_from=None):
        def register(build):
            self.failures.append(Failure(build, library, inside, op, cause, samples, came_from))
            return build

        return register

    def passes(self, library):
        def register(build):
            self.healthy.append((library, build))
            return build

        return register

    def each_failure(self):
        return pytest.mark.parametrize("case", self.failures, ids=lambda case: case.id)

    def each_healthy(self):
        return pytest.mark.parametrize(("library", "build"), self.healthy, ids=[b.__name__ for _, b in self.healthy])


def check_failure(case):
    pytest.importorskip(case.library)
    incident = incident_of(*case.build(), effort=Effort(remedies=False))
    origin, said = incident.origin, incident.render()
    own = case.build.__code__.co_filename
    if case.inside:
        assert (origin.library or "").startswith(f"{case.library} "), said
        assert Path(origin.file or "").name == case.inside, said
        assert origin.called_from is not None, said
        file, code = origin.called_from.file, origin.called_from.code
    else:
        assert origin.library is None, said
        file, code = origin.file, origin.code
    assert Path(file or "").name == Path(own).name, said
    assert "# here" in (code or ""), said
    assert (origin.op or "").removeprefix("aten.").partition(".")[0].strip("_") == case.op, said
    assert incident.cause.label == case.cause, said
    if case.samples is not None:
        assert incident.samples == case.samples, said
    if case.came_from is not None:
        assert incident.lineage[-1].text.startswith(case.came_from), said


def check_healthy(library, build):
    pytest.importorskip(library)
    incident = investigate(*build())
    assert incident is None, incident.render()
