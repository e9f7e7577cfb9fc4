"""What cannot work under `watch` says so at once, and what to do instead."""

import pytest
import torch
from small import make_batches, make_model, mse
from torch import nn

from safetrain import ConfigError, UsageError, watch


@pytest.fixture
def parts():
    model = make_model()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), make_batches(3)


def test_step_outside_of_a_block(make_guard, parts):
    model, optimizer, batches = parts
    make_guard(model, optimizer)
    mse(model, batches[0]).backward()
    with pytest.raises(UsageError, match=r"outside of guard\.step"):
        optimizer.step()


def test_step_left_out(make_guard, parts):
    model, optimizer, batches = parts
    guard = make_guard(model, optimizer)
    for batch in batches:
        with guard.step(batch):
            mse(model, batch).backward()
            optimizer.zero_grad()
    with pytest.raises(UsageError, match=r"optimizer\.step\(\) was not called"), guard.step(batches[0]):
        pass


def test_step_called_twice(make_guard, parts):
    model, optimizer, batches = parts
    guard = make_guard(model, optimizer)
    with pytest.raises(UsageError, match="called twice"), guard.step(batches[0]):
        mse(model, batches[0]).backward()
        optimizer.step()
        optimizer.step()


def test_blocks_within_blocks(make_guard, parts):
    model, optimizer, batches = parts
    guard = make_guard(model, optimizer)
    with pytest.raises(UsageError, match="within another block"), guard.step(batches[0]), guard.step(batches[1]):
        pass


def test_no_batch_for_the_loss_function(make_guard, parts):
    model, optimizer, _ = parts
    guard = make_guard(model, optimizer, loss_fn=mse)
    with pytest.raises(UsageError, match="no batch"), guard.step():
        pass


def test_no_backward(make_guard, parts):
    model, optimizer, batches = parts
    guard = make_guard(model, optimizer)
    with pytest.raises(UsageError, match=r"loss\.backward\(\) before it"), guard.step(batches[0]):
        mse(model, batches[0])
        optimizer.step()


def test_gradients_from_elsewhere_need_a_loss(make_guard, parts):
    model, optimizer, batches = parts
    guard = make_guard(model, optimizer)

    def functional(note):
        with guard.step(batches[0]):
            loss = mse(model, batches[0])
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
                p.grad = g
            if note:
                guard.note_loss(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    with pytest.raises(UsageError, match="note_loss"):
        functional(note=False)
    assert guard.result.losses == []
    loss = functional(note=True)
    assert guard.result.losses == [loss]


def test_a_loss_that_is_no_scalar(make_guard, parts):
    model, optimizer, batches = parts
    guard = make_guard(model, optimizer)
    with pytest.raises(UsageError, match="no loss to judge"), guard.step(batches[0]):
        out = model(batches[0][0])
        out.backward(torch.ones_like(out))


def test_a_scaler_without_fp16(make_guard, parts):
    model, optimizer, batches = parts
    guard = make_guard(model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(UsageError, match="precision='fp16'"), guard.step(batches[0]):
        scaler.scale(mse(model, batches[0])).backward()
        scaler.step(optimizer)


def test_autocast_that_watch_was_not_told_of(make_guard, parts):
    model, optimizer, batches = parts
    guard = make_guard(model, optimizer)
    with pytest.raises(UsageError, match="precision='bf16'"), guard.step(batches[0]):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mse(model, batches[0])
        loss.backward()
        optimizer.step()


def test_an_optimizer_whose_step_is_replaced_afterwards(make_guard, parts):
    model, optimizer, batches = parts
    guard = make_guard(model, optimizer)
    optimizer.step = torch.optim.SGD.step.__get__(optimizer)
    with pytest.raises(UsageError, match="replaced after watch"), guard.step(batches[0]):
        mse(model, batches[0]).backward()
        optimizer.step()


def test_an_optimizer_that_moves_the_weights_before_its_closure(make_guard, parts):
    model, _, batches = parts

    class Perturbed(torch.optim.SGD):
        def step(self, closure):
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.add_(0.01)
            closure()
            super().step()

    optimizer = Perturbed(model.parameters(), lr=0.1)
    guard = make_guard(model, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = mse(model, batches[0])
        loss.backward()
        return loss

    with pytest.raises(UsageError, match="closure several times"), guard.step(batches[0]):
        optimizer.step(closure)


def test_a_loss_function_that_cannot_take_the_batch(make_guard, parts):
    model, optimizer, batches = parts
    guard = make_guard(model, optimizer, loss_fn=mse)
    with pytest.raises(UsageError, match=r"loss_fn\(model, batch\) raised TypeError"), guard.step(None):
        mse(model, batches[0]).backward()
        optimizer.step()


def test_a_loss_function_that_computes_another_loss(make_guard, parts, caplog):
    model, optimizer, batches = parts
    guard = make_guard(model, optimizer, loss_fn=mse)
    with guard.step(batches[0]):
        (3 * mse(model, batches[0])).backward()
        optimizer.step()
    assert "the loop called backward on" in caplog.text
    assert guard.result.steps == 1


def test_lbfgs(parts):
    model = parts[0]
    with pytest.raises(UsageError, match="first-order optimizer"):
        watch(model, torch.optim.LBFGS(model.parameters()))


def test_model_and_optimizer_exchanged(parts):
    model, optimizer, _ = parts
    with pytest.raises(UsageError, match="model comes first"):
        watch(optimizer, model)


def test_an_optimizer_of_another_model(parts):
    with pytest.raises(UsageError, match="belongs to the model"):
        watch(parts[0], torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


def test_precision_misspelt(parts):
    with pytest.raises(UsageError, match="fp32, bf16, fp16"):
        watch(*parts[:2], precision="float16")


def test_settings_that_are_the_loops_own(parts):
    with pytest.raises(ConfigError, match=r"loop\.max_steps.*the loop decides this itself"):
        watch(*parts[:2], config={"loop": {"max_steps": 10}})


def test_close_puts_the_optimizer_back(make_guard, parts):
    model, optimizer, batches = parts
    before = optimizer.step
    guard = make_guard(model, optimizer)
    assert optimizer.step != before
    guard.close()
    guard.close()
    assert optimizer.step == before
    assert torch.Tensor.backward is not None
    mse(model, batches[0]).backward()
    optimizer.step()
