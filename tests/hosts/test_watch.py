"""A loop that keeps its own forward, backward and step, under `watch`."""

import contextlib
import copy
from functools import partial

import pytest
import torch
from small import assert_same, make_batches, make_model, mse
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from safetrain import TrainingStopped, UsageError

SGD, ADAMW = partial(torch.optim.SGD, lr=0.05, momentum=0.9), partial(torch.optim.AdamW, lr=1e-2)
QUIET_CLIP = {"guards": {"clip": None}}
NAN = float("nan")


def build(optimizer=ADAMW, model=make_model):
    torch.manual_seed(1)
    model = model()
    return model, optimizer(model.parameters())


def spoiled(batches, *indices):
    for index in indices:
        batches[index][0].fill_(NAN)
    return batches


def train(model, optimizer, batches, guard=None, scheduler=None, accum=1, autocast=None, scaler=None, max_norm=None):
    """The loop of somebody else."""
    for index, batch in enumerate(batches):
        with guard.step(batch) if guard else contextlib.nullcontext():
            with torch.autocast("cpu", dtype=autocast) if autocast else contextlib.nullcontext():
                loss = mse(model, batch) / accum
            (scaler.scale(loss) if scaler else loss).backward()
            if (index + 1) % accum:
                continue
            if max_norm:
                if scaler:
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            if scheduler:
                scheduler.step()
            optimizer.zero_grad()


LOOPS = {
    "sgd": {"optimizer": SGD},
    "adamw": {},
    "fused": {"optimizer": partial(ADAMW, fused=True)},
    "cosine": {"schedule": partial(CosineAnnealingLR, T_max=60)},
    "one cycle": {"schedule": partial(OneCycleLR, max_lr=0.05, total_steps=70)},
    "accumulation": {"accum": 4},
    "clipped by the loop": {"max_norm": 0.5},
    "bf16": {"autocast": torch.bfloat16, "precision": "bf16"},
    "fp16": {"autocast": torch.float16, "precision": "fp16", "scaler": True},
    "fp16, accumulated and clipped": {
        **{"autocast": torch.float16, "precision": "fp16", "scaler": True, "accum": 2, "max_norm": 0.5},
    },
    "fp16, a scale that overflows": {"autocast": torch.float16, "precision": "fp16", "scaler": 2.0**30},
    "fp16, fused": {
        "optimizer": partial(ADAMW, fused=True),
        "autocast": torch.float16,
        "precision": "fp16",
        "scaler": True,
    },
    "dropout": {
        "model": lambda: nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))
    },
}


@pytest.mark.parametrize("with_loss", [True, False], ids=["loss_fn", "no loss_fn"])
@pytest.mark.parametrize("name", LOOPS)
def test_quiet_guards_leave_the_loop_bit_identical(make_guard, name, with_loss):
    options = dict(LOOPS[name])
    precision, schedule = options.pop("precision", "fp32"), options.pop("schedule", None)
    parts = {key: options.pop(key) for key in ("optimizer", "model") if key in options}
    scaler = options.pop("scaler", None)
    found = []
    for is_watched in (False, True):
        model, optimizer = build(**parts)
        scheduler = schedule(optimizer) if schedule else None
        own = torch.amp.GradScaler("cpu", init_scale=2.0**16 if scaler is True else scaler) if scaler else None
        guard = None
        if is_watched:
            loss_fn = mse if with_loss else None
            guard = make_guard(
                model, optimizer, scheduler=scheduler, loss_fn=loss_fn, precision=precision, config=QUIET_CLIP
            )
        torch.manual_seed(2)
        train(model, optimizer, make_batches(60), guard, scheduler, scaler=own, **options)
        found.append(
            (copy.deepcopy(model.state_dict()), optimizer.state_dict(), torch.rand(3), own and own.state_dict())
        )
    assert_same(*found)
    assert guard.result.incidents == []
    assert guard.result.attempted == 60 // options.get("accum", 1)


def test_a_bad_step_never_happened_and_the_schedule_did_not_move(make_guard):
    model, optimizer = build(model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    scheduler = CosineAnnealingLR(optimizer, T_max=50)
    guard = make_guard(model, optimizer, scheduler=scheduler)
    batches = spoiled(make_batches(12), 7)
    train(model, optimizer, batches[:7], guard, scheduler)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    train(model, optimizer, batches[7:8], guard, scheduler)
    assert_same((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()), before)
    assert not guard.committed
    train(model, optimizer, batches[8:], guard, scheduler)
    assert guard.committed
    assert (guard.result.steps, guard.result.skipped, scheduler.last_epoch) == (11, 1, 11)
    (incident,) = guard.result.incidents
    assert (incident.step, incident.cause.label) == (7, "bad_input_data")
    assert (guard.run_dir / incident.path / "incident.json").is_file()


def test_guilty_samples_are_left_out_when_the_loss_is_known(make_guard):
    model, optimizer = build()
    guard = make_guard(model, optimizer, loss_fn=mse)
    batches = make_batches(10)
    batches[6][0][3] = NAN
    train(model, optimizer, batches, guard)
    assert (guard.result.steps, guard.result.skipped) == (10, 0)
    assert guard.result.incidents[0].samples == [3]
    assert guard.committed


def test_a_repaired_step_is_the_step_without_the_bad_sample(make_guard):
    batches = make_batches(5)
    batches[4][0][3] = NAN
    x, y = batches[4]
    clean = (torch.cat([x[:3], x[4:]]), torch.cat([y[:3], y[4:]]))
    model, optimizer = build()
    train(model, optimizer, [*batches[:4], clean])
    expected = copy.deepcopy(model.state_dict())
    model, optimizer = build()
    train(model, optimizer, batches, make_guard(model, optimizer, loss_fn=mse))
    assert_same(model.state_dict(), expected)


def test_accumulated_gradients_are_refused_as_one_step(make_guard):
    model, optimizer = build()
    guard = make_guard(model, optimizer, loss_fn=mse, config={"recovery": {"heal": []}})
    train(model, optimizer, spoiled(make_batches(16), 9), guard, accum=4)
    assert (guard.result.attempted, guard.result.steps) == (4, 3)
    assert guard.result.incidents[0].step == 2
    assert 0.5 < guard.result.losses[0] / mse(build()[0], make_batches(1)[0]).item() < 2  # not a quarter of it


def test_a_block_may_hold_all_micro_batches(make_guard):
    model, optimizer = build()
    guard = make_guard(model, optimizer, loss_fn=mse)
    batches = make_batches(12)
    batches[7][0][3] = NAN
    for start in range(0, 12, 3):
        window = batches[start : start + 3]
        with guard.step(*window):
            for batch in window:
                (mse(model, batch) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert (guard.result.attempted, guard.result.steps) == (4, 4)
    assert guard.result.incidents[0].samples == [3]


def test_the_loss_scaler_of_the_loop_forgets_a_refused_step(make_guard):
    model, optimizer = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    guard = make_guard(model, optimizer, precision="fp16")
    train(model, optimizer, spoiled(make_batches(12), 5, 8), guard, autocast=torch.float16, scaler=scaler)
    assert scaler.get_scale() == 2.0**10  # a NaN loss is not a scale that is too large
    assert (guard.result.steps, guard.result.overflows) == (10, 0)


def test_an_overflow_of_the_scaled_gradient_is_left_to_the_scaler(make_guard):
    model, optimizer = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    guard = make_guard(model, optimizer, precision="fp16", loss_fn=mse)
    train(model, optimizer, make_batches(40), guard, autocast=torch.float16, scaler=scaler)
    assert guard.result.overflows > 0
    assert guard.result.incidents == []
    assert guard.result.steps + guard.result.overflows == 40


def test_optimizers_that_step_together_are_refused_together(make_guard):
    torch.manual_seed(1)
    model = make_model(norm=False)
    first, last = list(model.parameters())[:2], list(model.parameters())[2:]
    both = [torch.optim.SGD(first, lr=0.05, momentum=0.9), torch.optim.AdamW(last, lr=1e-2)]
    guard = make_guard(model, both, loss_fn=mse, config={"recovery": {"heal": []}})
    batches = spoiled(make_batches(9), 5)
    for index, batch in enumerate(batches):
        before = copy.deepcopy(model.state_dict())
        with guard.step(batch):
            mse(model, batch).backward()
            for optimizer in both:
                optimizer.step()
            model.zero_grad()
        if index == 5:
            assert_same(model.state_dict(), before)
        else:
            assert all(not torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True))
    assert (guard.result.steps, guard.result.skipped) == (8, 1)


def test_two_models_have_a_guard_each(make_guard):
    torch.manual_seed(1)
    pair = [nn.Linear(4, 4), nn.Linear(4, 1)]
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in pair]
    guards = [make_guard(m, o) for m, o in zip(pair, optimizers, strict=True)]
    for index in range(6):
        x = torch.randn(8, 4)
        if index == 3:
            x[0] = NAN
        with guards[1].step(x):
            optimizers[1].zero_grad()
            pair[1](pair[0](x).detach()).square().mean().backward()
            optimizers[1].step()
        with guards[0].step(x):
            optimizers[0].zero_grad()
            pair[1](pair[0](x)).square().mean().backward()
            optimizers[0].step()
    assert [(g.result.steps, g.result.skipped) for g in guards] == [(5, 1), (5, 1)]


def test_a_closure_is_evaluated_once(make_guard):
    found = []
    for is_watched in (False, True):
        model, optimizer = build()
        guard = make_guard(model, optimizer, config=QUIET_CLIP) if is_watched else None
        count = 0
        for batch in make_batches(8):

            def closure(model=model, optimizer=optimizer, batch=batch):
                nonlocal count
                count += 1
                optimizer.zero_grad()
                loss = mse(model, batch)
                loss.backward()
                return loss

            with guard.step(batch) if guard else contextlib.nullcontext():
                assert optimizer.step(closure).isfinite()
        assert count == 8
        found.append(model.state_dict())
    assert_same(*found)


def test_what_the_loop_averages_is_kept_where_it_was(make_guard):
    model, optimizer = build()
    average = torch.optim.swa_utils.AveragedModel(model)
    guard = make_guard(model, optimizer)
    guard.keep("average", average)
    for batch in spoiled(make_batches(8), 5):
        before = copy.deepcopy(average.state_dict())
        with guard.step(batch):
            mse(model, batch).backward()
            optimizer.step()
            average.update_parameters(model)
            optimizer.zero_grad()
        if not guard.committed:
            assert_same(average.state_dict(), before)
    assert average.n_averaged.item() == 7


def test_evaluation_inside_a_block_is_untouched(make_guard):
    model, optimizer = build(model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    guard = make_guard(model, optimizer)
    poisoned = spoiled(make_batches(1), 0)[0]
    for index, batch in enumerate(make_batches(6)):
        with guard.step(batch):
            mse(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                assert mse(model, poisoned).isnan()
            model.train()
        assert guard.result.steps == index + 1
    assert guard.result.incidents == []


def test_a_loop_that_leaves_a_step_out_by_itself(make_guard):
    model, optimizer = build()
    guard = make_guard(model, optimizer)
    for index, batch in enumerate(make_batches(6)):
        with guard.step(batch):
            loss = mse(model, batch)
            if index == 2:
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert guard.result.steps == guard.result.attempted == 5


def test_a_run_of_bad_steps_stops_the_loop_and_the_record_says_so(make_guard):
    model, optimizer = build()
    guard = make_guard(model, optimizer, config={"recovery": {"max_refusals": 2}})
    with pytest.raises(TrainingStopped) as stopped:
        train(model, optimizer, spoiled(make_batches(12), *range(4, 12)), guard)
    assert (guard.result.status, guard.result.steps) == ("stopped", 4)
    assert stopped.value.result is guard.result
    assert (guard.run_dir / "summary.json").is_file()
    optimizer.step()  # the guard has let go
    with pytest.raises(UsageError, match="closed"):
        guard.step(None)


def test_a_rollback_restores_weights_moments_and_schedule(make_guard):
    model, optimizer = build(SGD)
    scheduler = CosineAnnealingLR(optimizer, T_max=100)
    config = {"checkpoint": {"snapshot_every": 5, "trust_after": 2}, "guards": {"clip": None}}
    guard = make_guard(model, optimizer, scheduler=scheduler, loss_fn=mse, config=config)
    batches = make_batches(40)
    train(model, optimizer, batches[:20], guard, scheduler)
    with torch.no_grad():
        next(model.parameters())[0, 0] = NAN  # as a flipped bit would
    train(model, optimizer, batches[20:], guard, scheduler)
    assert guard.result.rollbacks == 1
    assert all(p.isfinite().all() for p in model.parameters())
    assert scheduler.last_epoch == guard.result.steps


def test_an_error_that_a_guard_explains_is_a_refused_step(make_guard):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = make_guard(model, optimizer, config={"guards": {"batch": {}}})
    for index in range(6):
        batch = torch.randint(10, (5, 2)), torch.randint(3, (5,))
        if index == 3:
            batch[1][2] = 7
        with guard.step(batch):
            nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert (guard.result.steps, guard.result.skipped) == (5, 1)


def test_an_error_of_the_loop_is_raised_and_leaves_no_trace(make_guard):
    model, optimizer = build(model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    guard = make_guard(model, optimizer)
    batches = make_batches(4)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyError), guard.step(batches[0]):
        mse(model, batches[0]).backward()
        raise KeyError("a mistake")
    assert_same(model.state_dict(), before)
    train(model, optimizer, batches, guard)  # the loop may go on
    assert guard.result.steps == 4


def test_the_state_goes_into_the_loops_own_checkpoint(make_guard, tmp_path):
    calm = partial(make_model, dropout=0.0)  # the random state is the loop's to save
    model, optimizer = build(model=calm)
    batches = make_batches(60)
    guard = make_guard(model, optimizer)
    train(model, optimizer, batches[:30], guard)
    own = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "guard": guard.state_dict()}
    torch.save(own, tmp_path / "own.pt")
    train(model, optimizer, batches[30:], guard)

    saved = torch.load(tmp_path / "own.pt", weights_only=True)
    again, other = build(model=calm)
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    resumed = make_guard(again, other)
    resumed.load_state_dict(saved["guard"])
    train(again, other, batches[30:], resumed)
    assert_same(again.state_dict(), model.state_dict())  # the limit of the adaptive clip went on, too
    assert resumed.result.losses == guard.result.losses


def test_save_and_load_go_on_bit_for_bit(make_guard, tmp_path):
    dropout = lambda: nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 1))  # noqa: E731
    model, optimizer = build(model=dropout)
    guard, batches = make_guard(model, optimizer), make_batches(40)
    train(model, optimizer, batches[:20], guard)
    guard.save(tmp_path / "saved")
    train(model, optimizer, batches[20:], guard)
    again, other = build(model=dropout)
    resumed = make_guard(again, other)
    assert resumed.load(tmp_path / "saved") == 20
    train(again, other, batches[20:], resumed)
    assert_same(again.state_dict(), model.state_dict())


def test_run_makes_the_whole_step(make_guard):
    model, optimizer = build()
    scheduler = CosineAnnealingLR(optimizer, T_max=50)
    guard = make_guard(model, optimizer, scheduler=scheduler, config=QUIET_CLIP)
    losses = [guard.run(batch, mse) for batch in make_batches(20)]
    by_hand, other = build()
    train(by_hand, other, make_batches(20), scheduler=CosineAnnealingLR(other, T_max=50))
    assert_same(model.state_dict(), by_hand.state_dict())
    assert losses == guard.result.losses
    bad = make_batches(1)[0]
    bad[0][2] = NAN
    assert guard.run(bad) != guard.run(bad)  # NaN, as it was; the step is repaired
    assert guard.result.steps == 22


class Returned(nn.Module):
    """Returns its loss, as models of transformers and nanoGPT do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, x, y=None):
        out = self.layer(x) / x.norm(dim=1, keepdim=True)
        return {"loss": nn.functional.mse_loss(out, y), "out": out}


def test_without_loss_fn_a_model_that_returns_its_loss_can_be_repaired(make_guard):
    torch.manual_seed(0)
    model = Returned()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = make_guard(model, optimizer)
    for index, (x, y) in enumerate(make_batches(8)):
        if index == 5:
            x[2] = 0
        with guard.step():
            (model(x, y=y)["loss"] / 1).backward()
            optimizer.step()
            optimizer.zero_grad()
    (incident,) = guard.result.incidents
    assert (incident.cause.label, incident.samples, guard.result.steps) == ("division_by_zero", [2], 8)


def test_without_loss_fn_the_incident_says_what_was_not_replayed(make_guard):
    model, optimizer = build()
    guard = make_guard(model, optimizer)
    for index, batch in enumerate(make_batches(8)):
        with guard.step(batch):
            loss = mse(model, batch)
            if index == 5:
                loss = (loss - loss).log()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    (incident,) = guard.result.incidents
    assert "outputs (Log ← Sub" in incident.cause.explanation
    assert "pass loss_fn" in incident.cause.explanation
    assert guard.result.steps == 7


def test_the_time_between_two_steps_is_the_loops_own(make_guard):
    model, optimizer = build()
    guard = make_guard(model, optimizer)
    activity = guard._step.exchange.watchdog.activity
    train(model, optimizer, make_batches(3), guard)
    activity._began -= 3600.0  # an hour of evaluation
    assert activity.late() is None
    with guard.step(make_batches(1)[0]):
        activity._began -= 3600.0
        assert activity.late() is not None
