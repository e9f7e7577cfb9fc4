"""The packed step moves every number as torch's own step does, and notices whatever is changed behind its back."""

import copy
import functools
import itertools

import pytest
import torch
import torch._dynamo
from small import assert_same
from torch import nn

from safetrain.optim import packed_adam
from safetrain.optim.packed_adam import PackedAdam

SHAPES = [(5, 3), (1,), (64, 33), (7,), (2, 3, 4), (300,), ()]
KINDS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def make(kind, dtype=torch.float32, shapes=SHAPES, **options):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    half = len(parameters) // 2
    groups = [{"params": parameters[:half]}, {"params": parameters[half:], "lr": 0.03, "betas": (0.8, 0.95)}]
    return kind(groups, **{"lr": 0.01, **options})


def parameters_of(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Twins:
    """The same optimizer twice, given the same gradients: one is stepped by torch, the other packed."""

    def __init__(self, optimizer, piece=packed_adam.PIECE):
        self.plain, self.ours = optimizer, copy.deepcopy(optimizer)
        self.packed = PackedAdam(self.ours, piece)
        self._generator = torch.Generator().manual_seed(1)

    def step(self, without=()):
        """Whether it was packed."""
        for index, (one, other) in enumerate(zip(*map(parameters_of, (self.plain, self.ours)), strict=True)):
            gradient = torch.randn(one.shape, dtype=one.dtype, generator=self._generator)
            one.grad, other.grad = (None, None) if index in without else (gradient, gradient.clone())
        self.plain.step()
        if not (was_packed := self.packed.step()):
            self.ours.step()
        self.compare()
        return was_packed

    def compare(self):
        assert_same(parameters_of(self.plain), parameters_of(self.ours))
        assert_same(self.plain.state_dict(), self.ours.state_dict())


@pytest.mark.parametrize("piece", [40, packed_adam.PIECE], ids=["in pieces", "at once"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("fused", [None, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.0}, {"weight_decay": 0.3, "eps": 1e-3}], ids=str)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_bits_are_those_of_torch(kind, options, fused, dtype, piece):
    twins = Twins(make(kind, dtype, fused=fused, **options), piece)
    assert [twins.step() for _ in range(6)] == [False, *[True] * 5]  # torch makes the state


def test_a_fused_step_is_skipped_on_the_device_as_torch_does():
    twins = Twins(make(torch.optim.AdamW, fused=True))
    for found in (0.0, 0.0, 1.0, 0.0):
        for optimizer in (twins.plain, twins.ours):
            optimizer.found_inf = torch.tensor(found)
        twins.step()
    assert twins.packed._packs is not None
    steps = {float(state["step"]) for state in twins.ours.state.values()}
    assert steps == {3.0}


def test_fused_and_unfused_groups_in_one_optimizer():
    optimizer = make(torch.optim.AdamW)
    optimizer.param_groups[1]["fused"] = True
    twins = Twins(optimizer)
    assert [twins.step() for _ in range(3)] == [False, True, True]


def test_with_several_threads():
    torch.set_num_threads(2)
    twins = Twins(make(torch.optim.AdamW, shapes=[(300, 300), (17,), (100_001,)]), piece=2**15)
    assert [twins.step() for _ in range(3)] == [False, True, True]


def test_several_types_of_parameters():
    optimizer = make(torch.optim.AdamW)
    more = [nn.Parameter(torch.randn(9, dtype=dtype)) for dtype in (torch.float64, torch.float32, torch.float64)]
    optimizer.add_param_group({"params": more})
    twins = Twins(optimizer)
    assert [twins.step() for _ in range(3)] == [False, True, True]


def test_a_learning_rate_that_changes():
    twins = Twins(make(torch.optim.AdamW))
    for lr in (0.1, 0.1, 0.05, 1, 1e-5):
        for optimizer in (twins.plain, twins.ours):
            optimizer.param_groups[0]["lr"] = lr
        twins.step()


def test_state_that_is_loaded_is_gone_on_with():
    twins = Twins(make(torch.optim.AdamW))
    twins.step()
    before = copy.deepcopy(twins.plain.state_dict())
    assert twins.step()
    for optimizer in (twins.plain, twins.ours):
        optimizer.load_state_dict(copy.deepcopy(before))
    twins.compare()
    assert twins.step()
    assert twins.step()


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_a_moment_that_is_replaced_is_gone_on_with(key):
    twins = Twins(make(torch.optim.AdamW))
    twins.step()
    twins.step()
    for optimizer in (twins.plain, twins.ours):
        parameter = parameters_of(optimizer)[2]
        optimizer.state[parameter][key] = torch.ones_like(parameter)
    assert twins.step()
    for optimizer in (twins.plain, twins.ours):
        parameter = parameters_of(optimizer)[0]
        optimizer.state[parameter] = {**optimizer.state[parameter], key: torch.ones_like(parameter)}
    assert twins.step()


def test_a_moment_that_is_another_view_of_the_same_memory():
    twins = Twins(make(torch.optim.AdamW, shapes=[(4, 4), (3,), (5, 5), (2,)]))
    twins.step()
    twins.step()
    for optimizer in (twins.plain, twins.ours):
        state = optimizer.state[parameters_of(optimizer)[0]]
        state["exp_avg"] = state["exp_avg"].t()
    twins.step()
    twins.step()


def test_a_moment_that_is_written_to_is_gone_on_with():
    twins = Twins(make(torch.optim.AdamW))
    twins.step()
    twins.step()
    for optimizer in (twins.plain, twins.ours):
        optimizer.state[parameters_of(optimizer)[2]]["exp_avg"].zero_()
    assert twins.step()


def test_weights_whose_memory_is_replaced_are_moved():
    twins = Twins(make(torch.optim.AdamW))
    twins.step()
    twins.step()
    for optimizer in (twins.plain, twins.ours):
        parameters_of(optimizer)[0].data = torch.ones(5, 3)
    assert twins.step()


def unfreeze(optimizer):
    optimizer.param_groups[1]["params"].append(nn.Parameter(torch.ones(4)))


def move(optimizer):
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())


def remove(optimizer):
    del optimizer.state[optimizer.param_groups[0]["params"].pop()]


def reverse(optimizer):
    optimizer.param_groups.reverse()


def fuse(optimizer):
    optimizer.param_groups[0]["fused"] = True


def replace_memory_of_state(optimizer):
    for key in ("exp_avg", "step"):
        tensor = optimizer.state[parameters_of(optimizer)[1]][key]
        tensor.data = torch.ones_like(tensor)


def change_layout(optimizer):
    parameters_of(optimizer)[-1].data = parameters_of(optimizer)[-1].data.t().contiguous().t()


CHANGES = (unfreeze, move, remove, reverse, fuse, replace_memory_of_state, change_layout)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whatever_else_is_changed_is_noticed(change):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((5,), (3, 2), (7,), (4, 6))]
    groups = [{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:3]}, {"params": parameters[3:], "lr": 0.2}]
    twins = Twins(torch.optim.AdamW(groups, lr=0.001))
    assert [twins.step() for _ in range(3)] == [False, True, True]
    for optimizer in (twins.plain, twins.ours):
        change(optimizer)
    for _ in range(4):
        twins.step()


def test_tensors_of_the_state_stay_the_ones_that_others_have():
    twins = Twins(make(torch.optim.AdamW))
    twins.step()
    mine = {id(tensor): tensor for state in twins.ours.state.values() for tensor in state.values()}
    assert twins.step()
    assert {id(tensor) for state in twins.ours.state.values() for tensor in state.values()} == mine.keys()


def test_what_torch_would_call_is_called_if_it_is_not_torchs(monkeypatch):
    optimizer, called = make(torch.optim.AdamW), []
    own = torch.optim.Adam._init_group

    def counted(self, *args):
        called.append("step")
        return own(self, *args)

    for parameter in parameters_of(optimizer):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    packed = PackedAdam(optimizer)
    assert packed.step()
    monkeypatch.setattr(torch.optim.Adam, "_init_group", counted)
    assert not packed.step()
    monkeypatch.undo()
    optimizer._init_group = functools.partial(counted, optimizer)
    assert not packed.step()


def test_what_torchs_compiler_puts_around_its_optimizers_does_not_matter():
    torch._dynamo.eval_frame.TorchPatcher.patch()
    packed_adam._is_exact.cache_clear()
    twins = Twins(make(torch.optim.AdamW))
    assert [twins.step() for _ in range(2)] == [False, True]


def test_the_default_device_does_not_matter():
    packed_adam._is_exact.cache_clear()
    twins = Twins(make(torch.optim.AdamW))
    twins.step()
    for parameter in parameters_of(twins.ours):
        parameter.grad = torch.ones_like(parameter)
    with torch.device("meta"):
        assert twins.packed.step()


def test_parameters_without_a_gradient_stay():
    twins = Twins(make(torch.optim.AdamW))
    for without in ((), (1,), (1,), (), (0, 4)):
        twins.step(without)
    # From here on they have made different numbers of steps, and torch counts for each.
    assert [twins.step((1,)) for _ in range(2)] == [False, False]


def test_parameters_that_are_never_trained_are_left_out():
    twins = Twins(make(torch.optim.AdamW))
    assert [twins.step(without=(1, 3)) for _ in range(4)] == [False, True, True, True]


def test_a_model_that_always_trains_other_parameters_is_left_to_torch():
    twins = Twins(make(torch.optim.AdamW))
    assert (
        any(twins.step(without=(index % 2,)) for index in range(10)) is False
    )  # two that are never moved as often as others
    twins = Twins(make(torch.optim.AdamW, shapes=[(3,)] * 40))
    parameters = range(40)
    for index in parameters:  # each of them alone, so that none is ahead of those it is packed with
        twins.step(without=set(parameters) - {index})
    packed = [twins.step(without=set(parameters) - {index}) for index in parameters]
    assert packed == [True] * packed_adam.TRIES + [False] * (40 - packed_adam.TRIES)


def test_whoever_stays_packed_may_be_packed_again_and_again():
    twins = Twins(make(torch.optim.AdamW, shapes=[(3,), (2,)]))
    twins.step()
    for _ in range(packed_adam.TRIES + 5):
        twins.ours.load_state_dict(copy.deepcopy(twins.ours.state_dict()))
        assert all(twins.step() for _ in range(100))


@pytest.mark.parametrize(
    "options",
    [
        {"amsgrad": True},
        {"maximize": True},
        {"foreach": False},
        {"fused": True, "amsgrad": True},
        {"lr": torch.tensor(0.01)},
        {"betas": (torch.tensor(0.9), torch.tensor(0.99))},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_it_does_not_know_are_left_to_torch(options):
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    twins = Twins(torch.optim.AdamW(parameters, **options))
    assert not any(twins.step() for _ in range(3))


def test_an_option_that_is_changed_is_noticed():
    twins = Twins(make(torch.optim.Adam))
    assert [twins.step() for _ in range(2)] == [False, True]
    for optimizer in (twins.plain, twins.ours):
        optimizer.param_groups[1]["maximize"] = True
    assert not twins.step()


def test_parameters_that_share_memory_are_left_to_torch():
    memory = torch.randn(10)
    parameters = [nn.Parameter(memory[:6]), nn.Parameter(memory[4:])]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not PackedAdam(optimizer).step()


def test_other_layouts_are_left_to_torch():
    twins = Twins(torch.optim.AdamW([nn.Parameter(torch.randn(4, 3).t()), nn.Parameter(torch.randn(2))]))
    assert not any(twins.step() for _ in range(3))


def test_a_sparse_gradient_is_refused_as_torch_does():
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.AdamW(parameters)
    packed = PackedAdam(optimizer)
    for gradient in (torch.ones(3), torch.ones(3), torch.ones(3).to_sparse()):
        parameters[0].grad, parameters[1].grad = gradient, torch.ones(2)
        if not gradient.is_sparse and not packed.step():
            optimizer.step()
    assert not packed.step()


def test_a_machine_whose_bits_would_differ_is_left_to_torch(monkeypatch):
    joined = packed_adam.joined
    monkeypatch.setattr(packed_adam, "joined", lambda tensors: joined(tensors) * (1 + 1e-6))
    packed_adam._is_exact.cache_clear()
    try:
        twins = Twins(make(torch.optim.AdamW))
        assert not any(twins.step() for _ in range(3))
    finally:
        packed_adam._is_exact.cache_clear()


def test_trying_it_out_draws_no_random_number():
    packed_adam._is_exact.cache_clear()
    before = torch.get_rng_state()
    assert packed_adam._is_exact(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


def test_packs_have_one_type_and_a_bounded_size():
    sizes = (5, 4, 100, 3, 3, 3, 3, 50, 1)
    parameters = [torch.empty(size) for size in sizes] + [torch.empty(2).double()]
    packs = list(packed_adam._shared_out(parameters, 10))
    assert [p.numel() for p in itertools.chain.from_iterable(packs)] == [*sizes, 2]
    assert [[p.numel() for p in pack] for pack in packs] == [[5, 4], [100], [3, 3, 3], [3], [50], [1], [2]]
