"""CPU memory under the label of the device, and how much of it is in use."""

import collections
import ctypes
import weakref

import torch

from .state import KNOBS, NAME

CPU, EXTENSION = 1, 12
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class Ledger:
    """Bytes in use and their peak, by the index of the device."""

    def __init__(self):
        self.used, self.peak = collections.Counter(), collections.Counter()
        self._holders = collections.Counter()
        self._sizes = {}

    def reset_peak(self):
        self.peak = self.used.copy()

    def check_room(self, index, num_bytes):
        if KNOBS.memory_limit is not None and self.used[index] + num_bytes > KNOBS.memory_limit:
            raise torch.OutOfMemoryError(
                f"{NAME} out of memory. Tried to allocate {num_bytes} bytes. {self.used[index]} of {KNOBS.memory_limit} are in use."
            )

    def hold(self, storage, index):
        """Count this memory until its last holder lets go."""
        place = storage.data_ptr()
        if not place:
            return
        if not self._holders[place]:
            self._sizes[place] = index, storage.nbytes()
            self.used[index] += storage.nbytes()
            self.peak[index] = max(self.peak[index], self.used[index])
        self._holders[place] += 1
        weakref.finalize(storage, self._let_go, place).atexit = False

    def _let_go(self, place):
        self._holders[place] -= 1
        if not self._holders[place]:
            index, size = self._sizes.pop(place)
            self.used[index] -= size
            del self._holders[place]


LEDGER = Ledger()


def is_ours(item):
    return isinstance(item, torch.Tensor) and item.device.type == NAME


def _relabelled(tensor, kind, index=0):
    capsule = torch._C._to_dlpack(tensor.detach())
    device = (ctypes.c_int32 * 2).from_address(_pointer(capsule, b"dltensor") + 8)
    device[0], device[1] = kind, index
    return torch._C._from_dlpack(capsule)


def on_host(tensor):
    """The same memory as a CPU tensor."""
    if not tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return _relabelled(tensor, CPU)


def on_device(tensor, index=0):
    """The same memory as a tensor of the device."""
    tensor = tensor.resolve_conj().resolve_neg()
    LEDGER.check_room(index, 0)
    relabelled = _relabelled(tensor, EXTENSION, index)
    LEDGER.hold(relabelled.untyped_storage(), index)
    LEDGER.check_room(index, 0)
    return relabelled
