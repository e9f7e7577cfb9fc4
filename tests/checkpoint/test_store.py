"""Checkpoints on disk: complete, verified, safe to load, and rotated without losing the last good one."""

import json
import math
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file
from small import assert_same, make_batches
from torch import nn

from safetrain import CheckpointError, SafeTrainer, TrainingStopped
from safetrain.checkpoint import BadState, CheckpointStore, Damaged
from safetrain.checkpoint.manifest import _sealed, checksum
from safetrain.checkpoint.state import TrainState
from safetrain.checkpoint.tensorfile import write_tensors

ABOUT = {"num_committed": 1, "epoch": 0, "time": "", "version": "0", "metric": None}


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints")


def make_state(**tensors):
    tensors = {"model/w": torch.randn(5, 3), "optimizer/0/exp_avg_sq": torch.rand(5, 3), **tensors}
    return TrainState(tensors, {"born_bad": [], "numbers": [1, 2.5, math.nan], "buffers": []})


def write(store, step, **tensors):
    return store.write(make_state(**tensors), {"step": step, **ABOUT})


def forge(path, change):
    """A manifest that was changed and sealed again."""
    body = json.loads((path / "manifest.json").read_text())
    del body["checksum"]
    change(body)
    (path / "manifest.json").write_text(_sealed(body))


def test_every_type_of_tensor_comes_back_bit_for_bit(store):
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
    kinds += [torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn]
    tensors = {f"extra/{i}": torch.randn(3, 7).mul(9).to(kind) for i, kind in enumerate(kinds)}
    tensors |= {"extra/scalar": torch.tensor(3.5), "extra/empty": torch.empty(0, 4), "model/t": torch.randn(4, 6).t()}
    shared = torch.randn(10)
    tensors |= {"model/a": shared[:5], "model/b": shared[3:]}
    state = make_state(**tensors)
    loaded = store.load(store.write(state, {"step": 1, **ABOUT})).state
    assert loaded.tensors.keys() == state.tensors.keys()
    for name, tensor in state.tensors.items():
        back = loaded.tensors[name]
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8)), name
    assert repr(loaded.rest["numbers"]) == "[1, 2.5, nan]"


def test_a_written_file_loads_with_safetensors_and_has_the_returned_checksum(tmp_path):
    tensors = {"a": torch.randn(300_000), "b": torch.arange(5), "c": torch.tensor(1.5)}
    written = write_tensors(tmp_path / "x", tensors)
    assert_same(dict(sorted(load_file(tmp_path / "x").items())), tensors)
    assert (written.checksum, written.num_bytes) == (checksum(tmp_path / "x"), (tmp_path / "x").stat().st_size)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["model/w", "ema/w", "optimizer/0/exp_avg", "extra/0"])
def test_a_non_finite_value_is_never_saved(store, name, value):
    tensor = torch.zeros(400_000)
    tensor[311_111] = value
    before = write(store, 1)
    with pytest.raises(BadState, match=name):
        write(store, 2, **{name: tensor})
    assert store.paths() == [before]
    assert list(store.directory.glob(".*")) == []


def test_huge_finite_values_are_fine_and_a_negative_second_moment_is_not(store):
    write(store, 1, **{"model/h": torch.full((100,), 3e38), "model/n": torch.full((9,), 6e4, dtype=torch.float16)})
    with pytest.raises(BadState, match=r"optimizer/0/exp_avg_sq \(a second moment of -1\)"):
        write(store, 2, **{"optimizer/0/exp_avg_sq": torch.tensor([1.0, -1.0])})


def test_bit_flips_truncations_and_missing_files_fall_back_to_the_previous_checkpoint(store):
    older, newest = write(store, 1), write(store, 2)
    generator = torch.Generator().manual_seed(0)
    for path in sorted(newest.iterdir()):
        content = path.read_bytes()
        positions = torch.randint(len(content) * 8, (40,), generator=generator).tolist()
        damaged = [content[: p // 8] + bytes([content[p // 8] ^ 1 << p % 8]) + content[p // 8 + 1 :] for p in positions]
        for bad in [*damaged, content[:-1], content[: len(content) // 2], b"", content + b" "]:
            path.write_bytes(bad)
            loaded = store.load_newest()
            assert loaded.path == older
            assert list(loaded.passed_over) == [newest.name]
        path.unlink()
        assert store.load_newest().path == older
        path.write_bytes(content)
    assert store.load_newest().path == newest


def test_a_checkpoint_of_another_schema_is_an_error(store):
    forge(write(store, 1), lambda body: body.update(schema=7))
    with pytest.raises(CheckpointError, match="its format has the version 7"):
        store.load_newest()


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


@pytest.mark.parametrize("writer", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content, 2))])
def test_a_malicious_checkpoint_runs_no_code(store, tmp_path, writer):
    path = write(store, 1)
    writer({"tensors": {}, "x": Malicious(str(tmp_path / "owned"))}, path / "state.pt")
    written = {"bytes": (path / "state.pt").stat().st_size, "xxh3_128": checksum(path / "state.pt")}
    forge(path, lambda body: body["files"].update({"state.pt": written}))
    with pytest.raises(Damaged, match="cannot be loaded"):
        store.load(path)
    with pytest.raises(CheckpointError):
        store.load_newest()
    assert not (tmp_path / "owned").exists()


def test_a_manifest_cannot_point_outside(store):
    path = write(store, 1)
    forge(path, lambda body: body["files"].update({"../x": body["files"]["state.pt"]}))
    with pytest.raises(Damaged, match="outside its directory"):
        store.load(path)


def test_rotation_keeps_the_chosen_the_newest_and_the_linked_ones(store):
    paths = [write(store, step) for step in range(5)]
    store.point("best", paths[1])
    store.rotate(lambda sound: {paths[2]})
    assert store.paths() == [paths[1], paths[2], paths[4]]


def test_nothing_is_removed_when_the_newest_is_damaged(store):
    paths = [write(store, step) for step in range(3)]
    (paths[-1] / "state.pt").write_bytes(b"x")
    store.rotate(lambda sound: set())
    assert store.paths() == paths


@pytest.fixture
def train(make_trainer, tmp_path):
    def make(cls=SafeTrainer, **config):
        data = {"train_data": make_batches(12), "eval_data": make_batches(2)}
        return make_trainer(cls=cls, config=config, run_dir=tmp_path / "run", **data)

    return make


def test_keep_last_best_and_every(tmp_path, train):
    class Scripted(SafeTrainer):
        def evaluation_step(self, model, batch):
            return {"loss": torch.tensor(float({4: 1.0}.get(self.run.result.steps, 2.0 + self.run.result.steps)))}

    keep = {"every_steps": 2, "keep_last": 2, "keep_best": 1, "keep_every": 6}
    trainer = train(Scripted, checkpoint=keep, loop={"eval_every": 4})
    trainer.fit()
    directory = tmp_path / "run" / "checkpoints"
    names = [path.name for path in CheckpointStore(directory).paths()]
    assert names == ["step-00000004", "step-00000006", "step-00000010", "step-00000012-1"]
    assert (os.readlink(directory / "best"), os.readlink(directory / "last")) == ("step-00000004", "step-00000012-1")


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("ladder", [["rollback"], ["disk"], []])
def test_a_bad_state_is_never_saved_and_the_run_rolls_back_or_stops(background, ladder, train):
    class Spoiling(SafeTrainer):
        def on_commit(self, view):
            if view.step == 4:
                self.ema.weights["0.bias"][0] = math.nan

    config = {
        "checkpoint": {"every_steps": 5, "async": background},
        "loop": {"ema": 0.9},
        "recovery": {"ladder": ladder},
    }
    trainer = train(Spoiling, **config, guards={"finite": {"state_every": 100}})
    if ladder:
        result = trainer.fit()
        assert result.rollbacks == 1
    else:
        with pytest.raises(TrainingStopped, match=r"not saved: ema 0\.bias"):
            trainer.fit()
        assert CheckpointStore(trainer.run.dir / "checkpoints").load_newest().manifest.step == 0
    incident = trainer.run.result.incidents[0]
    assert incident.trigger.guard == "audit"
    assert "ema 0.bias" in incident.decision.reasons[0]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("on_error", ["warn", "stop"])
def test_a_directory_that_cannot_be_written_to(tmp_path, caplog, background, on_error, train):
    class Blocking(SafeTrainer):
        def on_commit(self, view):
            directory = self.run.dir / "checkpoints"
            if view.step == 2:
                directory.rename(self.run.dir / "kept")
                directory.write_text("a file in its place")
            if view.step == 8 and on_error == "warn":
                directory.unlink()
                (self.run.dir / "kept").rename(directory)

    options = {"every_steps": 3, "async": background, "on_error": on_error}
    trainer = train(Blocking, checkpoint=options)
    if on_error == "stop":
        with pytest.raises(CheckpointError, match="could not be written at step"):
            trainer.fit()
        assert trainer.run.result.steps < 12
    else:
        assert trainer.fit().steps == 12
        assert "training goes on" in caplog.text
        assert CheckpointStore(tmp_path / "run" / "checkpoints").load_newest().manifest.step == 12


def test_saves_and_snapshots_are_counted_in_the_summary(tmp_path, train):
    result = train(checkpoint={"every_steps": 4, "snapshot_every": 5}).fit()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["checkpoints"]["num_saved"] == result.checkpoints["num_saved"] >= 4
    assert summary["snapshots"]["num_taken"] == 3
    assert summary["snapshots"]["bytes"] > 0


def test_without_checkpoints_only_the_final_weights_are_written(tmp_path, train):
    train(checkpoint={"enabled": False}).fit()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["final.safetensors"]


def test_extra_state_transient_buffers_and_tied_weights_survive(make_trainer, tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.b.weight = self.a.weight
            self.register_buffer("count", torch.zeros(()), persistent=False)
            self.seen = 0

        def forward(self, x):
            self.count += 1
            self.seen += 1
            return self.b(self.a(x)).mean(1, keepdim=True)

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    parts = {"train_data": make_batches(5), "run_dir": tmp_path / "run"}
    make_trainer(Net(), **parts).fit()
    model = Net()
    make_trainer(model, **parts).fit(resume=True)
    assert (model.seen, model.count.item()) == (5, 5.0)
