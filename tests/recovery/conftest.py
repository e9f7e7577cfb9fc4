"""Runs with a fault, and checks of their records."""

import json

import pytest
import torch
from records import journal
from small import make_model

from safetrain import TrainingStopped


@pytest.fixture
def make_trainer(make_trainer):
    """A quiet SafeTrainer whose ladder has the named rungs only; other parts of `recovery` as keywords of `recovery`."""

    def make(*ladder, model=None, config=None, recovery=None, **parts):
        config = {**(config or {}), "recovery": {**({"ladder": list(ladder)} if ladder else {}), **(recovery or {})}}
        return make_trainer(make_model(dropout=0.0) if model is None else model, config=config, **parts)

    return make


@pytest.fixture
def check_saved():
    """Train; the run must come to its end with finite weights, and its records must list the incidents."""

    def check(trainer, *, steps, incidents, rung, reason):
        """`incidents`: the action by step. `reason` must be in the reasons of each, after the name of the rung."""
        result = trainer.fit()
        assert result.status == "done"
        assert result.steps == steps
        assert {incident.step: incident.decision.action for incident in result.incidents} == incidents
        assert all(torch.isfinite(tensor).all() for tensor in trainer.model.state_dict().values())
        for incident in result.incidents:
            assert any(r.startswith(f"{rung}: ") and reason in r for r in incident.decision.reasons), incident.decision
        summary = json.loads((result.run_dir / "summary.json").read_text())
        assert [i["decision"]["action"] for i in summary["incidents"]] == list(incidents.values())
        events = journal(result)
        assert [event["step"] for event in events if event["event"] == "incident"] == list(incidents)
        return result

    return check


@pytest.fixture
def check_stopped():
    """Train; the run must stop with these reasons, and no bad update may have been applied."""

    def check(trainer, *reasons):
        with pytest.raises(TrainingStopped) as stopped:
            trainer.fit()
        result = stopped.value.result
        assert result.status == "stopped"
        assert stopped.value.incident.decision.action == "stop"
        for expected in reasons:
            found = stopped.value.incident.decision.reasons
            assert any(expected in reason for reason in found), (expected, found)
            assert expected in str(stopped.value)
        assert journal(result)[-1]["status"] == "stopped"
        return result

    return check
