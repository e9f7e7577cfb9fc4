"""Numbers of autograd nodes, by which operations of a backward pass find those of the forward pass."""

import torch

from safetrain._private import autograd


def test_numbers_of_nodes_count_up_and_are_those_seen_in_backward():
    before = autograd.next_node_number()
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    assert autograd.node_number(y.grad_fn) == before
    assert autograd.next_node_number() == before + 1
    seen = []

    class Spy(autograd.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            node = autograd.current_node()
            seen.append(None if node is None else autograd.node_number(node))
            return func(*args, **(kwargs or {}))

    with torch.autograd.set_multithreading_enabled(False), Spy():
        torch.autograd.backward(y.sum())
    assert before in seen
