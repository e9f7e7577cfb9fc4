"""Records a few forward and backward passes: outputs and gradients of each layer, calls of losses and embeddings."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._private.autograd import TRACING, TorchDispatchMode, modes_off, op_schema
from .._private.modules import convolutions, norms_over_channels
from ..tensors.devices import wide
from ..tensors.nest import named_tensors

FP16_MAX = 65504.0
FP16_MIN = 2.0**-24
"""The smallest positive (subnormal) number of float16."""

_RECTIFIERS = {"relu", "relu_", "threshold", "hardtanh", "hardtanh_", "relu6", "clamp_min", "clamp_min_"}
_SQUASHERS = {"tanh": 0.99, "tanh_": 0.99, "sigmoid": 0.99, "sigmoid_": 0.99}


@dataclass
class Layer:
    """Statistics of a module's outputs, and of the gradients with respect to them."""

    kind: str
    max_abs: float = 0.0
    num_gradients: int = 0
    """Non-zero elements of the gradients."""
    num_lost: int = 0
    """Those that float16 would round to zero, even with the loss scale."""
    smallest: float = math.inf
    squares: float = 0.0
    num_values: int = 0

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / self.num_values) if self.num_values else 0.0


@dataclass
class Units:
    """The units of one activation function."""

    op: str
    alive: Tensor
    num_values: int = 0
    num_saturated: int = 0

    @property
    def num_dead(self) -> int:
        return int((~self.alive).sum())


@dataclass
class LossCall:
    """A call of one of torch's loss functions."""

    kind: str
    num_classes: int
    """Of a cross entropy; 0 for other losses."""
    input_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    arguments: dict[str, Any]
    target: Tensor = field(repr=False)
    field: str | None = None
    """The field of the batch that the target comes from, if any."""
    mean: float | None = None
    """Mean loss per element; None if the call raised."""

    @property
    def has_class_indices(self) -> bool:
        return self.kind in ("cross_entropy", "nll_loss") and not self.target.is_floating_point()


@dataclass
class Lookup:
    """A call of an embedding."""

    num_embeddings: int
    padding_idx: int | None
    indices: Tensor = field(repr=False)
    field: str | None = None


LOSSES: dict[str, Callable[..., Any]] = {
    name: getattr(F, name)
    for name in (
        *("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    )
}


class Observer:
    """A context manager around forward and backward passes. Reads every value on the host: only for a few batches."""

    def __init__(self, model: nn.Module, loss_scale: float) -> None:
        self.layers: dict[str, Layer] = {}
        self.units: dict[str, Units] = {}
        self.loss_calls: list[LossCall] = []
        self.lookups: list[Lookup] = []
        self.largest: dict[str, float] = {}
        """The largest magnitude of any operation's inputs and outputs, by module."""
        self._model, self._loss_scale = model, loss_scale
        self._path: list[str] = []
        self._channel_dim = -1
        self._stack = ExitStack()
        self._fields: Mapping[str, Tensor] = {}
        # Running statistics stay in float32 under autocast, so their size does not matter for float16.
        self._buffers = {t.data_ptr() for t in model.buffers()}
        self._numbers: dict[str, int] = {}
        self._channels_second = (*convolutions(), *norms_over_channels(), nn.GroupNorm)

    def begin(self, batch: Any) -> None:
        """Call it before each batch."""
        self._fields = dict(named_tensors(batch))
        self._path.clear()
        self._numbers.clear()

    def __enter__(self) -> Observer:
        for name, module in self._model.named_modules():
            before = module.register_forward_pre_hook(self._entering(name))
            after = module.register_forward_hook(self._leaving(name, module), always_call=False)
            self._stack.callback(before.remove)
            self._stack.callback(after.remove)
        self._stack.enter_context(_Calls(self))
        if TRACING.works:
            self._stack.enter_context(_Operations(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def path(self) -> str:
        """Path of the module that is running; empty outside all modules and in the model's own forward."""
        return self._path[-1] if self._path else ""

    @property
    def is_in_model(self) -> bool:
        return bool(self._path)

    # ---- modules -------------------------------------------------------------------------------------------------

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            self._path.append(name)

        return enter

    def _leaving(self, name: str, module: nn.Module) -> Any:
        is_leaf = next(module.children(), None) is None

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            while self._path and self._path.pop() != name:
                pass
            if not is_leaf:
                return
            if next(module.parameters(recurse=False), None) is not None:
                self._channel_dim = 1 if isinstance(module, self._channels_second) else -1
            layer = self.layers.setdefault(name or type(module).__name__, Layer(type(module).__name__))
            with modes_off():
                for _, leaf in named_tensors(output):
                    if leaf.is_floating_point() and leaf.numel() and leaf.layout is torch.strided:
                        _add_output(layer, leaf.detach())
                        if leaf.requires_grad:
                            leaf.register_hook(self._gradient_hook(layer))  # type: ignore[no-untyped-call]

        return leave

    def _gradient_hook(self, layer: Layer) -> Any:
        def note(gradient: Tensor) -> None:
            with modes_off():
                size = gradient.detach().abs().float()
                nonzero = size[size > 0]
                layer.num_gradients += nonzero.numel()
                # Below half of the smallest subnormal, float16 rounds to zero.
                layer.num_lost += int((nonzero * self._loss_scale < FP16_MIN / 2).sum())
                if nonzero.numel():
                    layer.smallest = min(layer.smallest, float(nonzero.min()))

        return note

    # ---- operations ----------------------------------------------------------------------------------------------

    def note_operation(self, name: str, tensors: list[Tensor], output: Any) -> None:
        if name.startswith(("empty", "new_empty")):
            return  # uninitialised memory
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.numel() and tensor.layout is torch.strided:
                if tensor.data_ptr() in self._buffers:
                    continue
                self.largest[self.path] = _larger(self.largest.get(self.path, 0.0), _finite_peak(tensor))
        if isinstance(output, Tensor) and output.dim() > 1 and output.is_floating_point():
            if name in _RECTIFIERS or name in _SQUASHERS:
                self._note_units(name, output)

    def _note_units(self, name: str, output: Tensor) -> None:
        dim = 1 if output.dim() > 3 or (output.dim() == 3 and self._channel_dim == 1) else output.dim() - 1
        others = [d for d in range(output.dim()) if d != dim]
        number = self._numbers[self.path] = self._numbers.get(self.path, -1) + 1
        key = f"{self.path or type(self._model).__name__}" + (f" ({name} {number + 1})" if number else "")
        if name in _RECTIFIERS:
            low = output.amin()
            active, saturated = (output > low).any(dim=others[0], keepdim=True), 0
            for other in others[1:]:
                active = active.any(dim=other, keepdim=True)
        else:
            is_saturated = (output.abs() > 0.99) if name.startswith("tanh") else ((output - 0.5).abs() > 0.49)
            active, saturated = torch.ones(output.shape[dim], dtype=torch.bool), int(is_saturated.sum())
        known = self.units.get(key)
        active = active.flatten().cpu()
        if known is None or known.alive.shape != active.shape:
            known = self.units[key] = Units(name, torch.zeros_like(active))
        known.alive |= active
        known.num_values += output.numel()
        known.num_saturated += saturated

    def note_loss(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LossCall | None:
        try:
            bound = inspect.signature(LOSSES[kind]).bind(*args, **kwargs)
        except TypeError:
            return None
        bound.apply_defaults()
        given = bound.arguments
        output, target = given.get("input"), given.get("target")
        if not (isinstance(output, Tensor) and isinstance(target, Tensor)):
            return None
        is_classified = kind in ("cross_entropy", "nll_loss")
        num_classes = output.shape[1 if output.dim() > 1 else 0] if is_classified else 0
        plain = {k: v for k, v in given.items() if isinstance(v, (int, float, str, bool))}
        plain["has_weight"] = given.get("weight") is not None or given.get("pos_weight") is not None
        shapes = tuple(output.shape), tuple(target.shape)
        call = LossCall(kind, num_classes, *shapes, plain, target.detach().clone(), self._field_of(target))
        if len(self.loss_calls) < 16:
            self.loss_calls.append(call)
        return call

    def note_lookup(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = inspect.signature(F.embedding).bind(*args, **kwargs).arguments
        indices, weight = given["input"], given["weight"]
        padding = given.get("padding_idx")
        if padding is not None and padding < 0:
            padding += weight.shape[0]
        if len(self.lookups) < 64:
            self.lookups.append(Lookup(weight.shape[0], padding, indices.detach().clone(), self._field_of(indices)))

    def _field_of(self, tensor: Tensor) -> str | None:
        for path, leaf in self._fields.items():
            if leaf.dtype == tensor.dtype and _comes_from(tensor, leaf):
                return path
        return None


class _Calls(TorchFunctionMode):
    """Intercepts loss functions and embeddings at the level of torch.nn.functional, with all their arguments."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        call = None
        with modes_off():
            if LOSSES.get(name) is func:
                call = self._observer.note_loss(name, args, kwargs)
            elif func is F.embedding:
                self._observer.note_lookup(args, kwargs)
        result = func(*args, **kwargs)
        if call is not None and isinstance(result, Tensor):
            with modes_off():
                call.mean = _mean_of(call, result.detach())
        return result


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercepts every aten operation of the forward pass inside a module."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observer = observer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._observer.is_in_model:
            tensors = [item for item in (*args, output) if isinstance(item, Tensor)]
            self._observer.note_operation(op_schema(func).name.rpartition("::")[2], tensors, output)
        return output


def _add_output(layer: Layer, leaf: Tensor) -> None:
    values = leaf.float()
    layer.max_abs = _larger(layer.max_abs, _peak(values))
    layer.squares += float(wide(values).square().sum())
    layer.num_values += values.numel()


def _peak(tensor: Tensor) -> float:
    low, high = torch.aminmax(tensor.detach().float() if tensor.element_size() == 1 else tensor.detach())
    return _larger(abs(float(low)), abs(float(high)))


def _finite_peak(tensor: Tensor) -> float:
    """Ignores infinities and NaN: masks are made of -inf."""
    peak = _peak(tensor)
    if math.isfinite(peak):
        return peak
    return _peak(torch.nan_to_num(tensor.detach(), 0.0, 0.0, 0.0))


def _larger(one: float, other: float) -> float:
    """The maximum, where NaN is larger than anything."""
    return other if math.isnan(other) or other > one else one


def _mean_of(call: LossCall, result: Tensor) -> float:
    """The mean over the elements that are not ignored."""
    reduction, count = call.arguments.get("reduction", "mean"), max(call.target.numel(), 1)
    if call.has_class_indices:
        count = int((call.target != call.arguments.get("ignore_index", -100)).sum())
    total = float(wide(result).sum())
    return total if reduction == "mean" else total / count if count else math.nan


def _comes_from(tensor: Tensor, leaf: Tensor) -> bool:
    """Whether it is the field, a view of it, or has the same values (for sequences also without the first or last)."""
    if tensor.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr() and leaf.numel():
        return True
    flat = tensor.reshape(-1)
    parts = [leaf, leaf[:, 1:], leaf[:, :-1]] if leaf.dim() > 1 else [leaf]
    return any(part.numel() == flat.numel() and torch.equal(part.reshape(-1), flat) for part in parts)
