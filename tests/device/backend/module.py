"""What torch finds under the name of the device, and its installation."""

import ctypes  # noqa: F401  loaded before torch's hooks need it
import weakref

import torch

from . import copies
from .memory import LEDGER, is_ours
from .operations import register
from .state import KNOBS, NAME
from .waits import wait

NUM_DEVICES = 2


class Module:
    Stream, Event = copies.Stream, copies.Event
    stream, current_stream = staticmethod(copies.use), staticmethod(copies.current)

    def __init__(self):
        self.generators = [torch.Generator() for _ in range(NUM_DEVICES)]
        self._index = 0

    def is_available(self):
        return True

    is_initialized = is_available

    def current_device(self):
        return self._index

    def set_device(self, index):
        self._index = _index(index)

    def device_count(self):
        return NUM_DEVICES

    def get_device_name(self, device=None):
        return "test device"

    def _is_in_bad_fork(self):
        return False

    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]

    def manual_seed_all(self, seed):
        for generator in self.generators:
            generator.manual_seed(seed)

    def get_rng_state(self, device=None):
        return self.generators[self._index if device is None else _index(device)].get_state()

    def set_rng_state(self, state, device=None):
        self.generators[self._index if device is None else _index(device)].set_state(state)

    def synchronize(self, device=None):
        wait("synchronize")

    def memory_allocated(self, device=None):
        return LEDGER.used[0 if device is None else _index(device)]

    def max_memory_allocated(self, device=None):
        return LEDGER.peak[0 if device is None else _index(device)]

    def empty_cache(self):
        KNOBS.check_alive()

    def mem_get_info(self, device=None):
        limit = KNOBS.memory_limit or 1 << 40
        return limit - self.memory_allocated(device), limit


MODULE = Module()


def _index(device):
    if isinstance(device, int):
        return device
    return torch.device(device).index or 0


def install():
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as set_up

    set_up(NAME, backend_module=MODULE)
    torch.__future__.set_swap_module_params_on_conversion(
        True
    )  # else Module.to() parts parameters from their optimizer
    register(MODULE)
    _patch_what_is_not_dispatched()


def _patch_what_is_not_dispatched():
    tensor, pinned = torch.Tensor, weakref.WeakSet()
    tolist, empty = tensor.tolist, torch.empty
    tensor.tolist = lambda self: tolist(self.cpu() if is_ours(self) else self)

    def pin_memory(self, device=None):
        if not KNOBS.pins:
            raise NotImplementedError("this device cannot pin memory")
        copy = self.clone()
        pinned.add(copy.untyped_storage())
        return copy

    def new_empty(*args, pin_memory=False, **kwargs):
        if not pin_memory:
            return empty(*args, **kwargs)
        return empty(*args, **kwargs).pin_memory()

    tensor.pin_memory = pin_memory
    tensor.is_pinned = lambda self, device=None: self.device.type == "cpu" and self.untyped_storage() in pinned
    torch.empty = new_empty
