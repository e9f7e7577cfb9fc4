"""What data and losses can be trained on, and clear errors for what cannot."""

import dataclasses
import os
import signal
from collections import namedtuple
from typing import Any

import pytest
import torch
from small import make_batches, mse
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from safetrain import DataError, Interrupted, LossError, SafeTrainer

INPUTS, TARGETS = torch.arange(60.0).reshape(10, 6) / 60, torch.zeros(10, 1)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(INPUTS, TARGETS, strict=True))


class Reusable:
    """Neither a list nor a Dataset: just something that can be iterated over again."""

    def __iter__(self):
        return iter(make_batches(2))


class NoLength(Dataset):
    def __getitem__(self, index):
        return INPUTS[index]


def generate():
    yield from make_batches(2)


@pytest.mark.parametrize(
    ("data", "steps_per_epoch"),
    [
        (DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=4), 3),
        (TensorDataset(INPUTS, TARGETS), 3),
        (Stream(), 3),
        (make_batches(2), 2),
        (Reusable(), 2),
        (generate, 2),
    ],
    ids=["loader", "dataset", "iterable dataset", "list", "re-iterable", "generator function"],
)
def test_every_kind_of_data_trains_for_several_epochs(make_trainer, data, steps_per_epoch):
    config = {"loop": {"max_epochs": 3}, "data": {"batch_size": 4}}
    result = make_trainer(train_data=data, config=config).fit()
    assert (result.steps, result.epochs) == (3 * steps_per_epoch, 3)


def test_steps_and_epochs_whichever_comes_first_or_one_epoch(make_trainer):
    for loop, expected in (({"max_steps": 3, "max_epochs": 2}, 3), ({"max_steps": 30, "max_epochs": 2}, 8), ({}, 4)):
        assert make_trainer(train_data=make_batches(4), config={"loop": loop}).fit().steps == expected


class Indices(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.tensor([float(index)])


def visited(make_trainer, seed=3, shuffle=True, epochs=2):
    order = []

    def loss_fn(model, batch):
        order.extend(batch.flatten().tolist())
        return model(batch).square().mean()

    config = {"seed": seed, "data": {"batch_size": 4, "shuffle": shuffle}, "loop": {"max_epochs": epochs}}
    make_trainer(nn.Linear(1, 1), loss_fn=loss_fn, train_data=Indices(), config=config).fit()
    return [order[i : i + 20] for i in range(0, len(order), 20)]


def test_the_order_is_a_permutation_that_depends_on_seed_and_epoch_only(make_trainer):
    first, second = visited(make_trainer)
    torch.rand(7)
    assert visited(make_trainer) == [first, second]
    assert first != second
    assert visited(make_trainer, seed=4)[0] != first
    assert sorted(first) == sorted(second) == list(range(20))
    assert visited(make_trainer, shuffle=False, epochs=1) == [list(range(20))]


Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor
    source: str = "file"


class Graph:
    """Not a tensor, but it can be moved."""

    def __init__(self, x, y, moved_to=None):
        self.x, self.y, self.moved_to = x, y, moved_to

    def to(self, device):
        return Graph(self.x.to(device), self.y.to(device), device)


X, Y = torch.randn(4, 6), torch.randn(4, 1)
NESTS: list[tuple[Any, Any]] = [
    ((X, Y), lambda b: (b[0], b[1])),
    ([X, Y], lambda b: (b[0], b[1])),
    ({"x": X, "more": {"y": [Y]}}, lambda b: (b["x"], b["more"]["y"][0])),
    (Pair(X, Y), lambda b: (b.x, b.y)),
    (Record(X, Y), lambda b: (b.x, b.y)),
    (Graph(X, Y), lambda b: (b.x, b.y)),
    ((X, Y, "name", None, 3), lambda b: (b[0], b[1])),
]


@pytest.mark.parametrize(("batch", "take"), NESTS, ids=lambda v: type(v).__name__)
def test_batches_of_any_nesting(make_trainer, batch, take):
    seen = []

    def loss_fn(model, batch):
        seen.append(batch)
        x, y = take(batch)
        return F.mse_loss(model(x), y)

    result = make_trainer(nn.Linear(6, 1), loss_fn=loss_fn, train_data=[batch, batch]).fit()
    assert result.healthy
    assert all(type(each) is type(batch) for each in seen)
    if isinstance(batch, Graph):
        assert seen[0].moved_to == torch.device("cpu")
    if isinstance(batch, Record):
        assert seen[0].source == "file"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "the training data is empty"),
        (DataLoader(TensorDataset(INPUTS[:3]), batch_size=4, drop_last=True), "drop_last"),
        (TensorDataset(INPUTS[:0]), "the training data is empty"),
        ([("a", "b")], "a batch contains no tensor"),
        ([{"x": 1.0}], "a batch contains no tensor"),
        (lambda: iter([]), "the training data is empty"),
        (NoLength(), "define __len__"),
    ],
)
def test_unusable_data_is_an_error_with_a_fix(make_trainer, data, message):
    with pytest.raises(DataError, match=message) as error:
        make_trainer(train_data=data).fit()
    assert "To fix" in str(error.value)


def test_an_exhausted_one_shot_generator_is_an_error(make_trainer):
    assert make_trainer(train_data=generate()).fit().steps == 2
    trainer = make_trainer(train_data=generate(), config={"loop": {"max_steps": 5}})
    with pytest.raises(DataError, match="one-shot iterator that was exhausted"):
        trainer.fit()
    assert trainer.run.result.steps == 2


OTHER = nn.Linear(6, 1)


def backward_first(model, batch):
    loss = mse(model, batch)
    loss.backward(retain_graph=True)
    return loss


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, b: None, "returned NoneType, not a tensor"),
        (lambda m, b: mse(m, b).item(), "not loss.item"),
        (lambda m, b: m(b[0]), r"shape \(8, 1\); it must be a scalar"),
        (lambda m, b: mse(m, b).detach(), "not connected to any trainable parameter"),
        (lambda m, b: {"accuracy": mse(m, b)}, "a dict without 'loss'"),
        (lambda m, b: torch.tensor(3), "torch.int64; it must be a floating-point"),
        (lambda m, b: mse(OTHER, b), "reaches none of the parameters that the optimizer moves"),
        (backward_first, "would count twice"),
    ],
)
def test_an_unusable_loss_is_an_error_with_a_fix(make_trainer, loss, message):
    with pytest.raises(LossError, match=message) as error:
        make_trainer(loss_fn=loss, train_data=make_batches(1)).fit()
    assert "To fix" in str(error.value)


def test_a_loss_of_one_element_and_a_loss_module_of_torch_can_be_used(make_trainer):
    for loss_fn in (lambda m, b: mse(m, b).reshape(1, 1), nn.MSELoss()):
        assert make_trainer(loss_fn=loss_fn, train_data=make_batches(2)).fit().healthy
    with pytest.raises(LossError, match=r"batches of \(inputs, targets\)"):
        make_trainer(loss_fn=nn.MSELoss(), train_data=[{"x": INPUTS}]).fit()


def test_loader_workers_are_released_when_the_run_ends(make_trainer):
    config = {"data": {"batch_size": 4, "num_workers": 1}, "loop": {"max_steps": 2}}
    trainer = make_trainer(None, SafeTrainer, train_data=TensorDataset(INPUTS, TARGETS), config=config)
    trainer.fit()
    assert torch.multiprocessing.active_children() == []


class EndsWithItsGroup(torch.utils.data.Dataset):
    """The process group is asked to end while the training process waits for a worker."""

    def __init__(self, main):
        self.main = main

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == 20 and os.getpid() != self.main:
            os.kill(self.main, signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.randn(6), torch.randn(1)


def test_a_signal_to_the_process_group_saves_the_state(make_trainer):
    config = {"data": {"num_workers": 1, "batch_size": 4, "shuffle": False}}
    trainer = make_trainer(train_data=EndsWithItsGroup(os.getpid()), config=config)
    with pytest.raises(Interrupted) as interrupted:
        trainer.fit()
    assert interrupted.value.signum == signal.SIGTERM
    steps = trainer.run.result.steps
    assert steps > 0
    assert (trainer.run.dir / "checkpoints" / "last").resolve().name == f"step-{steps:08d}"


@pytest.mark.parametrize("data", [TensorDataset(INPUTS, TARGETS), Stream()])
@pytest.mark.parametrize("shuffle", [False, True])
def test_drop_last_applies_to_training_and_not_to_evaluation(make_trainer, data, shuffle):
    sizes = {"training": [], "evaluation": []}

    class Counting(SafeTrainer):
        def training_step(self, model, batch):
            sizes["training"].append(len(batch[0]))
            return mse(model, batch)

        def evaluation_step(self, model, batch):
            sizes["evaluation"].append(len(batch[0]))
            return mse(model, batch)

    config = {"data": {"batch_size": 4, "drop_last": True, "shuffle": shuffle}}
    make_trainer(nn.Linear(6, 1), Counting, train_data=data, eval_data=data, config=config).fit()
    assert sizes == {"training": [4, 4], "evaluation": [4, 4, 2]}
