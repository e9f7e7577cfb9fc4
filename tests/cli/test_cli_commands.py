"""The commands that need no torch: output, exit codes, and what is not imported."""

import io
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import safetrain
from safetrain.cli.main import COMMANDS, main, run
from safetrain.config import load_config

ROOT = Path(safetrain.__file__).resolve().parent.parent


def out(capsys, *arguments):
    assert run(list(arguments)) == 0
    return capsys.readouterr().out


def err(capsys, *arguments, verbose=False):
    assert run(list(arguments), verbose) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


TORCH = {"torch", "accelerate", "tensorboard", "numpy"}
CONFIG_READERS = {"omegaconf", "yaml", "rich"}
RUN = "from safetrain.cli.main import run; assert run({}) == {}"


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        *((RUN.format(arguments.split(), 0), TORCH) for arguments in (
            "fit --help", "resume --help", "config show quickstart", "config validate quickstart",
            "config schema quickstart", "config schema --json", "explain quickstart", "recipes ls",
        )),
        (RUN.format(["--help"], 0), TORCH | CONFIG_READERS | {f"safetrain.{name}" for name in ("config", "cli.fit", "guards")}),
        (RUN.format(["lint", "bad.py"], 3), TORCH | CONFIG_READERS),
        (RUN.format(["lint", "--help"], 0), TORCH | CONFIG_READERS),
        (RUN.format(["init", "new"], 0), TORCH | CONFIG_READERS),
        ("import safetrain, safetrain.config", TORCH),
    ],
)  # fmt: skip
def test_nothing_heavy_is_imported(code, heavy):
    Path("bad.py").write_text("import torch\nx = torch.log(torch.softmax(y, -1))\n")
    code = f"import sys; {code}; heavy = {heavy!r} & set(sys.modules); assert not heavy, heavy"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)


def cpu_seconds(*arguments):
    """CPU time of a child process, the smallest of several."""

    def once():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return min(once() for _ in range(5))


def test_help_costs_little_more_than_click_and_validation_little_more_than_omegaconf():
    assert cpu_seconds("-m", "safetrain", "--help") < 2.5 * cpu_seconds("-c", "import click")
    assert cpu_seconds("-m", "safetrain", "config", "validate", "quickstart") < 5 * cpu_seconds(
        "-c", "import omegaconf"
    )


def test_python_m_is_the_same_program():
    command = [sys.executable, "-m", "safetrain", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"safetrain {safetrain.__version__}\n"


@pytest.mark.parametrize(
    "path", [[], *([name] for name in COMMANDS), ["config", "show"], ["config", "validate"], ["config", "schema"]]
)
def test_every_help_has_examples(path, capsys):
    text = out(capsys, *path, "--help")
    assert "Examples:" in text
    assert " ".join(["safetrain", *path]) in text.partition("Examples:")[2]


def test_every_command_is_listed_with_the_help_it_has(capsys):
    text = out(capsys, "--help")
    for name, summary in COMMANDS.items():
        assert f"  {name} " in text
        assert summary in text


def test_usage_mistakes_exit_with_2(capsys):
    assert "no command 'fitt', did you mean 'fit'?" in err(capsys, "fitt")
    assert "No such option" in err(capsys, "fit", "x.yaml", "--sed", "1")
    assert "Missing argument 'CONFIG'" in err(capsys, "config", "validate")


def test_show_prints_yaml_that_loads_again(capsys):
    text = out(capsys, "config", "show", "quickstart", "optimizer.lr=0.5", "~guards.clip", "--seed", "7")
    Path("saved.yaml").write_text(text)
    assert load_config("saved.yaml") == load_config("quickstart", ["optimizer.lr=0.5", "~guards.clip", "seed=7"])


def test_show_with_origins_and_docs(capsys):
    Path("a.yaml").write_text("loop:\n  max_steps: 3\n")
    flags = "data.batch_size=2 --seed 7 --precision bf16 --device cpu --origin"
    text = out(capsys, "config", "show", "a.yaml", *flags.split())
    for line in (
        "  max_steps: 3  # a.yaml:2", "  batch_size: 2  # override", "seed: 7  # --seed", "  precision: bf16  # --precision",
        "  device: cpu  # --device", "  log_every: 10  # default",
    ):  # fmt: skip
        assert line in text.splitlines()
    assert "Stop after this many" not in text
    assert "# Stop after this many committed optimizer steps." in out(capsys, "config", "show", "a.yaml", "--docs")


def test_show_json_is_valid_json(capsys):
    Path("a.yaml").write_text("model: {_target_: builtins.dict, x: .inf, y: .nan}\n")
    data = json.loads(out(capsys, "config", "show", "a.yaml", "--json"), parse_constant=pytest.fail)
    assert data["model"] == {"_target_": "builtins.dict", "x": "inf", "y": "nan"}
    assert "excludes" in err(capsys, "config", "show", "a.yaml", "--json", "--docs")


def test_an_explicit_override_wins_over_a_flag(capsys):
    text = out(capsys, "config", "show", "quickstart", "--fast-dev-run", "loop.log_every=3")
    loop = yaml.safe_load(text)["loop"]
    assert (loop["max_steps"], loop["max_epochs"], loop["log_every"]) == (5, None, 3)


def test_validate_says_ok_or_lists_every_problem(capsys):
    Path("good.yaml").write_text("loop: {max_steps: 3}\n")
    assert out(capsys, "config", "validate", "good.yaml").startswith("ok: ")
    Path("bad.yaml").write_text("loop: {max_stepz: 3}\nseed: -1\n")
    text = err(capsys, "config", "validate", "bad.yaml", "~nothing", "--precision", "no")
    for place in (
        "bad.yaml:1: loop.max_stepz",
        "bad.yaml:2: seed",
        "override '~nothing'",
        "--precision no: loop.precision",
    ):
        assert place in text
    assert "4 problems" in text
    assert "Traceback" not in text
    assert "Traceback" in err(capsys, "config", "validate", "bad.yaml", verbose=True)


def test_schema(capsys):
    assert "max_steps: an integer ≥ 1 or null" in out(capsys, "config", "schema")
    assert "safetrain.optimizers.adamw(params, lr=" in out(capsys, "config", "schema", "quickstart")
    assert json.loads(out(capsys, "config", "schema", "--json"))["title"] == "safetrain config"


def test_explain_draws_the_loop_in_order(capsys):
    text = out(capsys, "explain", "quickstart")
    marks = ["● begin", "● data", "● forward/backward", "● measure", "● judge", "├─ refused", "● commit", "● learn"]
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ("_target_: torch.optim.Adam, lr: 0.1", "Adam(lr=0.1) (fused);"),
        ("_target_: safetrain.optimizers.adamw, lr: 0.1", "adamw(lr=0.1) (fused);"),
        ("_target_: torch.optim.RMSprop, lr: 0.1", "RMSprop(lr=0.1);"),
        ("_target_: torch.optim.Adam, fused: false", "Adam(fused=False);"),
        ("_target_: torch.optim.SGD, foreach: true", "SGD(foreach=True);"),
    ],
)
def test_explain_says_whether_the_optimizer_is_fused(capsys, optimizer, said):
    text = out(capsys, "explain", "quickstart", f"optimizer={{{optimizer}}}")
    assert f" {said} schedule: " in text.partition("● commit")[2]


def test_explain_names_each_guard_where_it_acts(capsys):
    text = out(capsys, "explain", "quickstart", "guards.clip.mode=norm", "~guards.backoff")

    def at(stage):
        return text.partition(f"● {stage}")[2].partition("\n●")[0].partition("\n\n")[0]

    assert "finite adds its own numbers" in at("measure")
    assert "clip bounds the gradient" in at("measure")
    assert "finite gives a verdict" in at("judge")
    assert "clip updates its baseline" in at("learn")
    assert "finite" not in at("learn")
    assert "mode='norm' (default 'adaptive')" in text
    assert "max_norm" not in text
    assert "guards that are off\n  backoff   turned off by override" in text
    assert "backoff" not in at("judge")


def test_explain_shows_precision_accumulation_and_budget(capsys):
    changes = "loop.grad_accum=4 recovery.max_refusals=17 loop.ema=0.9 loop.compile=true loop.max_epochs=2"
    flags = "--precision bf16 --device cuda:1"
    text = out(capsys, "explain", "quickstart", *changes.split(), *flags.split())
    for part in ("4 micro-batches", "at most 17 times", "decay 0.9", ", compiled", "or 2 epochs", "in bf16", "cuda:1"):
        assert part in text


def test_explain_names_an_outside_guard_without_importing_it(capsys):
    Path("g.py").write_text("raise RuntimeError\nclass Ceiling:\n    def __init__(self, limit): ...\n")
    Path("a.yaml").write_text("guards: {ceiling: {_target_: './g.py:Ceiling', limit: 3}}\n")
    assert "g.py:Ceiling, an outside guard: Ceiling(limit=3)" in out(capsys, "explain", "a.yaml")
    assert "no guard is on" in out(capsys, "explain", "a.yaml", "guards=null")


def test_env_names_versions_and_devices(capsys):
    facts = json.loads(out(capsys, "env", "--json"))
    assert facts["safetrain"] == safetrain.__version__
    names = ["python", "platform", "torch", "accelerate", "omegaconf", "tensorboard", "numpy", "cpus", "cuda"]
    assert all(facts[name] for name in [*names, "devices"])
    text = out(capsys, "env")
    assert f"torch           {facts['torch']}" in text


def test_output_that_cannot_hold_every_character(monkeypatch):
    pipe = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe, encoding="cp1252"))  # as a pipe is on Windows
    with pytest.raises(SystemExit) as end:
        main(["explain", "quickstart"])
    sys.stdout.flush()
    assert end.value.code == 0
    assert b"\\u25cf begin" in pipe.getvalue()
