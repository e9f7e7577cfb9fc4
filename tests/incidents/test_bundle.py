"""The incident on disk: what is kept, how much of it, and that it is read back as it was."""

from __future__ import annotations

import collections
import json
import linecache
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from safetrain import SafeTrainer
from safetrain.config import import_target
from safetrain.core.incident import Cause, Incident, Origin, Outcome, Remedy, Trigger
from safetrain.errors import UsageError
from safetrain.forensics.frames import Place
from safetrain.forensics.patches import Patches
from safetrain.forensics.substitutes import Patch
from safetrain.incidents.batch_codec import decode, encode
from safetrain.incidents.bundle import incident_from, read_bundle, read_incident
from safetrain.incidents.render import answers, markdown, write_report
from safetrain.incidents.replay import replay


class Counting(nn.Module):
    """A model with buffers of both kinds and a part in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Dropout(0.5).eval()
        self.head = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.head(self.frozen(self.norm(x))) * (1 + self.seen)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    x, scale = batch
    return torch.log(model(x).square().sum(1) * scale).mean()


Train = Callable[..., tuple[SafeTrainer, Path]]


@pytest.fixture
def train(make_trainer: Callable[..., SafeTrainer], tmp_path: Path) -> Train:
    """Trains with a step that is bad; returns the trainer, and where that incident lies."""

    def make(**sections: Any) -> tuple[SafeTrainer, Path]:
        batches = [(torch.randn(4, 3), torch.tensor([1.0, float(i != 3), 1.0, 1.0])) for i in range(6)]
        model = Counting()
        parts = {"optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3), "train_data": batches}
        config = {"loop": {"device": "cpu"}, **sections}
        trainer = make_trainer(model, loss_fn=loss_fn, config=config, run_dir=tmp_path / "run", **parts)
        trainer.fit()
        return trainer, tmp_path / "run" / "incidents" / "step-000003"

    return make


def test_a_bundle_holds_all_that_a_fresh_model_needs_to_reproduce_the_step(train: Train) -> None:
    _, path = train()
    assert {file.name for file in path.iterdir()} == {"incident.json", "report.md", "report.html", "replay.pt"}
    contents = torch.load(path / "replay.pt", weights_only=True)
    assert contents["eval_mode"] == ["frozen"]
    assert contents["buffers"]["seen"] == 3
    torch.manual_seed(99)
    replayed = replay(read_bundle(path), Counting(), loss_fn)
    assert (replayed.verdict, replayed.differences, replayed.notes) == ("reproduced", [], [])
    assert replayed.incident.samples == [1]


def test_islands_and_patches_of_that_time_are_part_of_the_step(train: Train) -> None:
    guards = {"islands": {"modules": ["head"], "loss": False}}
    recovery = {"heal": ["patch"], "ladder": ["patch", "skip"]}
    loop = {"device": "cpu", "precision": "bf16"}
    _, path = train(guards=guards, recovery=recovery, loop=loop)
    contents = torch.load(path / "replay.pt", weights_only=True)
    assert (contents["islands"], contents["patches"], contents["precision"]) == (["head"], [], "bf16")
    replayed = replay(read_bundle(path), Counting(), loss_fn)
    assert replayed.verdict == "reproduced"
    assert replayed.notes == ["with its float32 islands: head"]
    # With the line patched, as it was from the next step on, the same batch is healthy.
    line = replayed.incident.origin.line
    patches = Patches()
    code = linecache.getline(__file__, line).strip()
    patches.add(Patch(Place(__file__, line, code, "loss_fn"), frozenset({"log"})))
    torch.save({**contents, "patches": patches.state_dict()["patches"]}, path / "replay.pt")
    assert replay(read_bundle(path), Counting(), loss_fn).verdict == "not reproduced"


def test_weights_that_are_too_large_are_taken_from_the_checkpoint(train: Train) -> None:
    sections = {"forensics": {"max_bundle_mb": 0.0001}, "checkpoint": {"every_steps": 3}}
    _, path = train(**sections)
    contents = torch.load(path / "replay.pt", weights_only=True)
    assert contents["model"] is None
    pointer = contents["checkpoint"]
    assert pointer == {"path": "checkpoints/step-00000003", "num_committed": 3, "is_exact": True}
    replayed = replay(read_bundle(path), Counting(), loss_fn)
    assert replayed.notes == ["weights of the checkpoint step-00000003"]
    assert (replayed.verdict, replayed.differences) == ("reproduced", [])


def test_a_checkpoint_of_another_step_is_said_to_be_one_and_a_missing_one_is_an_error(
    train: Train, tmp_path: Path
) -> None:
    _, path = train(forensics={"max_bundle_mb": 0.0001})
    contents = torch.load(path / "replay.pt", weights_only=True)
    assert contents["checkpoint"]["is_exact"] is False
    (note,) = replay(read_bundle(path), Counting(), loss_fn).notes
    assert "3 committed steps before the incident" in note
    (tmp_path / "run" / contents["checkpoint"]["path"]).rename(tmp_path / "gone")
    with pytest.raises(UsageError, match="cannot be used"):
        replay(read_bundle(path), Counting(), loss_fn)


def test_nothing_larger_than_the_limit_is_kept(train: Train) -> None:
    trainer, path = train(forensics={"max_bundle_mb": 0.0})
    contents = torch.load(path / "replay.pt", weights_only=True)
    assert contents["window"] is contents["model"] is None
    assert trainer.run.result.steps == 6
    with pytest.raises(UsageError, match="was not kept"):
        replay(read_bundle(path), Counting(), loss_fn)


def test_the_moments_are_kept_when_the_update_is_at_fault(
    make_trainer: Callable[..., SafeTrainer], tmp_path: Path
) -> None:
    class Late(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    count = self.state[parameter].setdefault("count", torch.zeros(()))
                    count += 1
                    with torch.no_grad():
                        parameter -= parameter.grad / (3 - count)

    model = nn.Linear(3, 3)
    optimizer = Late(model.parameters(), lr=0.1)
    batches = [(torch.randn(4, 3), torch.ones(4)) for _ in range(5)]
    parts = {"optimizer": optimizer, "train_data": batches, "run_dir": tmp_path / "run"}
    trainer = make_trainer(model, loss_fn=loss_fn, config={"loop": {"device": "cpu"}}, **parts)
    trainer.stepper.careful_steps = 10
    trainer.fit()
    incident = trainer.run.result.incidents[0]
    assert incident.origin.phase == "optimizer"
    path = tmp_path / "run" / str(incident.path)
    again = nn.Linear(3, 3)
    replayed = replay(read_bundle(path), again, loss_fn, Late(again.parameters(), lr=0.1))
    assert (replayed.verdict, replayed.differences) == ("reproduced", [])


def test_a_directory_that_cannot_be_written_does_not_end_the_run(train: Train, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "incidents").write_text("in the way")
    trainer, _ = train()
    assert trainer.run.result.steps == 6
    assert "could not be written" in (tmp_path / "run" / "journal.jsonl").read_text()


# ---- batches -------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Example:
    x: Tensor
    name: str


class Graph:
    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device) -> Graph:
        return self


class Slotted:
    __slots__ = ("x",)


def slotted(x: Tensor) -> Slotted:
    made = Slotted()
    made.x = x
    return made


def saved_and_loaded(batch: Any, tmp_path: Path) -> Any:
    torch.save(encode(batch), tmp_path / "batch.pt")
    return decode(torch.load(tmp_path / "batch.pt", weights_only=True), import_target)


def test_batches_of_every_kind_come_back_as_they_were(tmp_path: Path) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert saved_and_loaded([x, (1, "a", None, 2.5)], tmp_path)[1] == (1, "a", None, 2.5)
    pair = saved_and_loaded(Pair(x, x + 1), tmp_path)
    assert type(pair) is Pair
    assert torch.equal(pair.y, x + 1)
    example = saved_and_loaded({"a": Example(x, "n")}, tmp_path)["a"]
    assert (type(example), example.name) == (Example, "n")
    assert torch.equal(saved_and_loaded(Graph(x), tmp_path).nodes, x)
    assert torch.equal(saved_and_loaded(slotted(x), tmp_path).x, x)
    array = saved_and_loaded({"n": np.eye(2, dtype=np.float32)}, tmp_path)["n"]
    assert array.dtype == np.float32
    assert array.tolist() == [[1, 0], [0, 1]]
    ordered = saved_and_loaded(collections.OrderedDict(b=x, a=1), tmp_path)
    assert type(ordered) is collections.OrderedDict
    assert list(ordered) == ["b", "a"]
    default = saved_and_loaded(collections.defaultdict(list, {"k": [x]}), tmp_path)
    assert default["new"] == []
    packed = saved_and_loaded(pack_sequence([x, x[:1]]), tmp_path)
    assert torch.equal(packed.data, pack_sequence([x, x[:1]]).data)


def test_a_piece_of_a_large_tensor_does_not_bring_the_rest_along(tmp_path: Path) -> None:
    saved_and_loaded(torch.zeros(1_000_000)[5:7], tmp_path)
    assert (tmp_path / "batch.pt").stat().st_size < 10_000


def test_what_cannot_be_found_again_is_refused() -> None:
    class Local:
        pass

    with pytest.raises(UsageError, match="inside a function"):
        encode(Local())


# ---- incident.json and report.md -----------------------------------------------------------------------------------


def nasty() -> Incident:
    operand = {
        "name": "self", "shape": [2], "dtype": "float32", "count": 2, "zeros": 0, "negatives": 1, "nan": 0, "inf": 1,
        "neg_inf": 0, "min": -1.0, "max": float("inf"), "smallest": 1.0,
    }  # fmt: skip
    return Incident(
        7,
        "2026-01-01T00:00:00+00:00",
        Trigger("finite", "loss", float("nan")),
        Outcome("skip", ["finite: the loss is nan", "<script>alert(1)</script> [x](http://y) | `z`"]),
        origin=Origin(
            "forward", "aten.log.default", "log", "a|b.__x__<i>", "T`ick", "/no/such file.py", 3, "x = '```' + \x1b[31m`y`",
            [operand], [],
        ),
        cause=Cause("log_of_nonpositive", "log got *bold* <b>html</b>\n# not a heading"),
        samples=list(range(30)),
        propagation=["head `0`", "the loss"],
        remedies=[Remedy("retry", False, float("nan"), "a | b")],
        fix=f"use __that__ without {list(range(40))}",
        path="incidents/step-000007",
    )  # fmt: skip


def test_an_incident_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "step-000007").mkdir()
    (tmp_path / "step-000007" / "incident.json").write_text(json.dumps(nasty().to_dict(), allow_nan=False))
    incident = read_incident(tmp_path / "step-000007")
    assert repr(incident) == repr(nasty())
    assert "".join(answers(incident))


def test_an_unknown_schema_is_an_error() -> None:
    with pytest.raises(ValueError, match="its schema is 2"):
        incident_from({**nasty().to_dict(), "schema": 2})


def test_what_comes_from_user_code_is_no_markup_in_the_report(tmp_path: Path) -> None:
    text = write_report(nasty(), tmp_path).read_text()
    assert text == markdown(nasty())
    outside_code = re.sub(r"(?s)````python.*?````", "", text)
    for markup in ("<script>", "<b>", "<i>", " *bold*", "\n# not", "\x1b", " __that__"):
        assert markup not in outside_code
    assert not re.search(r"(?<!\\)\]\(", outside_code)
    assert "\\<script\\>" in text
    assert "x = '```' + \\x1b[31m`y`" in text
    fence = re.search(r"(?m)^(`+)python$", text)
    assert fence is not None
    assert len(fence[1]) == 4
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows[-3:]}) == 1


def test_the_terminal_gets_no_control_codes_and_no_endless_lists() -> None:
    text = nasty().render("runs/x")
    assert "\x1b" not in text
    assert "10, 11 and 18 more" in text
    assert "without [0, 1, 2, … 39: 40 in all]" in text
    assert "safetrain replay runs/x/incidents/step-000007" in text
    assert len(text.splitlines()) <= 14
    assert max(map(len, text.splitlines())) <= 120
