"""`watch` in loops of several processes: plain DDP and accelerate, on gloo."""

import pytest
import torch
from process_group import run_ranks
from small import make_batches, make_model, mse
from torch.nn.parallel import DistributedDataParallel

from safetrain import TrainingStopped, watch

QUIET = {"logging": {"console": "off", "tensorboard": False}}


def batches_of(rank, count, bad_rank, bad_steps, bad_sample=None):
    torch.manual_seed(10 + rank)
    batches = make_batches(count, bad=bad_steps if rank == bad_rank else ())
    if rank == bad_rank and bad_sample is not None:
        batches[bad_sample[0]][0][bad_sample[1]] = float("nan")
    return batches


def plain_ddp(rank, run_dir, bad_steps, with_loss, config, bad_sample=None):
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(make_model(dropout=0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    guard = watch(model, optimizer, loss_fn=mse if with_loss else None, config={**QUIET, **config}, run_dir=run_dir)
    stopped = None
    try:
        for batch in batches_of(rank, 14, 1, bad_steps, bad_sample):
            with guard.step(batch):
                mse(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
    except TrainingStopped as error:
        stopped = error.incident.rank
    guard.close()
    result = guard.result
    weights = [p.detach().clone() for p in model.module.parameters()]
    found = [(i.step, i.rank, i.cause.label) for i in result.incidents]
    return weights, (result.steps, result.skipped, result.status, found, stopped)


def accelerated(rank, run_dir, bad_steps, is_watched):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = make_model(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    guard = None
    if is_watched:
        guard = watch(
            model,
            optimizer,
            scheduler=scheduler,
            loss_fn=mse,
            config={**QUIET, "guards": {"clip": None}},
            run_dir=run_dir,
        )
    lrs = []
    for batch in batches_of(rank, 16, 1, bad_steps):

        def one(batch=batch):
            with accelerator.accumulate(model):
                accelerator.backward(mse(model, batch))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        if guard is None:
            one()
        else:
            with guard.step(batch):
                one()
        lrs.append(scheduler.get_last_lr()[0])
    if guard is not None:
        guard.close()
    weights = [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()]
    return weights, lrs, guard and (guard.result.steps, guard.result.skipped, len(guard.result.incidents))


@pytest.mark.parametrize("with_loss", [True, False])
def test_a_step_that_is_bad_on_one_rank_is_refused_on_all(tmp_path, with_loss):
    first, second = run_ranks(plain_ddp, 2, tmp_path / "run", [5], with_loss, {})
    assert first[1] == second[1]
    steps, skipped, status, incidents, _ = first[1]
    assert (steps, skipped, status) == (13, 1, "done")
    assert incidents == [(5, 1, "bad_input_data")]
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(first[0], second[0], strict=True))


def test_a_sample_of_one_rank_is_left_out(tmp_path):
    first, second = run_ranks(plain_ddp, 2, tmp_path / "run", [], True, {}, (5, 2))
    assert first[1] == second[1]
    assert first[1][:2] == (14, 0)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(first[0], second[0], strict=True))


def test_all_ranks_stop_together(tmp_path):
    first, second = run_ranks(plain_ddp, 2, tmp_path / "run", range(4, 14), True, {"recovery": {"max_refusals": 2}})
    assert first[1] == second[1]
    assert first[1][2] == "stopped"


def test_accelerate_with_accumulation(tmp_path):
    by_hand = run_ranks(accelerated, 2, None, [], False)
    watched = run_ranks(accelerated, 2, tmp_path / "quiet", [], True)
    for (hand, lrs, _), (ours, our_lrs, counts) in zip(by_hand, watched, strict=True):
        assert all(map(torch.equal, hand, ours))
        assert (our_lrs, counts) == (lrs, (8, 0, 0))
    first, second = run_ranks(accelerated, 2, tmp_path / "bad", [7], True)
    assert first[1:] == second[1:]
    assert first[2] == (7, 1, 1)
    assert all(map(torch.equal, first[0], second[0]))
    assert len(set(first[1])) == len(set(watched[0][1])) - 1  # the schedule stood still once
