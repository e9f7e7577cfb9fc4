"""One process prepared by accelerate: its wrappers around optimizer, scheduler and model stay in use."""

import copy

import pytest
import torch
from accelerate import Accelerator
from small import assert_same, make_batches, make_model, mse


@pytest.fixture(autouse=True)
def accelerators_of_their_own():
    yield
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def loop(batches, make_guard, accum=1, mixed="no", **options):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accum, mixed_precision=mixed)
    torch.manual_seed(1)
    model = make_model(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    guard = make_guard(model, optimizer, scheduler=scheduler, **options) if make_guard else None
    after = []
    for batch in batches:

        def one(batch=batch):
            with accelerator.accumulate(model):
                accelerator.backward(mse(model, batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        if guard:
            with guard.step(batch):
                one()
        else:
            one()
        after.append(copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict())))
    accelerator.free_memory()
    return after, guard


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_quiet_guards_leave_it_bit_identical(make_guard, accum, precision):
    plain, _ = loop(make_batches(12), None, accum, precision)
    torch.manual_seed(0)
    options = {"config": {"guards": {"clip": None}}, "precision": "fp32" if precision == "no" else precision}
    ours, guard = loop(make_batches(12), make_guard, accum, precision, loss_fn=mse, **options)
    assert_same(ours[-1], plain[-1])
    assert guard.result.attempted == 12 // accum


def test_a_refused_step_moves_neither_weights_nor_schedule(make_guard):
    after, guard = loop(make_batches(10, bad=[6]), make_guard)
    assert_same(after[5], after[6])
    assert (guard.result.steps, guard.result.skipped) == (9, 1)


def test_samples_are_left_out_of_an_accumulated_step(make_guard):
    batches = make_batches(10)
    batches[6][0][2] = float("nan")
    _, guard = loop(batches, make_guard, accum=2, loss_fn=mse)
    assert (guard.result.steps, guard.result.incidents[0].samples) == (5, [2])
