"""The optimizer of a config, with torch's fused kernel where the config leaves the kernel open.

One fused kernel updates all parameters: a step of many small tensors takes a fifth to a third of the time, and the numbers differ in the last
bits. Importing this module does not import torch, which `safetrain explain` does without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..config.targets import instantiate, static_signature
from ..config.tree import TARGET

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

ALWAYS_FUSED = tuple(
    f"{module}.{name}" for module in ("safetrain.optimizers", "safetrain.optim.optimizers") for name in ("adamw", "sgd")
)


def build_optimizer(node: Mapping[str, Any], model: nn.Module) -> Optimizer:
    """What a config's `optimizer` names, over the trainable parameters of `model`."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    # No fused kernel takes a sparse gradient, which only the first step would show.
    if _leaves_kernel_open(node) and not any(getattr(module, "sparse", False) for module in model.modules()):
        made: Optimizer = fused_where_supported(
            lambda params, **more: instantiate({**node, **more}, params), parameters
        )
        return made
    return instantiate(node, parameters)  # type: ignore[no-any-return]


def asks_for_fused(node: Mapping[str, Any]) -> bool:
    """The optimizer of this config is fused on every device with such a kernel. Found without importing anything."""
    return node[TARGET] in ALWAYS_FUSED or _leaves_kernel_open(node)


def _leaves_kernel_open(node: Mapping[str, Any]) -> bool:
    is_decided = node.keys() & {"fused", "foreach"} or node.get("differentiable")
    if is_decided or not node[TARGET].startswith("torch.optim."):
        return False
    signature = static_signature(node[TARGET])
    return signature is not None and "fused" in signature.parameters


def fused_where_supported(make: Callable[..., Any], params: Any, **options: Any) -> Any:
    """`make(params, fused=True, **options)`, or without `fused` where the fused kernel does not take these parameters.

    What it takes depends on device, dtype, optimizer and version of torch, and part of it is checked at the first step only, so a step of one
    number is tried for every kind of parameter.
    """
    plain = make(params, **options)
    parameters = [parameter for group in plain.param_groups for parameter in group["params"]]
    try:
        make([_one_number(like) for like in {_kind(p): p for p in parameters}.values()], fused=True, **options).step()
    except (RuntimeError, NotImplementedError):
        return plain
    # The groups of the plain one, because `params` may be an iterator that is used up.
    groups = [{key: value for key, value in group.items() if key != "fused"} for group in plain.param_groups]
    return make(groups, fused=True, **options)


def _kind(parameter: Any) -> tuple[Any, ...]:
    from ..tensors.sharded import is_dtensor

    sharded = (parameter.device_mesh, parameter.placements, parameter.dim()) if is_dtensor(parameter) else ()
    return parameter.device, parameter.dtype, *sharded


def _one_number(like: Any) -> Any:
    """Of a sharded parameter: one on each rank. Not every kernel takes those."""
    import torch

    from ..tensors.sharded import is_dtensor

    number = torch.zeros([1] * like.dim(), device=like.device, dtype=like.dtype)
    if is_dtensor(like):
        from torch.distributed.tensor import DTensor

        number = DTensor.from_local(number, like.device_mesh, like.placements, run_check=False)
    parameter = torch.nn.Parameter(number)
    parameter.grad = torch.zeros_like(parameter)
    return parameter
