"""Several losses in one, each watched on its own: an incident then says which of them went wrong.

What a step returns in addition to `loss` reaches every guard as `view.metrics`, in the same transfer as the loss.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

from safetrain import Action, Guard, SafeTrainer, Verdict


@dataclass
class PartsConfig:
    limits: dict = field(default_factory=dict)
    """Largest value that each loss may have, by its name."""


class Parts(Guard):
    """Refuses a step in which one of the named losses is above its limit, or not a number."""

    Config = PartsConfig

    def judge(self, view):
        for name, limit in self.config.limits.items():
            value = view.metrics.get(name, math.nan)
            if not value <= limit:  # also true for NaN
                evidence = {"signal": name, "value": value}
                return Verdict(Action.SKIP, reason=f"{name} is {value:.4g}, its limit is {limit}", evidence=evidence)
        return Verdict()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
        self.value, self.kind = nn.Linear(32, 1), nn.Linear(32, 3)


def loss_fn(model, batch):
    inputs, values, kinds = batch
    features = model.body(inputs)
    regression = F.mse_loss(model.value(features).squeeze(1), values)
    classification = F.cross_entropy(model.kind(features), kinds)
    sparsity = features.abs().mean()
    total = regression + classification + 0.01 * sparsity
    return {"loss": total, "regression": regression, "classification": classification, "sparsity": sparsity}


torch.manual_seed(0)
inputs = torch.randn(1280, 8)
values, kinds = inputs[:, 0].clone(), inputs[:, :3].argmax(1)
values[700] = 1e6  # a sensor that was unplugged: finite, and enough to ruin the regression
batches = list(zip(inputs.split(32), values.split(32), kinds.split(32), strict=True))
config = {"loop": {"max_epochs": 3}, "optimizer": {"_target_": "torch.optim.AdamW", "lr": 3e-3}}
guards = [Parts(limits={"regression": 100.0, "classification": 10.0})]
result = SafeTrainer(Model(), loss_fn=loss_fn, train_data=batches, guards=guards, config=config).fit()
for incident in result.incidents:
    print(
        f"step {incident.step}: {incident.trigger.guard} refused it, {incident.trigger.signal} is {incident.trigger.value}"
    )
