"""Runs that end as if the machine had crashed, and a comparison of everything that must survive it."""

import pytest
import torch
from checkpoint_cases import Gone
from records import journal
from small import assert_same, mse
from torch import nn

from safetrain import SafeTrainer
from safetrain.checkpoint import CheckpointStore
from safetrain.tensors.rng import seed_everything


def make_net():
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1))


@pytest.fixture
def start(tmp_path):
    """A trainer on directory `name`; `die_at` ends the process's run at that attempted step, wherever it then is."""

    def make(
        name, die_at=None, cls=SafeTrainer, model=None, optimizer=None, scheduler=None, seed_of_process=0, **parts
    ):
        class Dying(cls):
            def on_commit(self, view):
                super().on_commit(view)
                if die_at is not None and view.step >= die_at:
                    raise Gone

        seed_everything(seed_of_process)  # another process has another random state
        config = {"logging": {"console": "off", "tensorboard": False}, **parts.pop("config", {})}
        config["checkpoint"] = {"every_steps": 4, **config.get("checkpoint", {})}
        if model is None:
            torch.manual_seed(1 + seed_of_process)
            model = make_net()
        opt = (optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-2)))(model.parameters())
        sched = None if scheduler is None else scheduler(opt)
        parts.setdefault("loss_fn", mse)
        return Dying(model, optimizer=opt, scheduler=sched, config=config, run_dir=tmp_path / name, **parts)

    return make


def survivors(trainer):
    """The newest checkpoint of a run, without what a clock wrote; and its journal's steps and evaluations."""
    loaded = CheckpointStore(trainer.run.dir / "checkpoints").load_newest()
    rest = loaded.state.rest
    loaded.state.rest["progress"]["run"]["result"].pop("resumes", None)
    for name in ("seconds", "timing", "journal_position"):
        del rest["progress"]["run"][name]
    for incident in rest["progress"]["run"]["result"]["incidents"]:
        del incident["time"]
        incident["trigger"]["value"] = repr(incident["trigger"]["value"])
    kept = [line for line in journal(trainer.run.dir) if line["event"] in ("step", "eval")]
    return {"tensors": loaded.state.tensors, "rest": rest, "journal": kept}


@pytest.fixture
def check_exact(start):
    """Train to the end; train again dying and resuming at each of `deaths`; everything must be equal."""

    def check(deaths=(9,), data=None, **parts):
        whole = start("whole", train_data=data(), **parts)
        expected = whole.fit()
        pieces = None
        for index, die_at in enumerate((*deaths, None)):
            pieces = start(
                "pieces", die_at, train_data=data(), **parts, seed_of_process=0 if index == 0 else 100 + index
            )
            if die_at is None:
                result = pieces.fit(resume=True)
            else:
                with pytest.raises(Gone):
                    pieces.fit(resume="auto")
        assert_same(repr(expected.losses), repr(result.losses))
        assert (result.steps, result.skipped, result.epochs, result.evaluations, result.best) == (
            expected.steps, expected.skipped, expected.epochs, expected.evaluations, expected.best,
        )  # fmt: skip
        assert [i.step for i in result.incidents] == [i.step for i in expected.incidents]
        assert_same(survivors(whole), survivors(pieces))
        assert_same(whole.model.state_dict(), pieces.model.state_dict())
        return whole, pieces

    return check
