"""Lightning with automatic optimization."""

import copy

import pytest
import torch
from small import assert_same, make_batches, mse
from torch import nn

from safetrain import TrainingStopped, UsageError, watch

lightning = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.filterwarnings("ignore")

from safetrain.integrations.lightning import SafetrainCallback  # noqa: E402

QUIET = {"logging": {"console": "off", "tensorboard": False}}


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.after = []

    def training_step(self, batch, batch_idx):
        loss = mse(self.net, batch)
        self.log("loss", loss)
        return {"loss": loss, "mean": loss.detach()}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_end(self, *_):
        scheduler = self.lr_schedulers()
        self.after.append(copy.deepcopy((self.net.state_dict(), scheduler.state_dict())))


def fit(tmp_path, batches, callback=None, module=None, **options):
    module = Regression() if module is None else module
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[callback] if callback else [],
        **options,
    )
    torch.manual_seed(2)
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    return trainer, module


def callback_for(tmp_path, **config):
    return SafetrainCallback({**QUIET, **config}, run_dir=tmp_path / "run")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"precision": "bf16-mixed"},
        {"precision": "16-mixed"},
        {"gradient_clip_val": 0.5},
    ],
    ids=str,
)
def test_quiet_guards_leave_the_fit_bit_identical(tmp_path, options):
    if options.get("precision") == "16-mixed":  # Lightning refuses it on the CPU, and takes a plugin that does the same
        plugin = lightning.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**24))
        options = {"plugins": [plugin]}
    found = []
    for callback in (None, callback_for(tmp_path, guards={"clip": None})):
        if "plugins" in options:
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
            options = {"plugins": [lightning.plugins.MixedPrecision("16-mixed", "cpu", scaler)]}
        _, module = fit(tmp_path, make_batches(20), callback, **options)
        found.append((module.net.state_dict(), module.after[-1][1]))
        torch.manual_seed(0)
    assert_same(*found)
    result = callback.guard.result
    assert (result.status, result.incidents) == ("done", [])
    assert result.attempted == 20 // options.get("accumulate_grad_batches", 1)


def test_a_refused_update_moves_nothing(tmp_path):
    callback = callback_for(tmp_path)
    trainer, module = fit(tmp_path, make_batches(12, bad=[7]), callback)
    assert_same(module.after[6], module.after[7])
    assert (callback.guard.result.steps, callback.guard.result.skipped) == (11, 1)
    assert callback.guard.result.incidents[0].cause.label == "bad_input_data"
    assert trainer.callback_metrics["safetrain/skipped"] == 1


def test_bad_samples_are_left_out(tmp_path):
    batches = make_batches(12)
    batches[5][0][2] = float("nan")
    callback = callback_for(tmp_path)
    fit(tmp_path, batches, callback, accumulate_grad_batches=2)
    assert (callback.guard.result.steps, callback.guard.result.incidents[0].samples) == (6, [2])


def test_mixed_precision_forgets_a_refused_step(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plugin = lightning.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    callback = callback_for(tmp_path)
    fit(tmp_path, make_batches(12, bad=[7]), callback, plugins=[plugin])
    assert (callback.guard.result.steps, callback.guard.result.skipped) == (11, 1)
    assert scaler.get_scale() == 1024.0


def test_a_stop_is_raised_from_fit(tmp_path):
    callback = callback_for(tmp_path, recovery={"max_refusals": 1})
    with pytest.raises(TrainingStopped):
        fit(tmp_path, make_batches(12, bad=range(5, 12)), callback)
    assert callback.guard.result.status == "stopped"


def test_the_state_is_in_the_checkpoints_of_lightning(tmp_path):
    first = callback_for(tmp_path)
    trainer, _ = fit(tmp_path, make_batches(10), first)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)["callbacks"]
    second = SafetrainCallback(QUIET, run_dir=tmp_path / "again")
    second.load_state_dict(next(state for name, state in saved.items() if "Safetrain" in name))
    fit(tmp_path, make_batches(5), second)
    assert second.guard.result.losses[:10] == first.guard.result.losses
    assert second.guard.result.steps == 15


class Manual(Regression):
    def __init__(self, run_dir=None):
        super().__init__()
        self.automatic_optimization, self.run_dir = False, run_dir

    def on_train_start(self):
        if self.run_dir is not None:
            self.guard = watch(self, self.optimizers().optimizer, config=QUIET, run_dir=self.run_dir)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        with self.guard.step(batch):
            self.manual_backward(mse(self.net, batch))
            optimizer.step()
            optimizer.zero_grad()

    def on_train_end(self):
        self.guard.close()


def test_manual_optimization_says_what_to_do(tmp_path):
    with pytest.raises(UsageError, match="optimizes manually"):
        fit(tmp_path, make_batches(2), callback_for(tmp_path), Manual())


def test_manual_optimization_with_watch(tmp_path):
    _, module = fit(tmp_path, make_batches(8, bad=[5]), None, Manual(tmp_path / "run"))
    assert (module.guard.result.steps, module.guard.result.skipped) == (7, 1)
