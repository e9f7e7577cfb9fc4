"""What a TensorBoard page is made from."""

import math

import pytest
import torch
from small import assert_same, make_batches

from safetrain import TrainingStopped
from safetrain.telemetry.scalars import LAYOUT
from tests.telemetry.incident_runs import INCIDENTS, faulty_run


def events_of(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run_dir), size_guidance={"scalars": 0, "tensors": 0, "histograms": 0}).Reload()


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "run"
    result = faulty_run(directory)
    assert {i.step: i.cause.label for i in result.incidents} == INCIDENTS
    return events_of(directory)


def text_of(events, tag):
    return {event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors(f"{tag}/text_summary")}


def test_every_tag(events):
    expected = {
        *(f"health/{name}" for name in ("status", "nonfinite_losses", "nonfinite_gradients", "skipped", "rollbacks")),
        *(f"health/grad_norm{part}" for part in ("", "_p50", "_p95", "_p99")),
        *(f"health/{name}" for name in ("clip_fraction", "lr_scale", "loss_z", "update_size")),
        "loss/train",
        "optim/lr",
        "perf/steps_per_second",
        "perf/guards_percent",
    }
    assert expected <= set(events.Tags()["scalars"])
    groups = sorted({tag.split("/")[0] for tag in events.Tags()["scalars"]})
    assert groups == ["health", "loss", "optim", "perf", "run"]


def test_nan_is_logged_raw(events):
    losses = {event.step: event.value for event in events.Scalars("loss/train")}
    assert sorted(losses) == list(range(40))
    assert [step for step in losses if not math.isfinite(losses[step])] == [10, 20, 30]
    assert losses[20] == -math.inf
    assert events.Scalars("health/nonfinite_losses")[-1].value == 3


def test_incidents_are_markdown_at_their_step(events):
    texts = text_of(events, "health/incidents")
    assert sorted(texts) == [10, 20, 30]
    for step, label in INCIDENTS.items():
        assert f"`{label}`" in texts[step]
        assert "incident_runs.py:" in texts[step]
    assert "pooled = (hidden * mask).sum(1) / mask.sum(1)" in texts[10]


def test_config_environment_and_summary_are_texts(events):
    assert "name: three" in text_of(events, "run/config")[0]
    assert f"| torch | {torch.__version__.split('+')[0]}" in text_of(events, "run/environment")[0]
    (summary,) = text_of(events, "health/summary").values()
    assert summary.startswith("**done: 40 steps committed, 0 skipped")


def test_the_layout_names_tags_that_are_there(events):
    from tensorboard.plugins.custom_scalar import layout_pb2

    layout = layout_pb2.Layout()
    layout.ParseFromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    (category,) = layout.category
    assert category.title == "Run health"
    assert [chart.title for chart in category.chart] == list(LAYOUT["Run health"])
    tags = {tag.strip("^$") for chart in category.chart for tag in chart.multiline.tag}
    assert tags - set(events.Tags()["scalars"]) == {"loss/eval"}  # nothing was evaluated


def end_of(run_dir):
    from tensorboard.plugins.hparams.metadata import SESSION_END_INFO_TAG, parse_session_end_info_plugin_data

    found = events_of(run_dir).summary_metadata
    if SESSION_END_INFO_TAG not in found:
        return None
    return parse_session_end_info_plugin_data(found[SESSION_END_INFO_TAG].plugin_data.content).status


def test_hyperparameters_are_in_the_same_run_with_its_true_end(make_trainer, tmp_path):
    from tensorboard.plugins.hparams.api_pb2 import Status
    from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG, parse_session_start_info_plugin_data

    def trainer(**recovery):
        config = {"seed": 5, "recovery": recovery, "logging": {"console": "off"}}
        return make_trainer(train_data=make_batches(6, bad=(3,)), config=config, run_dir=tmp_path / "run")

    with pytest.raises(TrainingStopped):
        trainer(max_refusals=0).fit()
    assert [path for path in (tmp_path / "run").iterdir() if path.is_dir() and path.name.startswith("1")] == []
    assert end_of(tmp_path / "run") == Status.Value("STATUS_FAILURE")
    trainer(max_refusals=5).fit(resume=True)
    assert end_of(tmp_path / "run") == Status.Value("STATUS_SUCCESS")
    found = events_of(tmp_path / "run").summary_metadata[SESSION_START_INFO_TAG].plugin_data.content
    assert parse_session_start_info_plugin_data(found).hparams["seed"].number_value == 5


def test_histograms_of_the_finite_part_and_the_count_of_the_rest(events, tmp_path):
    histograms = events.Histograms("tensors/gradients/head.weight")
    assert [event.step for event in histograms] == [0, 21]  # step 20 is an incident
    assert histograms[0].histogram_value.num == 16
    assert sum(histograms[0].histogram_value.bucket) == 16
    assert "tensors/weights/body.bias" in events.Tags()["histograms"]

    from safetrain.telemetry.tensorboard import TensorBoard

    board = TensorBoard(tmp_path, {"loop": {"log_every": 1}}, {})
    nan, inf = math.nan, math.inf
    board.tensors(
        {"tensors/weights/w": torch.tensor([1.0, nan, 3.0, inf, -inf]), "tensors/weights/c": torch.ones(3)}, 7
    )
    board.tensors({"tensors/weights/w": torch.full((2,), nan)}, 8)
    board.tensors({"tensors/weights/w": torch.ones(2)}, 9)
    written = events_of(tmp_path)
    assert [(e.step, e.histogram_value.num) for e in written.Histograms("tensors/weights/w")] == [(7, 2), (9, 2)]
    counts = written.Scalars("precision/nonfinite_weights/w")
    assert [(event.step, event.value) for event in counts] == [(7, 3), (8, 2), (9, 0)]
    assert "precision/nonfinite_weights/c" not in written.Tags()["scalars"]


def test_logging_changes_no_number(make_trainer):
    def weights(tensorboard):
        torch.manual_seed(0)
        logging = {"console": "off", "tensorboard": tensorboard, "histograms_every": 1 if tensorboard else None}
        config = {"logging": logging, "seed": 1, "loop": {"log_every": 1}}
        trainer = make_trainer(train_data=make_batches(6), config=config)
        trainer.fit()
        return trainer.model.state_dict()

    assert_same(weights(True), weights(False))
