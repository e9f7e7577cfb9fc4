"""Check of the graph of the first loss: the parameters that it depends on, and the inputs of the loss."""

from __future__ import annotations

import torch

from ...core.causes import CAUSES
from ...core.view import FirstLoss
from ...guards.graph import coverage, graph_of
from ...guards.loss_graph import broadcast, mismatches
from ...tensors.sharded import is_sharded
from ..outcome import Outcome, Problems, passed, worst
from ..registry import preflight_check
from ..subject import Subject

CERTAIN = ("loss_mismatch", "not_registered")


@preflight_check(
    looks_at="the graph of the first loss: layers in plain lists, parameters that no optimizer holds, what the loss is given",
    fails="the loss takes raw outputs and is given those of softmax or sigmoid, targets are broadcast, or layers are not registered",
    warns="parameters get a gradient and are in no optimizer",
    fix="raw outputs for the loss, `nn.ModuleList`, an optimizer that is made last",
)
def wiring(subject: Subject) -> Outcome:
    """What the guard `sanity` would say of the first step."""
    trainer, read = subject.trainer, subject.healthy[0]
    with subject.clean(), torch.enable_grad():
        loss = subject.forward(read.batch, autocast=False)
        graph = graph_of(loss)
        first = FirstLoss(loss, subject.model, trainer.optimizer, [read.batch], "fp32", trainer.auxiliary_modules())
        findings = [*mismatches(graph), *filter(None, [broadcast(loss)])]
        if not is_sharded(subject.model):
            findings += coverage(first, graph).findings
    problems = Problems()
    for finding in findings:
        if finding.label != "not_reached":  # gradient_scale reports those
            problems.add(finding.label in CERTAIN, finding.text, CAUSES[finding.label].advice, label=finding.label)
    return worst(problems, passed(f"the loss depends on {len(graph.leaves)} parameters, as it should"))
