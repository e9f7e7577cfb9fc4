"""The activations guard and its probes: the numbers, when they are taken, and that nothing stays on the model."""

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from safetrain import Action, StepView, UsageError
from safetrain.core.verdict import merge
from safetrain.core.view import DeviceStep
from safetrain.guards.activations import Activations
from safetrain.guards.probes import Probe, by_module

COMMITTED = merge([])
ZERO = torch.zeros(())


def make_net():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(inplace=True), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))
        net[2].weight.copy_(torch.tensor([[3.0, 5.0]]))
    return net


def num_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


def watch(net, x, names=None, **kwargs):
    with Probe({name: m for name, m in net.named_modules() if names is None or name in names}) as probe:
        net(x, **kwargs).sum().backward()
    return by_module({f"probe.{name}": float(value) for name, value in probe.signals(ZERO).items()}, "probe")


def test_statistics_of_outputs_and_their_gradients():
    seen = watch(make_net(), torch.tensor([[2.0, 4.0], [7.0, -1.0]]))
    # Outputs of "0": [2, -4], [7, 1]; of "1": [2, 0], [7, 1]; of "2" and the model: 6, 26.
    assert seen["0"]["max_abs"] == 7.0
    assert seen["1"]["max_abs"] == 7.0
    assert seen["1"]["zeros"] == 0.25
    assert seen["2"] == seen[""]
    assert seen["2"]["max_abs"] == 26.0
    assert seen["2"]["saturation"] == pytest.approx(26.0 / torch.finfo(torch.float32).max)
    assert seen["2"]["grad_max_abs"] == 1.0
    assert seen["1"]["grad_max_abs"] == 5.0
    assert seen["0"]["grad_zeros"] == 0.25  # where the ReLU was closed


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float16, 60000 / 65504), (torch.bfloat16, 0.0)])
def test_saturation_is_relative_to_the_type_of_the_output(dtype, expected):
    class Cast(nn.Module):
        def forward(self, x):
            return x.to(dtype)

    x = torch.full((1, 1), 60000.0, requires_grad=True)
    assert watch(Cast(), x)[""]["saturation"] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf_show(value):
    x = torch.tensor([[value, 1.0], [1.0, 1.0]])
    seen = watch(nn.Sequential(nn.Identity(), nn.Linear(2, 1)), x)
    assert seen["0"]["max_abs"] == pytest.approx(value, nan_ok=True)
    assert seen["0"]["saturation"] == pytest.approx(value, nan_ok=True)


def test_a_module_called_twice_or_recomputed_is_merged_and_one_never_called_is_zero():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3, bias=False)
            self.unused = nn.Linear(3, 3)
            nn.init.eye_(self.fc.weight)

        def forward(self, x, recompute=False):
            x = checkpoint(self.fc, x, use_reentrant=False) if recompute else self.fc(x)
            return self.fc(x * 10.0)

    x = torch.tensor([[1.0, 0.0, 2.0]])
    for recompute in (False, True):
        seen = watch(Shared(), x, recompute=recompute)
        assert seen["fc"]["max_abs"] == 20.0
        assert seen["fc"]["zeros"] == pytest.approx(1 / 3)
        assert set(seen["unused"].values()) == {0.0}


def test_outputs_of_any_nesting_are_watched_and_other_types_left_alone():
    class Nested(nn.Module):
        def forward(self, x):
            return {"a": (x, x * 2), "index": torch.tensor([999]), "empty": x[:0], "name": "n"}

    net = Nested()
    with Probe({"": net}) as probe:
        net(torch.ones(2))
    assert float(probe.signals(ZERO)[".max_abs"]) == 2.0


def test_watching_changes_no_bit():
    x = torch.randn(4, 2)
    plain, watched = make_net(), make_net()
    plain(x).sum().backward()
    watch(watched, x)
    assert num_hooks(watched) == 0
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


# ---- the guard -----------------------------------------------------------------------------------------------------


def run_step(guard, model, step, num_refused=0):
    """One step as the trainer does it: the hooks while the forward ran, and a view of the step."""
    guard.begin(step, num_refused)
    hooks = num_hooks(model)
    loss = model(torch.tensor([[2.0, 4.0]])).sum()
    loss.backward()
    signals = guard.measure(DeviceStep(step, loss.detach(), ZERO, [], lambda: None, lambda: None))
    assert num_hooks(model) == 0
    numbers = {f"activations.{name}": float(value) for name, value in signals.items()}
    return hooks, StepView(step=step, loss=float(loss.detach()), grad_norm=1.0, signals=numbers)


@pytest.mark.parametrize(
    ("options", "step", "num_refused", "watched"),
    [
        ({}, 0, 0, True),
        ({}, 1, 0, False),
        ({}, 50, 0, True),
        ({"every": 3}, 6, 0, True),
        ({}, 1, 1, True),
        ({"after_refusal": False}, 1, 1, False),
    ],
)
def test_hooks_are_on_the_model_only_while_a_step_is_watched(options, step, num_refused, watched):
    model = make_net()
    guard = Activations(modules=["Linear"], **options)
    remove = guard.attach(model)
    assert num_hooks(model) == 0
    hooks, view = run_step(guard, model, step, num_refused)
    assert hooks == (2 if watched else 0)
    assert bool(view.signals) is watched
    remove()


def test_a_step_that_raised_leaves_no_hook():
    model = make_net()
    guard = Activations(every=1)
    remove = guard.attach(model)
    guard.begin(0, 0)
    guard.begin(1, 0)
    assert num_hooks(model) == 4
    remove()
    assert num_hooks(model) == 0


@pytest.mark.parametrize(
    ("options", "action", "signal"),
    [
        ({}, Action.COMMIT, None),
        ({"max_abs": 10.0}, Action.COMMIT, None),
        ({"max_abs": 3.0}, Action.SKIP, "0.max_abs"),
        ({"max_saturation": 1e-39}, Action.SKIP, "0.saturation"),
        ({"max_saturation": 0.5}, Action.COMMIT, None),
    ],
)
def test_limits_are_optional(options, action, signal):
    model = make_net()
    guard = Activations(modules=["?"], every=1, **options)
    guard.attach(model)
    _, view = run_step(guard, model, 0)
    verdict = guard.judge(view)
    assert (verdict.action, verdict.evidence.get("signal")) == (action, signal)


def test_nan_is_above_every_limit():
    signals = {"activations.fc.max_abs": math.nan, "activations.fc.saturation": math.nan}
    view = StepView(step=0, loss=1.0, grad_norm=1.0, signals=signals)
    assert Activations(max_abs=1e30).judge(view).action is Action.SKIP
    assert Activations(max_saturation=1.0).judge(view).action is Action.SKIP
    assert Activations().judge(view).action is Action.COMMIT


def test_a_watched_step_in_trouble_has_its_numbers_as_evidence():
    signals = {"activations.fc.max_abs": 1.0, "activations.fc.saturation": 0.0}
    verdict = Activations().judge(StepView(step=0, loss=math.nan, grad_norm=1.0, signals=signals))
    assert verdict.action is Action.COMMIT
    assert verdict.recording == {"fc": {"max_abs": 1.0, "saturation": 0.0}}


def test_the_recorder_keeps_the_last_watched_and_committed_steps():
    model = make_net()
    guard = Activations(modules=["0"], every=2, history=3)
    guard.attach(model)
    for step in range(12):
        _, view = run_step(guard, model, step)
        guard.learn(view, COMMITTED)
    records = guard.records()
    assert [record["step"] for record in records] == [6, 8, 10]
    assert records[0]["modules"]["0"]["max_abs"] == 4.0
    assert records[0]["loss"] == 6.0


def test_a_glob_that_matches_nothing_is_an_error():
    with pytest.raises(UsageError, match=r"guards.activations.modules: 'Linaer' matches no module.*'Linear'"):
        Activations(modules=["Linaer"]).attach(make_net())
