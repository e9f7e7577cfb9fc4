"""The short way to autograd's engine is `Tensor.backward`, and is left when somebody has put something there."""

import warnings

import pytest
import torch
from small import assert_same, make_batches, make_model, mse
from torch.overrides import TorchFunctionMode

from safetrain._private import torch_autograd
from safetrain._private.torch_autograd import backward


def gradients_by(run, times=1):
    torch.manual_seed(0)
    model = make_model(dropout=0.0)
    for batch in make_batches(times):
        run(mse(model, batch))
    return [parameter.grad for parameter in model.parameters()]


def test_the_gradients_are_the_same_and_add_up():
    assert torch_autograd._is_the_same()
    for times in (1, 3):
        assert_same(gradients_by(torch.Tensor.backward, times), gradients_by(backward, times))


def test_the_graph_is_freed():
    leaf = torch.ones(3, requires_grad=True)
    loss = (leaf * leaf).sum()
    backward(loss)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        backward(loss)


def test_hooks_see_the_gradient_of_the_loss():
    leaf = torch.ones(3, requires_grad=True)
    loss = leaf.sum()
    loss.register_hook(lambda gradient: gradient.mul_(2))
    for _ in range(2):  # what one did to its gradient is not there the next time
        leaf.grad = None
        backward(loss)
        assert leaf.grad.tolist() == [2.0, 2.0, 2.0]
        loss = leaf.sum()
        loss.register_hook(lambda gradient: gradient.mul_(2))


def test_anomaly_mode_names_the_operation():
    leaf = torch.zeros(1, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="SqrtBackward0"):
            backward((leaf.sqrt() * 0.0).sum())


@pytest.mark.parametrize(
    ("owner", "name"),
    [(torch.Tensor, "backward"), (torch.autograd, "backward"), (torch.autograd, "_engine_run_backward")],
)
def test_what_somebody_has_put_there_is_called(monkeypatch, owner, name):
    calls = []
    plain = getattr(owner, name)

    def watched(*args, **kwargs):
        calls.append(args[0])
        return plain(*args, **kwargs)

    monkeypatch.setattr(owner, name, watched)
    leaf = torch.ones(3, requires_grad=True)
    backward(leaf.sum())
    assert len(calls) == 1
    assert leaf.grad.tolist() == [1.0, 1.0, 1.0]


def test_a_mode_that_watches_functions_sees_it():
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    leaf = torch.ones(3, requires_grad=True)
    loss = leaf.sum()
    with Watch():
        backward(loss)
    assert torch.Tensor.backward in seen


def test_a_loss_with_a_backward_of_its_own():
    class Doubling(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

        def backward(self, *args, **kwargs):
            return super().backward(torch.tensor(2.0), *args, **kwargs)

    leaf = torch.ones(3, requires_grad=True)
    backward(leaf.sum().as_subclass(Doubling))
    assert leaf.grad.tolist() == [2.0, 2.0, 2.0]
    loss = leaf.sum()
    loss.backward = lambda: torch.Tensor.backward(loss, torch.tensor(3.0))
    backward(loss)
    assert leaf.grad.tolist() == [5.0, 5.0, 5.0]


def test_a_loss_that_is_unusual_goes_the_usual_way():
    leaf = torch.ones(3, requires_grad=True)
    backward(leaf.sum().reshape(1))
    assert leaf.grad.tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(RuntimeError, match="does not require grad"):
        backward(torch.ones(()))
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        backward(leaf * 2)


@pytest.mark.parametrize("engine", [lambda *args: None, lambda *args, **kwargs: None])
def test_a_torch_with_another_engine_is_asked_in_the_usual_way(monkeypatch, engine):
    torch_autograd._is_the_same.cache_clear()
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", engine)
    try:
        assert not torch_autograd._is_the_same()
        monkeypatch.undo()
        calls = []
        monkeypatch.setattr(torch_autograd, "_run_alone", calls.append)
        assert_same(gradients_by(torch.Tensor.backward), gradients_by(backward))
        assert calls == []
    finally:
        torch_autograd._is_the_same.cache_clear()
