"""State that is not a plain tensor in a buffer: undone, rolled back to, saved and resumed all the same, or said at the start."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from safetrain import Action, Guard, SafeTrainer, Verdict
from safetrain.errors import Interrupted

Make = Callable[..., SafeTrainer]
BAD = 9


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(24)]
    batches[BAD][0][1, 2] = float("nan")
    return batches


def inference_made() -> Tensor:
    with torch.inference_mode():
        return torch.ones(3)


BUFFERS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "expanded": lambda: {"a": torch.ones(1).expand(3)},
    "expanded in part": lambda: {"a": torch.ones(3, 1).expand(3, 2)},
    "overlapping": lambda: {"a": torch.ones(5).unfold(0, 3, 1)},
    "inference mode": lambda: {"a": inference_made()},
    "conjugated": lambda: {"a": torch.ones(3, dtype=torch.complex64).mul(1 + 2j).conj()},
    "negated": lambda: {"a": torch.ones(3, dtype=torch.complex64).mul(1 + 2j).conj().imag},
    "slices": lambda: dict(zip("ab", torch.ones(6).split(3), strict=True)),
    "the same twice": lambda: dict.fromkeys("ab", torch.ones(3)),
    "transposed": lambda: {"a": torch.ones(2, 3).t()},
    "bool and int": lambda: {"a": torch.ones(3, dtype=torch.bool), "b": torch.ones(3, dtype=torch.int16)},
    "empty": lambda: {"a": torch.ones(0, 3)},
    "complex and half": lambda: {"a": torch.ones(3, dtype=torch.complex128), "b": torch.ones(3, dtype=torch.float16)},
}


class Net(nn.Module):
    def __init__(self, buffers: dict[str, Tensor], persistent: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.norm = nn.BatchNorm1d(3)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        sums = [b.to(torch.complex64).abs().sum() for b in self.buffers() if b.numel()]
        return self.layer(self.norm(x)) + 1e-3 * torch.stack(sums).sum().detach()


class GoBack(Guard):
    def judge(self, view: Any) -> Verdict:
        if view.step != 17:
            return Verdict()
        return Verdict(
            Action.ROLLBACK, reason="asked for", evidence={"signal": "loss", "value": view.loss}, bad_state={"x": "bad"}
        )


class Paused(SafeTrainer):
    pause_at: int | None = None

    def on_commit(self, view: Any) -> None:
        if view.step == self.pause_at:
            self.run.signal = 15


CONFIG = {"checkpoint": {"snapshot_every": 4, "trust_after": 2, "every_steps": 6}, "loop": {"device": "cpu"}}


def fit(make: Make, run_dir: Path, build: Callable[[], nn.Module], pause: int | None, **parts: Any) -> SafeTrainer:
    torch.manual_seed(1)
    parts.setdefault("optimizer", lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
    trainer = make(build(), cls=Paused, train_data=data(), guards=[GoBack()], run_dir=run_dir, config=CONFIG, **parts)
    trainer.pause_at = pause
    if pause is None:
        trainer.fit(resume="auto")
    else:
        with pytest.raises(Interrupted):
            trainer.fit(resume="auto")
    return trainer


def same_after_a_resume(make: Make, tmp_path: Path, build: Callable[[], nn.Module], **parts: Any) -> SafeTrainer:
    """A refused step, a rollback and a resume end where the uninterrupted run ends."""
    whole = fit(make, tmp_path / "whole", build, None, **parts)
    assert (len(whole.run.result.incidents), whole.run.result.rollbacks) == (2, 1)
    fit(make, tmp_path / "pieces", build, 12, **parts)
    resumed = fit(make, tmp_path / "pieces", build, None, **parts)
    for one, other in zip(whole.model.state_dict().values(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert list(whole.run.losses)[13:] == list(resumed.run.losses)[13:]
    return resumed


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers_of_every_kind(kind: str, persistent: bool, make_trainer: Make, tmp_path: Path) -> None:
    resumed = same_after_a_resume(make_trainer, tmp_path, lambda: Net(BUFFERS[kind](), persistent))
    for name, buffer in BUFFERS[kind]().items():
        assert torch.equal(resumed.model.get_buffer(name), buffer)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_part(make_trainer: Make, tmp_path: Path) -> None:
    same_after_a_resume(
        make_trainer, tmp_path, lambda: nn.Sequential(torch.jit.script(nn.BatchNorm1d(3)), nn.Linear(3, 1))
    )


class Centred(nn.Module):
    """A loss that keeps a running mean in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("mask", torch.tensor(float("-inf")))

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        outputs, targets = model(batch[0]), batch[1]
        with torch.no_grad():
            self.mean.mul_(0.9).add_(targets.mean(), alpha=0.1)
        return (outputs - targets - self.mean).square().mean()


def test_buffers_of_a_loss(make_trainer: Make, tmp_path: Path) -> None:
    build = lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))  # noqa: E731
    whole = fit(make_trainer, tmp_path / "whole", build, None, loss_fn=(one := Centred()))
    assert whole.run.result.rollbacks == 1
    fit(make_trainer, tmp_path / "pieces", build, 12, loss_fn=Centred())
    fit(make_trainer, tmp_path / "pieces", build, None, loss_fn=(other := Centred()))
    assert one.mean == other.mean != 0
    assert other.mask == float("-inf")


class Counting(torch.optim.SGD):
    """Keeps what it needs outside of `state`."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.num_calls = 0
        self.total = torch.zeros(())
        self.seen = [p for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:
        self.num_calls += 1
        self.total += 1
        for group in self.param_groups:
            group["lr"] = 0.01 / (1 + self.num_calls) + 1e-4 * float(self.total)
        return super().step(closure)


def test_what_an_optimizer_keeps_outside_its_state(make_trainer: Make, tmp_path: Path) -> None:
    build = lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))  # noqa: E731
    resumed = same_after_a_resume(make_trainer, tmp_path, build, optimizer=Counting)
    assert resumed.optimizer.num_calls == resumed.run.result.steps
    assert resumed.optimizer.seen == list(resumed.model.parameters())


class Averaging(torch.optim.SGD):
    """With what is found by parameter, random generators, and another optimizer inside."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.by_parameter: dict[Tensor, Tensor] = {}
        self.by_id: dict[int, Tensor] = {}
        self.noise = torch.Generator().manual_seed(1)
        self.others = np.random.default_rng(2)
        self.chance = random.Random(3)
        self.inner = torch.optim.Adam([p for group in self.param_groups for p in group["params"]], lr=1e-3)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            for averages, key in ((self.by_parameter, parameter), (self.by_id, id(parameter))):
                average = averages.setdefault(key, torch.zeros_like(parameter))  # type: ignore[attr-defined]
                average.lerp_(parameter.grad, 0.1)
                parameter.sub_(average, alpha=1e-3)
            noise = torch.randn(parameter.shape, generator=self.noise)
            parameter.add_(noise, alpha=1e-3 * float(self.others.normal()) * self.chance.random())
        self.inner.step()
        return super().step(closure)


class Noisy(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)
        self.noise = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn(x.shape, generator=self.noise))


def test_generators_inner_optimizers_and_what_is_kept_by_parameter(make_trainer: Make, tmp_path: Path) -> None:
    same_after_a_resume(make_trainer, tmp_path, Noisy, optimizer=Averaging)


def test_what_an_optimizer_keeps_and_nobody_can_save_is_said(make_trainer: Make, tmp_path: Path) -> None:
    class Hidden(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.01)
            self.slow = {(p,): p.detach().clone() for group in self.param_groups for p in group["params"]}

    trainer = make_trainer(nn.Linear(3, 1), train_data=data()[:4], optimizer=Hidden, run_dir=tmp_path / "run")
    trainer.fit()
    assert "keeps tensors in .slow, outside of its state" in (tmp_path / "run" / "journal.jsonl").read_text()


def penalised(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    x = x.clone().requires_grad_(True)
    outputs = model(x)
    (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    return (outputs - y).square().mean() + slope.square().mean()


def test_a_gradient_penalty_survives_a_refused_step(make_trainer: Make, tmp_path: Path) -> None:
    config = {"recovery": {"heal": []}}
    trainer = make_trainer(
        nn.Linear(3, 1), train_data=data(), loss_fn=penalised, config=config, run_dir=tmp_path / "run"
    )
    result = trainer.fit()
    assert (result.status, result.skipped) == ("done", 1)


def test_a_numpy_generator_of_another_kind(make_trainer: Make, tmp_path: Path) -> None:
    before = np.random.get_bit_generator()
    try:
        for kind in (np.random.PCG64(1), np.random.Philox(2), np.random.SFC64(3)):
            np.random.set_bit_generator(kind)
            name = type(kind).__name__

            def noisy(model: nn.Module, batch: Any) -> Tensor:
                return (model(batch[0]) - batch[1] - float(np.random.random())).square().mean()

            make = lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))  # noqa: E731
            np.random.set_bit_generator(type(kind)(1))
            whole = fit(make_trainer, tmp_path / f"{name}-whole", make, None, loss_fn=noisy)
            np.random.set_bit_generator(type(kind)(1))
            fit(make_trainer, tmp_path / f"{name}-pieces", make, 12, loss_fn=noisy)
            resumed = fit(make_trainer, tmp_path / f"{name}-pieces", make, None, loss_fn=noisy)
            assert list(whole.run.losses)[13:] == list(resumed.run.losses)[13:]
    finally:
        np.random.set_bit_generator(before)


class Growing(SafeTrainer):
    """Adds a norm, and replaces a parameter of the optimizer, while it trains."""

    def on_commit(self, view: Any) -> None:
        if view.step == 5:
            self.model.append(nn.BatchNorm1d(1))
            group = self.optimizer.param_groups[0]["params"]
            group[0] = self.model[0].weight = nn.Parameter(self.model[0].weight.detach().clone())
            group.append(self.model[1].weight)


def test_what_joins_while_training_is_undone_and_cleared_too(make_trainer: Make, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 1))
    trainer = make_trainer(
        model, cls=Growing, train_data=data(), config={"recovery": {"heal": []}, "checkpoint": {"enabled": False, "snapshot_every": None}},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )  # fmt: skip
    assert trainer.fit().skipped == 1
    assert all(bool(torch.isfinite(t).all()) for t in model.state_dict().values())
    assert int(model[1].num_batches_tracked) == 24 - 6 - 1
    assert all(p.grad is None or float(p.grad.abs().max()) < 100 for p in model.parameters())
