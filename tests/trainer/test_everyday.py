"""What every run needs: ending early, hooks between steps, evaluation that fails early, and nothing lost with an exception."""

import copy
import logging
import re

import pytest
import torch
from records import notes
from safetensors.torch import load_file
from small import assert_same, make_batches, make_model, mse
from torch import nn

from safetrain import LossError, SafeTrainer, UsageError
from safetrain.checkpoint.export import export_weights
from safetrain.telemetry.summary import next_commands, summary_rows


class Recording(SafeTrainer):
    def on_evaluation(self, metrics):
        self.calls = [*getattr(self, "calls", []), ("evaluation", metrics["step"], metrics["loss"])]

    def on_epoch_end(self, epoch):
        self.calls = [*getattr(self, "calls", []), ("epoch", epoch, self.run.result.steps)]


def test_hooks_after_an_epoch_and_after_an_evaluation(make_trainer):
    trainer = make_trainer(
        None, Recording, train_data=make_batches(3), eval_data=make_batches(1), config={"loop": {"max_epochs": 2}}
    )
    result = trainer.fit()
    losses = [record["loss"] for record in result.evaluations]
    assert trainer.calls == [
        ("epoch", 0, 3),
        ("evaluation", 3, losses[0]),
        ("epoch", 1, 6),
        ("evaluation", 6, losses[1]),
    ]


# ---- ending early ------------------------------------------------------------------------------------------------------


class Stopping(SafeTrainer):
    def on_commit(self, view):
        if view.step == 3:
            self.stop("good enough")


def test_a_run_that_is_stopped_is_evaluated_and_saved_and_done(make_trainer):
    trainer = make_trainer(
        None, Stopping, train_data=make_batches(10), eval_data=make_batches(1), config={"loop": {"max_epochs": 2}}
    )
    result = trainer.fit()
    assert (result.status, result.steps, result.stop_reason, result.healthy) == ("done", 4, "good enough", True)
    assert [record["step"] for record in result.evaluations] == [4]
    assert (result.run_dir / "checkpoints" / "final.safetensors").exists()
    assert ("ended", "before its last step: good enough") in summary_rows(result)


def test_a_run_that_was_stopped_can_be_resumed(make_trainer, tmp_path):
    batches, parts = make_batches(10), {"run_dir": tmp_path / "run", "config": {"loop": {"max_epochs": 1}}}
    model, whole = make_model(), make_model()
    whole.load_state_dict(copy.deepcopy(model.state_dict()))
    torch.manual_seed(5)
    make_trainer(model, Stopping, train_data=batches, **parts).fit()
    result = make_trainer(model, train_data=batches, **parts).fit(resume=True)
    assert (result.steps, result.stop_reason) == (10, None)
    torch.manual_seed(5)
    make_trainer(whole, train_data=batches, config=parts["config"]).fit()
    assert_same(model.state_dict(), whole.state_dict())


class Scripted(SafeTrainer):
    """Its evaluations give the metrics of a list."""

    def evaluation_step(self, model, batch):
        return {"score": self.script[len(self.run.result.evaluations)]}


@pytest.mark.parametrize(
    ("options", "script", "num_evaluations"),
    [
        ({"patience": 2}, [1.0, 2.0, 1.5, 2.0, 3.0], 4),
        ({"patience": 2, "min_delta": 0.5}, [1.0, 1.2, 1.4, 1.6, 1.8], 3),
        ({"patience": 1}, [1.0, float("nan"), 5.0], 2),
        ({"patience": 2, "monitor_mode": "min"}, [5.0, 4.0, 3.0, 2.0, 1.0], 5),
    ],
)
def test_a_run_ends_when_evaluations_stop_getting_better(make_trainer, options, script, num_evaluations):
    loop = {"max_epochs": 5, "monitor": "score", "monitor_mode": "max", **options}
    trainer = make_trainer(None, Scripted, train_data=make_batches(2), eval_data=make_batches(1), config={"loop": loop})
    trainer.script = script
    result = trainer.fit()
    assert len(result.evaluations) == num_evaluations
    assert result.status == "done"
    assert (result.stop_reason is None) == (num_evaluations == 5)
    if result.stop_reason:
        assert f"score has not improved in {options['patience']} evaluations; the best was" in result.stop_reason


# ---- evaluation --------------------------------------------------------------------------------------------------------


class Broken(SafeTrainer):
    def evaluation_step(self, model, batch):
        return {"loss": undefined_name}  # noqa: F821


def test_a_mistake_in_the_evaluation_shows_before_the_first_step(make_trainer):
    trainer = make_trainer(None, Broken, train_data=make_batches(3), eval_data=make_batches(1))
    with pytest.raises(NameError):
        trainer.fit()
    assert trainer.run.result.steps == 0
    trainer = make_trainer(
        train_data=make_batches(3), eval_data=make_batches(1), config={"loop": {"monitor": "acuracy"}}
    )
    with pytest.raises(UsageError, match=r"loop.monitor is 'acuracy', which evaluation_step did not return"):
        trainer.fit()
    assert trainer.run.result.steps == 0


class Counting(SafeTrainer):
    num_batches = 0

    def evaluation_step(self, model, batch):
        self.num_batches += 1
        return mse(model, batch)


def test_trying_the_evaluation_leaves_no_trace(make_trainer):
    data, order = torch.utils.data.TensorDataset(torch.randn(32, 6), torch.randn(32, 1)), []

    def trained(check):
        torch.manual_seed(1)
        trainer = make_trainer(
            make_model(),
            Counting,
            train_data=torch.utils.data.DataLoader(data, 8, shuffle=True),
            eval_data=torch.utils.data.DataLoader(data, 8, shuffle=True, generator=torch.Generator()),
            config={"loop": {"max_epochs": 2, "eval_check": check}},
        )
        order.append(trainer.fit().evaluations)
        assert trainer.num_batches == 8
        return trainer.model.state_dict()

    assert_same(trained(True), trained(False))
    assert order[0] == order[1]


def test_evaluation_before_the_first_step_on_request(make_trainer):
    config = {"loop": {"eval_at_start": True}}
    result = make_trainer(train_data=make_batches(3), eval_data=make_batches(1), config=config).fit()
    assert [record["step"] for record in result.evaluations] == [0, 3]


class WithoutLoss(SafeTrainer):
    def evaluation_step(self, model, batch):
        return {"accuracy": (model(batch[0]) > 0).float().mean(), "outputs": model(batch[0])}


def test_an_evaluation_needs_no_loss_and_says_what_it_leaves_out(make_trainer):
    config = {"loop": {"monitor": "accuracy", "monitor_mode": "max"}}
    result = make_trainer(None, WithoutLoss, train_data=make_batches(3), eval_data=make_batches(1), config=config).fit()
    assert set(result.best) == {"step", "accuracy"}
    assert "not logged, because not numeric: outputs (returned by evaluation_step)" in notes(result)


class PlainNumbers(SafeTrainer):
    def evaluation_step(self, model, batch):
        return {"loss": mse(model, batch).item(), "count": 3}


def test_an_evaluation_may_return_plain_numbers(make_trainer):
    result = make_trainer(None, PlainNumbers, train_data=make_batches(3), eval_data=make_batches(1)).fit()
    assert result.best["count"] == 3.0


def test_an_evaluation_without_any_number_is_an_error(make_trainer):
    class Empty(SafeTrainer):
        def evaluation_step(self, model, batch):
            return {"outputs": model(batch[0])}

    with pytest.raises(LossError, match="without any number"):
        make_trainer(None, Empty, train_data=make_batches(3), eval_data=make_batches(1)).fit()


class LeavingEvalMode(SafeTrainer):
    def on_commit(self, view):
        self.model.eval()
        self.modes = [*getattr(self, "modes", []), view.step]

    def training_step(self, model, batch):
        assert model.training
        return mse(model, batch)


def test_eval_mode_left_by_a_hook_is_undone_and_said_once(make_trainer):
    model = make_model()
    model[3].eval()  # on purpose: stays so
    trainer = make_trainer(model, LeavingEvalMode, train_data=make_batches(4))
    result = trainer.fit()
    assert [module.training for module in model] == [True, True, True, False, True]
    assert [note for note in notes(result) if "on_commit left the model in eval mode" in note][1:] == []
    assert model[1].num_batches_tracked == 4


# ---- exceptions --------------------------------------------------------------------------------------------------------


class Failing(SafeTrainer):
    where = "nowhere"

    def training_step(self, model, batch):
        loss = mse(model, batch)
        if self.where == "forward" and self.step == 7:
            raise KeyError("label")
        return loss

    def on_commit(self, view):
        if self.where == "hook" and view.step == 7:
            raise KeyError("label")


class FailingData(torch.utils.data.Dataset):
    def __init__(self, data):
        self.data, self.fails = data, False

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        if self.fails and index == 30:
            raise OSError("unreadable")
        return self.data[index]


@pytest.mark.parametrize("where", ["forward", "hook", "data"])
def test_an_exception_loses_nothing_that_was_learned(make_trainer, tmp_path, where):
    data = FailingData(torch.utils.data.TensorDataset(torch.randn(40, 6), torch.randn(40, 1)))

    def trainer(run_dir, fails):
        torch.manual_seed(2)
        config = {"seed": 4, "data": {"batch_size": 4, "shuffle": False}, "loop": {"max_epochs": 2}}
        made = make_trainer(make_model(), Failing, train_data=data, config=config, run_dir=tmp_path / run_dir)
        made.where, data.fails = where if fails else "nowhere", fails and where == "data"
        return made

    whole = trainer("whole", False)
    whole.fit()
    failing = trainer("cut", True)
    with pytest.raises((KeyError, OSError)) as error:
        failing.fit()
    saved = {"forward": 7, "hook": 8, "data": 7}[where]
    assert any(f"{saved} steps are saved in" in note for note in error.value.__notes__)
    resumed = trainer("cut", False)
    result = resumed.fit(resume=True)
    assert (
        "7 steps committed" in (result.run_dir / "journal.jsonl").read_text().split('"resumed"')[1][:80]
        or where == "hook"
    )
    assert result.attempted == 20
    assert_same(resumed.model.state_dict(), whole.model.state_dict())


# ---- what is shown -----------------------------------------------------------------------------------------------------


def test_what_ends_before_its_first_step_shows_no_summary_of_nothing(make_trainer, capfd):
    trainer = make_trainer(train_data=make_batches(1), loss_fn=lambda model, batch: {}["loss"])
    with pytest.raises(KeyError):
        trainer.fit()
    assert summary_rows(trainer.run.result) == next_commands(trainer.run.result) == []


def test_notes_are_printed_once(make_trainer, monkeypatch, capfd):
    log = logging.getLogger("safetrain")
    monkeypatch.setattr(log, "propagate", False)  # as in a program without logging
    config = {"logging": {"console": "plain", "tensorboard": False}}
    make_trainer(None, LeavingEvalMode, train_data=make_batches(3), config=config).fit()
    out, err = capfd.readouterr()
    assert (out + err).count("on_commit left the model in eval mode") == 1


def test_a_result_has_a_short_repr(make_trainer):
    result = make_trainer(train_data=make_batches(60)).fit()
    assert len(repr(result)) < 300
    assert "steps=60" in repr(result)


def test_ctrl_c_is_acknowledged(make_trainer, capfd):
    trainer = make_trainer(train_data=make_batches(1), config={"logging": {"console": "plain", "tensorboard": False}})
    with trainer.rehearsal():
        trainer.run._asked_to_end(2)
    assert "Ctrl-C: the step is finished and the state saved" in capfd.readouterr().err


def test_the_summary_counts_what_is_kept_and_what_was_clipped(make_trainer):
    batches = make_batches(40, bad=range(0, 40, 8))
    config = {"forensics": {"max_incidents": 2}, "guards": {"clip": {"max_norm": 1e-3}}}
    result = make_trainer(train_data=batches, config=config).fit()
    rows = dict(summary_rows(result))
    assert "the first 2 kept in" in rows["incidents"]
    assert re.match(r"\d+ steps \(100.0%\), the most to 0\.0\d+ of its gradient", rows["clipped"])


@pytest.mark.parametrize("parts", [{"loss_fn": nn.MSELoss}])
def test_a_class_is_not_an_instance(parts):
    with pytest.raises(UsageError, match=r"To fix: pass MSELoss\(\)"):
        SafeTrainer(nn.Linear(1, 1), train_data=[], **parts)


def test_a_resume_says_which_settings_of_the_optimizer_it_keeps(make_trainer, tmp_path):
    batches = make_batches(6)

    def trainer(lr, steps):
        config = {"loop": {"max_steps": steps}}
        optimizer = lambda parameters: torch.optim.SGD(parameters, lr=lr)  # noqa: E731
        return make_trainer(train_data=batches, optimizer=optimizer, config=config, run_dir=tmp_path / "run")

    trainer(0.1, 3).fit()
    resumed = trainer(0.5, 5)
    result = resumed.fit(resume=True)
    assert resumed.optimizer.param_groups[0]["lr"] == 0.1
    assert any("was made with lr=0.5, and the run goes on with lr=0.1" in note for note in notes(result))


def test_the_best_weights_that_are_exported_are_those_that_were_evaluated(make_trainer, tmp_path):
    evaluated = []

    class Watching(SafeTrainer):
        def evaluation_step(self, model, batch):
            evaluated.append(model[0].weight.detach().clone())
            return mse(model, batch)

    config = {"loop": {"ema": 0.5}}
    result = make_trainer(None, Watching, train_data=make_batches(6), eval_data=make_batches(1), config=config).fit()
    export_weights(result.run_dir, tmp_path / "best.safetensors")
    assert torch.equal(load_file(tmp_path / "best.safetensors")["0.weight"], evaluated[-1])


def test_a_helper_that_is_called_may_have_any_name():
    def training_step(self, model, batch):
        return self.compute_loss(model, batch)

    body = {"training_step": training_step, "compute_loss": lambda self, model, batch: mse(model, batch)}
    assert type("Mine", (SafeTrainer,), body)
    with pytest.raises(TypeError, match="did you mean training_step"):
        type("Mine", (SafeTrainer,), {"compute_loss": body["compute_loss"]})
