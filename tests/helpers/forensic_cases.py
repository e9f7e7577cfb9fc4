"""Failures with the truth about each: how the step is built, and what an investigation must answer."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from small import assert_same
from torch import nn

from safetrain.forensics import investigate

Build = Callable[[], tuple[Any, ...]]


class Tiny(nn.Module):
    """A linear layer that others can be checked against: finite, and with a gradient."""

    def __init__(self, width=4, out=3):
        super().__init__()
        self.body = nn.Linear(width, out)

    def forward(self, x):
        return self.body(x)


class Apply(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def chain(**parts):
    """Modules and functions one after the other, by the names that an incident says."""
    return nn.Sequential(OrderedDict((k, v if isinstance(v, nn.Module) else Apply(v)) for k, v in parts.items()))


def without_bias(model, weight=None):
    nn.init.zeros_(model.body.bias)
    if weight is not None:
        nn.init.constant_(model.body.weight, weight)
    return model


@dataclass
class Case:
    """The line that is to blame carries the comment `# here`."""

    build: Build
    phase: str
    names: tuple[str, ...]
    cause: str
    module: str = "<loss>"
    samples: list[int] | None = None
    line: bool = True
    fix: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self):
        return self.build.__name__


class Cases(list[Case]):
    def add(self, phase, names, cause, **truth):
        """The function returns model, loss function and batch, and perhaps the optimizer."""

        def register(build):
            self.append(Case(build, phase, tuple(names.split()), cause, **truth))
            return build

        return register

    def loss(self, phase, names, cause, *data, rows=4, scale=None, silent=None, half=False, **truth):
        """The function is the loss of a `Tiny`, of `rows` samples x, and of what else the batch has (`data`).

        `scale` multiplies some samples; at the sample `silent` the output of the model is 0.
        """

        def register(loss):
            def build():
                model, x = Tiny(), torch.randn(rows, 4)
                for row, factor in (scale or {}).items():
                    x[row] *= factor
                if silent is not None:
                    without_bias(model)
                    x[silent] = 0
                if half:
                    model, x = model.half(), x.half()
                rest = [value() if callable(value) else torch.as_tensor(value) for value in data]
                if not rest:
                    return model, loss, x
                return model, lambda m, batch: loss(m, *batch), (x, *rest)

            build.__name__ = loss.__name__
            self.add(phase, names, cause, **truth)(build)
            return loss

        return register


def incident_of(*args, **options):
    """What `investigate` finds in a step that is bad."""
    incident = investigate(*args, **options)
    assert incident is not None, "not detected"
    return incident


def check(case):
    model, loss_fn, batch, *rest = case.build()
    optimizer = rest[0] if rest else torch.optim.SGD(model.parameters(), lr=0.1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    incident = incident_of(model, loss_fn, batch, optimizer=optimizer, **case.options)
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
    assert case.fix in incident.fix
    assert any(remedy.finite for remedy in incident.remedies), [f"{r.name}: {r.detail}" for r in incident.remedies]
    assert_same(dict(model.state_dict()), before)
