"""A run that is killed and resumed ends bit-identical to an uninterrupted one."""

import os
import random
import signal

import numpy as np
import pytest
import torch
from checkpoint_cases import Counting, Gone, Iterable, OwnState, make_samples
from records import journal
from small import make_batches, mse
from torch.utils.data import DataLoader

from safetrain import CheckpointError, ConfigError, Interrupted, RunDirectoryError, SafeTrainer, UsageError
from safetrain.checkpoint import CheckpointStore

COSINE = lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)  # noqa: E731


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("background", [False, True])
def test_a_data_set_with_shuffling_accumulation_ema_schedule_refusals_and_evaluation(check_exact, workers, background):
    config = {
        "seed": 5,
        "data": {"batch_size": 4, "num_workers": workers},
        "loop": {"max_steps": 22, "grad_accum": 2, "ema": 0.9, "eval_every": 6},
        "checkpoint": {"async": background},
    }
    check_exact(
        (3, 9, 9, 17), data=lambda: Counting(bad=(7, 30)), config=config, eval_data=make_batches(2), scheduler=COSINE
    )


def test_the_fp16_scaler_and_its_history(check_exact):
    config = {"seed": 1, "loop": {"precision": "fp16", "max_steps": 20}, "data": {"batch_size": 8}}
    whole, _ = check_exact((6, 13), data=lambda: Counting(), config=config)
    assert whole.run.result.overflows > 0


def test_backoff_and_adaptive_clipping(check_exact):
    guards = {"backoff": {"recovery_steps": 300}, "clip": {"warmup_steps": 3}}
    config = {"seed": 2, "loop": {"max_steps": 26}, "guards": guards, "data": {"batch_size": 4}}
    config |= {"forensics": {"enabled": False}, "recovery": {"ladder": ["skip"]}}  # the learning rate is suspected then
    whole, _ = check_exact((11, 14), data=lambda: Counting(bad=(3, 20)), config=config)
    backoff = next(guard for guard in whole.guards if guard.name == "backoff")
    assert backoff.level.scale < 1.0


def test_a_run_without_a_seed(check_exact):
    config = {"loop": {"max_steps": 15}, "data": {"batch_size": 4}}
    check_exact((2, 9), data=lambda: Counting(), config=config)


def test_deferred_reads_with_refusals(check_exact):
    config = {"seed": 1, "loop": {"host_read_every": 3, "max_steps": 22}, "data": {"batch_size": 4}}
    fused = lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True)  # noqa: E731
    check_exact((7, 12), data=lambda: Counting(bad=(9,)), config=config, optimizer=fused)


def test_random_numbers_of_python_and_numpy(check_exact):
    def noisy(model, batch):
        return mse(model, batch) * (1.0 + random.random() + np.random.rand() + torch.rand(()))

    check_exact(data=lambda: make_batches_of_seed(12), loss_fn=noisy, config={"loop": {"max_steps": 30}})


def make_batches_of_seed(count, bad=()):
    torch.manual_seed(77)
    return make_batches(count, bad=bad)


def shuffled(generator):
    def make():
        own = torch.Generator().manual_seed(4) if generator else None
        return DataLoader(make_samples(), batch_size=4, shuffle=True, generator=own)

    return make


def generated():
    def epoch():
        for _ in range(9):
            yield torch.randn(8, 6), torch.randn(8, 1)

    return epoch


SOURCES = {
    "list": lambda: make_batches_of_seed(9, bad=(4,)),
    "shuffled loader": shuffled(generator=False),
    "shuffled loader with generator": shuffled(generator=True),
    "loader of two workers": lambda: DataLoader(make_samples(), batch_size=4, shuffle=True, num_workers=2),
    "loader without batching": lambda: DataLoader(
        [(x[None].repeat(4, 1), y[None].repeat(4, 1)) for x, y in make_samples()], batch_size=None, shuffle=True
    ),
    "iterable": Iterable,
    "generator function": generated,
    "loader with state_dict": OwnState,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_data(check_exact, kind):
    check_exact((5, 13), data=SOURCES[kind], config={"loop": {"max_steps": 24}})


def test_a_skipped_data_window_stays_skipped(check_exact):
    class Skipping(SafeTrainer):
        def on_incident(self, incident):
            self.stream.skip(2)

    config = {"seed": 3, "loop": {"max_steps": 20}, "data": {"batch_size": 4}}
    check_exact((8, 12), data=lambda: Counting(bad=(5, 21)), config=config, cls=Skipping)


def test_other_schedulers_and_optimizers(check_exact):
    plateau = lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)  # noqa: E731
    momentum = lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)  # noqa: E731
    config = {"seed": 3, "loop": {"max_steps": 20, "eval_every": 3}, "data": {"batch_size": 8}}
    check_exact(
        data=lambda: Counting(), scheduler=plateau, optimizer=momentum, eval_data=make_batches(1), config=config
    )


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=100),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], milestones=[7]
        ),
    ],
    ids=["one cycle", "lambda", "sequential"],
)
def test_schedules(check_exact, scheduler):
    check_exact(data=lambda: make_batches_of_seed(8), scheduler=scheduler, config={"loop": {"max_steps": 20}})


def test_a_run_killed_before_its_first_checkpoint_starts_again(start, tmp_path):
    first = start("run", train_data=make_batches(4))
    first.fit()
    for path in CheckpointStore(tmp_path / "run" / "checkpoints").paths():
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    result = start("run", train_data=make_batches(4)).fit(resume=True)
    assert (result.steps, result.attempted) == (4, 4)
    assert [line["step"] for line in journal(tmp_path / "run") if line["event"] == "step"] == [0, 1, 2, 3]


def test_a_finished_run_resumes_to_the_same_result_or_trains_longer(start):
    batches = make_batches(30)
    first = start("run", train_data=batches, config={"loop": {"max_steps": 10}}).fit()
    again = start("run", train_data=batches, config={"loop": {"max_steps": 10}}, seed_of_process=3).fit(resume=True)
    assert (again.steps, again.losses) == (10, first.losses)
    longer = start("run", train_data=batches, config={"loop": {"max_steps": 20}}, seed_of_process=4).fit(resume=True)
    straight = start("straight", train_data=batches, config={"loop": {"max_steps": 20}}).fit()
    assert longer.losses == straight.losses


def test_a_damaged_newest_checkpoint_is_passed_over_and_logged(check_exact, start, tmp_path):
    data = lambda: make_batches_of_seed(8)  # noqa: E731
    whole = start("whole", train_data=data(), config={"loop": {"max_steps": 20}})
    whole.fit()
    with pytest.raises(Gone):
        start("run", 13, train_data=data(), config={"loop": {"max_steps": 20}}).fit()
    newest = CheckpointStore(tmp_path / "run" / "checkpoints").paths()[-1]
    content = bytearray((newest / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (newest / "model.safetensors").write_bytes(content)
    resumed = start("run", train_data=data(), config={"loop": {"max_steps": 20}}, seed_of_process=9)
    resumed.fit(resume=True)
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.model.state_dict().values(), resumed.model.state_dict().values(), strict=True)
    )
    notes = [line["text"] for line in journal(tmp_path / "run") if line["event"] == "note"]
    assert any(newest.name in text and "passed over" in text for text in notes)
    assert (newest.parent / f"{newest.name}.damaged").is_dir()


def test_only_damaged_checkpoints_are_an_error_and_nothing_is_written(start, tmp_path):
    start("run", train_data=make_batches(4)).fit()
    for path in CheckpointStore(tmp_path / "run" / "checkpoints").paths():
        (path / "state.pt").write_bytes(b"")
    before = (tmp_path / "run" / "journal.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"state\.pt has 0 bytes"):
        start("run", train_data=make_batches(4)).fit(resume=True)
    assert (tmp_path / "run" / "journal.jsonl").read_bytes() == before


def test_a_torn_last_line_of_the_journal_is_repaired(start, tmp_path):
    with pytest.raises(Gone):
        start("run", 6, train_data=make_batches_of_seed(8), config={"loop": {"max_steps": 12}}).fit()
    with open(tmp_path / "run" / "journal.jsonl", "a") as file:
        file.write('{"event": "step", "ste')
    start("run", train_data=make_batches_of_seed(8), config={"loop": {"max_steps": 12}}).fit(resume=True)
    assert [line["step"] for line in journal(tmp_path / "run") if line["event"] == "step"] == list(range(12))


def test_allowed_changes_apply_and_others_are_refused_with_the_difference(start):
    batches = make_batches(30)
    start("run", train_data=batches, config={"seed": 1, "loop": {"max_steps": 6}}).fit()
    changed = {"seed": 2, "loop": {"max_steps": 9, "grad_accum": 2}, "data": {"batch_size": 7}}
    with pytest.raises(ConfigError) as refused:
        start("run", train_data=batches, config=changed).fit(resume=True)
    assert [p.split(":")[0] for p in refused.value.problems] == ["seed", "data.batch_size", "loop.grad_accum"]
    assert "1 -> 2" in refused.value.problems[0]
    assert start("run", train_data=batches, config=changed).fit(resume="force").steps == 9


def test_another_model_does_not_fit(start):
    start("run", train_data=make_batches(4)).fit()
    model = torch.nn.Linear(6, 1)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        start("run", model=model, train_data=make_batches(4)).fit(resume=True)


def test_resume_needs_a_run_and_a_new_run_needs_none(start, tmp_path):
    with pytest.raises(RunDirectoryError, match="does not exist"):
        start("nowhere", train_data=make_batches(2)).fit(resume=True)
    assert start("auto", train_data=make_batches(2)).fit(resume="auto").steps == 2
    with pytest.raises(RunDirectoryError, match="already holds a run"):
        start("auto", train_data=make_batches(2)).fit()
    trainer = SafeTrainer(torch.nn.Linear(6, 1), loss_fn=mse, train_data=make_batches(2))
    with pytest.raises(RunDirectoryError, match="must be known"):
        trainer.fit(resume=True)


def test_two_runs_on_one_directory_are_refused(start):
    class Nested(SafeTrainer):
        def on_commit(self, view):
            with pytest.raises(RunDirectoryError, match="is being written to by process"):
                start("run", train_data=make_batches(2)).fit(resume=True)

    assert start("run", cls=Nested, train_data=make_batches(2)).fit().steps == 2


def test_caveats_of_a_resume_are_logged_at_the_start(start, tmp_path):
    def notes(name, batches, **config):
        start(name, train_data=batches, config=config).fit()
        return [line["text"] for line in journal(tmp_path / name) if line["event"] == "note"]

    assert notes("list", make_batches(2)) == []
    assert notes("map", make_samples(), data={"batch_size": 20}) == []
    (workers,) = notes("workers", make_samples(), data={"batch_size": 20, "num_workers": 1})
    assert "inside loader workers" in workers
    (iterable,) = notes("iterable", Iterable())
    assert "can only be read from its beginning" in iterable


def test_a_signal_saves_and_the_run_goes_on_exactly(start):
    class Signalled(SafeTrainer):
        def on_commit(self, view):
            if view.step == 5:
                os.kill(os.getpid(), signal.SIGTERM)

    config = {"loop": {"max_steps": 12}}
    straight = start("straight", train_data=make_batches_of_seed(8), config=config).fit()
    with pytest.raises(Interrupted):
        start("run", cls=Signalled, train_data=make_batches_of_seed(8), config=config).fit()
    resumed = start("run", train_data=make_batches_of_seed(8), config=config, seed_of_process=5)
    assert resumed.fit(resume=True).losses == straight.losses


def test_a_time_limit_pauses_without_an_error(start):
    config = {"loop": {"max_steps": 12, "max_hours": 1e-9}}
    straight = start("straight", train_data=make_batches_of_seed(8), config={"loop": {"max_steps": 12}}).fit()
    paused = start("run", train_data=make_batches_of_seed(8), config=config).fit()
    assert (paused.status, paused.steps, paused.healthy) == ("paused", 1, False)
    while paused.status == "paused":
        paused = start("run", train_data=make_batches_of_seed(8), config=config, seed_of_process=8).fit(resume=True)
    assert (paused.status, paused.losses) == ("done", straight.losses)


def test_a_state_that_could_not_be_loaded_safely_is_refused_before_training(start):
    class Strange:
        def step(self): ...

        def state_dict(self):
            return {"function": print}

    with pytest.raises(UsageError, match="builtin_function_or_method"):
        start("run", scheduler=lambda optimizer: Strange(), train_data=make_batches(2)).fit()
