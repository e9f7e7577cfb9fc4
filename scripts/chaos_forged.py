"""Forged and damaged runs, given to every command that reads a run: nothing of them runs, every answer is an answer, none takes long."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from safetrain.cli.main import run as safetrain
from safetrain.core.ownership import MARK
from scripts.chaos_runs import in_child

SECONDS = 10
CODES = {0, 1, 2, 3, 4, 5}
TRACE = "trace"
STEP = "step-000002"

PARTS = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, width)
    def forward(self, x):
        return self.head(self.norm(x))
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, generator=generator), torch.tensor(0.0 if index in (9, 17) else 1.0)
def loss(model, batch):
    x, scale = batch
    return torch.log(model(x).square().sum(1) * scale).mean()
"""
CONFIG = """
seed: 0
model: {_target_: './parts.py:Net'}
loss: {_target_: './parts.py:loss'}
optimizer: {_target_: torch.optim.AdamW, lr: 0.001}
data: {train: {_target_: './parts.py:Data'}, batch_size: 4, shuffle: false}
loop: {max_epochs: 2, device: cpu}
checkpoint: {every_steps: 2}
logging: {tensorboard: false, console: 'off'}
"""
EVIL = """
open({trace!r}, "w").close()
def f(*arguments, **more): open({trace!r}, "w").close()
class Net:
    def __init__(self, *arguments, **more): f()
    def __setstate__(self, state): f()
"""

PIPES = "torch.utils.data.datapipes.iter"
TARGETS = (
    "UNPACKED/evil.py:f", "UNPACKED/run/evil.py:Net", "unpacked.run.evil.f", "unpacked.evil.Net", "os.mkdir", "os.system", "builtins.exec",
    "subprocess.call", "torch.load", "torch.hub.load", "torch.jit.load", "parts.torch.hub.load", "./parts.py:torch.load", "pickle.loads",
    "torch.utils.data.DataLoader", f"{PIPES}.FileOpener", f"{PIPES}.RoutedDecoder", "torch.nn.Module", "safetrain.cli.main.run",
    "torch.nn.Linear", "torch.nn.ModuleList", "torch.serialization.load", "importlib.import_module", "safetrain.config.instantiate",
)  # fmt: skip
ODD: tuple[Callable[[], Any], ...] = (
    lambda: None, lambda: True, lambda: -1, lambda: 0, lambda: 2**70, lambda: float("nan"), lambda: 1e308, lambda: "nan", lambda: "",
    lambda: "\x1b]0;owned\x07\x1b[31m", lambda: "/etc/passwd", lambda: "/dev/zero", lambda: "x" * 100_000, list, dict,
    lambda: nested(500), lambda: [[1, 2], {"a": None}], lambda: {"_target_": random.choice(TARGETS)}, lambda: "${oc.env:HOME}",
    lambda: "../../../../etc/passwd", lambda: "\ud800", lambda: b"bytes",
)  # fmt: skip


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


# ---- mutations ------------------------------------------------------------------------------------------------------


def change_somewhere(value: Any, rng: random.Random) -> Any:
    """A copy with one node, at any depth, replaced, removed or doubled."""
    value = copy.deepcopy(value)
    places: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            places += [(node, key) for key in node]
            stack += list(node.values())
        elif isinstance(node, list):
            places += [(node, index) for index in range(len(node))]
            stack += node
    if not places:
        return rng.choice(ODD)()
    parent, key = rng.choice(places)
    action = rng.random()
    if action < 0.7:
        parent[key] = rng.choice(ODD)()
    elif action < 0.85:
        del parent[key]
    else:
        parent[key] = [parent[key], parent[key]]
    return value


def damage_bytes(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 4)):
        if not content:
            break
        at = rng.randrange(len(content))
        how = rng.randrange(4)
        if how == 0:
            content[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            del content[at:]
        elif how == 2:
            content[at:at] = rng.randbytes(rng.randint(1, 50))
        else:
            del content[at : at + rng.randint(1, 50)]
    path.write_bytes(bytes(content))


def damage_json(path: Path, rng: random.Random) -> None:
    lines = path.read_text().splitlines()
    whole = path.suffix == ".json"
    index = 0 if whole else rng.randrange(len(lines))
    changed = change_somewhere(json.loads("\n".join(lines) if whole else lines[index]), rng)
    try:
        text = json.dumps(changed, default=str)
    except RecursionError:
        text = "[" * 100_000
    path.write_text(text if whole else "\n".join([*lines[:index], text, *lines[index + 1 :]]) + "\n")


def damage_saved(path: Path, rng: random.Random) -> None:
    """What `torch.save` wrote, with another value in it; then it is another file whose checksums are right."""
    contents = torch.load(path, weights_only=True)
    with contextlib.suppress(Exception):  # not everything can be written
        torch.save(change_somewhere(contents, rng), path)


def damage_batch(path: Path, rng: random.Random) -> None:
    contents = torch.load(path, weights_only=True)
    target = rng.choice(TARGETS).replace("UNPACKED", str(path.parents[3]))
    made = {
        "__safetrain__": "object", "class": target, "is_new": rng.random() < 0.5, "arguments": [rng.choice(ODD)()],
        "state": rng.choice(({}, None, {"a": 1})), "items": rng.choice((None, [1])), "pairs": rng.choice((None, [["a", 1]])),
    }  # fmt: skip
    contents["window"] = [rng.choice((made, {"__safetrain__": "class", "class": target}, [made], {"x": made}))]
    torch.save(contents, path)


def damage_config(path: Path, rng: random.Random) -> None:
    import yaml

    config = yaml.safe_load(path.read_text())
    if rng.random() < 0.5:
        target = rng.choice(TARGETS).replace("UNPACKED", str(path.parents[1]))
        node = {
            "_target_": target,
            **rng.choice(({}, {"path": TRACE}, {"modules": [{"_target_": rng.choice(TARGETS)}]})),
        }
        whole = ("model", "loss", "optimizer", "trainer", "scheduler")
        inside = ("guards.mine", "data.collate_fn", "data.train", "data.eval", "logging.sinks", "recovery.ladder")
        section, _, key = rng.choice((*whole, *inside)).partition(".")
        if not key:
            config[section] = node
        else:
            config[section][key] = {"sinks": [node], "ladder": [target]}.get(key, node)
    else:
        config = change_somewhere(config, rng)
    with contextlib.suppress(Exception):
        path.write_text(yaml.safe_dump(config))


def mutate(run_dir: Path, rng: random.Random) -> str:
    """Change one or two things in it; says what."""
    bundle = run_dir / "incidents" / STEP
    newest = max((run_dir / "checkpoints").glob("step-????????"))
    files = [path for path in (run_dir, bundle, newest) for path in path.iterdir() if path.is_file()]
    choices: list[tuple[str, Callable[[], object]]] = [
        ("bytes", lambda: damage_bytes(rng.choice(files), rng)),
        ("incident", lambda: damage_json(bundle / "incident.json", rng)),
        ("journal", lambda: damage_json(run_dir / "journal.jsonl", rng)),
        ("summary", lambda: damage_json(run_dir / "summary.json", rng)),
        ("manifest", lambda: damage_json(newest / "manifest.json", rng)),
        ("replay", lambda: damage_saved(bundle / "replay.pt", rng)),
        ("batch", lambda: damage_batch(bundle / "replay.pt", rng)),
        ("state", lambda: damage_saved(newest / "state.pt", rng)),
        ("config", lambda: damage_config(run_dir / "config.yaml", rng)),
    ]
    done = []
    for _ in range(rng.choice((1, 1, 2))):
        name, action = rng.choice(choices)
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError, OSError, RuntimeError, EOFError):
            action()
        done.append(name)
    if "state" in done:
        seal(newest)
    return "+".join(done)


def seal(checkpoint: Path) -> None:
    """Give it a manifest that fits its files, as a forger would."""
    from safetrain.checkpoint.manifest import Manifest, checksum, read_manifest

    with contextlib.suppress(Exception):
        old = read_manifest(checkpoint)
        files = {
            name: {"bytes": (checkpoint / name).stat().st_size, "xxh3_128": checksum(checkpoint / name)}
            for name in old.files
        }
        about = (old.step, old.num_committed, old.epoch, old.time, old.version, old.metric)
        (checkpoint / "manifest.json").write_text(Manifest(*about, files=files).render())


# ---- commands -------------------------------------------------------------------------------------------------------


def commands(run_dir: Path, rng: random.Random, what: str) -> Iterator[list[str]]:
    bundle = f"{run_dir}/incidents/{STEP}"
    every = [
        ["replay", bundle, "--no-remedies"],
        ["report", str(run_dir), "--out", "report.html"],
        ["diagnose", str(run_dir)],
        ["config", "show", f"{run_dir}/config.yaml"],
        ["config", "validate", f"{run_dir}/config.yaml"],
        ["explain", f"{run_dir}/config.yaml"],
        ["simulate", str(run_dir)],
        ["fix", bundle, "--seconds", "1"],
    ]
    about = {
        "replay": (0, 7),
        "batch": (0,),
        "config": (0, 3, 4, 5, 7),
        "journal": (1, 2, 6),
        "incident": (0, 1, 2),
        "summary": (1,),
    }
    chosen = sorted({index for name in what.split("+") for index in about.get(name, (rng.randrange(len(every)),))})
    yield from (every[index] for index in chosen)
    if not {"config", "bytes"} & {*what.split("+")}:  # what a resume runs is the user's own config
        yield ["resume", str(run_dir), "loop.max_epochs=3"]


def answer(arguments: list[str], log: Path) -> None:
    """Run one command in this process, which ends with it; what it says goes to the log."""
    # Seconds of work, so that a busy machine is not taken for a hang; who waits for ever is ended too.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(30 * SECONDS)
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            code = safetrain(arguments)
        except BaseException:
            code = 99
            traceback.print_exc()
    said = out.getvalue() + error.getvalue()
    if arguments[0] != "config" and "\x1b]0;owned" in said:
        code = 98
    log.write_text(said, errors="replace")
    os._exit(code)


def forged(directory: Path, count: int, seed: int) -> bool:
    """Mutate a run `count` times; every command must answer within seconds, run nothing, and never be at a loss."""
    victim = directory / "forged" / "project"
    victim.mkdir(parents=True)
    before = os.getcwd()
    os.chdir(victim)
    try:
        return _forged(directory / "forged", count, seed)
    finally:
        os.chdir(before)


def _forged(directory: Path, count: int, seed: int) -> bool:
    os.environ.setdefault("XDG_STATE_HOME", str(directory / "state"))
    Path("parts.py").write_text(PARTS)
    Path("c.yaml").write_text(CONFIG)
    if code := os.waitstatus_to_exitcode(
        os.waitpid(in_child(lambda: answer(["fit", "c.yaml", "--out", "made"], directory / "log")), 0)[1]
    ):
        raise SystemExit(f"the run to forge ended with exit code {code}: {(directory / 'log').read_text()}")
    trace = directory / TRACE
    evil = EVIL.replace("{trace!r}", repr(str(trace))).replace("{{", "{").replace("}}", "}")
    wrong: list[str] = []
    num_answers = 0
    codes: dict[int, int] = {}
    slowest = 0.0
    for index in range(count):
        rng = random.Random(seed * 1_000_003 + index)
        random.seed(seed + index)
        shutil.rmtree("unpacked", ignore_errors=True)
        shutil.copytree("made", "unpacked/run", symlinks=True, ignore=shutil.ignore_patterns(MARK))
        for place in (Path("unpacked"), Path("unpacked/run")):
            (place / "evil.py").write_text(evil)
        what = mutate(Path("unpacked/run"), rng)
        for arguments in commands(Path("unpacked/run"), rng, what):
            begin = time.monotonic()
            status = os.waitpid(in_child(lambda a=arguments: answer(a, directory / "log")), 0)[1]  # type: ignore[misc]
            slowest = max(slowest, time.monotonic() - begin)
            code, num_answers = os.waitstatus_to_exitcode(status), num_answers + 1
            codes[code] = codes.get(code, 0) + 1
            said = (directory / "log").read_text(errors="replace") if (directory / "log").exists() else ""
            problem = ""
            if trace.exists() or Path(TRACE).exists():
                problem = "RAN CODE"
                trace.unlink(missing_ok=True)
                shutil.rmtree(TRACE, ignore_errors=True)
            elif code in (-signal.SIGALRM, -signal.SIGPROF):
                problem = f"took more than {SECONDS} s"
            elif code not in CODES:
                problem = f"ended with {code}"
            elif "mistake in safetrain" in said:
                problem = "was at a loss"
            if problem:
                wrong.append(f"{index} ({what}) {' '.join(arguments)}: {problem}")
                print(f"{wrong[-1]}\n{said[-2000:]}", file=sys.stderr, flush=True)
            (directory / "log").unlink(missing_ok=True)
    shown = ", ".join(f"{number} x {code}" for code, number in sorted(codes.items()))
    print(
        f"forged: {count} mutated runs (seed {seed}), {num_answers} answers (exit codes {shown}), slowest {slowest:.1f} s: "
        f"{len(wrong)} wrong{': ' + '; '.join(wrong[:5]) if wrong else ''}"
    )
    return not wrong
