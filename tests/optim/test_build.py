"""An optimizer that a config names is fused where torch can, and torch's own choice everywhere else."""

import pytest
import torch
from torch import nn

from safetrain.optim.build import asks_for_fused, build_optimizer


def node(name, **arguments):
    return {"_target_": f"torch.optim.{name}", "lr": 0.1, **arguments}


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(4, 2, sparse=True, mode="sum")


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_those_with_a_fused_kernel_are_fused_and_step(name, dtype):
    model = nn.Linear(3, 2, dtype=dtype)
    before = model.weight.detach().clone()
    optimizer = build_optimizer(node(name), model)
    assert type(optimizer).__name__ == name
    assert [group["fused"] for group in optimizer.param_groups] == [True]
    model(torch.ones(4, 3, dtype=dtype)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.weight)


def test_nothing_is_left_in_the_state_by_the_trial():
    model = nn.Linear(3, 2)
    random_state = torch.random.get_rng_state()
    optimizer = build_optimizer(node("AdamW"), model)
    assert not optimizer.state
    assert optimizer.defaults["lr"] == 0.1
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(("AdamW", {key: value}) for key, value in (("fused", False), ("fused", None), ("foreach", True), ("foreach", False))),
        ("Adam", {"differentiable": True}),  # excludes the fused kernel
        ("RMSprop", {}),
    ],
)  # fmt: skip
def test_what_the_config_says_about_the_kernel_stays(name, arguments):
    expected = getattr(torch.optim, name)(nn.Linear(3, 2).parameters(), lr=0.1, **arguments)
    assert build_optimizer(node(name, **arguments), nn.Linear(3, 2)).defaults == expected.defaults
    assert not asks_for_fused(node(name, **arguments))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # Adagrad's own, of its sparse update
@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("AdamW", nn.Linear(2, 1, dtype=torch.complex64)),
        ("SGD", Sparse()),
        ("Adagrad", Sparse()),
        ("Adagrad", nn.Linear(2, 1, dtype=torch.complex64)),
    ],
    ids=["complex", "sparse SGD", "sparse Adagrad", "complex Adagrad"],
)
def test_parameters_without_a_fused_kernel_are_stepped_all_the_same(name, model):
    optimizer = build_optimizer(node(name), model)
    assert [group["fused"] for group in optimizer.param_groups] == [None]
    parameter = next(model.parameters())
    before = parameter.detach().clone()
    if isinstance(model, Sparse):
        model.embedding(torch.tensor([[1, 2]])).sum().backward()
        assert parameter.grad.is_sparse
    else:
        model(torch.ones(3, 2, dtype=torch.complex64)).abs().sum().backward()
    optimizer.step()
    assert not torch.equal(before, parameter)


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    optimizer = build_optimizer(node("AdamW"), model)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model[1].parameters()]


def test_a_mistake_in_the_arguments_is_raised_as_torch_says_it():
    with pytest.raises(ValueError, match="learning rate"):
        build_optimizer({**node("AdamW"), "lr": -1.0}, nn.Linear(2, 1))


def test_safetrain_s_own_are_called_as_they_are():
    optimizer = build_optimizer({"_target_": "safetrain.optimizers.sgd", "lr": 0.1, "momentum": 0.5}, nn.Linear(2, 1))
    assert (type(optimizer).__name__, optimizer.defaults["fused"], optimizer.defaults["momentum"]) == ("SGD", True, 0.5)
