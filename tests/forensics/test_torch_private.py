"""The private APIs of torch that tracing needs: a torch without one of them fails here, by name."""

from __future__ import annotations

import torch

from safetrain._private import autograd as torch_private


def test_this_torch_has_every_private_api() -> None:
    assert torch_private.missing() == []


def test_numbers_of_nodes_count_up_and_are_those_seen_in_backward() -> None:
    before = torch_private.next_node_number()
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    assert torch_private.node_number(y.grad_fn) == before
    assert torch_private.next_node_number() == before + 1
    seen = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            node = torch_private.current_node()
            seen.append(None if node is None else torch_private.node_number(node))
            return func(*args, **(kwargs or {}))

    with torch.autograd.set_multithreading_enabled(False), Spy():
        torch.autograd.backward(y.sum())
    assert before in seen


def test_autocast_is_off_inside_and_on_again_after() -> None:
    x = torch.ones(2, 2)
    with torch_private.autocast_disabled(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
