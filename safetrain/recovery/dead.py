"""Is a network dead? A gradient of zero alone does not show it, because a loss may be flat where the network is good
enough. What its outputs depend on does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..step.step import Step
from ..tensors import gradients
from ..tensors.nest import copied, tensors_in
from ..tensors.rng import RandomState, undisturbed_rng
from ..tensors.sharded import is_sharded

LEAST = 1e-9
"""Share by which the outputs would change if all weights did by as much as they are, below which they do not depend on them."""


def is_dead(step: Step, windows: Sequence[Sequence[Any]], random_state: RandomState) -> bool:
    """No output of the model depends on any weight, for none of these windows. False where that cannot be seen.

    Biases do not count: the outputs of a network whose other layers are all dead are the bias of the last one.
    """
    if is_sharded(step.model):
        return False
    trained = [p for p in step.parameters if p.requires_grad]
    weights = [p for p in trained if p.dim() > 1] or trained
    size = gradients.global_norm([weight.detach() for weight in weights])
    dead = []
    for window in windows:
        try:
            with undisturbed_rng(), step.transaction.aside(), step.exchange.alone(step), step.patches.scope:
                random_state.restore()
                found = [_depends_on_none(step, copied(batch), weights, size) for batch in window]
            dead.append(torch.stack(found).all().float())
        except Exception:
            if step.exchange.world_size == 1:
                raise
            dead.append(torch.zeros((), device=step.device))  # the other ranks wait for an answer
    return float(step.exchange.mean(torch.stack(dead)).min()) == 1.0


def _depends_on_none(step: Step, batch: Any, weights: Sequence[Tensor], size: Tensor) -> Tensor:
    outputs: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        outputs.extend(o for o in tensors_in(output) if o.is_floating_point())

    hook = step.model.register_forward_hook(keep)
    try:
        with torch.compiler.set_stance("force_eager"):  # a compiled model would be compiled again for the hook
            step.forward(batch)
    finally:
        hook.remove()
    if not outputs:
        return torch.zeros((), dtype=torch.bool, device=step.device)
    grown = [output for output in outputs if output.requires_grad]
    if not grown:
        return torch.ones((), dtype=torch.bool, device=step.device)
    # In a random direction: the sum of a softmax, say, depends on nothing.
    total = torch.stack([(o.float() * torch.rand_like(o, dtype=torch.float32)).sum().to(step.device) for o in grown])
    found = torch.autograd.grad(total.sum(), weights, allow_unused=True)
    norm = gradients.global_norm([gradient for gradient in found if gradient is not None])
    return norm * size <= LEAST * total.detach().abs().sum()
