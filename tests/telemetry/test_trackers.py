"""Trackers through accelerate: they log the same as TensorBoard, and are never silently left out."""

import importlib.util
import math

import pytest
from small import make_batches, make_model, mse

from safetrain import SafeTrainer
from safetrain.errors import ConfigError, UsageError
from safetrain.telemetry.trackers import PACKAGES

MISSING = [name for name in PACKAGES if importlib.util.find_spec(PACKAGES[name]) is None]


def trainer(tmp_path, *trackers):
    config = {
        "name": "tracked",
        "loop": {"log_every": 1},
        "logging": {"console": "off", "tensorboard": False, "trackers": list(trackers)},
    }
    data = make_batches(6, bad=(3,))
    return SafeTrainer(make_model(), loss_fn=mse, train_data=data, config=config, run_dir=tmp_path / "run")


@pytest.mark.skipif(not MISSING, reason="every tracker is installed here")
def test_one_that_is_missing_is_an_error_that_says_what_to_install(tmp_path):
    with pytest.raises(UsageError) as raised:
        trainer(tmp_path, MISSING[0]).fit()
    assert f"logging.trackers asks for {MISSING[0]}, which is not installed" in str(raised.value)
    assert f"To fix: pip install {MISSING[0]}" in str(raised.value)
    assert not (tmp_path / "run" / "journal.jsonl").exists()


def test_an_unknown_one_is_a_mistake_in_the_config(tmp_path):
    with pytest.raises(ConfigError, match="wandb"):
        trainer(tmp_path, "wnadb")


@pytest.mark.skipif("wandb" in MISSING, reason="wandb is not installed")
@pytest.mark.filterwarnings("ignore")  # of its own
def test_wandb_logs_everything(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trainer(tmp_path, "wandb").fit()
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.skipif("mlflow" in MISSING, reason="mlflow is not installed")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_logs_everything(tmp_path):
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    trainer(tmp_path, "mlflow").fit()
    (run,) = mlflow.search_runs(experiment_names=["tracked"], output_format="list")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss/train")
    assert [metric.step for metric in history] == list(range(6))
    assert [math.isnan(metric.value) for metric in history] == [step == 3 for step in range(6)]
