"""Markup in names, source lines and messages is shown as text, never executed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from browser import Browser, find_browser
from report_pages import Parsed
from torch import nn

from safetrain import SafeTrainer
from safetrain.report import write_report

ATTACK = "<img src=x onerror=hacked=1>"


class Named(nn.Module):
    """A module whose name is markup."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(ATTACK, Ratio())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return getattr(self, ATTACK)(inputs)


class Ratio(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scale * inputs / inputs.sum(1, keepdim=True)  # </code></script><script>window.hacked=1</script>


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    run_dir = tmp_path_factory.mktemp("hostile") / f"run {ATTACK.replace('/', '')}"
    batches = [{f"x{ATTACK}": torch.rand(8, 4)} for _ in range(12)]
    batches[4][f"x{ATTACK}"][3] = 0.0
    batches[7][f"x{ATTACK}"][2] = float("nan")
    model = Named()
    trainer = SafeTrainer(
        model,
        loss_fn=lambda model, batch: model(batch[f"x{ATTACK}"]).square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        train_data=batches,
        config={
            "name": f"</title><script>window.hacked=1</script>{ATTACK}",
            "logging": {"console": "off", "tensorboard": False},
        },
        run_dir=run_dir,
    )
    assert len(trainer.fit().incidents) == 2
    return write_report(run_dir, tmp_path_factory.mktemp("page") / "report.html").path


def test_markup_in_names_and_source_is_text(page: Path) -> None:
    parsed = Parsed.file(page)
    parsed.check()
    assert "</script><script>window.hacked=1</script>" in parsed.text_of["incident-1"]  # the blamed line
    assert f"in {ATTACK} (Ratio)" in parsed.text_of["incident-1"]
    assert f"batch['x{ATTACK}']" in parsed.text_of["incident-2"]
    assert any(ATTACK in attributes.get("aria-label", "") for attributes in parsed.all("svg"))
    assert len(parsed.all("title")) == 1


def test_the_content_security_policy_allows_only_the_reports_script(page: Path) -> None:
    policy = next(a["content"] for a in Parsed.file(page).all("meta") if "http-equiv" in a)
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    assert "script-src 'unsafe-inline'" not in policy


@pytest.mark.skipif(find_browser() is None, reason="no Chromium here: apt-get install chromium")
def test_a_browser_executes_none_of_it(page: Path) -> None:
    with Browser.start() as browser:
        opened = browser.open(page)
        assert opened.run("typeof window.hacked") == "undefined"
        assert not opened.problems
        assert not opened.requests
        # The escaping alone is enough: without the policy nothing runs either.
        bare = page.with_name("bare.html")
        bare.write_text(page.read_text(encoding="utf-8").replace("Content-Security-Policy", "x"), encoding="utf-8")
        opened = browser.open(bare)
        assert opened.run("typeof window.hacked") == "undefined"
        assert not opened.problems
        assert not opened.requests
