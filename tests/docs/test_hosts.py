"""The scripts in docs/hosts: each loop as it was ruins its weights (or would), and guarded keeps them; the page shows their difference."""

import difflib
import re
import runpy

import pytest
from docs_pages import ROOT

HOSTS = ROOT / "docs" / "hosts"
NAMES = sorted(path.stem for path in HOSTS.glob("*.py") if not path.stem.endswith("_guarded"))
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
NEEDS = {
    "hf_trainer": ["transformers"],
    "sft": ["transformers", "trl", "datasets"],
    "lightning_fit": ["lightning"],
}
FAULTLESS = {"gpt_train"}
RUN_DIRS = {"loop": "loop", "accelerated": "accelerated", "gpt_train": "gpt", "hf_trainer": "hf", "sft": "sft"}


def run(name, tmp_path, monkeypatch, capsys):
    for package in NEEDS.get(name.removesuffix("_guarded"), ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(HOSTS / f"{name}.py"), run_name="__main__")
    return "weights are finite: True" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_guarded(name, tmp_path, monkeypatch, capsys):
    assert run(f"{name}_guarded", tmp_path, monkeypatch, capsys)
    run_dir = tmp_path / "runs" / RUN_DIRS.get(name, "lightning")
    assert (run_dir / "summary.json").is_file()
    incidents = list((run_dir / "incidents").glob("*/incident.json")) if (run_dir / "incidents").is_dir() else []
    assert len(incidents) == (0 if name in FAULTLESS else 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_as_it_was(name, tmp_path, monkeypatch, capsys):
    assert run(name, tmp_path, monkeypatch, capsys) == (name in FAULTLESS)


def changes(name):
    before, after = (
        (HOSTS / f"{each}.py").read_text(encoding="utf-8").splitlines() for each in (name, f"{name}_guarded")
    )
    return "\n".join(list(difflib.unified_diff(before, after, lineterm="", n=1))[2:])


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_what_changes(name):
    shown = re.findall(r"```diff\n(.*?)\n```", PAGE, flags=re.DOTALL)
    assert changes(name) in shown, changes(name)
    added = [line for line in changes(name).splitlines() if line.startswith("+") and line.strip("+ ")]
    assert len(added) <= 5
