"""Copies of a training state in host memory."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._private import foreach
from ..tensors.checksum import checksums
from ..tensors.devices import can_pin, is_host, module_of, recorded_event, side_stream, synchronize
from ..tensors.sharded import local, sharded_as
from .state import TrainState

ALIGNMENT = 64
BLOCK = 2**26
"""Bytes of a block of memory, unless a tensor is larger. Allocators of pinned memory round sizes up to a power of two."""


LARGE = 2**20
"""Bytes of a tensor from which it is copied within the host's memory while training goes on."""


class Frozen:
    """Weights that training does not change, copied once for all snapshots. That they have not changed is checked each time."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[int, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(local(value).nbytes for _, value in self._values.values())

    def values_of(self, tensors: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
        """Copies on the host of those with these names, shared with earlier calls as long as the bits are the same."""
        chosen = [name for name in tensors if name in names]
        if not chosen:
            return {}
        for name, number in zip(chosen, checksums([tensors[name] for name in chosen]), strict=True):
            known = self._values.get(name)
            if known is None or known[0] != number or known[1].shape != tensors[name].shape:
                value = local(tensors[name]).to("cpu", copy=True)
                self._values[name] = number, sharded_as(value, tensors[name])
        return {name: self._values[name][1] for name in chosen}


@dataclass
class _Transfer:
    """A copy from a device that goes on while training does. Nothing of the sources may be written before `order`."""

    device: torch.device
    events: list[Any]
    sources: list[Tensor]
    versions: list[int]

    @property
    def is_undisturbed(self) -> bool:
        return [source._version for source in self.sources] == self.versions


class _HostTransfer:
    """A copy within the host's memory by a thread, which lets others run meanwhile."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._pairs = [(own, source, source._version) for own, source in pairs]
        self._disturbed = False
        self._thread = threading.Thread(target=self._copy, name="safetrain-copy", daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        for own, source, version in self._pairs:
            # One thread, whatever torch uses: the cores are for the step that runs.
            np.copyto(own.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
            self._disturbed |= source._version != version

    def finish(self) -> bool:
        """Wait for it; whether nothing was written before it was copied."""
        self._thread.join()
        return not self._disturbed


class Copy:
    """Memory for one copy, allocated once: pinned if the state is on a device that can copy while it computes."""

    def __init__(self) -> None:
        self._layout: list[tuple[str, torch.Size, torch.dtype]] = []
        self._memory: dict[str, Tensor] = {}
        self._blocks: list[Tensor] = []
        self._transfer: _Transfer | _HostTransfer | None = None
        self._arriving: list[Any] = []
        """What the host has to wait for until the values are here."""

    @property
    def is_here(self) -> bool:
        """`finish` would wait for nothing."""
        return self._transfer is None and not self._arriving

    def arrived(self) -> None:
        """Something that came after it has reached the host."""
        self._arriving = []

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    @torch.no_grad()
    def take(
        self, state: TrainState, kept: Mapping[str, Tensor] | None = None, at_once: Collection[str] | None = None
    ) -> TrainState:
        """The copy. It is overwritten by the next call. `kept`: values that need not be copied. `at_once`: tensors that may be written
        before `order` is called; all others may still be on their way until `finish`. None: all are here when this returns."""
        self.finish()
        kept = kept or {}
        sources = {name: tensor for name, tensor in state.tensors.items() if name not in kept}
        layout = [(name, tensor.shape, tensor.dtype) for name, tensor in sources.items()]
        if layout != self._layout:
            self._arrange(sources)
            self._layout = layout
        self._copy(sources, at_once)
        return TrainState(
            {name: kept[name] if name in kept else self._memory[name] for name in state.tensors}, state.rest
        )

    def _arrange(self, sources: Mapping[str, Tensor]) -> None:
        """A place for each tensor, in as few blocks as possible."""
        on_device = any(not is_host(local(tensor).device) for tensor in sources.values())
        sizes = {name: -(-local(tensor).nbytes // ALIGNMENT) * ALIGNMENT for name, tensor in sources.items()}
        self._blocks, self._memory = [], {}
        capacity, used, places = max([BLOCK, *sizes.values()]), 0, []
        bounds: list[int] = [0]
        for name, size in sizes.items():
            if used + size > capacity:
                bounds.append(used)
                used = 0
            places.append((name, len(bounds) - 1, used))
            used += size
        ends = [*bounds[1:], used]
        self._blocks = [_block(end, on_device) for end in ends]
        for name, block, start in places:
            own = local(sources[name])
            part = self._blocks[block][start : start + own.nbytes].view(own.dtype).reshape(own.shape)
            self._memory[name] = sharded_as(part, sources[name])

    def _copy(self, sources: Mapping[str, Tensor], at_once: Collection[str] | None) -> None:
        pairs = {name: (local(self._memory[name]), local(tensor)) for name, tensor in sources.items()}
        devices = {source.device for _, source in pairs.values() if not is_host(source.device)}
        stream = side_stream(next(iter(devices))) if at_once is not None and len(devices) == 1 else None
        is_pinned = bool(devices) and all(block.is_pinned() for block in self._blocks if block.nbytes)
        if not devices and at_once is not None:
            late = {name for name, (_, source) in pairs.items() if name not in at_once and _is_large(source)}
            now = [pairs[name] for name in pairs if name not in late]
            foreach.copy_([own for own, _ in now], [source for _, source in now])
            self._transfer = _HostTransfer([pairs[name] for name in late]) if late else None
            return
        if stream is None or at_once is None or not is_pinned:
            for own, source in pairs.values() if is_pinned else ():
                own.copy_(source, non_blocking=True)
            if not is_pinned:
                foreach.copy_([own for own, _ in pairs.values()], [source for _, source in pairs.values()])
            for device in devices if is_pinned else ():  # one wait, and not one for each tensor
                synchronize(device)
            return
        device = next(iter(devices))
        module = module_of(device)
        late = {name for name in pairs if name not in at_once and not is_host(pairs[name][1].device)}
        for name, (own, source) in pairs.items():
            if name not in late:
                own.copy_(source, non_blocking=True)
        first = recorded_event(device)
        stream.wait_stream(module.current_stream(device))
        with module.stream(stream):
            for name in late:
                own, source = pairs[name]
                own.copy_(source, non_blocking=True)
            second = recorded_event(device)
        held = [pairs[name][1] for name in late]
        self._transfer = _Transfer(device, [first, second], held, [source._version for source in held])

    def order(self) -> bool:
        """What is asked of the device from now on waits for the copy, and may write what is copied. The host waits only for what is
        copied within its own memory. False: something was written before, and the copy is worth nothing."""
        transfer, self._transfer = self._transfer, None
        if transfer is None:
            return True
        if isinstance(transfer, _HostTransfer):
            return transfer.finish()
        for event in transfer.events:
            event.wait(module_of(transfer.device).current_stream(transfer.device))
        self._arriving = transfer.events
        return transfer.is_undisturbed

    def finish(self) -> bool:
        """All values are here. As `order`, and the host waits, too."""
        is_whole = self.order()
        arriving, self._arriving = self._arriving, []
        for event in arriving:
            event.synchronize()
        return is_whole


def _is_large(tensor: Tensor) -> bool:
    """Worth a thread, and one piece of memory."""
    return tensor.nbytes >= LARGE and tensor.dim() > 0 and tensor.is_contiguous() and tensor.layout is torch.strided


def _block(num_bytes: int, pin: bool) -> Tensor:
    if pin and num_bytes and can_pin():
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # no more can be pinned
            pass
    return torch.empty(num_bytes, dtype=torch.uint8)
