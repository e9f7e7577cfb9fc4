"""An investigation changes nothing, says whether the replay is the step that was, and never raises of itself."""

from __future__ import annotations

import copy
import math
import random
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from forensic_cases import Tiny, chain, incident_of, without_bias
from small import assert_same
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from safetrain.forensics import Effort, Step, diagnose, find_bad_batches, investigate
from safetrain.tensors.rng import RandomState


class Noisy(nn.Module):
    """Draws from every source, writes buffers and a parameter, counts its calls, and keeps its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.clipped = nn.Parameter(torch.ones(4))
        self.generator = torch.Generator().manual_seed(3)
        self.calls, self.last = 0, torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.clipped.data.mul_(0.9)
        h = self.drop(self.norm(self.lin(x))) * self.clipped + random.random() + np.random.rand()
        h = h + torch.randn(4, generator=self.generator)
        self.last.copy_(h[0].detach())
        return h


def everything(model: Noisy, optimizer: torch.optim.Optimizer, batch: Tensor) -> list[Any]:
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters()), model.last, batch]
    tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    copies = [None if t is None else t.detach().clone() for t in tensors]
    state = RandomState.capture()
    rng = [state.torch_cpu.clone(), str(state.python), str(state.numpy), model.generator.get_state().clone()]
    return [*copies, *rng, model.calls, model.training, str(optimizer.param_groups[0]["lr"]), len(optimizer.state)]


@pytest.mark.parametrize("make_bad", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_nothing_is_touched(make_bad: bool, kind: type[torch.optim.Optimizer]) -> None:
    model = Noisy()
    optimizer = kind(model.parameters(), lr=0.01)
    batch = torch.randn(6, 4)

    def loss_fn(m: nn.Module, x: Tensor) -> Tensor:
        out = m(x.mul_(1.5))
        return (out / (out - out) if make_bad else out).pow(2).mean()

    model(torch.randn(6, 4)).mean().backward()
    optimizer.step()
    before = everything(model, optimizer, batch)
    gradients = [p.grad for p in model.parameters()]
    incident = investigate(model, loss_fn, batch, optimizer=optimizer)
    assert (incident is not None) is make_bad
    assert_same(everything(model, optimizer, batch), before)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))


def test_an_optimizer_with_nested_state_of_its_own_is_restored() -> None:
    class Nested(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})
            self.log: list[float] = []
            self.norms = {"last": torch.zeros(())}

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                history = self.state[p].setdefault("history", [torch.zeros_like(p)])
                history[0].add_(p.grad)
                history.append(p.grad.clone())
                self.norms["last"].copy_(p.grad.norm())
                self.log.append(float(p.grad.norm()))
                p.sub_(history[0])

    model = Tiny()
    optimizer = Nested(model.parameters())
    model(torch.randn(3, 4)).mean().backward()
    optimizer.step()
    before = copy.deepcopy([optimizer.log, optimizer.norms, optimizer.state_dict()["state"]])
    assert investigate(model, lambda m, b: m(b).pow(2).mean(), torch.randn(3, 4), optimizer=optimizer) is None
    assert_same([optimizer.log, optimizer.norms, optimizer.state_dict()["state"]], before)


def test_what_a_module_stores_during_forward_is_restored() -> None:
    class Keeper(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.history: list[float] = []
            self.attention = torch.zeros(3)

        def forward(self, x: Tensor) -> Tensor:
            out = self.body(x)
            self.history.append(float(out.detach().sum()))
            self.attention = out.softmax(1)
            self.new = out
            return out

    model = Keeper()
    kept = model.attention
    assert investigate(model, lambda m, b: m(b).mean() / 0, torch.randn(3, 4)) is not None
    assert model.history == []
    assert model.attention is kept
    assert not hasattr(model, "new")


def test_replay_with_dropout_is_compared_bitwise_with_the_original_loss() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 1))
    batch = torch.randn(8, 4)

    def loss_fn(m: nn.Module, b: Tensor) -> Tensor:
        return (m(b) ** 2).sum(1).sqrt().mean() + 0 * torch.sqrt(m(b) * 0).mean()

    state = RandomState.capture()
    loss = loss_fn(model, batch)
    torch.randn(5)
    step = Step(model, loss_fn, [batch], random_state=state, loss=loss.detach())
    found = diagnose(step)
    assert (found.replay.reproduced, found.replay.deterministic) == (True, True)
    other = diagnose(Step(model, loss_fn, [batch], loss=loss.detach()))
    assert other.replay.reproduced is False


def test_a_fault_that_does_not_come_back_is_healthy_on_replay_and_not_reproduced() -> None:
    model = Tiny()
    found = diagnose(Step(model, lambda m, b: m(b).mean(), [torch.randn(3, 4)], loss=math.nan))
    assert found.healthy
    assert found.replay.reproduced is False


def test_a_step_that_differs_every_time_is_not_deterministic() -> None:
    calls = iter(range(1000))

    def loss_fn(m: nn.Module, b: Tensor) -> Tensor:
        return m(b).mean() + next(calls) + m(b).pow(2).mul(0).sqrt().sum()

    found = diagnose(Step(Tiny(), loss_fn, [torch.randn(3, 4)]), Effort(remedies=False, samples=False))
    assert found.replay.deterministic is False


def test_buffers_of_before_the_step_are_used_and_those_of_now_come_back() -> None:
    class Countdown(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("left", torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            self.left.sub_(1)
            return self.body(x) / self.left

    model = Countdown()
    before = {name: b.clone() for name, b in model.named_buffers()}
    model(torch.randn(3, 4))
    model.left.fill_(7)
    assert diagnose(Step(model, lambda m, b: m(b).mean(), [torch.randn(3, 4)])).healthy
    found = diagnose(Step(model, lambda m, b: m(b).mean(), [torch.randn(3, 4)], buffers=before))
    assert found.cause.label == "division_by_zero"
    assert model.left == 7


def test_the_guilty_micro_batch_of_a_window() -> None:
    window = [torch.randn(4, 4) for _ in range(4)]
    window[2][1] = math.inf
    found = diagnose(Step(Tiny(), lambda m, b: m(b).pow(2).mean(), window))
    assert (found.micro_batch, found.samples, found.origin.phase) == (2, [1], "data")
    assert "in micro-batch 2 of 4" in found.cause.explanation


def test_a_batch_with_a_constructor_of_its_own_and_one_that_cannot_be_cut() -> None:
    class Named(dict[str, Any]):
        def __init__(self, x: Tensor, why: str) -> None:
            super().__init__(x=x)
            self.why = why

    class Fixed(UserDict[str, Any]):
        def __init__(self, x: Tensor, why: str) -> None:
            super().__init__(x=x)

    batch = Named(torch.rand(4, 4), "it takes two arguments")
    batch["x"][2] = math.nan
    found = diagnose(Step(Tiny(), lambda m, b: m(b["x"]).mean() * len(b.why), [batch]))
    assert (found.cause.label, found.samples) == ("bad_input_data", [2])
    found = diagnose(Step(Tiny(), lambda m, b: m(b["x"]).mean() / 0, [Fixed(torch.rand(4, 4), "")]))
    assert (found.cause.label, found.samples) == ("division_by_zero", [])
    assert "the search failed" in found.cause.explanation


def test_samples_that_interact_are_reported_as_interacting() -> None:
    def loss_fn(m: nn.Module, b: Tensor) -> Tensor:
        out = m(b)
        i, j = torch.triu_indices(len(out), len(out), 1)
        return (out[i] - out[j]).pow(2).sum(1).sqrt().mean()

    batch = torch.randn(6, 4)
    batch[4] = batch[1]
    incident = incident_of(Tiny(), loss_fn, batch)
    assert len(incident.samples) == 1
    assert incident.samples[0] in (1, 4)
    assert "only together" in incident.cause.explanation


@pytest.mark.usefixtures("one_process")
def test_model_in_data_parallel_wrapper_is_replayed_locally() -> None:
    incident = incident_of(DistributedDataParallel(Tiny()), lambda m, b: m(b).log().mean(), -torch.ones(3, 4) * 1e3)
    assert incident.cause.label == "log_of_nonpositive"


@pytest.mark.parametrize("compiled", [False, True])
def test_training_goes_on_bit_for_bit_and_a_compiled_model_is_not_compiled_again(compiled: bool) -> None:
    def train(with_investigation: bool) -> tuple[list[Tensor], int]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        compilations = 0

        def counting(graph: torch.fx.GraphModule, _: Any) -> Any:
            nonlocal compilations
            compilations += 1
            return graph.forward

        plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        model = torch.compile(plain, backend=counting, fullgraph=True) if compiled else plain
        optimizer = torch.optim.Adam(plain.parameters())
        losses = []
        for step in range(6):
            batch = torch.randn(8, 4)
            if with_investigation and step == 3:
                incident = incident_of(model, lambda m, b: m(b).sum() / 0, batch, optimizer=optimizer)
                assert incident.cause.label == "division_by_zero"
            optimizer.zero_grad()
            loss = model(batch).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [*losses, *plain.state_dict().values()], compilations

    (plain, once), (investigated, still_once) = train(False), train(True)
    assert once == still_once == int(compiled)
    assert_same(investigated, plain)


def test_an_exception_because_of_numbers_is_an_incident() -> None:
    incident = incident_of(Tiny(), lambda m, b: F.cross_entropy(m(b), torch.tensor([0, 1, 7])), torch.randn(3, 4))
    assert (incident.cause.label, incident.origin.name) == ("bad_input_data", "cross_entropy")
    assert "F.cross_entropy" in (incident.origin.code or "")
    assert incident.trigger.signal == "exception"

    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    incident = incident_of(model, lambda m, b: m(b).mean(), torch.randn(1, 4))
    assert (incident.cause.label, incident.origin.module) == ("empty_reduction", "1")

    incident = incident_of(
        Tiny(), lambda m, b: torch.linalg.cholesky(m(b)[:, :3] * 0 - torch.eye(3)).sum(), torch.randn(3, 4)
    )
    assert incident.cause.label == "degenerate_decomposition"


def test_an_exception_about_nan_leads_to_where_the_nan_began() -> None:
    def loss_fn(m: nn.Module, b: Tensor) -> Tensor:
        scale = m(b)[:, 0].pow(2).mul(-1).sqrt()
        return torch.distributions.Normal(torch.zeros(3), scale).rsample().mean()

    incident = incident_of(Tiny(), loss_fn, torch.randn(3, 4))
    assert (incident.origin.name, incident.cause.label) == ("sqrt", "invalid_domain")


def test_a_mistake_in_the_program_is_raised_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        investigate(Tiny(), lambda m, b: m(b).mean(), torch.randn(3, 5))
    found = diagnose(Step(Tiny(), lambda m, b: m(b).mean(), [torch.randn(3, 5)]))
    assert isinstance(found.error, RuntimeError)
    assert not found.healthy


def test_a_failure_inside_the_investigation_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("no")

    monkeypatch.setattr("safetrain.forensics.investigation.judge", broken)
    model = Tiny()
    before = copy.deepcopy(model.state_dict())
    found = diagnose(Step(model, lambda m, b: m(b).mean() / 0, [torch.randn(3, 4)]))
    assert "the investigation itself failed: ZeroDivisionError: no" in found.cause.explanation
    assert_same(model.state_dict(), before)


def test_effort_is_bounded() -> None:
    calls = 0

    def loss_fn(m: nn.Module, b: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return m(b).mean() / 0

    diagnose(Step(Tiny(), loss_fn, [torch.randn(256, 4)]), Effort(max_replays=20))
    assert calls <= 30
    calls = 0
    diagnose(Step(Tiny(), loss_fn, [torch.randn(256, 4)]), Effort(remedies=False, samples=False))
    assert calls == 2


def test_scanning_finds_the_bad_batches_and_disturbs_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    data = [torch.randn(6, 4) for _ in range(5)]
    data[1][2] = math.nan
    data[4][0] = math.inf
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = find_bad_batches(model, lambda m, b: m(b).mean(), data)
    assert [(index, incident.samples) for index, incident in found] == [(1, [2]), (4, [0])]
    assert_same(model.state_dict(), before)
    assert torch.equal(rng, torch.get_rng_state())
    assert [index for index, _ in find_bad_batches(model, lambda m, b: m(b).mean(), data, limit=1)] == [1]


def test_a_failure_that_only_the_compiled_model_has_is_reported_as_one() -> None:
    def broken(graph: torch.fx.GraphModule, _: Any) -> Any:
        return lambda *inputs: [output * math.nan for output in graph.forward(*inputs)]

    torch._dynamo.reset()
    compiled = torch.compile(Tiny(), backend=broken)
    incident = incident_of(compiled, lambda m, b: m(b).mean(), torch.randn(3, 4))
    assert "compiled" in incident.cause.explanation
    assert [(r.name, r.finite) for r in incident.remedies] == [("eager", True)]
    torch._dynamo.reset()


def test_the_patch_of_a_diagnosis_keeps_later_steps_finite() -> None:
    def loss_fn(m: nn.Module, b: Tensor) -> Tensor:
        return torch.log(m(b).pow(2)).mean()

    model, batch = without_bias(Tiny()), torch.zeros(3, 4)
    found = diagnose(Step(model, loss_fn, [batch]))
    assert found.patch is not None
    assert not loss_fn(model, batch).isfinite()
    with found.patch.active():
        loss = loss_fn(model, batch)
        torch.autograd.backward(loss)
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_island_of_a_diagnosis_is_the_smallest_module_that_helps() -> None:
    model = chain(inp=nn.Linear(4, 4), block=nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    nn.init.constant_(model.inp.weight, 1.0)
    nn.init.constant_(model.block[0].weight, 2e3)
    batch = 10 + torch.rand(3, 4)
    found = diagnose(Step(model, lambda m, b: m(b).float().pow(2).mean(), [batch], precision="fp16"))
    assert found.cause.label == "fp16_overflow"
    assert found.island in ("block.0", "block")


def test_an_investigation_inside_no_grad_traces_all_the_same() -> None:
    model = without_bias(Tiny())
    with torch.no_grad():
        incident = incident_of(model, lambda m, b: m(b).pow(2).sum(1).sqrt().mean(), torch.zeros(3, 4))
        assert not torch.is_grad_enabled()
    assert incident.origin.phase == "backward"


@pytest.mark.usefixtures("one_process")
def test_sharded_parameters_of_one_process() -> None:
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 3, bias=False))
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(4, 4)
    assert investigate(model, lambda m, b: m(b).pow(2).mean(), batch, optimizer=optimizer) is None
    batch[1] = 0
    incident = incident_of(model, lambda m, b: m(b).pow(2).sum(1).sqrt().mean(), batch, optimizer=optimizer)
    assert (incident.cause.label, incident.samples) == ("singular_gradient", [1])
