"""The twenty most usual mistakes of docs/cookbook.md: each gives at most ten lines that say what to do, and most before the first step."""

import re
from pathlib import Path

import pytest
import torch
from records import notes
from small import make_batches, make_model, mse
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from safetrain import SafeTrainer, TrainingStopped, load_config

ROOT = Path(__file__).resolve().parents[2]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(6, 6)]
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        return self.out(self.layers[0](x))


class BrokenEvaluation(SafeTrainer):
    def evaluation_step(self, model, batch):
        return {"loss": missing_name}  # noqa: F821


class OwnBackward(SafeTrainer):
    def training_step(self, model, batch):
        loss = mse(model, batch)
        loss.backward(retain_graph=True)
        return loss


def misspelt_hook(make):
    type("Mine", (SafeTrainer,), {"validation_step": lambda self, model, batch: None})


def per_epoch_schedule(make):
    model = make_model()
    optimizer = sgd(model)
    scheduler = StepLR(optimizer, 1, 0.5)
    return make(
        model, optimizer=optimizer, scheduler=scheduler, train_data=make_batches(30), config={"loop": {"max_epochs": 3}}
    )


def labels_from_one(make):
    data = TensorDataset(torch.randn(320, 6), torch.randint(1, 11, (320,)))
    config = {"data": {"batch_size": 16}, "loop": {"max_epochs": 2}}
    return make(
        nn.Linear(6, 10),
        loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        train_data=data,
        config=config,
    )


def nan_targets(make):
    data = TensorDataset(torch.randn(80, 6), torch.full((80, 1), torch.nan))
    return make(train_data=data, config={"data": {"batch_size": 8}})


def other_models_optimizer(make):
    return make(optimizer=sgd(make_model()), train_data=make_batches(2))


def half_of_the_model(make):
    model = make_model()
    return make(model, optimizer=sgd(model[0]), train_data=make_batches(2))


def batch_of_one(make):
    data = TensorDataset(torch.randn(33, 6), torch.randn(33, 1))
    return make(train_data=data, config={"data": {"batch_size": 8}})


def monitor_typo(make):
    return make(train_data=make_batches(2), eval_data=make_batches(1), config={"loop": {"monitor": "acuracy"}})


MISTAKES = {
    # mistake: (what is done, what is said, whether it is said before the first step)
    "a schedule over epochs, stepped after every step": (per_epoch_schedule, r"scheduler_every='epoch'", True),
    "labels 1 to N for N classes": (labels_from_one, r"field '1' is 10; the others go from 1 to 9", False),
    "targets that are all NaN": (nan_targets, r"every sample with NaN or Inf in field '1'", False),
    "an optimizer of another model": (other_models_optimizer, r"none of the optimizer's parameters", True),
    "only a part of the model in the optimizer": (half_of_the_model, r"not in the optimizer", True),
    "layers in a plain list": (
        lambda make: make(Listed(), train_data=make_batches(2)),
        r"make it an nn.ModuleList",
        True,
    ),
    "a last batch of one under BatchNorm": (batch_of_one, r"data.drop_last=true", True),
    "a typo in loop.monitor": (monitor_typo, r"loop.monitor is 'acuracy'", True),
    "a mistake in evaluation_step": (
        lambda make: make(None, BrokenEvaluation, train_data=make_batches(2), eval_data=make_batches(1)),
        r"missing_name",
        True,
    ),
    "backward() called in training_step": (
        lambda make: make(None, OwnBackward, train_data=make_batches(2)),
        r"return the loss without calling backward",
        True,
    ),
    "a hook that is misspelt, or of another framework": (misspelt_hook, r"did you mean evaluation_step", True),
    "tensors given as data": (
        lambda make: make(train_data=(torch.zeros(8, 6), torch.zeros(8))),
        r"TensorDataset\(inputs, targets\)",
        True,
    ),
    "the class of a loss, not an instance": (
        lambda make: make(loss_fn=nn.MSELoss, train_data=make_batches(1)),
        r"pass MSELoss\(\)",
        True,
    ),
    "the class of a scheduler, not an instance": (
        lambda make: SafeTrainer(make_model(), loss_fn=mse, scheduler=StepLR, train_data=make_batches(1)),
        r"pass StepLR\(optimizer, …\)",
        True,
    ),
    "a scheduler of another optimizer": (
        lambda make: make(scheduler=StepLR(sgd(make_model()), 1), train_data=make_batches(1)),
        r"made for another optimizer",
        True,
    ),
    "everything by position": (
        lambda make: SafeTrainer(make_model(), mse, make_batches(1)),
        r"loss_fn=…, optimizer=…, train_data=…",
        True,
    ),
    "a number in quotes": (
        lambda make: load_config({"optimizer": {"_target_": "torch.optim.AdamW", "lr": "1e-3"}}),
        r"write 1e-3 without them",
        True,
    ),
    "an option that another one disables": (
        lambda make: load_config({"guards": {"clip": {"mode": "adaptive", "max_norm": 0.5}}}),
        r"set mode: norm, or leave max_norm out",
        True,
    ),
    "a loss for each sample": (
        lambda make: make(loss_fn=lambda model, batch: (model(batch[0]) - batch[1]) ** 2, train_data=make_batches(1)),
        r"return loss.mean\(\)",
        True,
    ),
    "a loss without a gradient": (
        lambda make: make(loss_fn=lambda model, batch: mse(model, batch).detach(), train_data=make_batches(1)),
        r"without .detach\(\)",
        True,
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_usual_mistake_is_said_in_a_few_lines(make_trainer, mistake):
    act, says, is_early = MISTAKES[mistake]
    try:
        trainer = act(make_trainer)
        result = trainer.fit()
    except TrainingStopped as stopped:
        said, steps = [str(stopped)], 0 if not is_early else stopped.result.steps
    except Exception as error:
        said, steps = [str(error)], 0
    else:
        said, steps = notes(result), 0
    (found,) = [text for text in said if re.search(says, text)]
    assert len(found.splitlines()) <= 10
    assert steps == 0


def test_the_cookbook_lists_them():
    page = (ROOT / "docs" / "cookbook.md").read_text(encoding="utf-8")
    assert len(MISTAKES) == 20
    assert [mistake for mistake in MISTAKES if f"| {mistake} |" not in page] == []
