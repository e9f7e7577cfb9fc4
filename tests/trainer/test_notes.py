"""What is odd about the parts of a run is said with names; what cannot be meant is an error that says what to write."""

import pytest
import torch
from records import notes
from small import make_batches, make_model, mse
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from safetrain import SafeTrainer, UsageError


def said(result, *words):
    return [note for note in notes(result) if all(word in note for word in words)]


def test_parameters_that_are_not_in_the_optimizer_are_named(make_trainer):
    model = make_model()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    result = make_trainer(model, optimizer=optimizer, train_data=make_batches(2)).fit()
    assert said(result, "1.weight", "not in the optimizer")


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 1)
        self.blocks = [nn.Linear(6, 6), nn.Linear(6, 6)]
        self.same = [self.out]  # registered already

    def forward(self, x):
        return self.out(self.blocks[0](x))


def test_layers_in_a_plain_list_are_named(make_trainer):
    result = make_trainer(Listed(), train_data=make_batches(2)).fit()
    (note,) = said(result, "plain list")
    assert "blocks is a plain list of 2 modules (Linear)" in note
    assert "make it an nn.ModuleList" in note


class Unfreezing(SafeTrainer):
    def on_epoch_end(self, epoch):
        self.model[0].requires_grad_(True)


def test_layers_that_are_unfrozen_later_are_named(make_trainer):
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    trainer = make_trainer(
        model, Unfreezing, optimizer=optimizer, train_data=make_batches(2), config={"loop": {"max_epochs": 2}}
    )
    assert said(trainer.fit(), "0.weight, 0.bias", "not in the optimizer")


class SteppingToo(SafeTrainer):
    def on_commit(self, view):
        self.scheduler.step()


def test_a_scheduler_that_is_stepped_twice_is_said_once(make_trainer):
    trainer = make_trainer(
        None,
        SteppingToo,
        train_data=make_batches(6),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        scheduler=lambda o: StepLR(o, 1000),
    )
    assert len(said(trainer.fit(), "something else steps StepLR too")) == 1


def test_a_healthy_run_is_told_nothing(make_trainer):
    data = TensorDataset(torch.randn(32, 6), torch.randn(32, 1))
    result = make_trainer(train_data=data, config={"data": {"batch_size": 8}}).fit()
    assert notes(result) == []


def test_a_last_batch_of_one_is_foreseen(make_trainer):
    data = TensorDataset(torch.randn(33, 6), torch.randn(33, 1))
    trainer = make_trainer(train_data=data, config={"data": {"batch_size": 8}})
    assert said(trainer.fit(), "a single sample (33 samples in batches of 8)", "data.drop_last=true")


def test_a_last_batch_of_one_of_a_loader_is_foreseen(make_trainer):
    data = DataLoader(TensorDataset(torch.randn(33, 6), torch.randn(33, 1)), 8)
    assert said(make_trainer(train_data=data).fit(), "a single sample (33 samples in batches of 8)", "drop_last=True")


def test_options_of_the_data_without_effect_are_named(make_trainer):
    config = {"data": {"batch_size": 16, "shuffle": False}}
    result = make_trainer(train_data=make_batches(2), config=config).fit()
    assert said(result, "data.batch_size, data.shuffle have no effect on training data of type list")
    data = TensorDataset(torch.randn(8, 6), torch.randn(8, 1))
    assert notes(make_trainer(train_data=make_batches(2), eval_data=data, config=config).fit()) == []


def test_a_learning_rate_of_zero_is_said(make_trainer):
    result = make_trainer(train_data=make_batches(2), optimizer=lambda p: torch.optim.SGD(p, lr=0.0)).fit()
    assert said(result, "the learning rate is 0")


def test_a_loss_of_outputs_and_targets_is_known_by_its_names(make_trainer):
    def squares(pred, y):
        return (pred - y).square().mean()

    assert make_trainer(train_data=make_batches(2), loss_fn=squares).fit().steps == 2
    with pytest.raises(TypeError) as error:
        make_trainer(train_data=make_batches(2), loss_fn=lambda a, b: (a - b).mean()).fit()
    note = "".join(getattr(error.value, "__notes__", ["loss_fn(model, batch), and this one takes (a, b)"]))
    assert "loss_fn(model, batch), and this one takes (a, b)" in note


def test_pairs_of_single_samples_in_a_list_are_noted(make_trainer):
    samples = [(torch.randn(4, 6), 1.0)] * 3
    trainer = make_trainer(train_data=samples, loss_fn=lambda model, batch: model(batch[0]).mean())
    assert said(trainer.fit(), "pass torch.utils.data.DataLoader")


MODEL = nn.Linear(6, 1)
OTHER = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("arguments", "parts", "says"),
    [
        ((mse,), {}, "SafeTrainer takes only the model without a name, and was given function too"),
        (
            (),
            {"scheduler": StepLR},
            r"scheduler is the class StepLR, not an instance.*\nTo fix: pass StepLR\(optimizer",
        ),
        ((), {"scheduler": [StepLR(OTHER, 5)]}, "scheduler is a list, which has no step"),
        ((), {"optimizer": torch.optim.SGD}, r"optimizer is the class SGD.*\nTo fix: pass SGD\(model.parameters"),
        ((), {"scheduler": StepLR(OTHER, 5)}, "StepLR was made for another optimizer"),
        ((), {"run_dir": True}, "run_dir=True is no directory"),
    ],
)
def test_what_cannot_be_meant_is_an_error(arguments, parts, says):
    with pytest.raises(UsageError, match=says):
        SafeTrainer(MODEL, *arguments, train_data=make_batches(1), **{"loss_fn": mse, **parts})


# ---- several evaluation sets, and no directory -------------------------------------------------------------------------


def test_several_evaluation_sets_by_name(make_trainer):
    sets = {"val": make_batches(1), "test": make_batches(2)}
    result = make_trainer(train_data=make_batches(3), eval_data=sets).fit()
    record = result.evaluations[-1]
    assert set(record) == {"step", "val/loss", "test/loss", "loss"}
    assert record["loss"] == record["val/loss"] != record["test/loss"]
    assert result.best == record


def test_several_evaluation_sets_in_a_config(make_trainer):
    node = {"_target_": f"{__file__}:make_batches", "count": 1}
    config = {"data": {"train": node, "eval": {"val": node, "test": node}}, "loop": {"monitor": "test/loss"}}
    result = make_trainer(config=config).fit()
    assert set(result.best) == {"step", "val/loss", "test/loss"}


def test_a_run_without_a_directory_writes_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", None)
    batches = make_batches(6, bad=(3,))
    config = {"logging": {"console": "plain"}}
    trainer = SafeTrainer(
        make_model(), loss_fn=mse, train_data=batches, eval_data=batches[:1], config=config, run_dir=False
    )
    result = trainer.fit()
    assert (result.status, result.steps, result.run_dir, len(result.incidents)) == ("done", 5, None, 1)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]
    assert "no run directory: nothing is written" in capfd.readouterr().out


class Carrying(SafeTrainer):
    hidden = None

    def training_step(self, model, batch):
        self.hidden, self.last_loss = batch[1].mul(2), batch[1].sum()
        return mse(model, batch)


def test_a_state_that_is_carried_in_an_attribute_is_said_to_be_lost(make_trainer):
    trainer = make_trainer(None, Carrying, train_data=make_batches(2), config={"loop": {"max_epochs": 2}})
    trainer.class_weights = torch.ones(3)
    assert notes(trainer.fit()) == [
        "hidden of the trainer holds tensors that changed while it trained: they are neither undone with a refused step nor saved for a resume; "
        "if training goes on from them, keep them in a buffer of the model"
    ]
