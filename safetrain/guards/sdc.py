"""Silent data corruption: bits that flip in memory or in arithmetic, and leave every number finite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.options import option
from ..core.verdict import COMMIT, Action, Decision, Doubt, Finding, Verdict
from ..core.view import DeviceStep, FirstLoss, StepView
from .base import Guard

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


@dataclass
class SdcConfig:
    replay_every: int = option(100, ge=1)
    """Compute one step in N twice, and compare the gradients bit for bit. Needs a deterministic step (`safetrain check --only replay`)."""
    state: bool = True
    """Compare weights and optimizer state, in every step, with what the step before left: a pass over all of them."""


class Sdc(Guard):
    Config = SdcConfig
    config: SdcConfig
    over_ranks = "max"

    def __init__(self, config: SdcConfig | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self._weights: dict[str, Tensor] = {}
        self._optimizer: Optimizer | None = None
        self._left: tuple[dict[str, Tensor], Tensor] | None = None
        """The state that the last step has left, with a fingerprint of each tensor."""
        self._changed: tuple[list[str], Tensor] | None = None
        self._gradients: tuple[int, Tensor] | None = None
        self._differs: Tensor | None = None
        self.num_seen = 0

    def inspect(self, first: FirstLoss) -> None:
        self._weights = {name: p for name, p in first.model.named_parameters() if p.requires_grad}
        self._optimizer = first.optimizer

    def measure(self, step: DeviceStep) -> Mapping[str, Tensor]:
        from ..distributed.comm import num_processes
        from ..tensors.sharded import is_dtensor
        from .fingerprint import as_signal, digests

        if not self._weights:
            return {}
        signals: dict[str, Tensor] = {}
        if self._left is not None:
            state, before = self._left
            mask = digests(list(state.values())) != before
            self._changed = list(state), mask
            signals["changed"] = mask.sum().float()
        gradients = [w.grad for w in self._weights.values() if w.grad is not None]
        if gradients:
            now = digests(gradients)
            earlier, self._gradients = self._gradients, (step.step, now)
            if earlier is not None and earlier[0] == step.step and len(earlier[1]) == len(now):
                self._differs = earlier[1] != now
            signals["gradients"] = as_signal(now.sum())
            if num_processes() > 1 and not any(map(is_dtensor, gradients)):
                signals["gradients_negative"] = -signals["gradients"]
        return {name: value.to(step.loss.device) for name, value in signals.items()}

    def judge(self, view: StepView) -> Verdict:
        if view.in_trouble or view.scaler_overflow:
            return COMMIT
        if view.signals.get(f"{self.name}.changed"):
            names, ranks, sound = self._over_ranks()
            text = f"{', '.join(names[:4]) or 'a weight'} changed between two steps: nothing that this run knows of wrote to it"
            finding = Finding("memory_corruption", text, names, ranks)
            return Verdict(
                Action.ROLLBACK,
                reason=text,
                evidence={"signal": "changed", "value": float(len(names))},
                bad_state=dict.fromkeys(names, "not what the step before has left"),
                sound_rank=sound,
                findings=(finding,),
            )
        most, least = (view.signals.get(f"{self.name}.{name}") for name in ("gradients", "gradients_negative"))
        if most is not None and least is not None and most != -least:
            text = "the ranks hold different gradients after they were summed"
            finding = Finding("memory_corruption", text)
            return Verdict(
                Action.SKIP, reason=text, evidence={"signal": "gradients", "value": most}, findings=(finding,)
            )
        if most is not None and self.num_seen % self.config.replay_every == self.config.replay_every - 1:
            text = "computed twice, the step gave other gradients"
            return Verdict(
                Action.SKIP,
                reason=text,
                evidence={"signal": "gradients", "value": most},
                findings=(Finding("memory_corruption", text),),
                doubt=Doubt.REPLAY,
            )
        return COMMIT

    def _over_ranks(self) -> tuple[tuple[str, ...], tuple[int, ...], int | None]:
        """What has changed, on which ranks, and the first rank where nothing has. Collective: every rank must call it."""
        from ..distributed.comm import gather, num_processes

        own = []
        if self._changed is not None:
            changed, mask = self._changed
            own = [name for name, flag in zip(changed, mask.tolist(), strict=True) if flag]
        found = gather(own)
        if num_processes() == 1:
            return tuple(own), (), None
        names = tuple(f"{name} on rank {rank}" for rank, each in enumerate(found) for name in each)
        ranks = tuple(rank for rank, each in enumerate(found) if each)
        return names, ranks, next((rank for rank, each in enumerate(found) if not each), None)

    def differing(self) -> tuple[str, ...]:
        """Weights whose gradients were not the same the second time."""
        if self._differs is None:
            return ()
        names = [name for name, weight in self._weights.items() if weight.grad is not None]
        return tuple(name for name, flag in zip(names, self._differs.tolist(), strict=False) if flag)

    def begin(self, step: int, num_refused: int) -> None:
        if num_refused:  # a rollback may have put other values in, and a refused step leaves none
            self._left = None
        self._changed = self._differs = None

    def learn(self, view: StepView, decision: Decision) -> None:
        from .fingerprint import digests

        self.num_seen += 1
        self._gradients = None
        if self.config.state and self._optimizer is not None:
            state = self._state()
            self._left = state, digests(list(state.values()))

    def _state(self) -> dict[str, Tensor]:
        assert self._optimizer is not None
        found = dict(self._weights)
        for name, weight in self._weights.items():
            for key, value in self._optimizer.state.get(weight, {}).items():
                if hasattr(value, "untyped_storage") and value.numel():
                    found[f"{key} of {name}"] = value
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"num_seen": self.num_seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_seen = state["num_seen"]
        self._left = None
