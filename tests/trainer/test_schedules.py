"""Schedules that are stepped once per epoch, and what is said of those that are not and should be."""

import copy

import pytest
import torch
from records import notes
from small import assert_same, make_batches, make_model, mse
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from safetrain import Interrupted, SafeTrainer, UsageError, load_config
from safetrain.errors import ConfigError

COSINE = {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": 3}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def test_a_schedule_over_epochs_gives_the_bits_of_a_plain_loop(make_trainer):
    model, batches = make_model(dropout=0.0), make_batches(4)
    plain = copy.deepcopy(model)
    make_trainer(
        model,
        train_data=batches,
        optimizer=sgd,
        scheduler=lambda o: CosineAnnealingLR(o, T_max=3),
        scheduler_every="epoch",
        config={"loop": {"max_epochs": 3}},
    ).fit()
    optimizer = sgd(plain.parameters())
    scheduler = CosineAnnealingLR(optimizer, T_max=3)
    for _ in range(3):
        for batch in batches:
            optimizer.zero_grad()
            mse(plain, batch).backward()
            optimizer.step()
        scheduler.step()
    assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("every", ["step", "epoch"])
def test_a_config_says_what_a_schedule_counts(make_trainer, every):
    config = {"scheduler": {**COSINE, "every": every}, "loop": {"max_epochs": 2}}
    trainer = make_trainer(train_data=make_batches(4), config=config)
    trainer.fit()
    assert trainer.scheduler.last_epoch == {"step": 8, "epoch": 2}[every]


def test_another_interval_is_an_error(make_trainer):
    with pytest.raises(ConfigError, match=r"scheduler.every: 'week' is not accepted, give one of step, epoch"):
        load_config({"scheduler": {**COSINE, "every": "week"}})
    with pytest.raises(UsageError, match="every step or epoch, not every 'week'"):
        make_trainer(train_data=make_batches(4), scheduler_every="week")


class Interrupting(SafeTrainer):
    stop_at = 6

    def on_commit(self, view):
        if view.step == self.stop_at:
            self.run.signal = 15


def test_a_schedule_over_epochs_survives_an_interruption(make_trainer, tmp_path):
    batches = make_batches(4)

    def trainer(cls, run_dir):
        torch.manual_seed(3)
        config = {"scheduler": {**COSINE, "every": "epoch"}, "loop": {"max_epochs": 3}}
        return make_trainer(make_model(), cls, train_data=batches, config=config, run_dir=run_dir)

    whole = trainer(SafeTrainer, tmp_path / "whole")
    whole.fit()
    with pytest.raises(Interrupted):
        trainer(Interrupting, tmp_path / "cut").fit()
    resumed = trainer(SafeTrainer, tmp_path / "cut")
    resumed.fit(resume=True)
    assert resumed.scheduler.last_epoch == 3
    assert_same(resumed.model.state_dict(), whole.model.state_dict())


def test_a_schedule_of_epochs_that_is_stepped_after_every_step_is_noted_at_the_start(make_trainer):
    trainer = make_trainer(
        train_data=make_batches(20),
        optimizer=sgd,
        scheduler=lambda o: StepLR(o, 1, 0.5),
        config={"loop": {"max_epochs": 5}},
    )
    result = trainer.fit()
    (note,) = [note for note in notes(result) if "StepLR" in note]
    assert "is stepped after every step, 100 times, and the rate falls from 0.1 to 9.77e-05 by step 10" in note
    assert "scheduler_every='epoch'" in note
