"""fp32 islands: float32 forward and backward where asked, and nothing else changed."""

import copy
import io
import types
from typing import NamedTuple

import pytest
import torch
from forensic_cases import Apply
from island_cases import BF16, Net
from small import assert_same
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from safetrain import UsageError
from safetrain.precision.islands import autocast, island, islands_of, loss_island


def under_bf16(model, x):
    with torch.autocast("cpu", BF16):
        return model(x)


def spy(module):
    """A list that is filled with the dtypes that the module is given: of its output in forward, of the gradient in backward."""
    seen = []

    class Spying(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(x.dtype)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(gradient.dtype)
            return gradient

    plain = type(module)
    module.__class__ = type(plain.__name__, (plain,), {"forward": lambda self, x: Spying.apply(plain.forward(self, x))})
    return seen


def test_an_island_computes_in_float32_forward_and_backward_and_the_rest_does_not():
    model = Net()
    seen = spy(model.blocks[1].fc)
    out = under_bf16(model, torch.randn(4, 8))
    out.float().sum().backward()
    assert seen == [BF16, BF16]
    seen.clear()
    remove = island(model.blocks[1])
    out = under_bf16(model, torch.randn(4, 8))
    assert out.dtype == BF16  # the head is no island
    out.float().sum().backward()
    assert seen == [torch.float32, torch.float32]
    remove()
    seen.clear()
    under_bf16(model, torch.randn(4, 8)).float().sum().backward()
    assert seen == [BF16, BF16]


def test_the_whole_model_as_an_island_equals_float32_bit_for_bit():
    model, x = Net(), torch.randn(4, 8)
    expected = model(x)
    expected.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    remove = island(model)
    out = under_bf16(model, x)
    out.sum().backward()
    remove()
    assert torch.equal(out, expected)
    assert_same([p.grad for p in model.parameters()], gradients)


def test_state_dict_keys_types_and_modules_stay_as_they_were():
    model = Net()
    keys, names, instance = list(model.state_dict()), [n for n, _ in model.named_modules()], dict(vars(model.head))
    removes = [island(m) for m in model.modules()] + [loss_island(model)]
    assert list(model.state_dict()) == keys
    assert [n for n, _ in model.named_modules()] == names
    assert type(model.head) is nn.Linear
    for remove in removes:
        remove()
    assert vars(model.head) == instance
    assert "forward" not in vars(model)


def test_an_island_asked_for_twice_stays_until_both_are_done():
    model = Net()
    first, second = island(model.head), island(model.head)
    first()
    first()  # once more changes nothing
    assert islands_of(model) == ["head"]
    second()
    assert islands_of(model) == []


def test_a_forward_that_the_instance_had_of_its_own_is_used_and_comes_back():
    model = Net()
    model.head.forward = types.MethodType(lambda self, x: type(self).forward(self, x) * 0 + 3, model.head)
    own = model.head.forward
    remove = island(model.head)
    out = under_bf16(model, torch.randn(2, 8))
    assert (out.dtype, out.unique().tolist()) == (torch.float32, [3.0])
    remove()
    assert model.head.forward == own


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def test_inputs_of_any_nesting_are_cast_and_other_types_are_left_alone():
    seen = {}

    class Takes(nn.Module):
        def forward(self, pair, *, options):
            seen.update(pair=pair, options=options)
            return pair.left

    module = Takes()
    island(module)
    half, mask = torch.ones(2, dtype=torch.float16), torch.tensor([True, False])
    double, index = torch.ones(2, dtype=torch.float64), torch.tensor([1, 2])
    packed = pack_sequence([torch.ones(2, 3, dtype=BF16)])
    module(Pair(half, index), options={"a": [half, (mask, double)], "packed": packed, "name": "x"})
    assert isinstance(seen["pair"], Pair)
    assert (seen["pair"].left.dtype, seen["pair"].right.dtype) == (torch.float32, torch.int64)
    first, (kept, wide) = seen["options"]["a"]
    assert (first.dtype, kept.dtype, wide.dtype) == (torch.float32, torch.bool, torch.float64)
    assert seen["options"]["packed"].data.dtype == torch.float32
    assert seen["options"]["name"] == "x"


def test_a_deepcopy_is_an_island_with_weights_of_its_own():
    model = Net()
    island(model.head)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.head.weight.fill_(0.0)
        twin.head.bias.fill_(5.0)
    out = under_bf16(twin, torch.randn(2, 8))
    assert (out.dtype, out.unique().tolist()) == (torch.float32, [5.0])
    assert islands_of(twin) == ["head"]


def test_a_pickled_island_loads_as_a_model_that_works():
    model = Net()
    island(model.head)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x = torch.randn(2, 8)
    assert torch.equal(loaded(x), model(x))
    assert islands_of(loaded) == []
    assert under_bf16(loaded, x).dtype == BF16
    remove = island(loaded.head)
    assert under_bf16(loaded, x).dtype == torch.float32
    remove()
    assert under_bf16(loaded, x).dtype == BF16


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_recomputes_the_island_in_float32(reentrant):
    gradients = []
    for model in (Net(), Net(reentrant)):
        torch.manual_seed(0)
        model.load_state_dict(Net().state_dict())
        island(model.blocks[1].fc)
        seen = spy(model.blocks[1].fc)
        under_bf16(model, torch.randn(4, 8, requires_grad=True)).float().sum().backward()
        assert set(seen) == {torch.float32}
        gradients.append(model.blocks[1].fc.weight.grad)
    assert torch.equal(*gradients)


def test_an_island_cures_an_fp16_overflow():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), Apply(lambda h: torch.log1p(h.abs())), nn.Linear(8, 1))
    nn.init.constant_(model[0].weight, 300.0)
    x = torch.full((4, 8), 100.0)
    with torch.autocast("cpu", torch.float16):
        assert not torch.isfinite(model(x)).any()
        remove = island(model[0])
        out = model(x)
    assert torch.isfinite(out).all()
    out.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    remove()


@pytest.mark.parametrize("compile_first", [True, False])
def test_compiled_in_one_graph_with_a_float32_backward_and_grown_after_compiling(compile_first):
    """The gradient of a compiled island is that of an uncompiled one; with autocast in the backward trace it would not be."""
    torch.manual_seed(0)
    eager = Net()
    island(eager.blocks[1])
    x = torch.randn(4, 8)
    under_bf16(eager, x).float().sum().backward()

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    if compile_first:
        under_bf16(compiled, x).float().sum().backward()
        assert not torch.equal(model.blocks[1].fc.weight.grad, eager.blocks[1].fc.weight.grad)
        model.zero_grad()
    remove = island(model.blocks[1])
    assert torch._functorch.config.backward_pass_autocast == "off"
    under_bf16(compiled, x).float().sum().backward()
    assert torch.equal(model.blocks[1].fc.weight.grad, eager.blocks[1].fc.weight.grad)
    remove()
    torch._dynamo.reset()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("wrap_first", [True, False])
def test_distributed_wrapping_before_or_after(wrap_first):
    model = Net()
    seen = spy(model.blocks[1].fc)
    if not wrap_first:
        island(model.blocks[1])
    wrapped = nn.parallel.DistributedDataParallel(model)
    if wrap_first:
        island(model.blocks[1])
    under_bf16(wrapped, torch.randn(4, 8)).float().sum().backward()
    assert seen == [torch.float32, torch.float32]
    assert all(p.grad is not None for p in model.parameters())


def test_the_setting_for_compiled_backwards_is_as_before_when_the_last_island_is_gone():
    before = torch._functorch.config.backward_pass_autocast
    model = Net()
    first, second = island(model.head), island(model.norm)
    first()
    assert torch._functorch.config.backward_pass_autocast == "off"
    second()
    assert torch._functorch.config.backward_pass_autocast == before


def test_parameters_in_low_precision_are_refused():
    with pytest.raises(UsageError, match=r"parameters in bfloat16.*\nTo fix"):
        island(Net().to(BF16).head)


# ---- the loss ------------------------------------------------------------------------------------------------------


def test_with_the_loss_as_an_island_only_the_model_runs_under_autocast():
    model, dtypes = Net(), {}
    spied = spy(model.blocks[0].fc)
    remove = loss_island(model)

    def loss_fn(model, x):
        dtypes["before"] = (x @ x.T).dtype
        out = model(x)
        dtypes["output"] = out.dtype
        dtypes["after"] = (out @ out.T).dtype
        return out.square().mean()

    x = torch.randn(4, 8)
    with autocast(model, "cpu", BF16):
        loss_fn(model, x).backward()
    assert spied == [BF16, BF16]
    assert set(dtypes.values()) == {torch.float32}
    assert islands_of(model) == ["loss"]
    remove()
    with autocast(model, "cpu", BF16):
        loss_fn(model, x)
    assert set(dtypes.values()) == {BF16}


def test_the_loss_and_the_model_can_both_be_islands_and_go_in_any_order():
    model, x = Net(), torch.randn(2, 8)
    plain = model(x)
    module, loss = island(model), loss_island(model)
    with autocast(model, "cpu", BF16):
        assert torch.equal(model(x), plain)
    module()
    with autocast(model, "cpu", BF16):
        assert not torch.equal(model(x), plain)
    loss()
    assert "forward" not in vars(model)


def test_no_autocast_in_fp32():
    model = Net()
    loss_island(model)
    with autocast(model, "cpu", None):
        x = torch.randn(2, 8)
        assert torch.equal(model(x), type(model).forward(model, x))
