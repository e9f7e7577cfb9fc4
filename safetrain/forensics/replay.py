"""Runs a step again, as it was: plainly, to see whether it stays finite, or traced, to see where it goes wrong."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._private import compiler
from ..tensors.bounds import Bounds
from ..tensors.nest import in_code, map_tensors, named_tensors
from ..tensors.originals import note_moved, original_of
from ..tensors.rng import RandomState
from .facts import examined
from .limit import OperationLimit
from .sandbox import Sandbox
from .step import Step
from .storages import Region
from .tracer import Interventions, Observer, Tracer
from .values import FINITE, INF, is_mask, kind_of, numbers, same_bits


@dataclass
class Result:
    """How a plain replay went."""

    loss: Tensor | None = None
    """Mean over the window."""
    bad_gradients: list[str] = field(default_factory=list)
    bad_buffers: list[str] = field(default_factory=list)
    """Of those that are watched."""
    error: Exception | None = None

    @property
    def finite(self) -> bool:
        if self.error is not None or self.loss is None or self.bad_gradients or self.bad_buffers:
            return False
        return kind_of(self.loss) == FINITE

    @property
    def loss_value(self) -> float | None:
        return None if self.loss is None else float(self.loss)


@dataclass(frozen=True)
class Leaf:
    """A tensor that existed before the step."""

    kind: str
    """`parameter`, `buffer`, `attribute` (a tensor that a module holds), `batch`, or `outside` of all these."""
    name: str
    is_mask: bool
    """Holds -inf on purpose."""
    may_forbid: bool = False
    """A parameter with -inf and no other bad value: transitions that are forbidden, if it is added to scores or picked from."""


@dataclass
class Trace:
    """The record of one traced micro-batch, the first bad one if any is."""

    tracer: Tracer
    leaves: dict[int, Leaf]
    micro_batch: int
    batch: Any
    loss: Tensor | None = None
    loss_region: Region | None = None
    losses: list[Tensor] = field(default_factory=list)
    bad_gradients: dict[str, tuple[Region, int]] = field(default_factory=dict)
    bad_buffers: dict[str, tuple[Region, int]] = field(default_factory=dict)
    error: Exception | None = None

    @property
    def loss_kind(self) -> int:
        return FINITE if self.loss is None else kind_of(self.loss)

    @property
    def finite(self) -> bool:
        return self.error is None and not self.loss_kind and not self.bad_gradients


class Replayer:
    """Replays one step any number of times. Use it as a context manager: on leaving, everything is as it was found."""

    def __init__(self, step: Step, max_seconds: float | None = None) -> None:
        self.step = step
        self.model = unwrapped_model(step.model)
        self.is_compiled = compiler.is_compiled(step.model)
        self.parameters = _named_parameters(self.model, step)
        self.module_names = {id(module): name for name, module in self.model.named_modules()}
        self.num_replays = 0
        self._began, self._max_seconds = time.monotonic(), max_seconds
        device = next((p.device for p in self.parameters.values()), torch.device("cpu"))
        self._bounds = Bounds(device)
        self.max_operations: int | None = None
        """Of a micro-batch, once the step is known to raise: without the exception it might not end."""
        self.watched_buffers: set[str] = set()
        """Buffers that must stay finite too; none until one was found to turn bad and to matter."""

    def __enter__(self) -> Replayer:
        step = self.step
        self.sandbox = Sandbox(
            self.model, step.loss_fn, list(self.parameters.values()), step.random_state, step.buffers
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.sandbox.leave()

    def has_time(self, share: float = 1.0) -> bool:
        """Is less than this share of the time used up?"""
        return self._max_seconds is None or self.seconds < share * self._max_seconds

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def module_type(self, path: str) -> str | None:
        module = dict(self.model.named_modules()).get(path)
        return None if module is None else type(module).__name__

    # ---- plain -----------------------------------------------------------------------------------------------------

    def plain(
        self,
        window: Sequence[Any] | None = None,
        changes: Sequence[AbstractContextManager[Any]] = (),
        loss_scale: float | None = None,
        backward: bool = True,
        eager: bool = True,
        rewind_random: bool = True,
    ) -> Result:
        """Run the window with `changes` entered around it. An exception of the step is a result, not raised."""
        self.num_replays += 1
        random_now = RandomState.capture(with_host=False)
        self.sandbox.rewind()
        if not rewind_random:
            random_now.restore()
        window = self.step.window if window is None else window
        result, losses = Result(), []
        with ExitStack() as stack:
            if eager:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            try:
                if self.max_operations is not None:
                    stack.enter_context(OperationLimit(self.max_operations * len(window)))
                for change in changes:
                    stack.enter_context(change)
                for batch in window:
                    loss = self.forward(fresh(batch), self.model if eager else self.step.model)
                    losses.append(loss.detach().clone())
                    if kind_of(loss) == FINITE and backward and loss.requires_grad:
                        self.backward(loss, len(window), loss_scale)
                result.loss = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
                result.bad_gradients = self.bad_gradients()
                buffers = dict(self.model.named_buffers()) if self.watched_buffers else {}
                result.bad_buffers = [name for name in self.watched_buffers if kind_of(buffers[name])]
            except Exception as error:
                result.error = error
        return result

    def forward(self, batch: Any, model: nn.Module) -> Tensor:
        from ..core.loss import split_loss

        with self.step.autocast(self.model), self._bounds.checked([batch]), self._bounds.thorough():
            output = self.step.loss_fn(model, batch)
        loss, _ = split_loss(output, "loss_fn")
        return loss

    def backward(self, loss: Tensor, num_batches: int, scale: float | None = None) -> None:
        factor = (self.step.loss_scale if scale is None else scale) / num_batches
        # Not loss.backward(): that would switch off the mode that knows the names of functions.
        torch.autograd.backward(loss if factor == 1 else loss * factor)

    def bad_gradients(self) -> list[str]:
        return [name for name, p in self.parameters.items() if p.grad is not None and kind_of(p.grad)]

    # ---- traced ----------------------------------------------------------------------------------------------------

    def traced(
        self,
        interventions: Interventions | None = None,
        micro_batch: int | None = None,
        observer: Observer | None = None,
    ) -> Trace:
        """Trace the micro-batches in order, up to the first bad one. Interventions and observer apply to `micro_batch` only."""
        self.num_replays += 1
        self.sandbox.rewind()
        losses: list[Tensor] = []
        window = self.step.window
        for index, batch in enumerate(window):
            is_meant = micro_batch in (None, index)
            changed, watching = (interventions, observer) if is_meant else (None, None)
            trace = self._trace_one(index, fresh(batch), len(window), changed, watching)
            if trace.loss is not None:
                losses.append(trace.loss)
            trace.losses = losses
            if not trace.finite:
                break
        trace.bad_buffers = self._bad_buffers(trace.tracer)
        return trace

    def _trace_one(
        self,
        index: int,
        batch: Any,
        num_batches: int,
        interventions: Interventions | None,
        observer: Observer | None,
    ) -> Trace:
        tracer = Tracer(_run_traced.__code__, interventions, self.sandbox.before_write, observer, self.max_operations)
        trace = Trace(tracer, self._leaves(tracer, batch), index, batch)
        with torch.compiler.set_stance("force_eager"), tracer.recording():
            _run_traced(self, trace, num_batches)
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and (kind := kind_of(parameter.grad)):
                trace.bad_gradients[name] = (tracer.storages.region(parameter.grad), kind)
        return trace

    def _leaves(self, tracer: Tracer, batch: Any) -> dict[int, Leaf]:
        found: dict[int, Leaf] = {}
        for kind, name, tensor in self.named_leaves(batch):
            found.setdefault(tracer.storages.region(tensor).storage, self._leaf(kind, name, tensor))
        return found

    def _leaf(self, kind: str, name: str, tensor: Tensor) -> Leaf:
        return Leaf(kind, name, _is_mask(kind, tensor), kind == "parameter" and _is_mask("buffer", tensor))

    def named_leaves(self, batch: Any) -> Iterator[tuple[str, str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield "parameter", name, parameter
        for name, buffer in self.model.named_buffers():
            yield "buffer", name, buffer
        for name, tensor in named_fields(batch):
            yield "batch", name, tensor
        for path, module in self.model.named_modules():
            for name, value in vars(module).items():
                if type(value) is Tensor:
                    yield "attribute", f"{path}.{name}" if path else name, value
        for module in self.sandbox.loss_modules:
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                yield "outside", f"{type(module).__name__}.{name}", tensor

    def examine_leaf(self, leaf: Leaf, batch: Any) -> list[dict[str, Any]]:
        """Statistics of that tensor, as of an operand; empty when no tensor has its name."""
        with suppress(Exception):  # statistics are a help, never a reason to fail
            for kind, name, tensor in self.named_leaves(batch):
                if (kind, name) == (leaf.kind, leaf.name):
                    return [examined(name, tensor)]
        return []

    def _bad_buffers(self, tracer: Tracer) -> dict[str, tuple[Region, int]]:
        """Buffers that were finite before the step and are not after it."""
        result = {}
        before = {(id(module), name): value for module, name, value in self.sandbox.buffers_before()}
        for path, module in self.model.named_modules():
            for name, buffer in module._buffers.items():
                old = before.get((id(module), name))
                if buffer is not None and (kind := kind_of(buffer)) and old is not None and not kind_of(old):
                    result[f"{path}.{name}" if path else name] = (tracer.storages.region(buffer), kind)
        return result


def _run_traced(replayer: Replayer, trace: Trace, num_batches: int) -> None:
    """Stacks of traced ops end here."""
    try:
        loss = replayer.forward(trace.batch, replayer.model)
    except Exception as error:
        trace.error = error
        return
    trace.loss = loss.detach().clone()
    trace.loss_region = trace.tracer.storages.region(loss)
    if kind_of(loss) == FINITE and loss.requires_grad:
        try:
            _watch_python_nodes(loss, trace.tracer)
            replayer.backward(loss, num_batches)
        except Exception as error:
            trace.error = error


def _watch_python_nodes(loss: Tensor, tracer: Tracer) -> None:
    seen: set[Any] = set()
    todo: list[Any] = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            node.register_hook(
                lambda gradients, incoming, n=node: tracer.gradient_of_python_node(n, incoming, gradients)
            )
        todo += [following for following, _ in node.next_functions]


def unwrapped_model(model: nn.Module) -> nn.Module:
    """Without DistributedDataParallel and torch.compile around it: a replay is local and eager."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif (inside := compiler.original(model)) is not model:
            model = inside
        else:
            return model


def _named_parameters(model: nn.Module, step: Step) -> dict[str, nn.Parameter]:
    """Those of the model, and any others that the optimizer moves (a loss with weights of its own)."""
    named = dict(model.named_parameters())
    known = {id(p) for p in named.values()}
    if step.optimizer is not None:
        for g, group in enumerate(step.optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    named[f"<loss>.param_groups[{g}][{i}]"] = parameter
    return named


def fresh(batch: Any) -> Any:
    """A copy that the step may change in place."""
    try:
        return map_tensors(batch, _copied)
    except TypeError:  # a container that cannot be rebuilt from its items
        return copy.deepcopy(batch)


def _copied(item: Any) -> Any:
    if isinstance(item, Tensor):
        copied = item.detach().clone().requires_grad_(item.requires_grad)
        if (known := original_of(item)) is not None:
            note_moved(copied, known[2])
        return copied
    return item.clone() if hasattr(item, "clone") else item


def named_fields(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a batch, named as a program spells it: `batch[0]`, `batch['x']`, `batch.x`."""
    return named_tensors(batch, lambda path: in_code(path, "batch"))


def _is_mask(kind: str, tensor: Tensor) -> bool:
    if kind != "buffer" or kind_of(tensor) != INF:
        return is_mask(tensor)
    values = numbers(tensor)  # a buffer may hold both a mask and a position bias
    return values is not None and not bool((values == torch.inf).any())


NOISE = 1e-2
"""Losses of one step that differ by no more, relative to their size: half precision, sums in another order."""


def is_like(loss: Tensor | None, original: Tensor | float | None) -> bool | None:
    """The same step may give it: NaN for NaN, Inf for Inf, and nearly the same number. Kernels that add in no fixed order, and
    compiled ones, seldom give the same bits twice."""
    if loss is None or original is None:
        return None
    one, other = float(loss), float(original)
    if not (math.isfinite(one) and math.isfinite(other)):
        return one == other or (one != one and other != other)
    return math.isclose(one, other, rel_tol=NOISE)


def is_same_loss(loss: Tensor | None, original: Tensor | float | None) -> bool | None:
    """Bitwise, NaN equal to NaN; None when there is nothing to compare with."""
    if loss is None or original is None:
        return None
    if isinstance(original, Tensor):
        return same_bits(loss.cpu().reshape(()), original.detach().cpu().to(loss.dtype).reshape(()))
    return same_bits(loss.cpu().double().reshape(()), torch.tensor(float(original), dtype=torch.float64))
