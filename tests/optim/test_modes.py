"""Optimizers with train() and eval(): the weights that are used are those meant for use, and training goes on from its own."""

import pytest
import torch
from small import assert_same, make_batches, make_model, mse
from torch import nn

from safetrain import SafeTrainer
from safetrain.optim.modes import train_mode, weights_to_use
from safetrain.optim.optimizers import OptimizerGroup


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD: steps are made from y, and x, the average, is what is used."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "train_mode": False, "k": 0})

    def _to(self, train):
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] is not train else ():
                if "z" in self.state[p]:
                    weight = 1 - group["beta"] if train else 1 - 1 / group["beta"]
                    p.data.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = train

    def train(self):
        self._to(True)

    def eval(self):
        self._to(False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"], "optimizer.train() was not called"
            group["k"] += 1
            for p in group["params"]:
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.clone()
                p.lerp_(state["z"], 1 - 1 / group["beta"])  # y to x
                state["z"].sub_(p.grad, alpha=group["lr"])
                p.lerp_(state["z"], 1 / group["k"])
                p.lerp_(state["z"], 1 - group["beta"])  # x to y


def test_evaluation_and_export_use_the_averaged_weights(make_trainer):
    model, batches, evaluated = make_model(), make_batches(6), []

    class Watching(SafeTrainer):
        def evaluation_step(self, model, batch):
            evaluated.append(model[0].weight.detach().clone())
            return mse(model, batch)

    optimizer = ScheduleFree(model.parameters())
    trainer = make_trainer(model, Watching, optimizer=optimizer, train_data=batches, eval_data=make_batches(1))
    result = trainer.fit()
    mine = model[0].weight.detach().clone()
    optimizer.eval()
    final = model[0].weight.detach().clone()
    assert not torch.equal(mine, final)
    assert torch.equal(evaluated[-1], final)
    from safetensors.torch import load_file

    assert torch.equal(load_file(result.run_dir / "checkpoints" / "final.safetensors")["0.weight"], final)


def test_evaluation_leaves_the_weights_of_training_bit_for_bit(make_trainer):
    batches = make_batches(12)

    def trained(eval_data):
        torch.manual_seed(1)
        model = make_model(dropout=0.0)
        config = {"loop": {"eval_every": 2}}
        make_trainer(
            model, optimizer=ScheduleFree(model.parameters()), train_data=batches, eval_data=eval_data, config=config
        ).fit()
        return model.state_dict()

    assert_same(trained(make_batches(1)), trained(None))


def test_parts_of_a_group_are_switched_too():
    layers = nn.Linear(2, 2), nn.Linear(2, 2)
    group = OptimizerGroup(
        one=ScheduleFree(layers[0].parameters()), other=torch.optim.SGD(layers[1].parameters(), lr=0.1)
    )
    train_mode(group)
    assert group.param_groups[0]["train_mode"] is True
    with weights_to_use(group):
        assert group.param_groups[0]["train_mode"] is False


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_ordinary_optimizers_are_left_alone(make):
    layer = nn.Linear(2, 2)
    with weights_to_use(make(layer.parameters(), lr=0.1)):
        pass
