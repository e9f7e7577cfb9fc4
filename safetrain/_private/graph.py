"""Output shapes of the nodes in the autograd graph."""

from __future__ import annotations

from typing import Any

import torch

from .feature import Feature


def _probe() -> bool:
    with torch.enable_grad(), torch.inference_mode(False):
        made = torch.ones(3, 1, requires_grad=True) - torch.ones(2)
    return _shape(made.grad_fn) == (3, 2)


GRAPH_SHAPES = Feature(
    "graph_shapes",
    relies_on="torch.autograd.graph.Node._input_metadata",
    lost="the shapes of what the operations of the first loss computed",
    instead="the guard sanity does not see that targets were broadcast against the outputs",
    probe=_probe,
)


def shape_of(node: Any) -> tuple[int, ...] | None:
    """Of what the operation of this node returned; None if it is not known."""
    return _shape(node) if GRAPH_SHAPES.works else None


def _shape(node: Any) -> tuple[int, ...] | None:
    metadata = node._input_metadata
    return tuple(metadata[0].shape) if metadata else None


def saved(node: Any, name: str, otherwise: Any = None) -> Any:
    """What the operation has kept for its derivative, by the name that torch gives it."""
    return getattr(node, f"_saved_{name}", otherwise)
