"""Small runs with a fault on one rank, and the same run in one process with the same global batches."""

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from records import journal
from small import make_batches, make_model, mse
from torch.nn import functional as F

from safetrain import SafeTrainer

NUM_STEPS = 14
BAD_STEP = 6
SPIKE_STEP = 40
"""Later: a guard that compares with the past has to have one."""
SIZE = 12
"""Samples of a global micro-batch; divided evenly by two and by three ranks."""


@dataclass
class Scenario:
    """What happens, on which rank; `config` is added to the quiet defaults."""

    fault: str
    rank: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    norm: bool = False
    """Whether the model has a BatchNorm."""
    num_steps: int = NUM_STEPS


@dataclass
class Record:
    """The result of one process."""

    error: str | None
    message: str
    weights: list[torch.Tensor]
    moments: list[torch.Tensor]
    losses: list[float]
    steps: list[tuple[Any, ...]]
    """Of the journal: step, action, learning-rate scale."""
    incidents: list[dict[str, Any]]
    summary: dict[str, Any]
    evaluations: list[dict[str, float]]
    islands: list[str]
    checkpoints: list[str]


class Faulty(SafeTrainer):
    """Injects the fault of the scenario into itself, on one rank."""

    scenario: Scenario

    @property
    def is_guilty(self):
        return self.machine.world_size == 1 or self.machine.rank == self.scenario.rank

    def training_step(self, model, batch):
        fault = self.scenario.fault if self.is_guilty and self.step == BAD_STEP else ""
        if fault == "user_error":
            raise KeyError("a mistake in user code")
        if fault == "index_error":
            F.cross_entropy(torch.zeros(2, 3), torch.tensor([1, 7]))
        if fault == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        loss = mse(model, batch)
        if fault == "late_user_error":
            raise KeyError("a mistake in user code, after the model was called")
        if fault == "backward_error":
            self.model[0].weight.register_hook(_raise_in_backward)
        if self.scenario.fault == "metric_on_one" and self.is_guilty:
            return {"loss": loss, "accuracy": 0.25}
        return loss

    def on_commit(self, view):
        if view.step == BAD_STEP and self.is_guilty:
            with torch.no_grad():
                if self.scenario.fault == "bad_buffers":
                    self.model[1].running_mean.fill_(float("nan"))
                if self.scenario.fault == "bad_weights":
                    self.model[0].weight[0, 0] = float("nan")


def _raise_in_backward(gradient):
    raise KeyError("a mistake in a backward hook")


def global_batches(scenario, accumulate):
    torch.manual_seed(3)
    batches = make_batches(scenario.num_steps * accumulate, size=SIZE)
    for inputs, targets in batches:
        targets.copy_(inputs.sum(1, keepdim=True) * 0.1)
    return batches


def shares(batches, scenario, accumulate, world_size):
    """The batches, split so that each rank, which takes every n-th, gets its shard. The guilty rank's shard has the fault."""
    parts = []
    for index, (inputs, targets) in enumerate(batches):
        for rank in range(world_size):
            part = slice(rank * SIZE // world_size, (rank + 1) * SIZE // world_size)
            parts.append((inputs[part].clone(), targets[part].clone()))
        guilty = parts[-world_size + (scenario.rank if world_size > 1 else 0)]
        _spoil(guilty, scenario.fault, index, accumulate)
    return parts


def _spoil(batch, fault, index, accumulate):
    inputs, targets = batch
    step, micro_batch = divmod(index, accumulate)
    if fault == "spike" and step == SPIKE_STEP:
        targets.fill_(300.0)
    elif step == BAD_STEP:
        if fault == "nan" or (fault == "nan_micro" and micro_batch == accumulate - 1):
            inputs.fill_(float("nan"))
        if fault == "huge":
            inputs.fill_(1e5)  # beyond the range of half precision
        if fault == "nan_sample":
            inputs[0].fill_(float("nan"))


def train(scenario, run_dir, rank, world_size):
    accumulate = scenario.config.get("loop", {}).get("grad_accum", 1)
    batches = global_batches(scenario, accumulate)
    data = shares(batches, scenario, accumulate, world_size)
    torch.manual_seed(5)
    model = make_model(dropout=0.0, norm=scenario.norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    config = {
        **scenario.config,
        "loop": {"device": "cpu", **scenario.config.get("loop", {})},
        "logging": {"console": "off", "tensorboard": False},
    }
    evaluation = batches[:3] if scenario.fault == "evaluation" else None
    error, message, result = None, "", None
    Faulty.scenario = scenario
    trainer = Faulty(model, optimizer=optimizer, train_data=data, eval_data=evaluation, config=config, run_dir=run_dir)
    try:
        result = trainer.fit()
    except Exception as raised:
        error, message, result = type(raised).__name__, str(raised), trainer.run.result
    moments = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    lines = journal(Path(run_dir)) if rank == 0 else []
    return Record(
        error,
        message,
        [parameter.detach().clone() for parameter in model.parameters()],
        moments,
        list(result.losses),
        [(line["step"], line["action"], line["lr_scale"]) for line in lines if line["event"] == "step"],
        [incident.to_dict() for incident in result.incidents],
        {"steps": result.steps, "skipped": result.skipped, "rollbacks": result.rollbacks, "status": result.status},
        result.evaluations,
        result.islands.get("modules", []),
        sorted(path.name for path in Path(run_dir, "checkpoints").glob("*")) if rank == 0 else [],
    )


def train_all(rank, world_size, scenarios, directory):
    """Several runs one after another in the same processes."""
    return {
        name: train(scenario, f"{directory}/{name}-{world_size}", rank, world_size)
        for name, scenario in scenarios.items()
    }
