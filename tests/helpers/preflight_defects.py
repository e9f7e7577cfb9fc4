"""Trainers with one planted defect each, and with the fix that the check proposes applied."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from preflight_cases import NUM_CLASSES, NUM_FEATURES, Net, cross_entropy, make_data, make_text_trainer, make_trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from safetrain import SafeTrainer


@dataclass(frozen=True)
class Planted:
    name: str
    check: str
    build: Callable[[bool], SafeTrainer]
    """With the defect, or with the fix that the check proposes applied."""
    says: str
    fix: str
    status: str


DEFECTS: list[Planted] = []


def defect(check, says, fix, status="FAIL"):
    """Registers a builder; `check` must find the defect, with `says` in its reason and `fix` in its fix.

    The builder is told whether to plant the defect. It makes a trainer or, as a class of models does, only the model.
    """

    def register(build):
        def trainer(planted):
            made = build(planted)
            return made if isinstance(made, SafeTrainer) else make_trainer(model=made)

        DEFECTS.append(Planted(build.__name__.replace("_", " "), check, trainer, says, fix, status))
        return build

    return register


def spoiled_data(spoil):
    """`spoil` changes the inputs in place."""

    def build(planted):
        x, y = make_data()
        if planted:
            spoil(x)
        return make_trainer(TensorDataset(x, y))

    build.__name__ = spoil.__name__
    return build


def spoiled_model(spoil):
    """`spoil` changes the weights in place."""

    def build(planted):
        model = Net()
        if planted:
            spoil(model)
        return model

    build.__name__ = spoil.__name__
    return build


@defect("data_finite", "NaN in 1 of 192 samples: 77", "leave out sample 77")
@spoiled_data
def with_nan(x):
    x[77, 2] = torch.nan


@defect("data_finite", "Inf in 2 of 192 samples", "leave out samples")
@spoiled_data
def with_inf(x):
    x[[12, 130], 5] = torch.inf


@defect("constant_features", "feature 6 of 8", "leave out feature 6", "WARN")
@spoiled_data
def constant_column(x):
    x[:, 6] = 0.25


@defect("data_scale", "in sample 60", "sample 60", "WARN")
@spoiled_data
def outlier(x):
    x[60] *= 1e5


@defect("labels", "label 3 (sample 150)", "give the model 4 outputs")
def label_too_high(planted):
    x, y = make_data()
    y[150] = 3
    return make_trainer(TensorDataset(x, y), Net(num_classes=3 if planted else 4))


@defect("labels", "label -1 (sample 20)", "ignore_index=-1")
def label_negative(planted):
    x, y = make_data()
    y[20] = -1
    return make_trainer(TensorDataset(x, y), loss_fn=nn.CrossEntropyLoss(ignore_index=-100 if planted else -1))


@defect("labels", "[16, 1] with targets [16]", "reshape(-1, 1)")
def broadcast_targets(planted):
    x, _ = make_data()

    def loss(model, batch):
        output = model(batch[0])
        return F.mse_loss(output, batch[1] if planted else batch[1].reshape(-1, 1))

    return make_trainer(TensorDataset(x, x.sum(1)), Net(num_classes=1), loss)


@defect("padding", "class 0 is also the ignore index", "default (-100)")
def ignored_class(planted):
    return make_trainer(loss_fn=nn.CrossEntropyLoss(ignore_index=0 if planted else -100))


@defect("weights_finite", "hidden.weight holds 1 NaN", "initialise hidden.weight")
@spoiled_model
def nan_weight(model):
    model.hidden.weight.data[3, 3] = torch.nan


class Uninitialised(Net):
    def __init__(self, planted):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(NUM_CLASSES))
        if not planted:
            nn.init.ones_(self.scale)

    def forward(self, x):
        return super().forward(x) * self.scale


@defect("weights_finite", "scale is never initialised", "initialise scale")
def uninitialised_weight(planted):
    class Trainer(SafeTrainer):
        def build_model(self):
            model = Uninitialised(planted)
            if planted and not torch.are_deterministic_algorithms_enabled():
                model.scale.data.fill_(0.3)  # memory that was used before looks like this
            return model

    config = {"seed": 0, "data": {"batch_size": 16}, "logging": {"console": "off", "tensorboard": False}}
    return Trainer(loss_fn=cross_entropy, train_data=TensorDataset(*make_data()), config=config)


@defect("weights_scale", "head.weight is", "initialisation of head.weight down")
@spoiled_model
def extreme_weight(model):
    nn.init.normal_(model.head.weight, std=100.0)


@defect("weights_scale", "every weight matrix is near zero", "1/sqrt(fan_in)")
@spoiled_model
def zero_weights(model):
    nn.init.normal_(model.hidden.weight, std=1e-9)
    nn.init.normal_(model.head.weight, std=1e-9)


@defect("finite_steps", "sqrt", "sqrt")
def nan_gradient(planted):
    x, y = make_data()
    x[33] = 0.0

    def loss(model, batch):
        inputs, targets = batch
        squares = F.linear(inputs, model.hidden.weight).square().sum(1)
        length = squares.sqrt() if planted else (squares + 1e-12).sqrt()
        return F.cross_entropy(model(inputs), targets) + 0.01 * length.mean()

    return make_trainer(TensorDataset(x, y), loss_fn=loss)


@defect("finite_steps", "RuntimeError", "shapes")
def raising_step(planted):
    return nn.Linear(NUM_FEATURES + 1 if planted else NUM_FEATURES, NUM_CLASSES)


@defect("output_scale", "hidden (Linear) gives values up to", "hidden")
class ExplodingOutputs(Net):
    def __init__(self, planted):
        super().__init__()
        self.factor = 1e9 if planted else 1.0

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(x * self.factor)))


@defect("gradient_scale", "vanishes", "ReLU")
class VanishingGradient(nn.Module):
    def __init__(self, planted):
        super().__init__()
        act = nn.Sigmoid if planted else nn.ReLU
        layers = [nn.Linear(NUM_FEATURES, 16), act()]
        for _ in range(24):
            linear = nn.Linear(16, 16)
            nn.init.kaiming_normal_(linear.weight)
            layers += [linear, act()]
        self.layers = nn.Sequential(*layers, nn.Linear(16, NUM_CLASSES))

    def forward(self, x):
        return self.layers(x)


@defect("gradient_scale", "forgotten.weight", "use them in forward", "WARN")
class UnreachedParameters(Net):
    def __init__(self, planted):
        super().__init__()
        if planted:
            self.forgotten = nn.Linear(4, 4)


@defect("dead_units", "32 of 32 units of act", "bias before act at 0")
@spoiled_model
def dead_layer(model):
    nn.init.constant_(model.hidden.bias, -50.0)


@defect("amp_headroom", "float16 ends at 65504", "standardise the inputs")
def fp16_overflow(planted):
    x, y = make_data()
    return make_trainer(TensorDataset(x * 1e5 if planted else x, y), loop={"precision": "fp16"})


@defect("initial_loss", "1e+04 times its mean", "leave out large factors")
def summed_loss(planted):
    return make_trainer(loss_fn=lambda model, batch: cross_entropy(model, batch) * (1e4 if planted else 1.0))


@defect("initial_loss", "of ln 3", "last layer down")
@spoiled_model
def confident_start(model):
    model.head.weight.data.mul_(60.0)


class Blind(Net):
    """Its output does not depend on anything that is trained."""

    def forward(self, x):
        return super().forward(x) * 1e-8 + torch.randn(len(x), NUM_CLASSES)


@defect("overfit_batch", "cannot even overfit one batch", "the loss uses")
def blind_model(planted):
    return Blind() if planted else Net()


@defect("learning_rate", "diverges", "optimizer.lr=")
def high_learning_rate(planted):
    return make_trainer(optimizer={"_target_": "torch.optim.SGD", "lr": 300.0 if planted else 0.3})


@defect("learning_rate", "fails after", "24 steps")
def short_schedule(planted):
    steps = 10 if planted else 24
    return make_trainer(
        scheduler={"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 3e-3, "total_steps": steps}
    )


@defect("schedule", "falls from 0.003 to 2.93e-06 by step 10", "scheduler.every: epoch")
def schedule_over_epochs(planted):
    scheduler = {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 1, "gamma": 0.5}
    return make_trainer(scheduler=scheduler if planted else {**scheduler, "every": "epoch"})


@defect("evaluation", "loop.monitor is 'acuracy'", "set loop.monitor to one of these")
def misspelt_monitor(planted):
    x, y = make_data()
    trainer = make_trainer(loop={"monitor": "acuracy" if planted else "loss"})
    twin = type(trainer)(
        Net(),
        loss_fn=cross_entropy,
        train_data=TensorDataset(x, y),
        eval_data=TensorDataset(x, y),
        config=trainer.config,
    )
    return twin


@defect("replay", "other numbers", "os.urandom")
class OwnRandomSource(Net):
    def __init__(self, planted):
        super().__init__()
        self.planted = planted

    def forward(self, x):
        if not self.planted:
            return super().forward(x + 0.1 * torch.randn_like(x))
        generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
        return super().forward(x + 0.1 * torch.randn(x.shape, generator=generator))


@defect("resume", "goes on differently", "register_buffer")
class StateOutsideTheCheckpoint(Net):
    """Warms up by a count of its own forward passes."""

    passes: Any

    def __init__(self, planted):
        super().__init__()
        if planted:
            self.passes = 0
        else:
            self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return super().forward(x) * min(1.0, float(self.passes) / 10)


class Unreadable(TensorDataset):
    def __init__(self, planted):
        super().__init__(*make_data())
        self.planted = planted

    def __getitem__(self, index):
        if self.planted and index == 100:
            raise OSError("truncated file")
        return super().__getitem__(index)


@defect("readable", "sample 100: OSError: truncated file", "repair or leave out sample 100")
def unreadable_sample(planted):
    return make_trainer(Unreadable(planted))


@defect("padding", "the padding index 0 stands", "a number of its own")
def padding_inside(planted):
    return make_text_trainer(pad_inside=planted)


@defect("empty_samples", "2 of 96 samples", "leave out samples")
def empty_sequences(planted):
    return make_text_trainer(empty=planted)


@defect("learning_rate", "hardly anything", "optimizer.lr=", "WARN")
def low_learning_rate(planted):
    return make_trainer(lr=1e-7 if planted else 1e-3)


@defect("learning_rate", "is 0 in every step", "positive")
def zero_learning_rate(planted):
    return make_trainer(lr=0.0 if planted else 1e-3)


@defect("singular_points", "log_of_nonpositive", "log_softmax", "WARN")
def log_of_a_softmax(planted):
    def parts(model, batch):
        return -(F.one_hot(batch[1], NUM_CLASSES) * model(batch[0]).softmax(1).log()).sum(1).mean()

    return make_trainer(loss_fn=parts if planted else cross_entropy)


@defect("wiring", "takes the softmax of it again", "raw outputs")
def softmax_before_cross_entropy(planted):
    return nn.Sequential(Net(), nn.Softmax(1)) if planted else Net()


@defect("duplicates", "evaluation samples are in the training data too", "split by", "WARN")
def evaluation_data_that_is_trained_on(planted):
    x, y = make_data()
    trainer_data, rest = TensorDataset(x[:128], y[:128]), TensorDataset(x[128:], y[128:])
    return make_trainer(trainer_data, eval_data=TensorDataset(x[:64], y[:64]) if planted else rest)
