"""Bundles and runs that were damaged, or made to hurt who opens them."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from safetrain.checkpoint.manifest import Damaged, Manifest, read_manifest
from safetrain.checkpoint.plain import MAX_EXPANDED, load_plain
from safetrain.checkpoint.store import CheckpointStore
from safetrain.cli.main import run
from safetrain.core.incident import Incident, Origin, Outcome, Trigger
from safetrain.incidents.bundle import incident_from, read_bundle, write_report
from safetrain.incidents.render import source_lines
from safetrain.report import write_incident_page
from safetrain.telemetry.console import Console


def made(tmp_path: Path, **more: Any) -> Incident:
    return Incident(3, "now", Trigger("finite", "loss", "nan"), Outcome("skip", ["bad"]), **more)


def laughing(levels: int) -> Any:
    value: Any = ["ha"]
    for _ in range(levels):
        value = [value] * 10
    return value


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        laughing(12),
        deep(300),
        {"x": torch.zeros(1).expand(2**20, 2**20)},
        {"x": [torch.zeros(2**20).expand(2**8, 2**20)] * (MAX_EXPANDED // 2**28)},
    ],
    ids=["laughs", "deep", "wide tensor", "many wide tensors"],
)
def test_what_is_larger_than_it_looks_is_refused(tmp_path: Path, value: Any) -> None:
    torch.save(value, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size < 2**23
    with pytest.raises(ValueError, match="more, or deeper"):
        load_plain(tmp_path / "x.pt")


def test_a_compressed_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    torch.save(torch.zeros(2**20), tmp_path / "x.pt")
    with (
        zipfile.ZipFile(tmp_path / "x.pt") as old,
        zipfile.ZipFile(tmp_path / "y.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(ValueError, match="compressed"):
        load_plain(tmp_path / "y.pt")


def test_one_flipped_bit_in_the_contents_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"x": torch.arange(4000.0), "loss": 1.25}, path)
    content = path.read_bytes()
    for at in (content.find(torch.arange(4000.0).numpy().tobytes()[400:440]) + 3, content.find(b"loss") + 2):
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        with pytest.raises(ValueError, match="checksum"):
            load_plain(path)
    path.write_bytes(content)
    assert load_plain(path)["loss"] == 1.25


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", "3"), ("origin", []), ("samples", "all"), ("cause", None), ("remedies", [1]), ("trigger", {"guard": 1})],
)
def test_an_incident_of_other_types_is_said_to_be_one(tmp_path: Path, field: str, value: Any) -> None:
    fields = json.loads(json.dumps(made(tmp_path).to_dict()))
    assert incident_from(fields).step == 3
    with pytest.raises(ValueError, match=rf"not what they should be: .*{field}"):
        incident_from({**fields, field: value})


def test_an_incident_cannot_have_any_file_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "elsewhere" / "secrets.py"
    secret.parent.mkdir()
    secret.write_text("# settings\nTOKEN = 'hf_123'\n")
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    Path("net.py").write_text("def f(x):\n    return x.log()\n")

    def shown(file: str | Path, line: int, code: str) -> str:
        return "\n".join(source_lines(made(tmp_path, origin=Origin("forward", file=str(file), line=line, code=code))))

    assert "hf_123" not in shown(secret, 1, "# settings")
    assert "root" not in shown("/etc/passwd", 1, "x")
    assert len(shown("/dev/zero", 1, "x").splitlines()) == 2
    assert "def f(x):" in shown(Path("net.py").absolute(), 2, "return x.log()")


def test_a_run_with_devices_for_files_is_read_all_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "run" / "incidents" / "step-000003"
    bundle.mkdir(parents=True)
    for path in (bundle / "incident.json", tmp_path / "run" / "journal.jsonl", tmp_path / "run" / "config.yaml"):
        path.symlink_to("/dev/zero")
    assert run(["diagnose", str(tmp_path / "run")]) == 0
    assert "no incident" in capsys.readouterr().out
    assert run(["report", str(tmp_path / "run"), "--out", str(tmp_path / "x.html")]) == 0
    assert run(["config", "validate", str(tmp_path / "run" / "config.yaml")]) == 2


def test_a_damaged_journal_and_incident_leave_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (3, 4):
        directory = tmp_path / "incidents" / f"step-00000{step}"
        directory.mkdir(parents=True)
        (directory / "incident.json").write_text(json.dumps({**made(tmp_path).to_dict(), "step": step}))
    (tmp_path / "incidents/step-000004/incident.json").write_bytes(b"\xff\xfe{")
    (tmp_path / "journal.jsonl").write_bytes(b'\xff\n{"event": "incident"}\n' + b"[" * 100_000)
    assert run(["diagnose", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "1 incident" in captured.out
    assert "left out: " in captured.err


@pytest.mark.parametrize(
    "change",
    [{"step": "1"}, {"files": []}, {"files": {"state.pt": 1}}, {"epoch": None}, {"num_committed": -1}, {"time": 3}],
)
def test_a_forged_manifest_is_damage(tmp_path: Path, change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"step": 1, "num_committed": 1, "epoch": 0, "time": "", "version": "", "files": {}}
    (tmp_path / "manifest.json").write_text(Manifest(**fields).render())
    assert read_manifest(tmp_path).step == 1
    (tmp_path / "manifest.json").write_text(Manifest(**{**fields, **change}).render())
    with pytest.raises(Damaged):
        read_manifest(tmp_path)


def test_a_forged_state_is_passed_over(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    from scripts.chaos_forged import seal

    make_trainer(
        train_data=[(torch.ones(2, 6), torch.ones(2, 1))] * 4,
        config={"checkpoint": {"every_steps": 2}},
        run_dir=tmp_path / "run",
    ).fit()
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    older, newest = store.paths()[-2:]
    for change in ({"optimizer": 3}, {"tensors": []}, {"born_bad": {}}, {"guards": None}):
        state = torch.load(older / "state.pt", weights_only=True)
        torch.save({**state, **change}, newest / "state.pt")
        seal(newest)
        loaded = store.load_newest()
        assert loaded is not None
        assert loaded.path == older
        assert "of another type" in loaded.passed_over[newest.name]
    with open(newest / "training.safetensors", "wb") as file:
        file.write((2**31).to_bytes(8, "little") + b"{}")
    seal(newest)
    assert store.load_newest().path == older  # type: ignore[union-attr]


def test_control_codes_reach_no_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[31m"
    console = Console(1)
    about = {"name": evil, "parameters": 1, "device": "cpu", "precision": "fp32", "guards": [evil], "run_dir": evil}
    console.started({**about, "resumed": evil})
    console.noted(evil)
    console.rolled_back(1, 1, evil)
    console.evaluated({"step": 1, evil: 1.0}, True)
    console.incident(made(tmp_path, fix=evil))
    (tmp_path / "evil.yaml").write_text(f"name: {json.dumps(evil)}\nmodel: {{_target_: torch.nn.ReLU}}")
    assert run(["explain", str(tmp_path / "evil.yaml")]) == 0
    assert run(["fit", evil]) == 2
    assert run(["config", "show", "quickstart", f"model.{evil}=1"]) == 2
    captured = capsys.readouterr()
    assert "owned" in captured.out
    assert "owned" in captured.err
    assert "\x1b" not in captured.out + captured.err


def test_control_codes_reach_no_report(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x9b31m\u202e\ud800"
    incident = made(tmp_path, fix=evil, origin=Origin("forward", module=evil, code=evil))
    write_report(tmp_path, incident)
    write_incident_page(tmp_path, incident)
    for name in ("report.html", "report.md"):
        text = (tmp_path / name).read_text()
        assert "owned" in text
        assert not any(code in text for code in "\x1b\x07\x9b\u202e")


def test_a_bundle_of_other_types_is_not_as_written(tmp_path: Path) -> None:
    bundle = tmp_path / "run" / "incidents" / "step-000003"
    bundle.mkdir(parents=True)
    (bundle / "incident.json").write_text(json.dumps(made(tmp_path).to_dict()))
    torch.save({"schema": 1}, bundle / "replay.pt")
    with pytest.raises(ValueError, match="format"):
        read_bundle(bundle)
