"""A small classifier that is healthy, and the same with one defect planted; each is built anew, so that fixes can be applied."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from safetrain import SafeTrainer

NUM_SAMPLES, NUM_FEATURES, NUM_CLASSES = 192, 8, 3


def make_data() -> tuple[Tensor, Tensor]:
    """Points whose class is the largest of their first three features."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(NUM_SAMPLES, NUM_FEATURES, generator=generator)
    return x, x[:, :NUM_CLASSES].argmax(1)


class Net(nn.Module):
    def __init__(self, num_classes: int = NUM_CLASSES, width: int = 32) -> None:
        super().__init__()
        self.hidden = nn.Linear(NUM_FEATURES, width)
        self.act = nn.ReLU()
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.act(self.hidden(x))))


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def make_trainer(
    data: Any = None,
    model: nn.Module | None = None,
    loss_fn: Callable[..., Any] = cross_entropy,
    lr: float = 3e-3,
    cls: type[SafeTrainer] = SafeTrainer,
    **sections: Any,
) -> SafeTrainer:
    torch.manual_seed(3)
    if data is None:
        data = TensorDataset(*make_data())
    config = {
        "seed": 5,
        "data": {"batch_size": 16},
        "loop": {"max_steps": 24, "device": "cpu", **sections.pop("loop", {})},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": lr},
        "logging": {"console": "off", "tensorboard": False},
        **sections,
    }
    return cls(Net() if model is None else model, loss_fn=loss_fn, train_data=data, config=config)


# ---- texts ---------------------------------------------------------------------------------------------------------

VOCABULARY, LENGTH = 12, 10


class Tokens(Dataset[dict[str, Tensor]]):
    """Sequences of 1 to 11, padded at the end with 0. The label of a token is the next one; of padding it is `ignored`."""

    def __init__(self, empty: bool = False, pad_inside: bool = False, ignored: int = -100) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(1, VOCABULARY, (96, LENGTH + 1), generator=generator)
        lengths = torch.randint(4, LENGTH + 1, (96,), generator=generator)
        self.tokens[torch.arange(LENGTH + 1) >= lengths[:, None]] = 0
        if pad_inside:
            self.tokens[::2, 2] = 0
        if empty:
            self.tokens[[11, 40]] = 0
        self.ignored = ignored

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index, 1:].clone()
        labels[labels == 0] = self.ignored
        return {"tokens": self.tokens[index, :-1], "labels": labels}


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16, padding_idx=0)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Every sequence counts the same: a mean per sequence, then over sequences."""
    logits = model(batch["tokens"]).transpose(1, 2)
    per_token = F.cross_entropy(logits, batch["labels"], reduction="none")
    return (per_token.sum(1) / (batch["labels"] != -100).sum(1)).mean()


def make_text_trainer(**options: Any) -> SafeTrainer:
    return make_trainer(Tokens(**options), Tagger(), token_loss, lr=1e-2)


# ---- the defects ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    name: str
    check: str
    """The check that must find it."""
    build: Callable[[bool], SafeTrainer]
    """With the defect, or with the fix that the check proposes applied."""
    says: str
    """What the reason must name."""
    fix: str
    """What the fix must name."""
    status: str = "FAIL"


def with_nan(planted: bool) -> SafeTrainer:
    x, y = make_data()
    if planted:
        x[77, 2] = torch.nan
    return make_trainer(TensorDataset(x, y))


def with_inf(planted: bool) -> SafeTrainer:
    x, y = make_data()
    if planted:
        x[[12, 130], 5] = torch.inf
    return make_trainer(TensorDataset(x, y))


def constant_column(planted: bool) -> SafeTrainer:
    x, y = make_data()
    if planted:
        x[:, 6] = 0.25
    return make_trainer(TensorDataset(x, y))


def outlier(planted: bool) -> SafeTrainer:
    x, y = make_data()
    if planted:
        x[60] *= 1e5
    return make_trainer(TensorDataset(x, y))


def label_too_high(planted: bool) -> SafeTrainer:
    x, y = make_data()
    y[150] = 3
    return make_trainer(TensorDataset(x, y), Net(num_classes=3 if planted else 4))


def label_negative(planted: bool) -> SafeTrainer:
    x, y = make_data()
    y[20] = -1
    ignored = -100 if planted else -1

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], ignore_index=ignored)

    return make_trainer(TensorDataset(x, y), loss_fn=loss)


def broadcast_targets(planted: bool) -> SafeTrainer:
    x, _ = make_data()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        output = model(batch[0])
        return F.mse_loss(output, batch[1] if planted else batch[1].reshape(-1, 1))

    return make_trainer(TensorDataset(x, x.sum(1)), Net(num_classes=1), loss)


def ignored_class(planted: bool) -> SafeTrainer:
    criterion = nn.CrossEntropyLoss(ignore_index=0) if planted else nn.CrossEntropyLoss()
    return make_trainer(loss_fn=criterion)


def padding_inside(planted: bool) -> SafeTrainer:
    return make_text_trainer(pad_inside=planted)


def empty_sequences(planted: bool) -> SafeTrainer:
    return make_text_trainer(empty=planted)


def nan_weight(planted: bool) -> SafeTrainer:
    model = Net()
    if planted:
        model.hidden.weight.data[3, 3] = torch.nan
    return make_trainer(model=model)


class Uninitialised(Net):
    def __init__(self, planted: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(NUM_CLASSES))
        if not planted:
            nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def uninitialised_weight(planted: bool) -> SafeTrainer:
    class Trainer(SafeTrainer):
        def build_model(self) -> nn.Module:
            model = Uninitialised(planted)
            if planted and not torch.are_deterministic_algorithms_enabled():
                model.scale.data.fill_(0.3)  # memory that was used before looks like this
            return model

    config = {"seed": 0, "data": {"batch_size": 16}, "logging": {"console": "off", "tensorboard": False}}
    return Trainer(loss_fn=cross_entropy, train_data=TensorDataset(*make_data()), config=config)


def extreme_weight(planted: bool) -> SafeTrainer:
    model = Net()
    nn.init.normal_(model.head.weight, std=100.0 if planted else 32**-0.5)
    return make_trainer(model=model)


def zero_weights(planted: bool) -> SafeTrainer:
    model = Net()
    if planted:
        nn.init.normal_(model.hidden.weight, std=1e-9)
        nn.init.normal_(model.head.weight, std=1e-9)
    return make_trainer(model=model)


def nan_gradient(planted: bool) -> SafeTrainer:
    x, y = make_data()
    x[33] = 0.0

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        squares = F.linear(inputs, model.hidden.weight).square().sum(1)
        length = squares.sqrt() if planted else (squares + 1e-12).sqrt()
        return F.cross_entropy(model(inputs), targets) + 0.01 * length.mean()

    return make_trainer(TensorDataset(x, y), loss_fn=loss)


def raising_step(planted: bool) -> SafeTrainer:
    return make_trainer(model=nn.Linear(NUM_FEATURES + 1 if planted else NUM_FEATURES, NUM_CLASSES))


class Exploding(Net):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(x * self.factor)))


def exploding_outputs(planted: bool) -> SafeTrainer:
    return make_trainer(model=Exploding(1e9 if planted else 1.0))


class Deep(nn.Module):
    def __init__(self, planted: bool) -> None:
        super().__init__()
        act = nn.Sigmoid if planted else nn.ReLU
        layers: list[nn.Module] = [nn.Linear(NUM_FEATURES, 16), act()]
        for _ in range(24):
            linear = nn.Linear(16, 16)
            nn.init.kaiming_normal_(linear.weight)
            layers += [linear, act()]
        self.layers = nn.Sequential(*layers, nn.Linear(16, NUM_CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def vanishing_gradient(planted: bool) -> SafeTrainer:
    return make_trainer(model=Deep(planted))


class Unused(Net):
    def __init__(self, planted: bool) -> None:
        super().__init__()
        if planted:
            self.forgotten = nn.Linear(4, 4)


def unreached_parameters(planted: bool) -> SafeTrainer:
    return make_trainer(model=Unused(planted))


def dead_layer(planted: bool) -> SafeTrainer:
    model = Net()
    if planted:
        nn.init.constant_(model.hidden.bias, -50.0)
    return make_trainer(model=model)


def fp16_overflow(planted: bool) -> SafeTrainer:
    x, y = make_data()
    return make_trainer(TensorDataset(x * 1e5 if planted else x, y), loop={"precision": "fp16"})


def summed_loss(planted: bool) -> SafeTrainer:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) * (1e4 if planted else 1.0)

    return make_trainer(loss_fn=loss)


def confident_start(planted: bool) -> SafeTrainer:
    model = Net()
    if planted:
        model.head.weight.data.mul_(60.0)
    return make_trainer(model=model)


class Blind(Net):
    """Its output does not depend on anything that is trained."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1e-8 + torch.randn(len(x), NUM_CLASSES)


def blind_model(planted: bool) -> SafeTrainer:
    return make_trainer(model=Blind() if planted else Net())


def high_learning_rate(planted: bool) -> SafeTrainer:
    optimizer = {"_target_": "torch.optim.SGD", "lr": 300.0 if planted else 0.3}
    return make_trainer(optimizer=optimizer)


def low_learning_rate(planted: bool) -> SafeTrainer:
    return make_trainer(lr=1e-7 if planted else 1e-3)


def zero_learning_rate(planted: bool) -> SafeTrainer:
    return make_trainer(lr=0.0 if planted else 1e-3)


def short_schedule(planted: bool) -> SafeTrainer:
    scheduler = {
        "_target_": "torch.optim.lr_scheduler.OneCycleLR",
        "max_lr": 3e-3,
        "total_steps": 10 if planted else 24,
    }
    return make_trainer(scheduler=scheduler)


class Noisy(Net):
    def __init__(self, planted: bool) -> None:
        super().__init__()
        self.planted = planted

    def forward(self, x: Tensor) -> Tensor:
        if not self.planted:
            return super().forward(x + 0.1 * torch.randn_like(x))
        generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
        return super().forward(x + 0.1 * torch.randn(x.shape, generator=generator))


def own_random_source(planted: bool) -> SafeTrainer:
    return make_trainer(model=Noisy(planted))


class Counting(Net):
    """Warms up by a count of its own forward passes."""

    passes: Any

    def __init__(self, planted: bool) -> None:
        super().__init__()
        if planted:
            self.passes = 0
        else:
            self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x) * min(1.0, float(self.passes) / 10)


def state_outside_the_checkpoint(planted: bool) -> SafeTrainer:
    return make_trainer(model=Counting(planted))


class Unreadable(TensorDataset):
    def __init__(self, planted: bool) -> None:
        super().__init__(*make_data())
        self.planted = planted

    def __getitem__(self, index: int) -> Any:
        if self.planted and index == 100:
            raise OSError("truncated file")
        return super().__getitem__(index)


def unreadable_sample(planted: bool) -> SafeTrainer:
    return make_trainer(Unreadable(planted))


DEFECTS = (
    Planted(
        "unreadable sample",
        "readable",
        unreadable_sample,
        "sample 100: OSError: truncated file",
        "repair or leave out sample 100",
    ),
    Planted("NaN", "data_finite", with_nan, "NaN in 1 of 192 samples: 77", "leave out sample 77"),
    Planted("Inf", "data_finite", with_inf, "Inf in 2 of 192 samples", "leave out samples"),
    Planted("outlier", "data_scale", outlier, "in sample 60", "sample 60", "WARN"),
    Planted("constant feature", "constant_features", constant_column, "feature 6 of 8", "leave out feature 6", "WARN"),
    Planted("label too high", "labels", label_too_high, "label 3 (sample 150)", "give the model 4 outputs"),
    Planted("negative label", "labels", label_negative, "label -1 (sample 20)", "ignore_index=-1"),
    Planted("targets that broadcast", "labels", broadcast_targets, "[16, 1] with targets [16]", "reshape(-1, 1)"),
    Planted("ignored class", "padding", ignored_class, "class 0 is also the ignore index", "default (-100)"),
    Planted("padding that is a token", "padding", padding_inside, "the padding index 0 stands", "a number of its own"),
    Planted("empty sequences", "empty_samples", empty_sequences, "2 of 96 samples", "leave out samples"),
    Planted("NaN weight", "weights_finite", nan_weight, "hidden.weight holds 1 NaN", "initialise hidden.weight"),
    Planted(
        "uninitialised weight", "weights_finite", uninitialised_weight, "scale is never initialised", "initialise scale"
    ),
    Planted("extreme weight", "weights_scale", extreme_weight, "head.weight is", "initialisation of head.weight down"),
    Planted("weights near zero", "weights_scale", zero_weights, "every weight matrix is near zero", "1/sqrt(fan_in)"),
    Planted("NaN gradient", "finite_steps", nan_gradient, "sqrt", "sqrt"),
    Planted("a step that raises", "finite_steps", raising_step, "RuntimeError", "shapes"),
    Planted("exploding outputs", "output_scale", exploding_outputs, "hidden (Linear) gives values up to", "hidden"),
    Planted("vanishing gradient", "gradient_scale", vanishing_gradient, "vanishes", "ReLU"),
    Planted("unused layer", "gradient_scale", unreached_parameters, "forgotten.weight", "use them in forward", "WARN"),
    Planted("dead layer", "dead_units", dead_layer, "32 of 32 units of act", "bias before act at 0"),
    Planted("float16 overflow", "amp_headroom", fp16_overflow, "float16 ends at 65504", "standardise the inputs"),
    Planted("loss with a factor", "initial_loss", summed_loss, "1e+04 times its mean", "leave out large factors"),
    Planted("confident start", "initial_loss", confident_start, "of ln 3", "last layer down"),
    Planted("model that cannot learn", "overfit_batch", blind_model, "cannot even overfit one batch", "the loss uses"),
    Planted("learning rate too high", "learning_rate", high_learning_rate, "diverges", "optimizer.lr="),
    Planted("learning rate too low", "learning_rate", low_learning_rate, "hardly anything", "optimizer.lr=", "WARN"),
    Planted("learning rate of zero", "learning_rate", zero_learning_rate, "is 0 in every step", "positive"),
    Planted("schedule too short", "learning_rate", short_schedule, "fails after", "24 steps"),
    Planted("random source of its own", "replay", own_random_source, "other numbers", "os.urandom"),
    Planted(
        "state that is not saved", "resume", state_outside_the_checkpoint, "goes on differently", "register_buffer"
    ),
)
