"""What a step may change before it is judged, and how that is undone.

Weights, optimizer state, schedule, scaler and EMA move only in `Step.commit`. A forward pass, however, may do more
than compute: it writes buffers (BatchNorm statistics) and makes new ones, writes parameters (a codebook, the moving average
of a teacher, weights that are clamped) and even its batch, switches modules between train and eval, and draws random numbers.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._private.modules import children_of
from ..tensors.compare import same_values, without_inf
from ..tensors.gradients import numbers_of, peak
from ..tensors.nest import map_tensors, tensors_in
from ..tensors.rng import RandomBeforeStep
from ..tensors.saved import SavedTensors, layout_of
from ..tensors.sharded import local

_VERSION = operator.attrgetter("_version")
_TRAINING = operator.attrgetter("training")
_NO_BUFFERS: dict[str, Tensor | None] = {}


class Transaction:
    """Copies every buffer before a step. Parameters and batches are copied only if the step writes to them.

    Which of these a step writes to is found in the first step, for which everything is copied; later, by their version counters.
    """

    def __init__(self, model: nn.Module, parameters: Iterable[Tensor] = ()) -> None:
        """`parameters`: those that a step may write to besides the model's."""
        self.roots = {"": model}
        """The model, and the auxiliary modules by what stands before the names of their parts."""
        self._extra_parameters = list(parameters)
        self.nonfinite_by_design: set[str] = set()
        """Buffers, and parameters that are not trained, that held NaN or Inf when they were created: sentinels, masks and
        observers do so on purpose."""
        self._known: set[str] = set()
        self._buffers = SavedTensors()
        self._watched: list[tuple[str, Tensor]] = []
        """The buffers of `begin` that are to stay finite."""
        self._watched_tensors: list[Tensor] = []
        self._weights = SavedTensors()
        """Of the parameters that forward was seen to write to."""
        self._lost: list[str] = []
        """Parameters that this step wrote to that had not been seen written before."""
        self._batch: list[Tensor] = []
        self._batch_values: list[Tensor] | None = None
        self.writes_batch = False
        """A step was seen to write to its batch, so each one is copied."""
        self._first_weights: list[Tensor] | None = None
        """Copies of all parameters, during the first step."""
        self._is_first_step = True
        self._random = RandomBeforeStep()
        self._find_modules()
        self._mark_nonfinite_by_design(p for p in self._parameters.items() if not p[1].requires_grad)
        self.begin()

    def include(self, modules: Iterable[nn.Module]) -> None:
        """Modules that are not part of the model but take part in a step: a loss with buffers, say."""
        ours = set(self._modules)
        others = [module for module in dict.fromkeys(modules) if module not in ours]
        for index, module in enumerate(others):
            self.roots["<loss>" if len(others) == 1 else f"<loss {index}>"] = module
        self._find_modules()
        self._mark_nonfinite_by_design(p for p in self._parameters.items() if not p[1].requires_grad)
        self.begin()

    def _find_modules(self) -> None:
        owners: dict[nn.Module, str] = {}
        for root, top in self.roots.items():
            for path, module in top.named_modules(prefix=root):
                owners.setdefault(module, path)
        self._modules = list(owners)
        self._children = children_of(owners)
        self._known_children = [tuple(children.values()) for children in self._children]
        self._paths = list(owners.values())
        self._held = [module._buffers for module in owners]
        self._no_contents = [_NO_BUFFERS] * len(self._held)
        unique: dict[int, tuple[str, Tensor]] = {}
        for module, path in owners.items():
            for name, parameter in module.named_parameters(recurse=False):
                unique.setdefault(id(parameter), (_joined(path, name), parameter))
        for index, extra in enumerate(self._extra_parameters):
            unique.setdefault(id(extra), (f"<extra {index}>", extra))
        self._parameters = dict(unique.values())
        self._unwritten = [parameter for parameter in self._parameters.values() if not parameter.is_inference()]

    @property
    def has_other_modules(self) -> bool:
        """A hook has added, removed or replaced one. Compares identities only."""
        return [tuple(children.values()) for children in self._children] != self._known_children

    def look_again(self) -> None:
        """Modules or parameters have changed between two steps."""
        self._find_modules()
        self._mark_nonfinite_by_design(p for p in self._parameters.items() if not p[1].requires_grad)

    # ---- a step ------------------------------------------------------------------------------------------------

    def begin(self, window: Sequence[Any] = ()) -> None:
        """Remember all that a step on this window may change. One foreach copy into tensors that are kept."""
        self.random_state = self._random.capture()
        self._lost = []
        self._modes = self.modes()
        has_buffers = any(self._held)
        self._contents = (
            [dict(held) if held else _NO_BUFFERS for held in self._held] if has_buffers else self._no_contents
        )
        if (has_buffers or self._buffers.tensors) and self._buffers.capture(_tensors(self._contents)):
            named = self._named_buffers(self._contents)
            self._mark_nonfinite_by_design(named)
            self._watched = [(path, buffer) for path, buffer in named if self._is_watched(path, buffer)]
            self._watched_tensors = [buffer for _, buffer in self._watched]
        if self._weights.tensors:
            self._weights.capture(self._weights.tensors)
        self._versions = list(map(_VERSION, self._unwritten))
        self._batch = [tensor for batch in window for tensor in tensors_in(batch) if not tensor.is_inference()]
        self._batch_versions = list(map(_VERSION, self._batch))
        is_probe = self._is_first_step and bool(window)
        self._batch_values = [t.detach().clone() for t in self._batch] if is_probe or self.writes_batch else None
        # On the host: a device that just holds the model need not hold it twice.
        self._first_weights = (
            [local(weight.detach()).to("cpu", copy=True) for weight in self._unwritten] if is_probe else None
        )

    def extend(self, window: Sequence[Any]) -> None:
        """Further micro-batches of the step that was begun."""
        new = [tensor for batch in window for tensor in tensors_in(batch) if not tensor.is_inference()]
        self._batch += new
        self._batch_versions += map(_VERSION, new)
        if self._batch_values is not None:
            self._batch_values += [tensor.detach().clone() for tensor in new]

    def notice_writes(self) -> None:
        """After backward: from now on remember what this step wrote to. Costs a look at the version counters."""
        if self.random_state.python is not None:
            self._random.compare(self.random_state)
        written = self._changed_versions()
        if not written and self._first_weights is None and self._batch_values is None:
            if list(map(_VERSION, self._batch)) == self._batch_versions:
                return  # nearly every step ends here
        if self._first_weights is not None:
            pairs = enumerate(zip(self._unwritten, self._first_weights, strict=True))
            written = [
                i for i, (now, then) in pairs if i in written or not same_values(local(now.detach()).cpu(), then)
            ]
        if self._written_batch():
            self.writes_batch = True
        if written:
            self._remember(written)
        self._is_first_step = False
        self._first_weights = None

    @torch.no_grad()
    def _remember(self, written: list[int]) -> None:
        weights = [self._unwritten[index] for index in written]
        if self._first_weights is None:
            names = {id(weight): name for name, weight in self._parameters.items()}
            self._lost = [names[id(weight)] for weight in weights]
        values = [None if self._first_weights is None else self._first_weights[index] for index in written]
        self._weights.add(weights, values)
        self._unwritten = [w for index, w in enumerate(self._unwritten) if index not in set(written)]
        self._versions = [v for index, v in enumerate(self._versions) if index not in set(written)]
        if self._first_weights is not None:
            self._first_weights = [w for i, w in enumerate(self._first_weights) if i not in set(written)]

    def _written_batch(self) -> list[int]:
        changed = [i for i, tensor in enumerate(self._batch) if _VERSION(tensor) != self._batch_versions[i]]
        if self._batch_values is None or not (self._is_first_step or self.writes_batch):
            return changed
        pairs = enumerate(zip(self._batch, self._batch_values, strict=True))
        return [i for i, (now, then) in pairs if i in changed or not same_values(now.detach(), then)]

    @torch.no_grad()
    def restore(self, replayed: bool = False) -> None:
        """All as it was at `begin`, but for the random stream: that goes on, so no dropout mask is drawn twice.

        `replayed`: the step was restored before, and then replayed by forensics, which restores the weights itself.
        """
        for held, before in zip(self._held, self._contents, strict=True):
            if isinstance(held, dict):  # those of a scripted module are fixed
                held.clear()  # new ones go, and a forward may have put other tensors in their places
                held.update(before)
        replaced = self._buffers.restore()
        for held in self._held if replaced else ():
            held.update({name: replaced.get(id(buffer), buffer) for name, buffer in held.items()})
        self.restore_modes(self._modes)
        self._restore_weights(replayed)
        for index in self._written_batch():
            if self._batch_values is not None:
                self._batch[index].copy_(self._batch_values[index])
            else:
                self.writes_batch = True
                _warn("the step wrote to its batch for the first time, so a replay sees the batch as the step left it")
        self._versions = list(map(_VERSION, self._unwritten))
        self._batch_versions = list(map(_VERSION, self._batch))

    def modes(self) -> list[bool]:
        """Of each module: whether it is in train mode."""
        return list(map(_TRAINING, self._modules))

    def restore_modes(self, modes: Sequence[bool]) -> None:
        for module, training in zip(self._modules, modes, strict=True):
            module.training = training

    def _changed_versions(self) -> list[int]:
        now = list(map(_VERSION, self._unwritten))
        if now == self._versions:
            return []
        return [index for index, version in enumerate(now) if version != self._versions[index]]

    def _restore_weights(self, replayed: bool) -> None:
        self._weights.restore()
        if replayed:
            return
        if self._first_weights is not None:
            for weight, value in zip(self._unwritten, self._first_weights, strict=True):
                if not same_values(local(weight.detach()).cpu(), value):
                    local(weight).copy_(value)
            return
        if written := self._changed_versions():
            self._remember(written)
        if self._lost:
            _warn(
                f"forward wrote to {', '.join(self._lost)} for the first time, in a pass that is undone: this write could not be "
                "undone, later ones will be"
            )
            self._lost = []

    def expect_weights(self) -> None:
        """Other code changed and restored the weights: do not count that as a write of this step."""
        self._versions = list(map(_VERSION, self._unwritten))

    def rewind(self) -> None:
        """As `restore`, and the random state too: what follows sees exactly what the step saw."""
        self.restore()
        self.random_state.restore()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, forward passes that are no part of the step: what they write to buffers and weights is undone at the end."""
        contents = [dict(held) for held in self._held]
        modes = list(map(_TRAINING, self._modules))
        values = [(t, t.detach().clone()) for t in (*_tensors(contents), *self._weights.tensors)]
        try:
            yield
        finally:
            for held, before in zip(self._held, contents, strict=True):
                if isinstance(held, dict):
                    held.clear()
                    held.update(before)
            for tensor, value in values:
                with torch.no_grad():
                    local(tensor).copy_(local(value))
            for module, training in zip(self._modules, modes, strict=True):
                module.training = training

    @torch.no_grad()
    def restore_where(self, bad: Tensor) -> None:
        """As `restore` if `bad` (0-d bool on the device) is true; decided on the device, without a host read.

        The batch is left as it is. What a device cannot decide is read: in a step that made or replaced buffers of another
        shape, or changed modes.
        """
        if self._shape_changed():
            if bool(bad):
                self.restore()
            return
        values = self._buffers.value_of
        for held, before in zip(self._held, self._contents, strict=True):
            for name, buffer in before.items():
                if buffer is not None:
                    current = held[name]
                    assert current is not None
                    current.copy_(torch.where(bad, values[id(buffer)], current))
        for weight in self._weights.tensors:
            now = local(weight)
            now.copy_(torch.where(bad, self._weights.value_of[id(weight)], now))

    def _shape_changed(self) -> bool:
        if self._buffers.has_odd or any(
            module.training != mode for module, mode in zip(self._modules, self._modes, strict=True)
        ):
            return True
        return any(
            held.keys() != before.keys()
            or any(layout_of(held[name]) != layout_of(buffer) for name, buffer in before.items())
            for held, before in zip(self._held, self._contents, strict=True)
            if before or held
        )

    # ---- what the guards and the audit look at -----------------------------------------------------------------

    def window_before(self, window: Sequence[Any]) -> Sequence[Any]:
        """The window of this step as it was at `begin`: itself, or copies if the step writes to its batches."""
        if not self.writes_batch or self._batch_values is None:
            return window
        values = {id(tensor): value for tensor, value in zip(self._batch, self._batch_values, strict=True)}
        return [map_tensors(batch, lambda item: values.get(id(item), item)) for batch in window]

    def batch_before(self) -> list[tuple[Tensor, Tensor]]:
        """The tensors of this step's window with their values at `begin`, if the step writes to its batches."""
        if not self.writes_batch or self._batch_values is None:
            return []
        return list(zip(self._batch, self._batch_values, strict=True))

    def buffer_peak(self) -> Tensor | None:
        """Largest absolute value over the buffers as the forward pass left them."""
        if not (self._weights.tensors or self._buffers.tensors or any(self._held)):
            return None
        if not self._weights.tensors and self._buffers.are(_tensors(self._held)):
            return peak(self._watched_tensors) if self._watched_tensors else None
        return peak([tensor for _, tensor in self.buffers_now()])

    def buffers_now(self) -> list[tuple[str, Tensor]]:
        """Floating-point buffers that were finite when they were created, and the parameters that forward writes to."""
        found: list[tuple[str, Tensor]] = []
        if self._buffers.are(_tensors(self._held)):
            return self._watched + self._written_weights(lambda weight: weight.detach())
        for path, buffer in self._named_buffers(self._held):
            if self._is_watched(path, buffer):
                # One that is made in this step may hold a mask of -inf; NaN is never meant.
                found.append((path, buffer if path in self._known else without_inf(buffer)))
        return found + self._written_weights(lambda weight: weight.detach())

    def buffers_before(self) -> list[tuple[str, Tensor]]:
        """The same as they were at `begin`."""
        values = self._buffers.value_of
        found = [(path, values[id(b)]) for path, b in self._named_buffers(self._contents) if self._is_watched(path, b)]
        return found + self._written_weights(lambda weight: self._weights.value_of[id(weight)])

    def exempt_bad_buffers(self) -> list[str]:
        """No longer watch the buffers that are not finite now; their names."""
        names = [path for path, buffer in self.buffers_now() if not _is_finite(buffer)]
        self.nonfinite_by_design.update(names)
        self._watched = [(path, buffer) for path, buffer in self._watched if path not in self.nonfinite_by_design]
        self._watched_tensors = [buffer for _, buffer in self._watched]
        return names

    @property
    def written_parameters(self) -> set[str]:
        """Names of the parameters that forward writes to."""
        names = {id(weight): name for name, weight in self._parameters.items()}
        return {names[id(weight)] for weight in self._weights.tensors}

    def _written_weights(self, value: Any) -> list[tuple[str, Tensor]]:
        if not self._weights.tensors:
            return []
        names = {id(weight): name for name, weight in self._parameters.items()}
        weights = [(names[id(weight)], weight) for weight in self._weights.tensors]
        return [(name, value(weight)) for name, weight in weights if self._is_watched(name, weight)]

    def _is_watched(self, path: str, tensor: Tensor) -> bool:
        return (tensor.is_floating_point() or tensor.is_complex()) and path not in self.nonfinite_by_design

    def _named_buffers(self, contents: Sequence[Mapping[str, Tensor | None]]) -> list[tuple[str, Tensor]]:
        return [
            (_joined(path, name), buffer)
            for path, held in zip(self._paths, contents, strict=True)
            if held
            for name, buffer in held.items()
            if buffer is not None
        ]

    def _mark_nonfinite_by_design(self, named: Iterable[tuple[str, Tensor]]) -> None:
        new = [(name, tensor) for name, tensor in named if name not in self._known]
        self._known.update(name for name, _ in new)
        self.nonfinite_by_design.update(name for name, tensor in new if not _is_finite(tensor))


def _tensors(contents: Iterable[Mapping[str, Tensor | None]]) -> list[Tensor]:
    return [tensor for held in contents if held for tensor in held.values() if tensor is not None]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_finite(tensor: Tensor) -> bool:
    tensor = local(tensor)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(torch.isfinite(numbers_of(tensor)).all())


def _warn(text: str) -> None:
    logging.getLogger("safetrain").warning("%s", text)
