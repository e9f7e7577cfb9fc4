"""Everything that a forward pass writes to, not only BatchNorm's statistics, is restored when its step is refused."""

import copy
import math
from functools import partial

import pytest
import torch
from safetensors.torch import load_model
from small import assert_same, make_batches, make_model, mse
from torch import nn
from torch.nn import functional as F

from safetrain import SafeTrainer, UsageError
from safetrain.step.transaction import Transaction

NO_REPAIR = {"forensics": {"enabled": False}, "recovery": {"ladder": ["skip"]}}


class Compared(SafeTrainer):
    """After every refusal all parameters and buffers, also of the loss, are what they were after the last commit."""

    def everything(self):
        roots = [self.model, *self.auxiliary_modules()]
        held = [module._buffers for root in roots for module in root.modules()]
        buffers = [{n: b.to_dense() if b is not None else None for n, b in each.items()} for each in held]
        weights = [p.detach() for root in roots for p in root.parameters()]
        return copy.deepcopy([weights, buffers, [m.training for root in roots for m in root.modules()]])

    def run_step(self, window):
        self.before = self.everything()
        super().run_step(window)

    def on_incident(self, incident):
        assert_same(self.everything(), self.before)
        self.refused_at = [*getattr(self, "refused_at", []), incident.step]


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 1)

    def forward(self, x):
        self.write(x.detach())
        return self.fc(x)


class Codebook(Base):
    """Parameters that forward moves and the optimizer does not."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.table = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.still = nn.Parameter(torch.zeros(6), requires_grad=False)

    @torch.no_grad()
    def write(self, x):
        self.codes.mul_(0.9).add_(x.mean(0))
        self.table.data.copy_(x.mean(0))  # without a trace in the version counter


class Clamped(Base):
    @torch.no_grad()
    def write(self, x):
        self.fc.weight.clamp_(-0.01 * x.abs().max().nan_to_num(), 0.01)


class LateBuffer(Base):
    """Buffers that come, go and are replaced by new tensors; a bad batch leaves it in another mode."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", None)
        self.register_buffer("phase", torch.zeros(6, dtype=torch.complex64))
        self.register_buffer("fixed", torch.ones(1).expand(4))
        self.register_buffer("gone", torch.zeros(2))

    def write(self, x):
        self.mean = x.mean(0) if self.mean is None else self.mean + x.mean(0)
        if x.isnan().any():
            self.eval()
        self.phase = self.phase + x.mean(0)
        self.fixed = self.fixed.clone().expand(4) * 0.5
        self.gone = None if self.gone is not None else torch.zeros(2)
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
        self.register_buffer(f"step_{len(self._buffers)}", x.mean(0))


class Growing(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))

    def write(self, x):
        self.seen = torch.cat([self.seen, x.mean().reshape(1)])


class Sparse(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("graph", torch.eye(6).to_sparse(), persistent=False)

    def write(self, x):
        self.graph = (self.graph * x.mean()).coalesce()


WRITERS = [Codebook, Clamped, LateBuffer, Growing, Sparse]


@pytest.mark.parametrize("bad", [(0, 3), (4,)])
@pytest.mark.parametrize("make", WRITERS)
def test_writes_of_forward_are_undone_when_the_step_is_refused(make_trainer, make, bad):
    config = {**NO_REPAIR, "checkpoint": {"enabled": False, "snapshot_every": None, "save_final": make is not Sparse}}
    trainer = make_trainer(make(), Compared, train_data=make_batches(6, bad=bad), config=config)
    result = trainer.fit()
    assert trainer.refused_at == list(bad)
    assert result.steps == 6 - len(bad)


@pytest.mark.parametrize("make", WRITERS)
def test_writes_of_forward_are_the_same_as_in_a_plain_loop(make_trainer, make):
    batches = make_batches(6)
    torch.manual_seed(3)
    plain = make()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for batch in batches:
        mse(plain, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.manual_seed(3)
    model = make()
    config = {"guards": {"clip": None}, "checkpoint": {"enabled": False, "save_final": False, "snapshot_every": None}}
    parts = {"optimizer": partial(torch.optim.AdamW, lr=1e-2), "config": config}
    assert make_trainer(model, train_data=batches, **parts).fit().healthy
    dense = [{n: t.to_dense() for n, t in [*m.named_parameters(), *m.named_buffers()]} for m in (plain, model)]
    assert_same(*dense)


class HiddenStatistic(Base):
    """NaN reaches a buffer, or a parameter that is not trained, and never the loss."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.register_buffer("late", None)
        self.register_buffer("phase", torch.zeros(6, dtype=torch.complex64))
        self.codes = nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, x):
        mean = x.detach().mean(0)
        if self.kind == "late":
            self.late = mean
        elif self.kind == "complex":
            self.phase = self.phase + mean
        else:
            with torch.no_grad():
                self.codes.copy_(mean)
        return self.fc(x.nan_to_num())


@pytest.mark.parametrize("kind", ["late", "complex", "parameter"])
@pytest.mark.parametrize("bad", [0, 3])
def test_nan_that_forward_writes_to_a_buffer_is_refused(make_trainer, kind, bad):
    model = HiddenStatistic(kind)
    trainer = make_trainer(model, train_data=make_batches(5, bad=(bad,)), config=NO_REPAIR)
    result = trainer.fit()
    assert [incident.step for incident in result.incidents] == [bad]
    assert all(torch.isfinite(t).all() for t in [*model.parameters(), *model.buffers()])


class CountingLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.center = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, model, batch):
        loss = mse(model, batch)
        self.mean.mul_(0.9).add_(loss.detach())
        self.center.data.add_(loss.detach())
        if torch.isnan(loss):
            self.eval()
        return loss


def test_the_state_of_a_loss_module_is_restored_too(make_trainer):
    loss = CountingLoss()
    trainer = make_trainer(nn.Linear(6, 1), Compared, loss_fn=loss, train_data=make_batches(6, bad=(2,)))
    trainer.fit()
    assert trainer.refused_at == [2]
    assert loss.training
    assert math.isfinite(loss.mean)
    assert math.isfinite(loss.center)


def test_a_refused_step_restores_its_batch(make_trainer):
    """Retries, the bundle and the probe of the last good batch see what the step saw."""
    seen = []

    def loss_fn(model, batch):
        x, y = batch["x"], batch.pop("y")
        seen.append(x.clone())
        x.add_(1)
        return F.mse_loss(model(x), y)

    batches = [{"x": x, "y": y} for x, y in make_batches(6, bad=(3,))]
    originals = copy.deepcopy(batches)
    config = {**NO_REPAIR, "guards": {"finite": {"max_consecutive": 1}}, "recovery": {"ladder": ["retry", "skip"]}}
    result = make_trainer(nn.Linear(6, 1), loss_fn=loss_fn, train_data=batches, config=config).fit()
    assert_same(batches[3], originals[3])
    assert_same(seen[3], originals[3]["x"])  # the step
    assert_same(seen[4], originals[3]["x"])  # tried again
    assert_same(seen[5], originals[2]["x"])  # the last good batch
    assert_same(seen[6], originals[4]["x"])
    assert_same(batches[4]["x"], originals[4]["x"] + 1)  # as in a plain loop
    bundle = torch.load(result.run_dir / result.incidents[0].path / "replay.pt", weights_only=True)
    assert_same(bundle["window"][0], originals[3])


def test_retried_micro_batches_are_restored_first(make_trainer):
    sizes = []

    def loss_fn(model, batch):
        x, y = batch
        sizes.append(float(x[0, 0].detach()))
        x.mul_(2)
        return F.mse_loss(model(x), y)

    batches = make_batches(4, bad=(3,))
    first = float(batches[2][0][0, 0])
    guards = {"finite": {"drop_micro_batch": True}}
    config = {"loop": {"grad_accum": 2}, "guards": guards, "forensics": {"enabled": False}}
    result = make_trainer(nn.Linear(6, 1), loss_fn=loss_fn, train_data=batches, config=config).fit()
    assert result.steps == 2
    assert {s for s in sizes[2:] if not math.isnan(s)} == {first}


def test_nothing_is_copied_for_a_step_without_writes():
    model = nn.Linear(6, 1)
    transaction = Transaction(model)
    for batch in make_batches(2):
        transaction.begin([batch])
        mse(model, batch).backward()
        transaction.notice_writes()
        model.zero_grad()
    assert transaction._batch_values is None
    assert transaction._first_weights is None
    assert transaction._weights.tensors == []


def test_evaluation_leaves_no_trace(make_trainer):
    class Training(SafeTrainer):
        def evaluation_step(self, model, batch):
            model.eval()
            model.train()
            return mse(model, batch)

    model = make_model()
    config = {"loop": {"eval_every": 2}}
    make_trainer(model, Training, train_data=make_batches(6), eval_data=make_batches(3), config=config).fit()
    assert model[1].num_batches_tracked == 6
    assert all(module.training for module in model.modules())


def test_integer_and_infinite_parameters_and_nan_on_purpose_are_allowed(make_trainer):
    model = nn.Sequential(nn.Linear(6, 1))
    model.register_parameter("mask", nn.Parameter(torch.full((3,), -math.inf), requires_grad=False))
    model.register_parameter("codes", nn.Parameter(torch.arange(4, dtype=torch.int8), requires_grad=False))
    model.register_buffer("sentinel", torch.tensor([math.nan, -math.inf]))
    trainer = make_trainer(model, train_data=make_batches(4), config={"loop": {"ema": 0.9}})
    assert trainer.fit().healthy
    assert torch.isneginf(trainer.ema.state_dict()["mask"]).all()


def test_gradients_left_over_before_the_run_are_cleared(make_trainer):
    weights = []
    for left_over in (False, True):
        torch.manual_seed(1)
        model = nn.Linear(6, 1)
        batches = make_batches(3)
        if left_over:
            (100 * mse(model, batches[0])).backward()
        make_trainer(model, train_data=batches).fit()
        weights.append(model.state_dict())
    assert_same(*weights)


def test_lazy_modules_and_sparse_buffers_are_errors_with_a_fix(make_trainer):
    for lazy in (nn.LazyLinear(1), nn.Sequential(nn.Linear(6, 4), nn.LazyBatchNorm1d(), nn.Linear(4, 1))):
        with pytest.raises(UsageError, match="call the model on one batch"):
            make_trainer(lazy, train_data=make_batches(2))
    with pytest.raises(UsageError, match="the sparse buffer graph cannot be saved"):
        make_trainer(Sparse(), train_data=make_batches(2)).fit()


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 1, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).abs()


def test_complex_gradients_are_clipped_by_value(make_trainer):
    model = Complex()
    before = model.weight.detach().clone()
    config = {"guards": {"clip": {"mode": "value", "max_value": 1e-3}}}
    make_trainer(model, optimizer=partial(torch.optim.SGD, lr=1.0), train_data=make_batches(1), config=config).fit()
    moved = torch.view_as_real(model.weight.detach() - before).abs()
    assert moved.max() == pytest.approx(1e-3, rel=1e-2)


def test_final_weights_and_their_ema_load_with_tied_weights_and_transient_buffers(make_trainer):
    class Tied(Growing):
        def __init__(self):
            super().__init__()
            self.twin = self.fc
            self.register_buffer("scratch", torch.zeros(2), persistent=False)

    trainer = make_trainer(Tied(), train_data=make_batches(4), config={"loop": {"ema": 0.9}})
    result = trainer.fit()
    state = trainer.ema.state_dict()
    twin = Tied()
    twin.seen = torch.zeros(4)
    twin.load_state_dict(state)
    assert torch.equal(state["fc.weight"], trainer.ema.weights["fc.weight"])
    load_model(twin, result.run_dir / "checkpoints" / "final_ema.safetensors")
    assert torch.equal(twin.twin.weight, trainer.ema.weights["fc.weight"])
    load_model(twin, result.run_dir / "checkpoints" / "final.safetensors")
    assert_same(twin.state_dict(), trainer.model.state_dict())
    assert not torch.equal(state["fc.weight"], trainer.model.fc.weight)


def test_an_investigation_is_not_mistaken_for_a_forward_that_writes_weights(make_trainer, caplog):
    """It tries the optimizer's update on the weights, and puts them back."""
    trainer = make_trainer(HiddenStatistic("complex"), train_data=make_batches(5, bad=(2,)))
    trainer.fit()
    assert trainer.stepper.transaction.written_parameters == set()
    assert "for the first time" not in caplog.text


def test_a_late_first_write_that_cannot_be_undone_is_logged(make_trainer, caplog):
    class Late(Base):
        @torch.no_grad()
        def write(self, x):
            if x.isnan().any():
                self.fc.weight.mul_(0.5)

    config = {**NO_REPAIR, "loop": {"max_epochs": 2}}
    trainer = make_trainer(Late(), train_data=make_batches(4, bad=(2,)), config=config)
    with caplog.at_level("WARNING", "safetrain"):
        trainer.fit()
    assert caplog.text.count("forward wrote to fc.weight for the first time") == 1
    assert trainer.stepper.transaction.written_parameters == {"fc.weight"}


def test_batches_with_sparse_tensors_train_and_are_refused(make_trainer):
    def loss_fn(model, batch):
        return model(torch.sparse.mm(batch[0], torch.eye(6))).square().mean() * batch[1]

    batches = [(torch.randn(8, 6).relu().to_sparse(), torch.tensor(1.0)) for _ in range(6)]
    batches[3] = (batches[3][0], torch.tensor(math.nan))
    result = make_trainer(nn.Linear(6, 1), loss_fn=loss_fn, train_data=batches).fit()
    assert (result.steps, result.skipped) == (5, 1)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_part_of_the_model_is_restored(make_trainer):
    model = nn.Sequential(torch.jit.script(nn.BatchNorm1d(6)), nn.Linear(6, 1))
    result = make_trainer(model, loss_fn=mse, train_data=make_batches(6, bad=(3,))).fit()
    assert (result.steps, result.skipped) == (5, 1)
    assert torch.isfinite(model[0].running_mean).all()
    assert int(model[0].num_batches_tracked) == 5
