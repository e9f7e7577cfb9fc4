"""The same config under `--nproc`, `torchrun`, `accelerate launch` and without a launcher; requests without effect are errors."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from records import journal
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from safetrain.cli.main import run
from safetrain.distributed import launch
from safetrain.distributed.launch import record_failure, without_option
from safetrain.distributed.machine import Machine, num_processes_asked
from safetrain.errors import UsageError

CODE = """
import os
import signal
from pathlib import Path
import torch

def loss(model, batch, fail_on=-1, kind="user"):
    rank = int(os.environ.get("RANK", 0))
    loss.calls = getattr(loss, "calls", 0) + 1
    if kind == "killed once" and rank == 1 and loss.calls == 4 and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "in step 3" and loss.calls == (1 if Path("failed").exists() else 4):  # a resume goes on with step 3
        Path("failed").touch()
        raise KeyError("a mistake in user code")
    if rank == fail_on:
        raise KeyError("a mistake in user code")
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return x, x.sum().reshape(1)
"""
CONFIG = """
seed: 1
model: {_target_: torch.nn.Linear, in_features: 6, out_features: 1}
data: {train: {_target_: "./code.py:Data"}, batch_size: 4}
loss: {_target_: "./code.py:loss"}
loop: {max_steps: 6, device: cpu}
logging: {tensorboard: false, console: json}
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "c.yaml").write_text(CONFIG)
    return tmp_path


def started(project, *command, timeout=150):
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [sys.executable, *command], cwd=project, env=environment, capture_output=True, text=True, timeout=timeout
    )


def test_ranks_end_when_their_launcher_is_killed():
    """Also before they have found each other: what waits there listens to nobody."""
    rank = "from safetrain.distributed.launch import end_with_launcher as e; e(); print(flush=True); import time; time.sleep(60)"
    launcher = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {rank!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "TORCHELASTIC_RUN_ID": "1"}
    command = [sys.executable, "-c", launcher]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        handle = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
        ended = select.select([handle], [], [], 30.0)[0]
        os.close(handle)
    assert ended


def test_nproc_trains_with_one_log_per_rank_and_one_journal(project):
    done = started(project, "-m", "safetrain", "fit", "c.yaml", "--nproc", "2", "--out", "run", "loop.device=auto")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0]["world_size"] == 2
    assert [line["step"] for line in lines if line["event"] == "step"] == list(range(6))
    logs = sorted(path.name for path in (project / "run/logs/1").iterdir())
    assert [name for name in logs if "stdout" in name] == ["rank-0.stdout.log", "rank-1.stdout.log"]
    assert (project / "run/logs/1/rank-1.stdout.log").read_text() == ""


def test_nproc_reports_exit_code_and_error_of_the_failed_rank(project):
    done = started(project, "-m", "safetrain", "fit", "c.yaml", "--nproc=2", "--out", "run", "loss.fail_on=1")
    assert done.returncode == 1
    assert "rank 1 failed first, with exit code 1" in done.stderr
    assert "KeyError: 'a mistake in user code'" in done.stderr
    assert "ChildFailedError" not in done.stderr


def test_a_killed_rank_does_not_end_the_run(project):
    command = ("fit", "c.yaml", "--nproc", "2", "--restarts", "1", "--out", "run", "loss.kind=killed once")
    done = started(project, "-m", "safetrain", *command, "checkpoint.every_steps=2")
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 1" in done.stderr
    summary = json.loads((project / "run/summary.json").read_text())
    assert summary["steps"] == 6
    (resumed,) = summary["resumes"]
    assert (resumed["from_step"], resumed["steps_repeated"]) == (2, 1)
    assert "rank 1 is gone" in resumed["cause"]
    assert resumed["seconds"] > 0


def test_the_same_error_at_the_same_step_is_not_restarted_for_ever(project):
    done = started(
        project, "-m", "safetrain", "fit", "c.yaml", "--restarts", "5", "--out", "run", "loss.kind=in step 3"
    )
    assert done.returncode == 1
    assert "restart 1 of 5" in done.stderr
    assert "restart 2 of 5" not in done.stderr
    assert "has failed twice in the same way at step 3: KeyError" in done.stderr


@pytest.mark.slow
def test_torchrun_restarts_go_on_with_the_run(project):
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "-m", "safetrain"]
    command = ["fit", "c.yaml", "--out", "run", "--resume", "auto", "loss.kind=killed once", "checkpoint.every_steps=2"]
    done = started(project, "-m", "torch.distributed.run", *options, *command)
    assert done.returncode == 0, done.stderr
    summary = json.loads((project / "run/summary.json").read_text())
    assert (summary["steps"], [each["steps_repeated"] for each in summary["resumes"]]) == (6, [1])


@pytest.mark.parametrize(("code", "kept"), [(-signal.SIGTERM, 2), (1, 2)])
def test_the_exit_code_is_the_one_the_rank_recorded(tmp_path, monkeypatch, code, kept):
    """The launcher may terminate a rank that has reported its failure before it exits by itself."""
    error_file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    record_failure(UsageError("a mistake"), 2)
    failures = {
        0: ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "none")),
        1: ProcessFailure(local_rank=1, pid=2, exitcode=code, error_file=str(error_file)),
    }
    messages = []
    assert launch._report(failures, tmp_path, messages.append) == kept
    assert "rank 1 failed first, with exit code 2" in messages[-1]


@pytest.mark.parametrize("shown", ["error: no such key\nTo fix: …\n", ""], ids=["by rank 0 too", "by one rank"])
def test_an_error_that_rank_0_already_printed_is_not_repeated(tmp_path, shown):
    (tmp_path / "rank-0.stderr.log").write_text(f"starting\n{shown}")
    (tmp_path / "rank-1.stderr.log").write_text("error: no such key\nTo fix: …\n")
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=2, error_file=str(tmp_path / "none"))
    messages = []
    launch._report({1: failure}, tmp_path, messages.append)
    assert ("no such key" in "".join(messages)) is (shown == "")


def test_a_rank_without_a_recorded_code_keeps_its_exit_code(tmp_path):
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=-signal.SIGKILL, error_file=str(tmp_path / "none"))
    assert launch._report({0: failure}, tmp_path, print) == 128 + signal.SIGKILL


LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    # Its way to several processes on one machine, GPUs or not; "--mixed_precision no" and the rest keep it from asking back.
    "accelerate": ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
                   "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"],
}  # fmt: skip


def check_trained_by_two(project):
    summary = json.loads((project / "run/summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("done", 6)
    assert journal(project / "run")[0]["world_size"] == 2


@pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=LAUNCHERS)
def test_other_launchers(project, launcher):
    done = started(project, "-m", *launcher, "-m", "safetrain", "fit", "c.yaml", "--out", "run")
    assert done.returncode == 0, done.stderr
    check_trained_by_two(project)


@pytest.mark.slow
def test_two_agents_as_on_two_machines(project):
    """`torchrun --nnodes 2` twice, with a run directory that both see."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    fit = ["-m", "safetrain", "fit", "c.yaml", "--out", "run"]
    with ThreadPoolExecutor(2) as agents:
        both = [agents.submit(started, project, "-m", "torch.distributed.run", *nodes, *fit) for _ in range(2)]
    for agent in both:
        assert agent.result().returncode == 0, agent.result().stderr
    check_trained_by_two(project)


def test_accelerate_that_starts_one_process_instead_of_two_is_an_error(project):
    launcher = ["accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"]
    more = ["--mixed_precision", "no", "--dynamo_backend", "no"]
    done = started(project, "-m", *launcher, *more, "-m", "safetrain", "fit", "c.yaml", "--out", "run")
    assert done.returncode != 0
    assert "2 process" in done.stderr
    assert not (project / "run/checkpoints").exists()


def test_a_config_error_is_reported_once_and_starts_nothing(project, monkeypatch, capsys):
    monkeypatch.chdir(project)
    assert run(["fit", "c.yaml", "--nproc", "2", "--out", "run", "loop.max_step=3"]) == 2
    assert "max_steps" in capsys.readouterr().err
    assert not (project / "run").exists()


def test_nproc_inside_a_launcher_is_an_error(project, monkeypatch, capsys):
    monkeypatch.chdir(project)
    monkeypatch.setenv("RANK", "0")
    assert run(["fit", "c.yaml", "--nproc", "2", "--out", "run"]) == 2
    assert "leave --nproc out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["fit", "c.yaml", "--nproc", "2", "-q"], ["fit", "c.yaml", "-q"]),
        (["fit", "--nproc=2", "c.yaml"], ["fit", "c.yaml"]),
        (["fit", "c.yaml"], ["fit", "c.yaml"]),
    ],
)
def test_without_option(given, left):
    assert without_option(given, "--nproc") == left


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        (["python", "/bin/accelerate", "launch", "--cpu", "--num_processes", "2", "train.py"], 2),
        (["accelerate", "launch", "--num_processes=4", "train.py"], 4),
        (["python", "-m", "accelerate.commands.launch", "--num_processes=4", "train.py"], 4),
        (["python", "/bin/accelerate-launch", "--num-processes", "4", "train.py"], 4),
        (["accelerate", "launch", "train.py"], None),
        (["python", "launch", "--num_processes", "2"], None),
        (["bash"], None),
    ],
)
def test_num_processes_asked_of_accelerate(command, asked):
    assert num_processes_asked(command) == asked


def test_fewer_processes_than_configured_is_an_error():
    with pytest.raises(UsageError, match="asks for 2 process"):
        Machine("cpu", num_processes=2)


def test_fsdp_that_is_not_in_effect_is_an_error(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UsageError, match=r"loop\.strategy=fsdp"):
        Machine("cpu").check_launch("fp32", shards_model=False)
