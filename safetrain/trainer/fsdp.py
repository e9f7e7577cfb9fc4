"""FSDP2: shards the parameters of a model over the processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from .._private import dtensor, modules
from ..distributed.machine import OTHER_MESHES
from ..errors import UsageError
from ..tensors.module_globs import matching
from ..tensors.sharded import is_dtensor


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
    is_empty = _check_meta(model)
    with torch.no_grad():
        for tensor in () if is_empty else (*before.values(), *model.buffers()):
            value = tensor.detach().to(device).contiguous()  # one at a time: the model may be larger than the device
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
    _take_means(model, device)
    if is_empty:
        _initialise(model, device)
    if optimizer is not None:
        _hand_over(optimizer, before, model)


def _check_meta(model: nn.Module) -> bool:
    """Whether the model was made on the meta device, without values; then each module must be able to make its own."""
    on_meta = {name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta}
    if not on_meta:
        return False
    owners = {name.rpartition(".")[0] for name in on_meta}
    mute = [name for name in owners if not callable(getattr(model.get_submodule(name), "reset_parameters", None))]
    if mute or any(not parameter.is_meta for parameter in model.parameters()):
        what = f"{sorted(mute)[0] or 'the model itself'} has no reset_parameters()" if mute else "only some are"
        raise UsageError(
            f"parameters are on the meta device, and {what}, so they cannot be given values.\n"
            "To fix: make the whole model on the meta device, of modules with reset_parameters(); or make it on the CPU, from where it "
            "is sharded one unit at a time."
        )
    return True


def _initialise(model: nn.Module, device: torch.device) -> None:
    """Give each process's part its first values."""
    model.to_empty(device=device)
    with torch.no_grad():
        for module in model.modules():
            if any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
                module.reset_parameters()  # type: ignore[operator]


def keep_sharded(model: nn.Module, device: torch.device) -> None:
    """For a model that was sharded by its owner: between passes its parameters are the parts, never made whole."""
    _check_meshes(model)
    dtensor.check_placements(model)
    _take_means(model, device)
    for module in model.modules():
        if callable(reshard := getattr(module, "set_reshard_after_forward", None)):
            reshard(True, recurse=False)


def _check_meshes(model: nn.Module) -> None:
    """Each rank trains on data of its own, and with the others makes up the whole model: only FSDP2 goes with that."""
    from torch.distributed.fsdp import FSDPModule

    of_fsdp = {id(p) for module in model.modules() if isinstance(module, FSDPModule) for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if not is_dtensor(parameter):
            continue
        num_shards = sum(not placement.is_replicate() for placement in parameter.placements)  # type: ignore[attr-defined]
        if id(parameter) not in of_fsdp or num_shards > 1:
            raise UsageError(
                f"{name} is sharded by tensor parallelism (or in another way than by FSDP2), with which several ranks have to train on the "
                f"same data; SafeTrainer gives each its own.\nTo fix: {OTHER_MESHES}."
            )


def _take_means(model: nn.Module, device: torch.device) -> None:
    """Gradients are the mean over the processes. Where a backend adds although it is asked for the mean, without a word (gloo of torch
    2.8), FSDP is told to ask for the sum and to divide it."""
    if _averages(device):
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def _averages(device: torch.device) -> bool:
    import torch.distributed as dist

    # What FSDP calls; the first is its newer name.
    reduce = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
    mean = torch.zeros(1, device=device)
    try:
        reduce(mean, torch.ones(dist.get_world_size(), device=device), op=dist.ReduceOp.AVG)
    except (RuntimeError, ValueError):
        return False
    return mean.item() == 1.0


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
