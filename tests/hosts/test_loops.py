"""What loops do that is out of the ordinary: another loss in one step, steps of their own that are left out, a cell that is run again."""

import copy

import pytest
import torch
from small import assert_same, make_batches, make_model, mse
from torch import nn

NAN = float("nan")
PLAIN = {"guards": {"clip": None, "spike": None}}


class WithLoss(nn.Module):
    """Returns its loss, as language models do."""

    def __init__(self):
        super().__init__()
        self.net = make_model()

    def forward(self, inputs, targets):
        outputs = self.net(inputs)
        return outputs, nn.functional.mse_loss(outputs, targets)


def build(model=make_model):
    torch.manual_seed(1)
    made = model()
    return made, torch.optim.SGD(made.parameters(), lr=0.05)


def one_step(guard, model, optimizer, batch, change=lambda loss: loss):
    with guard.step():
        change(model(*batch)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_loss_that_the_loop_changes_in_one_step_is_not_replaced_by_the_models(make_guard):
    model, optimizer = build(WithLoss)
    guard, batches = make_guard(model, optimizer, config=PLAIN), make_batches(6)
    for batch in batches[:5]:
        one_step(guard, model, optimizer, batch)
    before = copy.deepcopy(model.state_dict())
    one_step(guard, model, optimizer, batches[5], lambda loss: loss * NAN)
    assert_same(model.state_dict(), before)
    (incident,) = guard.result.incidents
    assert incident.decision.action == "skip"
    assert "where the loop computes the loss" in incident.cause.explanation
    one_step(guard, model, optimizer, batches[0])
    assert guard.result.steps == 6


def test_a_repair_weighs_the_loss_as_the_loop_does(make_guard):
    found = []
    for bad in (False, True):
        model, optimizer = build(WithLoss)
        guard, (inputs, targets) = make_guard(model, optimizer, config=PLAIN), make_batches(1)[0]
        one_step(guard, model, optimizer, (inputs, targets), lambda loss: loss * 0.25)
        if bad:
            inputs[2] = NAN
        else:
            inputs, targets = (torch.cat([part[:2], part[3:]]) for part in (inputs, targets))
        one_step(guard, model, optimizer, (inputs, targets), lambda loss: loss * 0.25)
        assert guard.result.steps == 2
        found.append(copy.deepcopy(model.state_dict()))
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name])


@pytest.mark.parametrize("clears_at_once", [True, False])
def test_a_step_that_the_loop_leaves_out_after_backward(make_guard, clears_at_once):
    model, optimizer = build(lambda: make_model(norm=False))  # the loop itself leaves NaN in BatchNorm
    guard, batches = make_guard(model, optimizer, loss_fn=mse, config=PLAIN), make_batches(6)
    batches[3][0].fill_(NAN)
    for batch in batches:
        with guard.step(batch):
            optimizer.zero_grad()
            mse(model, batch).backward()
            if not torch.isfinite(nn.utils.get_total_norm([p.grad for p in model.parameters()])):
                if clears_at_once:
                    optimizer.zero_grad()
                continue
            optimizer.step()
    assert (guard.result.steps, guard.result.incidents) == (5, [])


def test_optimizers_that_step_together_keep_their_own_state(make_guard):
    torch.manual_seed(1)
    model = make_model()
    first, *others = model.parameters()
    one, two = torch.optim.SGD([first], lr=0.05, momentum=0.9), torch.optim.Adam(others, lr=1e-2)
    guard = make_guard(model, [one, two], loss_fn=mse)
    for batch in make_batches(5):
        with guard.step(batch):
            mse(model, batch).backward()
            two.step()
            one.step()
            one.zero_grad()
            two.zero_grad()
    assert [len(each.state_dict()["state"]) for each in (one, two)] == [1, len(others)]
    assert guard.result.warnings == []  # of weights that do not move


def test_a_cell_that_is_run_again(make_guard, tmp_path, caplog):
    model, optimizer = build()
    for name in ("mine", "mine-2"):
        guard = make_guard(model, optimizer, loss_fn=mse, run_dir=tmp_path / "mine")
        for batch in make_batches(3):
            with guard.step(batch):
                mse(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert (guard.run_dir, guard.result.steps, guard.result.status) == (tmp_path / name, 3, "running")
    assert "was still open, and was closed" in caplog.text


def test_a_suspicious_step_whose_loss_the_loop_computes(make_guard):
    model, optimizer = build()
    guard = make_guard(model, optimizer, config={"guards": {"spike": {"warmup_steps": 5}}})
    batches = make_batches(14)
    batches[11][1].mul_(1e6)
    for batch in batches:
        with guard.step(batch):
            mse(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert guard.result.incidents == []  # nothing can be tried, and a suspicion alone refuses nothing
    assert guard.result.steps == 14
