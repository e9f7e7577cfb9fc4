"""Data of every usual kind is read as it is meant, or the message says what to write."""

import pytest
import torch
from records import notes
from small import assert_same, make_batches, make_model, mse
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from safetrain import DataError, Interrupted, SafeTrainer
from safetrain.config.schema import DataConfig
from safetrain.data.sources import MapSource, open_source


class Rows:
    """A data set that is not derived from torch's, like those of Hugging Face."""

    def __init__(self, count=40):
        self.x, self.y = torch.randn(count, 6), torch.randn(count, 1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index]}


class HuggingFaceLike(Rows):
    def __getitems__(self, indices):
        return [self[index] for index in indices]

    def __iter__(self):
        return (self[index] for index in range(len(self)))


def dict_mse(model, batch):
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


@pytest.mark.parametrize("kind", [Rows, HuggingFaceLike])
def test_a_data_set_that_is_not_torchs_is_batched_and_shuffled(make_trainer, kind):
    data, seen = kind(), []

    class Watching(SafeTrainer):
        def training_step(self, model, batch):
            seen.append(batch["x"])
            return dict_mse(model, batch)

    result = make_trainer(None, Watching, train_data=data, config={"seed": 1, "data": {"batch_size": 8}}).fit()
    assert result.steps == 5
    assert [len(x) for x in seen] == [8] * 5
    assert not torch.equal(torch.cat(seen), data.x)
    assert torch.equal(torch.cat(seen).sort(0).values, data.x.sort(0).values)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ((torch.zeros(8, 3), torch.zeros(8)), r"TensorDataset\(inputs, targets\)"),
        ([torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)], r"reads as 2 batches, not as inputs and targets"),
        ((torch.zeros(8, 3), torch.zeros(8, 1)), r"TensorDataset\(inputs, targets\)"),
        (torch.zeros(8, 3), r"one tensor of shape \(8, 3\)"),
        ({"x": torch.zeros(8, 3), "y": torch.zeros(8)}, "mapping with the keys 'x', 'y'"),
        (Rows, r"pass Rows\(…\)"),
    ],
)
def test_what_cannot_be_meant_is_an_error_that_says_what_to_write(make_trainer, data, says):
    with pytest.raises(DataError, match=says) as error:
        make_trainer(train_data=data)
    assert "To fix" in str(error.value)


@pytest.mark.parametrize(
    "data",
    [make_batches(3), tuple(make_batches(3)), [torch.zeros(4, 3)] * 3, [torch.zeros(4, 3), torch.zeros(4, 5)]],
)
def test_lists_of_batches_stay_lists_of_batches(data):
    assert not isinstance(open_source(data, DataConfig(), shuffle=True, seed=0), MapSource)


def summed(samples, scale=1.0):
    return torch.stack([x for x, _ in samples]) * scale, torch.stack([y for _, y in samples])


def test_a_config_names_how_samples_become_a_batch(make_trainer):
    data = TensorDataset(torch.ones(8, 6), torch.ones(8, 1))
    node = {"_target_": f"{__file__}:summed", "scale": 3.0}
    config = {"data": {"batch_size": 4, "collate_fn": node}}
    seen = []

    def loss(model, batch):
        seen.append(float(batch[0].mean()))
        return mse(model, batch)

    make_trainer(train_data=data, loss_fn=loss, config=config).fit()
    assert seen == [3.0, 3.0]


# ---- samples that cannot be read ---------------------------------------------------------------------------------------


class Damaged(Dataset):
    def __init__(self, bad=(), count=80):
        self.bad, self.x, self.y, self.asked = bad, torch.randn(count, 6), torch.randn(count, 1), []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.asked.append(index)
        if index in self.bad:
            raise OSError(f"image {index} is truncated")
        return self.x[index], self.y[index]


@pytest.mark.parametrize("as_loader", [False, True])
def test_samples_that_cannot_be_read_are_left_out_if_the_config_says_so(make_trainer, as_loader):
    data = Damaged(bad=(5, 30))
    given = DataLoader(data, 8, shuffle=True) if as_loader else data
    config = {"seed": 1, "data": {"batch_size": 32 if as_loader else 8, "skip_unreadable": True}}
    result = make_trainer(train_data=given, config={**config, "loop": {"max_epochs": 3}}).fit()
    assert result.status == "done"
    assert sorted(result.quarantined) == [5, 30]
    assert data.asked.count(5) == 1
    assert any(
        "sample 30 of the data set cannot be read and is left out: OSError: image 30 is truncated" in n
        for n in notes(result)
    )
    assert '"id": 5' in (result.run_dir / "quarantine.jsonl").read_text()


def test_an_unreadable_sample_ends_the_run_otherwise_and_many_always_do(make_trainer):
    with pytest.raises(OSError, match="image 5"):
        make_trainer(train_data=Damaged(bad=(5,)), config={"data": {"batch_size": 8}}).fit()
    config = {"data": {"batch_size": 8, "skip_unreadable": True, "shuffle": False}}
    with pytest.raises(DataError, match="samples could not be read; the last is sample"):
        make_trainer(train_data=Damaged(bad=range(0, 80, 2)), config=config).fit()


# ---- indices of a DataLoader's samples ---------------------------------------------------------------------------------


def loader(data, workers=0, **options):
    return DataLoader(data, 8, num_workers=workers, **{"shuffle": True, **options})


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_of_a_data_loader_are_named_and_left_out(make_trainer, workers):
    data = Damaged()
    data.x[17] = torch.nan
    result = make_trainer(train_data=loader(data, workers), config={"loop": {"max_epochs": 4}}).fit()
    assert result.quarantined == [17]
    assert len(result.incidents) == 2
    assert "sample 17 of the data set has caused 1 of 2 incidents" in str(result.incidents[0].decision.reasons)


def test_remembering_the_indices_changes_no_batch():
    data = TensorDataset(torch.arange(40.0))

    def epochs(given):
        torch.manual_seed(3)
        return [[batch[0].tolist() for batch in given(epoch)] for epoch in range(2)], torch.rand(1).item()

    plain = loader(data)
    source = open_source(loader(data), DataConfig(), shuffle=True, seed=0)
    assert epochs(lambda epoch: plain) == epochs(lambda epoch: source.open(epoch, 0))
    assert [source.ids(4).tolist()] == [
        [int(v) for v in batch] for batch in epochs(lambda e: source.open(e, 0))[0][1][4:]
    ]


class Ending(SafeTrainer):
    at = 14

    def on_commit(self, view):
        if view.step == self.at:
            self.run.signal = 15


def test_what_a_data_loader_leaves_out_survives_a_resume(make_trainer, tmp_path):
    data = Damaged()
    data.x[17] = torch.nan

    def trainer(cls, name):
        torch.manual_seed(2)
        config = {"loop": {"max_epochs": 4}, "recovery": {"quarantine_after": 1}}
        return make_trainer(make_model(), cls, train_data=loader(data), config=config, run_dir=tmp_path / name)

    whole = trainer(SafeTrainer, "whole")
    whole.fit()
    with pytest.raises(Interrupted):
        trainer(Ending, "cut").fit()
    resumed = trainer(SafeTrainer, "cut")
    result = resumed.fit(resume=True)
    assert len(result.incidents) == 1
    assert_same(resumed.model.state_dict(), whole.model.state_dict())


def test_batches_without_indices_say_why_nothing_is_left_out(make_trainer):
    batches = make_batches(6)
    batches[3][0][2] = torch.nan
    result = make_trainer(train_data=lambda: iter(batches)).fit()
    assert any("pass a Dataset, or a DataLoader over one" in note for note in notes(result))


class Loader(DataLoader):
    """As those of graph libraries: only its constructor is its own."""


def test_a_loader_that_is_derived_from_torchs_is_read_by_its_indices(make_trainer):
    data = TensorDataset(torch.randn(32, 6), torch.randn(32, 1))
    data.tensors[0][3] = torch.nan
    config = {"seed": 1, "loop": {"max_epochs": 3}, "recovery": {"max_bad_share": None}}
    result = make_trainer(train_data=Loader(data, 8, shuffle=True), config=config).fit()
    assert result.quarantined == [3]
    assert len(result.incidents) == 2


class Streaming(IterableDataset):
    """Yields samples and keeps its own position, as a streaming data set of Hugging Face does."""

    def __init__(self):
        self.position, self.x, self.y = 0, torch.arange(240.0).reshape(40, 6) / 240, torch.ones(40, 1)

    def __iter__(self):
        for index in range(self.position, 40):
            self.position = index + 1
            yield self.x[index], self.y[index]
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def test_a_stream_of_samples_that_keeps_its_position_is_batched_and_resumed(make_trainer, tmp_path):
    sizes = []

    def train(steps, run_dir):
        def loss_fn(model, batch):
            sizes.append(len(batch[0]))
            return mse(model, batch)

        torch.manual_seed(0)
        config = {"seed": 1, "data": {"batch_size": 8}, "loop": {"max_steps": steps}}
        parts = {"train_data": Streaming(), "loss_fn": loss_fn, "config": config, "run_dir": tmp_path / run_dir}
        trainer = make_trainer(make_model(), **parts)
        trainer.fit(resume="auto")
        return trainer.model.state_dict()

    whole = train(7, "whole")
    train(3, "part")
    assert_same(whole, train(7, "part"))
    assert set(sizes) == {8}
