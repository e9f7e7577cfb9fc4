"""One interface to devices of every kind: random state, pinned memory, streams, memory in use, and whether the device
still works.

A kind of device need not offer all of it. What it lacks is done without: a copy then blocks, or a number is unknown.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_in_use: dict[torch.device, None] = {}


def is_host(device: torch.device) -> bool:
    return device.type == "cpu"


def module_of(device: torch.device) -> Any:
    """`torch.cuda`, `torch.xpu`, …; None for the CPU, and for a device without a module of its own."""
    if device.type in ("cpu", "meta"):
        return None
    try:
        return torch.get_device_module(device)
    except RuntimeError:
        return None


def with_index(device: torch.device) -> torch.device:
    """`cuda` is whichever GPU is the current one; this says which."""
    index: int | None = device.index
    if is_host(device) or index is not None:
        return device
    return torch.device(device.type, _asked(device, "current_device") or 0)


def _asked(device: torch.device, name: str, *args: Any) -> Any:
    """What a function of the device's module returns; None if there is no such function, or if it fails."""
    function = getattr(module_of(device), name, None)
    if function is None:
        return None
    try:
        return function(*args)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):
        return None


def place(module: nn.Module, device: torch.device) -> None:
    """Move a module that is on the host as a whole to the device. One that is on some device already was put there."""
    tensors = [*module.parameters(), *module.buffers()]
    if not is_host(device) and all(is_host(tensor.device) for tensor in tensors):
        module.to(device)


# ---- random numbers ------------------------------------------------------------------------------------------------


def note_in_use(devices: Iterable[torch.device]) -> None:
    """From now on the random state of these is captured and restored with that of the host."""
    for device in devices:
        if module_of(device) is not None and hasattr(module_of(device), "get_rng_state"):
            _in_use.setdefault(with_index(device))


def random_states() -> dict[str, Tensor]:
    """By device, of those that are in use; if none is known to be, of the current accelerator if it was used at all."""
    if not _in_use and (current := _initialised_accelerator()) is not None:
        note_in_use([current])
    return {str(device): _random_state(device) for device in _in_use}


def _random_state(device: torch.device) -> Tensor:
    get = module_of(device).get_rng_state
    try:
        state: Tensor = get(device)
    except TypeError:  # there is only one device of its kind
        state = get()
    return state


def set_random_states(states: dict[str, Tensor]) -> None:
    """Also of devices that have another index now: then in the order in which they came into use. Those of another kind of device
    fit none, and are left out."""
    for name, device in _places(states).items():
        module = module_of(device)
        try:
            module.set_rng_state(states[name], device)
        except TypeError:
            module.set_rng_state(states[name])


def unplaced(states: dict[str, Tensor]) -> list[str]:
    """Devices of which there is a state and that have no counterpart here: what is drawn there will be other numbers."""
    return [name for name in states if name not in _places(states)]


def _places(states: dict[str, Tensor]) -> dict[str, torch.device]:
    known = {str(device): device for device in _in_use}
    if states.keys() == known.keys():
        return known
    saved = list(states)
    if not known and (current := _initialised_accelerator()) is not None:
        known = {str(current): current}
    places: dict[str, torch.device] = {}
    for kind in {name.partition(":")[0] for name in saved}:
        there = [name for name in saved if name.partition(":")[0] == kind]
        here = [device for device in known.values() if device.type == kind]
        same = {name: known[name] for name in there if name in known}
        places |= same if len(same) == len(there) else dict(zip(there, here, strict=False))
    return places


def _initialised_accelerator() -> torch.device | None:
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    module = None if device is None else module_of(device)
    if device is None or not hasattr(module, "get_rng_state") or _asked(device, "is_initialized") is False:
        return None  # asking for its state would initialise it
    return with_index(device)


# ---- memory --------------------------------------------------------------------------------------------------------


def free_cached_memory(device: torch.device) -> None:
    """Give back what nobody uses any more. Slow."""
    gc.collect()
    _asked(device, "empty_cache")


def memory(device: torch.device) -> dict[str, int]:
    """Bytes `used`, their `peak`, `reserved` from the device, and `total`: what of these the device can tell."""
    numbers = {
        "used": _asked(device, "memory_allocated", device),
        "peak": _asked(device, "max_memory_allocated", device),
        "reserved": _asked(device, "memory_reserved", device),
        "total": (_asked(device, "mem_get_info", device) or (None, None))[1],
    }
    return {name: number for name, number in numbers.items() if number is not None}


@functools.cache
def widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device that does not have it."""
    if is_host(device):
        return torch.float64
    try:
        torch.ones((), dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


def wide(tensor: Tensor) -> Tensor:
    """In the widest type that its device has, so that sums of it are exact enough."""
    return tensor.to(widest_float(tensor.device))


def pinned(tensor: Tensor) -> Tensor:
    """The values in memory that a device can copy from while the host goes on, and that nobody else writes to. A tensor that is pinned
    already is returned as it is; where memory cannot be pinned, it is an ordinary copy."""
    if not can_pin():
        return tensor.clone()
    try:
        return tensor.pin_memory()
    except RuntimeError:  # not this one (sparse, say), or no more memory can be pinned
        return tensor.clone()


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device, without a wait of the host."""
    return (
        tensor
        if tensor.device == device
        else pinned(tensor).to(device, non_blocking=True)
        if is_host(tensor.device)
        else tensor.to(device)
    )


@functools.cache
def can_pin() -> bool:
    try:
        return torch.accelerator.is_available() and torch.ones(1).pin_memory().is_pinned()
    except (RuntimeError, NotImplementedError):
        return False


# ---- streams -------------------------------------------------------------------------------------------------------


@functools.cache
def side_stream(device: torch.device) -> Any:
    """A stream beside the one that computes, the same each time; None where there are no streams."""
    module = module_of(device)
    if module is None or not all(hasattr(module, name) for name in ("Stream", "Event", "stream", "current_stream")):
        return None
    try:
        return module.Stream(device=device)
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def recorded_event(device: torch.device) -> Any:
    """Has happened when all that was asked of the device before is done; None where there are no events."""
    module = module_of(device)
    try:
        event = module.Event()
        event.record()
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):
        return None
    return event


def synchronize(device: torch.device) -> None:
    """Wait until all that was asked of the device is done."""
    if is_host(device):
        return
    try:
        module_of(device).synchronize()
    except (AttributeError, NotImplementedError, TypeError):
        torch.ones((), device=device).item()


def still_works(device: torch.device) -> bool:
    """False after an error that a device does not recover from: an index out of range in a kernel, an illegal access."""
    if is_host(device):
        return True
    try:
        return torch.ones((), device=device).item() == 1.0
    except torch.OutOfMemoryError:
        return True
    except RuntimeError:
        return False
