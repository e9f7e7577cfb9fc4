"""FSDP2: shards the parameters of a model over the processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from .._private import dtensor, modules
from ..errors import UsageError
from ..tensors.module_globs import matching


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
