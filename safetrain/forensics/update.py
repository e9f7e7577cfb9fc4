"""The optimizer's step, tried on the gradients of a replay and undone: does the update stay finite, and if not, why?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..tensors.saved import Captured, on_host
from .finding import LOSS, Finding, describe
from .frames import user_place
from .provenance import Provenance, primary
from .replay import Leaf, Replayer, Trace
from .tracer import Tracer
from .values import FINITE, kind_of


@contextmanager
def undone(optimizer: Optimizer) -> Iterator[None]:
    """Whatever the optimizer does inside, parameters, gradients, moments and settings come back as they were.

    It runs on the real parameters, because hooks of an optimizer (clipping) hold on to them.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    values = [(p, on_host(p), p.grad, None if p.grad is None else on_host(p.grad)) for p in parameters]
    members = getattr(optimizer, "optimizers", {})  # of a group
    held = Captured([vars(each) for each in (optimizer, *members.values())])
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value, gradient, gradient_value in values:
                parameter.data.copy_(value)
                parameter.grad = gradient
                if gradient is not None:
                    gradient.copy_(gradient_value)
            held.restore()


def survives_bad_gradients(replayer: Replayer) -> bool:
    """Does the optimizer notice the non-finite gradients of the last replay, and leave them out? A loss scaler does."""
    optimizer = replayer.step.optimizer
    if optimizer is None:
        return False
    with undone(optimizer):
        before = _bad_tensors(replayer, optimizer)
        try:
            optimizer.step()
        except Exception:  # an update that raises does not cope with them
            return False
        return _bad_tensors(replayer, optimizer).keys() <= before.keys()


def update_is_finite(replayer: Replayer, changes: Sequence[AbstractContextManager[Any]] = ()) -> bool:
    """After a replay that left finite gradients: is everything finite after the optimizer's step too?"""
    optimizer = replayer.step.optimizer
    assert optimizer is not None
    with undone(optimizer), ExitStack() as stack:
        _unscale(optimizer, replayer.step.loss_scale)
        before = _bad_tensors(replayer, optimizer)
        for change in changes:
            stack.enter_context(change)
        optimizer.step()
        return _bad_tensors(replayer, optimizer).keys() <= before.keys()


def locate_in_update(replayer: Replayer, trace: Trace) -> Finding | None:
    """Trace `optimizer.step()` on the gradients of the last replay; None when all stays finite or it needs a closure."""
    optimizer = replayer.step.optimizer
    if optimizer is None:
        return None
    try:
        if update_is_finite(replayer):
            return None
    except Exception:  # LBFGS and others call a closure; what else an optimizer raises is not about its numbers
        return None
    with undone(optimizer):
        _unscale(optimizer, replayer.step.loss_scale)
        tracer = Tracer(_run_update.__code__)
        leaves = _leaves(tracer, replayer, optimizer)
        before = _bad_tensors(replayer, optimizer)
        with tracer.recording():
            _run_update(optimizer)
        turned = {name: t for name, t in _bad_tensors(replayer, optimizer).items() if name not in before}
        if not turned:
            return None
        provenance = Provenance(tracer, leaves)
        blames = {
            name: primary(provenance.origins(tracer.storages.region(tensor), kind_of(tensor)))
            for name, tensor in turned.items()
        }
        return _finding(replayer, optimizer, Trace(tracer, leaves, trace.micro_batch, trace.batch), provenance, blames)


def _run_update(optimizer: Optimizer) -> None:
    optimizer.step()


def _unscale(optimizer: Optimizer, scale: float) -> None:
    if scale != 1:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(scale)


def _finding(
    replayer: Replayer, optimizer: Optimizer, trace: Trace, provenance: Provenance, blames: dict[str, Any]
) -> Finding | None:
    found = [(blame.order, name, blame) for name, blame in blames.items() if blame is not None]
    if not found:
        return None
    _, name, blame = min(found, key=lambda item: item[0])
    finding = Finding(trace, provenance, blame, "optimizer", name)
    finding.optimizer = type(optimizer).__name__
    finding.event = blame.event
    finding.notes = [
        f"the learning rate of parameter group {i} is {float(group['lr'])}"
        for i, group in enumerate(optimizer.param_groups)
        if not math.isfinite(float(group.get("lr") or 0.0))
    ]
    if blame.leaf is not None:
        finding.op = finding.name = "step"
        finding.notes.append(f"{blame.leaf.name} was already non-finite before the update")
    else:
        describe(finding, replayer)
        if user_place(blame.event.frames) is None:
            finding.name = "step"
    finding.owner = name.partition(" ")[0]
    finding.module = LOSS if finding.owner.startswith(LOSS) else finding.owner.rpartition(".")[0]
    finding.module_type = replayer.module_type(finding.module)
    return finding


def _tensors(replayer: Replayer, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    names = {id(p): name for name, p in replayer.parameters.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter), LOSS)
            yield name, parameter
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"{name} ({key})", value


def _bad_tensors(replayer: Replayer, optimizer: Optimizer) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in _tensors(replayer, optimizer) if kind_of(tensor) != FINITE}


def _leaves(tracer: Tracer, replayer: Replayer, optimizer: Optimizer) -> dict[int, Leaf]:
    found = {}
    for name, tensor in _tensors(replayer, optimizer):
        found[tracer.storages.region(tensor).storage] = Leaf("parameter", name, is_mask=False)
        if isinstance(tensor, nn.Parameter) and tensor.grad is not None:
            region = tracer.storages.region(tensor.grad)
            found[region.storage] = Leaf("parameter", f"the gradient of {name}", is_mask=False)
    return found
