"""An index or a label out of range would end the device: it is seen before it gets there, or the run is saved from the host's memory."""

import pytest
import torch
from backend import KNOBS, NAME
from small import fused_adamw
from torch import nn
from torch.nn import functional as F

from safetrain import SafeTrainer
from safetrain.errors import DeviceLost

VOCABULARY, CLASSES = 20, 5


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCABULARY, 8), nn.Linear(8, CLASSES)

    def forward(self, words):
        return self.out(self.embed(words).mean(1))


def batches(count=20):
    return [{"words": torch.randint(VOCABULARY, (8, 3)), "label": torch.randint(CLASSES, (8,))} for _ in range(count)]


def loss_fn(model, batch):
    return F.cross_entropy(model(batch["words"]), batch["label"])


@pytest.fixture
def train(on_device):
    KNOBS.poisons = True

    def make(data, **parts):
        parts = {"loss_fn": loss_fn, "optimizer": fused_adamw, "model": Words(), **parts}
        return on_device(train_data=data, **parts)

    return make


@pytest.mark.parametrize(
    ("field", "value"), [("words", VOCABULARY + 3), ("words", -1), ("label", CLASSES), ("label", -5)]
)
def test_it_is_named_and_left_out(train, field, value):
    data = batches()
    data[7][field][4] = value
    result = train(data).fit()
    assert [(i.step, i.decision.action, i.samples) for i in result.incidents] == [(7, "commit", [4])]
    incident = result.incidents[0]
    assert (incident.origin.name, incident.cause.label) == (
        "embedding" if field == "words" else "cross_entropy",
        "bad_input_data",
    )
    assert f"field '{field}' of the batch, row 4" in incident.render()
    assert result.steps == 20
    assert not KNOBS.is_poisoned


def test_in_the_first_step_too_and_in_a_view(train):
    data = batches()
    data[0]["words"][2, 1] = 99

    def through_a_view(model, batch):
        words = batch["words"][:, 1:]
        return F.cross_entropy(model(words), batch["label"])

    result = train(data, loss_fn=through_a_view).fit()
    assert [i.samples for i in result.incidents] == [[2]]


def test_an_ignored_label_is_none(train):
    data = batches()
    for batch in data:
        batch["label"][0] = -100
    assert train(data).fit().healthy


def test_what_the_step_puts_right_in_place_is_in_range(train):
    data = batches(10)
    for batch in data:
        batch["words"][0, 0] = batch["label"][1] = -1

    def loss(model, batch):
        words, label = batch["words"], batch["label"]
        words.clamp_(min=0)
        label[label < 0] = -100
        return F.cross_entropy(model(words), label)

    assert train(data, loss_fn=loss).fit().healthy


def test_columns_of_one_tensor_are_used_on_tables_of_their_own(train):
    class Ratings(nn.Module):
        def __init__(self):
            super().__init__()
            self.users, self.items = nn.Embedding(50, 4), nn.Embedding(3, 4)

        def forward(self, pairs):
            return (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(1)

    data = [torch.stack([torch.randint(50, (8,)), torch.randint(3, (8,))], 1) for _ in range(10)]
    assert train(data, model=Ratings(), loss_fn=lambda model, pairs: model(pairs).square().mean()).fit().healthy


def computed_index(model, batch):
    return F.cross_entropy(model(batch["words"] * 1), batch["label"])


def test_what_cannot_be_seen_ends_the_run_with_a_checkpoint_of_the_newest_trusted_snapshot(train):
    data = batches(30)
    data[17]["words"][4] = 99
    config = {"checkpoint": {"snapshot_every": 4, "trust_after": 2, "every_steps": None}}
    trainer = train(data, loss_fn=computed_index, config=config)
    with pytest.raises(DeviceLost) as lost:
        trainer.fit()
    text = str(lost.value)
    assert "after step 12" in text, text
    assert "device-side assert" in text
    assert "To fix: " in text
    KNOBS.reset()
    resumed = SafeTrainer(
        (model := Words()),
        loss_fn=computed_index,
        optimizer=fused_adamw(model.parameters()),
        train_data=data[:17] + data[18:],
        config={"loop": {"device": NAME}, "logging": {"console": "off"}},
        run_dir=trainer.run.dir,
    )
    assert resumed.fit(resume="force").steps == 29
