"""What every registered guard must honour."""

import copy
import importlib
import json
import math

import pytest
from torch import nn

from safetrain import Action, Guard, StepView, Verdict
from safetrain.core.options import field_docs
from safetrain.core.verdict import merge
from safetrain.guards import DEFAULT, REGISTRY

OURS = sorted(name for name, cls in REGISTRY.items() if cls.__module__.startswith("safetrain.guards."))
VIEWS = [
    StepView(step=3, loss=1.0, grad_norm=1.0),
    StepView(step=3, loss=math.nan, grad_norm=math.inf, consecutive_refusals=2, refused_steps=(1, 2)),
    StepView(step=3, loss=1.0, grad_norm=math.inf, scaler_overflow=True, loss_scale=2.0, consecutive_overflows=1),
]


@pytest.fixture(params=OURS)
def guard(request):
    return REGISTRY[request.param]()


def test_the_defaults_are_registered():
    assert set(DEFAULT) <= set(OURS)


def test_file_name_and_registry_key_and_class_name_agree(guard):
    module = importlib.import_module(f"safetrain.guards.{guard.name}")
    assert type(guard).__module__ == module.__name__


def test_a_guard_of_the_same_name_from_elsewhere_does_not_take_the_place_of_ours(guard):
    type(type(guard).__name__, (Guard,), {})
    assert REGISTRY[guard.name] is type(guard)


def test_every_option_is_documented(guard):
    docs = field_docs(type(guard).Config)
    assert set(docs) == set(type(guard).Config.__dataclass_fields__)


@pytest.mark.parametrize("view", VIEWS)
def test_judge_is_pure(guard, view):
    before = copy.deepcopy(guard.__dict__)
    first, second = guard.judge(view), guard.judge(view)
    assert first == second
    assert isinstance(first, Verdict)
    assert guard.__dict__ == before


def test_only_learning_changes_the_state_and_the_state_survives_json(guard):
    for step in range(60):
        guard.learn(StepView(step=step, loss=1.0, grad_norm=1.0 + step % 3, consecutive_refusals=step % 2), merge([]))
    state = json.loads(json.dumps(guard.state_dict(), allow_nan=False))
    twin = type(guard)()
    twin.load_state_dict(state)
    assert twin.state_dict() == guard.state_dict()
    for view in VIEWS:
        assert twin.judge(view) == guard.judge(view)
        assert twin.limits() == guard.limits()


def test_a_healthy_step_is_let_pass(guard):
    assert guard.judge(StepView(step=0, loss=2.0, grad_norm=0.5)).action is Action.COMMIT


def test_what_attach_returns_leaves_the_model_as_it_was(guard):
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    before = [{name: copy.copy(value) for name, value in vars(module).items()} for module in model.modules()]
    remove = guard.attach(model)
    guard.begin(0, 1)
    if remove is not None:
        remove()
    assert [vars(module) for module in model.modules()] == before


def test_no_exception_of_the_users_is_explained_away(guard):
    assert not guard.explains(StepView(step=0, loss=math.nan, grad_norm=math.nan, error=RuntimeError("mine")))
