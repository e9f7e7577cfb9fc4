"""A rank that hangs, dies or has no data: the others end too, and name the rank and its line of code."""

import os
import signal
import subprocess
import sys
import threading

import torch
from process_group import outcomes_of, run_ranks
from records import journal
from small import make_batches, make_model, mse
from torch.utils.data import Dataset

from safetrain import SafeTrainer
from safetrain.distributed import activity, watchdog
from safetrain.errors import RankError
from safetrain.trainer import hangs

GUILTY = 1
BAD_STEP = 3


class Quiet(SafeTrainer):
    fault = ""

    def training_step(self, model, batch):
        if self.machine.rank == GUILTY and self.step == BAD_STEP:
            if self.fault == "hang":
                threading.Event().wait(100)
            if self.fault == "stopped":
                helper = self.let_go_when_named()
                os.kill(os.getpid(), signal.SIGSTOP)
                helper.wait()
            if self.fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        return mse(model, batch)

    def let_go_when_named(self):
        code = (
            "import os, pathlib, signal, sys, time\n"
            "deadline = time.monotonic() + 40\n"
            'while time.monotonic() < deadline and \'"event": "hang"\' not in pathlib.Path(sys.argv[1]).read_text():\n'
            "    time.sleep(0.1)\n"
            "os.kill(int(sys.argv[2]), signal.SIGCONT)\n"
        )
        return subprocess.Popen(
            [sys.executable, "-c", code, str(self.run.shared_dir / "journal.jsonl"), str(os.getpid())]
        )

    def on_commit(self, view):
        if self.fault == "hook" and self.machine.rank == GUILTY and view.step == BAD_STEP:
            raise LookupError("a mistake in a hook")


class RaisingData(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        if int(os.environ["RANK"]) == GUILTY and index >= 20:
            raise OSError(f"sample {index} cannot be read")
        return torch.randn(6), torch.randn(1)


def trainer(fault, run_dir, data=None, **loop):
    Quiet.fault = fault
    model = make_model(dropout=0.0, norm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = {
        "loop": {"device": "cpu", **loop},
        "data": {"batch_size": 2, "shuffle": False},
        "logging": {"console": "off", "tensorboard": False},
    }
    data = make_batches(20) if data is None else data
    return Quiet(model, optimizer=optimizer, train_data=data, config=config, run_dir=run_dir)


def run(rank, fault, run_dir, timeout):
    trainer(fault, run_dir, rank_timeout_seconds=timeout).fit()


def run_impatient(rank, fault, run_dir, timeout):
    """What hangs is late after half a second already."""
    activity.FLOOR_SECONDS = 0.5
    watchdog.ANSWER_SECONDS = 1.5
    run(rank, fault, run_dir, timeout)


def test_a_hanging_rank_is_named_long_before_the_timeout_and_ends_where_it_hangs(tmp_path):
    first, guilty, third = outcomes_of(run_impatient, 3, "hang", str(tmp_path / "run"), 8.0, timeout=120)
    hang, *_ = [line for line in journal(tmp_path / "run") if line["event"] == "hang"]
    assert hang["seconds"] < 8.0 * hangs.EARLIER
    assert (hang["step"], hang["ranks"], hang["unit"]) == (BAD_STEP, [GUILTY], "step")
    place = hang["places"][str(GUILTY)]
    assert (place["phase"], place["code"]) == ("forward pass", "threading.Event().wait(100)")
    assert "training_step" in place["stacks"]
    assert guilty.error == "HangError"
    assert "threading.Event().wait(100)" in guilty.traceback
    for other in (first, third):
        assert other.error == "RankError"
        assert f"rank {GUILTY} raised HangError at step {BAD_STEP}" in other.message
    saved = [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")]
    assert f"step-{BAD_STEP:08d}" in saved, "nothing that was learned is lost"


def test_a_stopped_rank_is_named_while_it_is_stopped(tmp_path):
    """SIGSTOP also stops its watchdog; it goes on when the others have named it."""
    run_ranks(run_impatient, 2, "stopped", str(tmp_path / "run"), 60.0, timeout=120)
    hang, over = [line for line in journal(tmp_path / "run") if line["event"] == "hang"]
    assert hang["ranks"] == [GUILTY]
    assert hang["places"][str(GUILTY)]["gone"]
    assert "it is stopped (SIGSTOP or a debugger)" in hang["text"]
    assert over["over"]


def test_a_killed_rank_is_named(tmp_path):
    outcomes = outcomes_of(run, 3, "killed", str(tmp_path / "run"), 60.0, timeout=120)
    for rank in (0, 2):
        assert outcomes[rank].error == "RankError"
        assert f"rank {GUILTY} is gone" in outcomes[rank].message


def fail_in_hook(rank, run_dir):
    """As a program would: a rank that raises leaves its process group."""
    import torch.distributed as dist

    made = trainer("hook", run_dir, rank_timeout_seconds=30.0)
    try:
        made.fit()
    except LookupError:
        dist.destroy_process_group()
        raise


def test_an_exception_outside_the_step_is_reported_by_the_other_ranks(tmp_path):
    outcomes = outcomes_of(fail_in_hook, 2, str(tmp_path / "run"), timeout=60)
    assert outcomes[GUILTY].error == "LookupError"
    assert outcomes[0].error == "RankError"
    assert f"rank {GUILTY} failed: LookupError: a mistake in a hook" in outcomes[0].message


def run_data_faults(rank, directory):
    """Two runs in the same processes: the first failure leaves all ranks in step."""
    errors = []
    made = trainer("", f"{directory}/raising", RaisingData())
    try:
        made.fit()
    except (OSError, RankError) as error:
        errors.append((type(error).__name__, str(error), made.run.result.steps))
    made = trainer("", f"{directory}/uneven")
    take, made.stream.take = made.stream.take, lambda count: [] if rank == GUILTY and made.step == 4 else take(count)
    try:
        made.fit()
    except Exception as error:
        errors.append((type(error).__name__, str(error), made.run.result.steps))
    return errors


def test_data_that_raises_or_ends_on_one_rank(tmp_path):
    (raised, ended), (own, own_ended) = run_ranks(run_data_faults, 2, str(tmp_path), timeout=90)
    assert own[0] == "OSError"
    assert raised[0] == "RankError"
    assert f"rank {GUILTY} raised OSError" in raised[1]
    assert "cannot be read" in raised[1]
    assert raised[2] == own[2]
    assert (ended[0], own_ended[0]) == ("DataError", "DataError")
    assert f"rank {GUILTY} had no more data at step 4" in ended[1]
    assert ended[2] == own_ended[2] == 4


class Gathering(SafeTrainer):
    """An evaluation with a collective in user code."""

    seen = ()

    def evaluation_step(self, model, batch):
        count = torch.tensor(float(len(batch[0])))
        torch.distributed.all_reduce(count)
        self.seen = [*self.seen, count.item()]
        return {"loss": mse(model, batch), "samples": float(len(batch[0]))}


class Counting(SafeTrainer):
    def evaluation_step(self, model, batch):
        self.seen = [*getattr(self, "seen", []), float(batch[0].sum())]
        return mse(model, batch)


def evaluate_unevenly(rank, directory):
    found = []
    for kind, strategy in ((Gathering, "ddp"), (Counting, "ddp"), (Counting, "fsdp")):
        torch.manual_seed(1)
        model, batches = make_model(dropout=0.0, norm=False), make_batches(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        config = {
            "loop": {"device": "cpu", "strategy": strategy, "eval_check": False},
            "logging": {"console": "off", "tensorboard": False},
        }
        made = kind(
            model,
            loss_fn=mse,
            optimizer=optimizer,
            train_data=make_batches(4),
            eval_data=batches,
            config=config,
            run_dir=f"{directory}/{kind.__name__}-{strategy}",
        )
        result = made.fit()
        found.append((len(made.seen), result.evaluations[-1]["loss"]))
    return found


def test_ranks_with_different_numbers_of_evaluation_batches(tmp_path):
    """What communicates gets a batch more, which does not count; what does not is left alone."""
    first, second = run_ranks(evaluate_unevenly, 2, str(tmp_path), timeout=90)
    assert [number for number, _ in first] == [2, 2, 2]
    assert [number for number, _ in second] == [2, 1, 2]
    assert [loss for _, loss in first] == [loss for _, loss in second]
    assert first[0][1] == first[1][1]
