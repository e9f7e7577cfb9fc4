"""What would become non-finite in step after step is held as it is, and the rest is trained."""

import math
from functools import partial

import pytest
import torch
from small import make_batches, make_model
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from safetrain import SafeTrainer, TrainingStopped


def weights(trainer):
    return [p.detach().clone() for p in trainer.model.parameters()]


def test_a_schedule_that_gives_nan_keeps_its_last_good_rate(make_trainer):
    ends = []
    for rate in (lambda step: 0.5 if step < 4 else math.nan, lambda step: 0.5):
        torch.manual_seed(1)
        optimizer = partial(torch.optim.SGD, lr=0.1)
        scheduler = partial(LambdaLR, lr_lambda=rate)
        trainer = make_trainer(optimizer=optimizer, scheduler=scheduler, train_data=make_batches(12))
        result = trainer.fit()
        ends.append(weights(trainer))
        assert result.steps == 12
        if len(ends) == 1:
            (incident,) = result.incidents
            assert (incident.step, incident.decision.action) == (4, "commit")
            assert "it stays at the last good one, 0.05" in incident.decision.reasons[-1]
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_without_permission_such_a_schedule_ends_the_run(make_trainer):
    scheduler = partial(LambdaLR, lr_lambda=lambda step: 1.0 if step < 4 else math.nan)
    parts = {"optimizer": partial(torch.optim.SGD, lr=0.1), "scheduler": scheduler, "train_data": make_batches(12)}
    trainer = make_trainer(recovery={"heal": []}, **parts)
    with pytest.raises(TrainingStopped, match="learning rate is nan") as stopped:
        trainer.fit()
    assert stopped.value.result.steps == 4


def test_an_eps_that_is_zero_in_half_precision_is_raised(make_trainer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    model[0].bias.data[3] = -30.0  # this unit has no gradient at all
    batches = [(x.half(), x.sum(1, keepdim=True)) for x in torch.randn(20, 8, 4)]
    loss_fn = lambda model, batch: (model(batch[0]).float() - batch[1]).square().mean()  # noqa: E731
    optimizer = torch.optim.Adam(model.half().parameters(), lr=1e-3)
    trainer = make_trainer(model=model, loss_fn=loss_fn, optimizer=optimizer, train_data=batches)
    result = trainer.fit()
    assert result.steps >= 17
    assert "eps=1e-08 of Adam is zero in half precision" in result.incidents[-1].decision.reasons[-1]
    assert optimizer.param_groups[0]["eps"] == 1e-4
    assert all(torch.isfinite(p).all() for p in model.parameters())


class ByNorm(torch.optim.Optimizer):
    """Divides each gradient by its norm."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(0.01 * p.grad / p.grad.norm())


def test_an_update_that_divides_by_a_zero_gradient_is_left_out_while_it_is_zero(make_trainer):
    torch.manual_seed(0)
    model = make_model(dropout=0.0)
    last = [module for module in model if isinstance(module, nn.Linear)][-1]
    nn.init.zeros_(last.weight)  # what is before it has no gradient in the first step
    before = model[0].weight.detach().clone()
    trainer = make_trainer(model=model, optimizer=ByNorm(model.parameters()), train_data=make_batches(20))
    result = trainer.fit()
    assert "no update while the gradient is zero" in result.incidents[-1].decision.reasons[-1]
    assert result.steps >= 15
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert not torch.equal(model[0].weight, before)  # it is trained as soon as it has a gradient


class Noisy(nn.Module):
    """`sigma` has an infinite gradient at zero; `width` numbers of it."""

    def __init__(self, width):
        super().__init__()
        self.body, self.variance = make_model(dropout=0.0), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return self.body(x) + self.variance.sqrt().mean()


def test_a_few_parameters_with_bad_gradients_are_held_and_the_rest_is_trained(make_trainer):
    model = Noisy(1)
    trainer = make_trainer(model=model, train_data=make_batches(12))
    result = trainer.fit()
    assert [i.decision.action for i in result.incidents] == ["skip", "skip", "commit"]
    assert "variance: no update while the gradient is not finite" in result.incidents[-1].decision.reasons[-1]
    assert (result.steps, model.variance.tolist()) == (10, [0.0])


def test_most_of_a_model_is_not_held(make_trainer):
    trainer = make_trainer(model=Noisy(10_000), train_data=make_batches(12))
    with pytest.raises(TrainingStopped):
        trainer.fit()


class Codebook(nn.Module):
    """Its entries are the means of what was assigned to them: 0/0 where nothing was."""

    def __init__(self):
        super().__init__()
        self.body = make_model(dropout=0.0)
        self.register_buffer("codes", torch.randn(16, 3))

    def forward(self, x):
        owners = torch.cdist(x[:, :3].detach(), self.codes).argmin(1)
        if self.training:
            one_hot = nn.functional.one_hot(owners, 16).float()
            self.codes.copy_(one_hot.T @ x[:, :3].detach() / one_hot.sum(0)[:, None])
        return self.body(x) + self.codes[owners].mean(1, keepdim=True)


def test_entries_of_a_buffer_that_would_become_nan_keep_their_values(make_trainer, tmp_path):
    model = Codebook()
    result = make_trainer(model=model, train_data=make_batches(12)).fit()
    assert [i.decision.action for i in result.incidents] == ["skip", "skip", "commit"]
    assert "codes: entries that would become non-finite keep their values" in result.incidents[-1].decision.reasons[-1]
    assert result.steps == 10
    assert torch.isfinite(model.codes).all()


def test_what_is_held_survives_a_resume(make_trainer, tmp_path):
    parts = {"train_data": make_batches(12), "config": {"seed": 0}, "run_dir": tmp_path / "run"}
    for steps in (6, 10):
        parts["config"]["loop"] = {"max_steps": steps}
        trainer = make_trainer(model=Codebook(), **parts)
        result = trainer.fit(resume=steps == 10)
    assert isinstance(trainer, SafeTrainer)
    assert (result.steps, len(result.incidents)) == (10, 3)
