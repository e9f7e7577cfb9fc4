"""TensorBoard's own pages of a run with three different incidents, in a real browser."""

import base64
import json
import subprocess
import sys
import time
import urllib.request

import pytest
from browser import TIMEOUT, Browser, find_browser

from tests.telemetry.incident_runs import INCIDENTS, faulty_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_browser() is None, reason="no Chromium here: apt-get install chromium"),
]

SHOWN_TEXT = """
(() => {
  const found = [];
  const walk = node => {
    if (node.shadowRoot) walk(node.shadowRoot);
    for (const child of node.childNodes) {
      if (child.nodeType === Node.TEXT_NODE && child.textContent.trim()) found.push(child.textContent.trim());
      else if (child.nodeType === Node.ELEMENT_NODE && !['STYLE', 'SCRIPT', 'NOSCRIPT'].includes(child.nodeName)) walk(child);
    }
  };
  if (document.body) walk(document.body);
  return found.join('\\n');
})()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Address of a TensorBoard that has read the run."""
    directory = tmp_path_factory.mktemp("page") / "run"
    faulty_run(directory)
    arguments = ["--logdir", str(directory), "--host", "127.0.0.1", "--port", "0", "--load_fast", "false"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        address = next(line for line in process.stderr if "http://" in line).split("http://")[1].split("/")[0]
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            with urllib.request.urlopen(f"http://{address}/data/plugin/scalars/tags", timeout=10) as answer:
                if "run/final_loss" in json.load(answer).get(".", {}):
                    break
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()
        process.stderr.close()


@pytest.fixture(scope="module")
def browser():
    with Browser.start() as started:
        yield started


PAGES = {
    "timeseries": ["health", "/grad_norm", "/clip_fraction"],
    "custom_scalars": ["Run health", "gradient norm", "update-to-weight ratio", "loss/train (.)"],
    "text": [
        "health/incidents/text_summary",
        *INCIDENTS.values(),
        "run/config/text_summary",
        "run/environment/text_summary",
        "done: 40 steps committed, 0 skipped",
    ],
    "hparams": ["optimizer.lr", "run/final_loss"],
    "histograms": ["tensors/gradients/head.weight"],
}


@pytest.mark.parametrize("name", PAGES)
def test_the_page_shows_the_run(browser, server, tmp_path, name):
    (tmp_path / "blank.html").write_text("<p>")
    page = browser.open(tmp_path / "blank.html", width=1600)
    page.call("Page.navigate", url=f"{server}/#{name}")
    deadline, shown = time.monotonic() + TIMEOUT, ""
    while time.monotonic() < deadline and not all(text in shown for text in PAGES[name]):
        shown = page.run(SHOWN_TEXT)
    assert [text for text in PAGES[name] if text not in shown] == []
    assert page.problems == []
    assert [address for address in page.requests if not address.startswith((server, "blob:"))] == []
    if name == "timeseries":
        titles = [line for line in shown.splitlines() if line in ("health", "loss", "optim", "perf", "run", "tensors")]
        assert list(dict.fromkeys(titles)) == ["health", "loss", "optim", "perf", "run", "tensors"]
    picture = base64.b64decode(page.call("Page.captureScreenshot", format="png")["data"])
    assert len(picture) > 20_000  # curves and texts; an empty page is a fraction of that
