"""Replays a step on the host, for a model that lives on another device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ..core.loss import split_loss
from ..precision.autocast import autocast_disabled, cast_floats
from ..tensors.nest import to_device
from .replay import Replayer, Result
from .values import FINITE, kind_of

MAX_ON_HOST = 50_000_000
"""Weights of a model that is not too slow to run on the host once."""


def in_double_on_host(replayer: Replayer) -> Result:
    """The step in double precision. What its loss function holds on the device makes it raise, which is the result then."""
    replayer.num_replays += 1
    copies: dict[int, Any] = {}
    for tensor in [*replayer.model.parameters(), *replayer.model.buffers()]:
        values = tensor.detach().cpu()
        values = values.double() if tensor.is_floating_point() else values.clone()
        is_parameter = isinstance(tensor, nn.Parameter)
        copies[id(tensor)] = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
    result, losses, default = Result(), [], torch.get_default_dtype()
    try:
        with autocast_disabled(), torch.compiler.set_stance("force_eager"):
            torch.set_default_dtype(torch.float64)
            model = copy.deepcopy(replayer.model, copies)  # with these in the places of its tensors
            for batch in replayer.step.window:
                on_host = cast_floats(to_device(batch, torch.device("cpu")), torch.float64)
                loss, _ = split_loss(replayer.step.loss_fn(model, on_host), "loss_fn")
                losses.append(loss.detach())
                if kind_of(loss) == FINITE and loss.requires_grad:
                    torch.autograd.backward(loss / len(replayer.step.window))
        result.loss = torch.stack(losses).mean()
        result.bad_gradients = [n for n, p in model.named_parameters() if p.grad is not None and kind_of(p.grad)]
    except Exception as error:
        result.error = error
    finally:
        torch.set_default_dtype(default)
    return result
