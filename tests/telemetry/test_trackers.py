"""Trackers through accelerate: they log the same as TensorBoard, and are never silently left out."""

import importlib.util
import math

import pytest
from small import make_batches

from safetrain.errors import ConfigError, UsageError

MISSING = [name for name in ("wandb", "mlflow", "trackio", "aim") if importlib.util.find_spec(name) is None]


@pytest.fixture
def trainer(make_trainer, tmp_path):
    def make(*trackers):
        logging = {"console": "off", "tensorboard": False, "trackers": list(trackers)}
        config = {"name": "tracked", "loop": {"log_every": 1}, "logging": logging}
        return make_trainer(train_data=make_batches(6, bad=(3,)), config=config, run_dir=tmp_path / "run")

    return make


@pytest.mark.skipif(not MISSING, reason="every tracker is installed here")
def test_one_that_is_missing_is_an_error_that_says_what_to_install(trainer, tmp_path):
    with pytest.raises(UsageError) as raised:
        trainer(MISSING[0]).fit()
    assert f"logging.trackers asks for {MISSING[0]}, which is not installed" in str(raised.value)
    assert f"To fix: pip install {MISSING[0]}" in str(raised.value)
    assert not (tmp_path / "run" / "journal.jsonl").exists()


def test_an_unknown_one_is_a_mistake_in_the_config(trainer):
    with pytest.raises(ConfigError, match="wandb"):
        trainer("wnadb")


@pytest.mark.skipif("wandb" in MISSING, reason="wandb is not installed")
@pytest.mark.filterwarnings("ignore")  # of its own
def test_wandb_logs_everything(trainer, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trainer("wandb").fit()
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.skipif("mlflow" in MISSING, reason="mlflow is not installed")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_logs_everything(trainer, tmp_path):
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    trainer("mlflow").fit()
    (run,) = mlflow.search_runs(experiment_names=["tracked"], output_format="list")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss/train")
    assert [metric.step for metric in history] == list(range(6))
    assert [math.isnan(metric.value) for metric in history] == [step == 3 for step in range(6)]
