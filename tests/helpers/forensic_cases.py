"""Failures with the truth about each: a case is a function that builds a step, and says what an investigation must answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from safetrain.core.incident import Incident
from safetrain.forensics import investigate


@dataclass
class Case:
    """The line that is to blame carries the comment `# here`."""

    build: Callable[[], tuple[Any, ...]]
    phase: str
    names: tuple[str, ...]
    cause: str
    module: str = "<loss>"
    samples: list[int] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    line: bool = True

    @property
    def id(self) -> str:
        return self.build.__name__


class Cases(list[Case]):
    def add(
        self,
        phase: str,
        names: str,
        cause: str,
        module: str = "<loss>",
        samples: Any = None,
        line: bool = True,
        **options: Any,
    ):
        def register(build: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
            self.append(Case(build, phase, tuple(names.split()), cause, module, samples, options, line))
            return build

        return register


def check(case: Case) -> Incident:
    model, loss_fn, batch, *rest = case.build()
    optimizer = rest[0] if rest else torch.optim.SGD(model.parameters(), lr=0.1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    incident = investigate(model, loss_fn, batch, optimizer=optimizer, **case.options)
    assert incident is not None, "not detected"
    origin = incident.origin
    said = (
        f"{origin.phase} {origin.op} {origin.name} @{origin.module} {origin.code} / {incident.cause} {incident.samples}"
    )
    plain = {str(part).removeprefix("aten.").partition(".")[0].strip("_") for part in (origin.op, origin.name)}
    assert incident.cause.label == case.cause, said
    assert origin.phase == case.phase, said
    assert plain & set(case.names), said
    assert origin.module == case.module, said
    if case.line:
        assert "# here" in (origin.code or ""), said
    if case.samples is not None:
        assert incident.samples == case.samples, said
    assert any(remedy.finite for remedy in incident.remedies), [f"{r.name}: {r.detail}" for r in incident.remedies]
    after = model.state_dict()
    assert all(torch.equal(after[key].nan_to_num(), value.nan_to_num()) for key, value in before.items())
    return incident


class Tiny(nn.Module):
    """A linear layer that others can be checked against: finite, and with a gradient."""

    def __init__(self, width: int = 4, out: int = 3) -> None:
        super().__init__()
        self.body = nn.Linear(width, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)
