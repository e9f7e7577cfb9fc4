"""Every operation of the device: checked, and then run on the CPU."""

import contextlib
import random

import torch
from torch.utils import _pytree as pytree

from . import copies
from .memory import LEDGER, is_ours, on_device, on_host
from .state import KNOBS, NAME
from .waits import wait

_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_SIZE_FROM_VALUES = {
    *("aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::bincount"),
    *("aten::repeat_interleave", "aten::_linalg_check_errors", "aten::is_nonzero"),
}
_TAKES_CPU_INDICES = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_SUMS = ("mm", "sum", "mean", "embedding_dense_backward", "index_add", "scatter_add", "convolution", "bmm")
_kept = []
_noise = random.Random(0)


def register(module):
    every, some = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _kept.extend((every, some))  # they are undone when they are collected
    every.fallback(lambda op, *args, **kwargs: _run(module, op, args, kwargs), "PrivateUse1")
    metadata = torch.ops.aten.set_
    for name, function in {
        "_local_scalar_dense": _item,
        "copy_": _copy,
        "_copy_from": lambda source, target, non_blocking=False: _copy(target, source, non_blocking),
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "set_.source_Tensor": _on_metadata(metadata.source_Tensor),
        "set_.source_Storage": _on_metadata(metadata.source_Storage),
        "set_.source_Storage_storage_offset": _on_metadata(metadata.source_Storage_storage_offset),
    }.items():
        some.impl(name, function, "PrivateUse1")

    cast, every = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _kept.extend((cast, every))
    for names, dtype in ((_LOW, None), (_HIGH, torch.float32)):
        for name in names:
            cast.impl(name, _autocast(_overload(name), dtype), "AutocastPrivateUse1")


_LOW = ("mm", "addmm", "matmul", "linear", "bmm", "conv2d", "scaled_dot_product_attention")
_HIGH = (
    "mse_loss",
    "nll_loss",
    "cross_entropy_loss",
    "log_softmax.int",
    "softmax.int",
    "layer_norm",
    "exp",
    "log",
    "pow.Tensor_Scalar",
)


def _overload(name):
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _autocast(op, dtype):
    """Floating-point arguments in another type: that of autocast, or the given one."""
    without = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def run(*args, **kwargs):
        to = dtype or torch.get_autocast_dtype(NAME)

        def converted(item):
            floats = is_ours(item) and item.is_floating_point() and item.dtype is not torch.float64
            return item.to(to) if floats else item

        with torch._C._ExcludeDispatchKeyGuard(without):
            args, kwargs = pytree.tree_map(converted, (args, kwargs))
            return op(*args, **kwargs)

    return run


def _item(self):
    wait("item")
    copies.deliver_to([self])
    return on_host(self).item()


def _copy(self, src, non_blocking=False):
    KNOBS.check_alive()
    copies.deliver_to([t for t in (self, src) if is_ours(t)])
    crosses = is_ours(self) is not is_ours(src)
    if crosses and non_blocking and (not KNOBS.pins or (src if is_ours(self) else self).is_pinned()):
        if KNOBS.late_copies:
            copies.enqueue(self, src)
            return self
    elif crosses:
        wait("to host" if is_ours(src) else "to device")
    (on_host(self) if is_ours(self) else self).copy_((on_host(src) if is_ours(src) else src).expand(self.shape))
    return self


def _empty(size, *, dtype=None, device=None, memory_format=None, **_):
    layout = memory_format or torch.contiguous_format
    return _allocated(lambda: torch.empty(size, dtype=dtype, device="cpu", memory_format=layout), device)


def _empty_strided(size, stride, *, dtype=None, device=None, **_):
    return _allocated(lambda: torch.empty_strided(size, stride, dtype=dtype, device="cpu"), device)


def _allocated(make, device):
    KNOBS.check_alive()
    return _labelled(make(), 0 if device is None else torch.device(device).index or 0)


def _labelled(tensor, index):
    if tensor.dtype is torch.float64 and not KNOBS.has_float64:
        raise TypeError("Cannot convert a tensor to float64 on this device, which does not support it")
    LEDGER.check_room(index, tensor.untyped_storage().nbytes())
    return on_device(tensor, index)


def _on_metadata(op):
    """The CPU's kernel, which changes sizes, strides and storage only."""
    return lambda *args, **kwargs: op.redispatch(_ON_CPU, *args, **kwargs)


@contextlib.contextmanager
def _numbers_of(generator):
    host = torch.get_rng_state()
    torch.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.get_rng_state())
        torch.set_rng_state(host)


def _run(module, op, args, kwargs):
    schema = op._schema
    KNOBS.check_alive()
    if schema.returns and all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        return op.redispatch(_ON_CPU, *args, **kwargs)  # a view
    flat, spec = pytree.tree_flatten((args, kwargs))
    _check_devices(op, flat)
    if schema.name in _SIZE_FROM_VALUES or (schema.name in _TAKES_CPU_INDICES and _indexes_by_mask(flat)):
        wait(schema.name)
    ours = {id(item): (item, None) for item in flat if is_ours(item)}
    copies.deliver_to([item for item, _ in ours.values()])
    ours = {key: (item, on_host(item)) for key, (item, _) in ours.items()}
    index = next((item.device.index for item, _ in ours.values()), None)
    if index is None:
        asked = next((i for i in flat if isinstance(i, torch.device)), None)
        index = 0 if asked is None else asked.index or 0
    lowered = [
        ours[id(i)][1] if id(i) in ours else torch.device("cpu") if isinstance(i, torch.device) else i for i in flat
    ]
    low_args, low_kwargs = pytree.tree_unflatten(lowered, spec)
    low_kwargs.pop("pin_memory", None)
    outs = {arg.name: kwargs[arg.name] for arg in schema.arguments if arg.is_out and arg.name in kwargs}
    low_kwargs |= {
        name: torch.empty(0, dtype=out.dtype) for name, out in outs.items()
    }  # what came by DLPack cannot grow
    draws = torch.Tag.nondeterministic_seeded in op.tags and not any(isinstance(i, torch.Generator) for i in flat)
    with _numbers_of(module.generators[index]) if draws else contextlib.nullcontext():
        result = _computed(op, low_args, low_kwargs)
    if outs:
        return _put_out(outs, low_kwargs, index)
    by_host = {id(host): item for item, host in ours.values()}
    for item, host in ours.values():
        if host.shape != item.shape:  # resize_
            item.data = on_device(host, index)

    def back(value):
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in by_host:
            return by_host[id(value)]
        shares = any(value.untyped_storage().data_ptr() == h.untyped_storage().data_ptr() for _, h in ours.values())
        return on_device(value, index) if shares else _labelled(value, index)

    return pytree.tree_map(back, result)


def _check_devices(op, flat):
    indices = {item.device.index for item in flat if is_ours(item)}
    if len(indices) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices ({op})")
    name = op._schema.name
    takes_scalars = torch.Tag.pointwise in op.tags or any(
        word in name for word in ("lerp", "where", "fill", "_foreach")
    )
    for item in flat:
        if not isinstance(item, torch.Tensor) or is_ours(item):
            continue
        if name in _TAKES_CPU_INDICES:
            wait("to device")
        elif not (takes_scalars and item.dim() == 0) and "tensor_lr" not in op._schema.overload_name:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices ({op})")


def _indexes_by_mask(flat):
    return any(getattr(item, "dtype", None) is torch.bool for item in flat[1:])


def _computed(op, args, kwargs):
    try:
        result = op(*args, **kwargs)
    except IndexError:
        if not KNOBS.poisons:
            raise
        KNOBS.is_poisoned = True  # what comes of it is garbage, and nobody knows yet
        args, kwargs = pytree.tree_map(lambda i: torch.zeros_like(i) if _is_index(i) else i, (args, kwargs))
        result = op(*args, **kwargs)
    if KNOBS.noise and any(word in op._schema.name for word in _SUMS):
        result = pytree.tree_map(_nudged, result)
    return result


def _is_index(item):
    return isinstance(item, torch.Tensor) and item.dtype in (torch.int64, torch.int32)


def _nudged(item):
    if not (isinstance(item, torch.Tensor) and item.is_floating_point()):
        return item
    return item * (1 + _noise.choice((-1, 0, 1)) * torch.finfo(item.dtype).eps)


def _put_out(outs, made, index):
    for name, out in outs.items():
        if out.shape == made[name].shape:
            (on_host(out) if is_ours(out) else out).copy_(made[name])
        else:
            out.data = _labelled(made[name], index) if is_ours(out) else made[name]
    return next(iter(outs.values())) if len(outs) == 1 else tuple(outs.values())
