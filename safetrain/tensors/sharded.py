"""FSDP2: a model whose parameters are sharded over the processes, and what that means for the tensors of its state.

Each process holds one part of every parameter, of its gradient, of its moments and of its average (a `DTensor`); a block's
parameters are whole only while the block computes. Copies, audits and checks look at a process's own part and then agree.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from .._private import dtensor, modules
from ..errors import UsageError
from .module_globs import matching


def is_dtensor(tensor: Any) -> bool:
    """Whether each process holds a part of it only."""
    known = sys.modules.get("torch.distributed.tensor")  # importing it is slow; until somebody has, there is no DTensor
    return known is not None and isinstance(tensor, known.DTensor)


def any_dtensor(tensors: Iterable[Any]) -> bool:
    known = sys.modules.get("torch.distributed.tensor")
    return known is not None and any(isinstance(tensor, known.DTensor) for tensor in tensors)


def is_sharded(model: nn.Module) -> bool:
    return any_dtensor(model.parameters())


def local(tensor: Tensor) -> Tensor:
    """This process's part, in the same memory; a tensor that is not sharded is all here."""
    return tensor.detach().to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def full_tensor(tensor: Tensor) -> Tensor:
    """All of it, on every process. Every process must ask for it."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The norm over all processes' parts, equal on each; what is not sharded counts once. Every process must ask for it."""
    sharded, others = [t for t in tensors if is_dtensor(t)], [t for t in tensors if not is_dtensor(t)]
    norms = [full_tensor(get_total_norm(sharded)), *([get_total_norm(others)] if others else [])]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def empty_like(
    tensor: Tensor, dtype: torch.dtype | None = None, device: str | None = None, pin: bool = False
) -> Tensor:
    """Memory for the values of a tensor, sharded as it is."""
    own = local(tensor)
    memory = torch.empty(
        own.shape, dtype=dtype or own.dtype, device=own.device if device is None else device, pin_memory=pin
    )
    return _from_part(memory, tensor) if is_dtensor(tensor) else memory


def shard_like(full: Tensor, tensor: Tensor) -> Tensor:
    """The values of `full`, which every process has all of, sharded as `tensor` is."""
    if not is_dtensor(tensor) or is_dtensor(full) or full.shape != tensor.shape:
        return full
    return _from_part(dtensor.part_of(full, tensor).to(local(tensor).device, copy=True), tensor)


def _from_part(part: Tensor, tensor: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


@torch.no_grad()
def put(target: Tensor, saved: Tensor) -> None:
    """Give the tensor these values, in place. `saved` is sharded as it is, or whole."""
    local(target).copy_(local(shard_like(saved, target)))


def shard_model(
    model: nn.Module,
    device: torch.device,
    blocks: Sequence[str],
    islands: Sequence[str],
    dtype: torch.dtype | None,
    optimizer: Optimizer | None = None,
) -> None:
    """Shard the parameters over the processes, in place; all start with those of process 0.

    `blocks`: globs over names or types of the modules that are made whole one at a time; without any, the elements of every
    ModuleList. `islands`: names of modules that get their parameters in float32; the others get them in `dtype`, if that is
    given. The parameters of the model are other objects afterwards: an optimizer that was made for them is given the new ones.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    before = _named(model)
    with torch.no_grad():
        for tensor in (*before.values(), *model.buffers()):
            value = tensor.detach().contiguous()
            dist.broadcast(value, 0)
            tensor.copy_(value)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    low = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else MixedPrecisionPolicy()
    high = MixedPrecisionPolicy(param_dtype=torch.float32) if dtype else MixedPrecisionPolicy()
    if dtype:  # running statistics stay in float32, and go with parameters of their own type only
        kept = [name for name, module in model.named_modules() if isinstance(module, modules.batch_norms())]
        islands = [*islands, *kept]
    units = _units(model, blocks, islands)
    for name in sorted(units, key=lambda name: -name.count(".")):  # inner ones first: an outer one takes what is left
        module = model.get_submodule(name)
        if next(module.parameters(), None) is not None:
            fully_shard(module, mesh=mesh, mp_policy=high if name in set(islands) else low)
    # By default the outermost module stays whole after a forward pass, also after one that no backward follows.
    fully_shard(model, mesh=mesh, mp_policy=low, reshard_after_forward=True)
    if optimizer is not None:
        _hand_over(optimizer, before, model)


def keep_sharded(model: nn.Module) -> None:
    """For a model that was sharded by its owner: between passes its parameters are the parts, never made whole."""
    dtensor.check_placements(model)
    for module in model.modules():
        if callable(reshard := getattr(module, "set_reshard_after_forward", None)):
            reshard(True, recurse=False)


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _units(model: nn.Module, blocks: Sequence[str], islands: Iterable[str]) -> set[str]:
    if blocks:
        names = set(matching(model, blocks, "loop.shard_blocks"))
    else:
        lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        names = {f"{name}.{index}" if name else str(index) for name, found in lists for index in range(len(found))}
    names |= set(islands)
    return {
        name for name in names if name and not isinstance(model.get_submodule(name), (nn.ModuleList, nn.ModuleDict))
    }


def _hand_over(optimizer: Optimizer, before: dict[str, nn.Parameter], model: nn.Module) -> None:
    if optimizer.state:
        raise UsageError(
            "the optimizer has taken steps already, on parameters that are sharded over the processes now.\n"
            "To fix: make a new optimizer, or let the trainer build it (build_optimizer, or `optimizer` in the config)."
        )
    now = _named(model)
    successors = {id(parameter): now[name] for name, parameter in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [successors.get(id(parameter), parameter) for parameter in group["params"]]
