"""What a person and a program read of an incident."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from forensic_cases import Tiny, incident_of, without_bias
from torch import nn

from safetrain.core.incident import Incident
from safetrain.incidents.render import markdown, write_report


def incident() -> Incident:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        rate = model(batch).abs().sum(1)
        return torch.log(rate).mean()

    model = without_bias(Tiny())
    batch = torch.randn(4, 4)
    batch[2] = 0
    return incident_of(model, loss_fn, batch)


def test_terminal_block_answers_the_questions_with_the_line_in_its_context() -> None:
    text = incident().render()
    for label in ("FIRST BAD OP", "WHY", "INPUTS", "SAMPLES", "FIX", "REPLAY"):
        assert label in text
    assert ">   " in text
    assert "rate = model(batch).abs().sum(1)" in text
    assert "log_of_nonpositive" in text
    assert "safetrain.safe.log" in text
    assert "Verified" in text


def test_json_is_valid_and_has_the_documented_fields() -> None:
    fields = json.loads(json.dumps(incident().to_dict(), allow_nan=False))
    assert set(fields["origin"]) == {
        "phase", "op", "name", "module", "module_type", "file", "line", "code", "inputs", "outputs",
        "library", "called_from", "frames",
    }  # fmt: skip
    assert fields["origin"]["inputs"][0]["zeros"] == 1
    assert fields["samples"] == [2]
    assert fields["replay"] == {"reproduced": True, "deterministic": True, "bitwise": None}
    assert {"name", "finite", "loss", "detail"} == set(fields["remedies"][0])
    assert fields["propagation"][-1] == "the loss"


def test_report_has_a_table_of_inputs_and_of_remedies(tmp_path: Path) -> None:
    found = incident()
    text = write_report(found, tmp_path).read_text()
    assert text == markdown(found)
    assert "| self | [4] | float32 |" in text
    assert "| drop_samples | yes |" in text
    assert "```python" in text
    assert "torch.log(rate).mean()" in text


def test_report_of_an_incident_that_was_not_investigated_is_short() -> None:
    found = incident()
    bare = Incident(found.step, found.time, found.trigger, found.decision)
    assert "FIRST BAD OP" not in bare.render()
    assert "## Inputs" not in markdown(bare)
