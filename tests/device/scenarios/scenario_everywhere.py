"""What else a device is not to change: bits of a resume, dropout of a replay, criteria, several devices, noise, a type it lacks."""

import math

import pytest
import torch
from backend import KNOBS, NAME
from small import assert_same, fused_adamw, make_batches, make_model, mse
from torch import nn
from torch.nn import functional as F

from safetrain import SafeTrainer
from safetrain.tensors.devices import widest_float
from safetrain.tensors.rng import RandomState
from safetrain.trainer.build import is_placed


def on_host(model):
    return {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}


def test_a_resume_has_the_bits_of_the_whole_run_and_draws_its_own_dropout(on_device):
    data, states = make_batches(12), []
    for parts in ([12], [5, 12]):
        run_dir = None
        for steps in parts:
            torch.manual_seed(3)
            where = {} if run_dir is None else {"run_dir": run_dir}
            trainer = on_device(loop={"max_steps": steps}, optimizer=fused_adamw, train_data=data, **where)
            trainer.fit(resume=False if run_dir is None else "force")
            run_dir = trainer.run.dir
            torch.rand(5, device=NAME)
        states.append(on_host(trainer.model))
    assert_same(*states)


def test_a_criterion_with_weights_is_moved_to_the_device(on_device):
    data = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(6)]
    criterion = nn.CrossEntropyLoss(weight=torch.ones(3))
    assert on_device(nn.Linear(6, 3), loss_fn=criterion, optimizer=fused_adamw, train_data=data).fit().healthy

    class Own(SafeTrainer):
        def __init__(self, *args, **parts):
            super().__init__(*args, **parts)
            self.criterion = nn.CrossEntropyLoss(weight=torch.ones(3))

        def training_step(self, model, batch):
            return self.criterion(model(batch[0]), batch[1])

    assert on_device(nn.Linear(6, 3), Own, loss_fn=None, optimizer=fused_adamw, train_data=data).fit().healthy


def test_two_trainers_with_different_devices(make_trainer, on_device):
    data = make_batches(4)
    for device in ("cpu", NAME, "cpu"):
        trainer = on_device(loop={"device": device}, optimizer=fused_adamw, train_data=data)
        assert trainer.fit().steps == 4
        assert {str(p.device) for p in trainer.model.parameters()} <= {device, f"{device}:0"}


def test_a_model_on_two_devices_stays_there():
    halves = nn.Sequential(nn.Linear(6, 8).to(f"{NAME}:0"), nn.Linear(8, 1).to(f"{NAME}:1"))
    assert is_placed(halves)
    assert not is_placed(nn.Sequential(nn.Linear(6, 8).to(NAME), nn.Linear(8, 1)))


def test_random_states_go_to_the_device_that_is_there_now():
    torch.get_device_module(NAME).set_rng_state(torch.Generator().manual_seed(7).get_state(), 0)
    state = RandomState.capture()
    assert list(state.torch_devices) == [f"{NAME}:0"]
    first = torch.rand(3, device=NAME)
    moved = RandomState(None, None, state.torch_cpu, {f"{NAME}:3": state.torch_devices[f"{NAME}:0"]})
    moved.restore()
    assert torch.equal(torch.rand(3, device=NAME), first)
    other = RandomState(None, None, state.torch_cpu, {"cuda:0": state.torch_devices[f"{NAME}:0"]})
    assert other.unplaced() == ["cuda:0"]
    other.restore()


def test_noise_in_the_last_bit_is_no_transient_fault(on_device):
    KNOBS.noise = True
    data = make_batches(14)
    data[9][1][3] = 0.0

    def loss(model, batch):
        y = model(batch[0])
        return (y - y.detach() + batch[1]).square().sum(1).sqrt().mean()

    incident = on_device(optimizer=fused_adamw, loss_fn=loss, train_data=data).fit().incidents[0]
    assert (incident.origin.name, incident.replay.reproduced, incident.samples) == ("sqrt", True, [3])
    assert not any("retry" in reason for reason in incident.decision.reasons)


def test_a_device_without_float64(on_device, request):
    request.addfinalizer(widest_float.cache_clear)
    widest_float.cache_clear()
    KNOBS.has_float64 = False
    data = make_batches(10)
    data[6][0][2] = math.nan
    result = on_device(
        optimizer=fused_adamw, train_data=data, eval_data=data[:2], config={"logging": {"console": "off"}}
    ).fit()
    assert [(i.step, i.samples) for i in result.incidents] == [(6, [2])]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_bad_sample_in_every_precision(on_device, precision):
    data = make_batches(12)
    data[8][0][3] = math.nan
    loss = (lambda model, batch: F.mse_loss(model(batch[0]).float(), batch[1])) if precision != "fp32" else mse
    result = on_device(
        make_model(), loop={"precision": precision}, loss_fn=loss, optimizer=fused_adamw, train_data=data
    ).fit()
    assert [(i.step, i.samples) for i in result.incidents] == [(8, [3])]
