"""A start from which nothing can be learned gets new weights, once; a state that dies again and again ends the run with advice."""

import pytest
import torch
from small import make_model
from torch import nn

from safetrain import SafeTrainer, TrainingStopped
from safetrain.recovery.initial import all_layers, odd_layers, reinitialise, standardised

QUIET = {"logging": {"console": "off", "tensorboard": False}}


@pytest.fixture
def fit(tmp_path):
    def run(model, cls=SafeTrainer, steps=160, **config):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        parts = {"loss_fn": nn.MSELoss(), "optimizer": optimizer, "train_data": batches(steps)}
        return cls(model, **parts, config={**QUIET, **config}, run_dir=tmp_path / "run").fit()

    return run


def batches(steps=160):
    generator = torch.Generator().manual_seed(0)
    return [(x, x.sum(1, keepdim=True)) for x in torch.randn(steps, 16, 4, generator=generator)]


def net():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))


def dead():
    model = net()
    nn.init.constant_(model[2].bias, -50.0)
    return model


def exploding():
    model = net()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=30.0)
    return model


@pytest.mark.parametrize("build", [dead, exploding])
@pytest.mark.parametrize("ema", [None, 0.9])
def test_layers_that_began_dead_or_too_large_are_initialised_again(build, ema, fit):
    result = fit(build(), loop={"ema": ema})
    reasons = [reason for incident in result.incidents for reason in incident.decision.reasons]
    assert any(reason.startswith("reinitialise: training starts again with new weights") for reason in reasons)
    assert result.final_loss < 1.0


def test_without_the_rung_it_is_not_done(fit):
    with pytest.raises(TrainingStopped) as stopped:
        fit(dead(), steps=400, recovery={"ladder": ["skip", "rollback"]})
    reasons = [reason for incident in stopped.value.result.incidents for reason in incident.decision.reasons]
    assert not any("reinitialise" in reason for reason in reasons)


def test_a_network_that_dies_again_and_again_ends_the_run_with_advice(fit):
    class Killing(SafeTrainer):
        def on_commit(self, view):
            if view.step > 20:
                with torch.no_grad():
                    self.model[2].bias.fill_(-50.0)

    with pytest.raises(TrainingStopped) as stopped:
        fit(net(), Killing, steps=900, guards={"spike": None, "rollback": None})
    incident = stopped.value.incident
    assert incident.cause.label == "dead_network"
    assert "LeakyReLU" in incident.fix
    assert len(stopped.value.result.incidents) <= 4


def test_only_layers_of_the_wrong_size_are_chosen():
    model = net()
    assert odd_layers(model) == []
    nn.init.normal_(model[2].weight, std=30.0)
    assert odd_layers(model) == ["2"]
    reinitialise(model, ["2"], seed=1)
    assert odd_layers(model) == []
    assert odd_layers(make_model()) == []


def test_a_deep_sigmoid_network_gets_weights_through_which_gradients_pass():
    layers = [part for _ in range(10) for part in (nn.Linear(8, 8), nn.Sigmoid())]
    model, inputs = nn.Sequential(*layers, nn.Linear(8, 4)), torch.randn(64, 8)
    reinitialise(model, all_layers(model), seed=1)
    with torch.no_grad(), standardised(model, all_layers(model)):
        model(inputs)
    outputs = model(inputs)
    assert 0.5 < float(outputs.detach().std()) < 2
    outputs.square().mean().backward()
    assert float(model[0].weight.grad.norm()) > 1e-2 * float(model[-1].weight.grad.norm())
