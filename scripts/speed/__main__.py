"""scripts/bench: see there for how to call it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from safetrain._private import allocator

from . import plots, rounds, startup, variants
from .workloads import TITLES, WORKLOADS

BASE, CLIP = "plain", "plain + clip"
LIMITS = {"mlp": 1.15, "gpt": 1.02, "resnet": 1.02, "many": 1.05}
"""SafeTrainer with its default guards against plain + clip, the same optimizer on both sides, fused or not."""
HOST_LIMIT = 1.05
"""A loop of somebody else with guards against the same loop without, on steps of 5 ms or more."""
MOST_READS = 1.0
"""Reads of the device per step, with default guards."""
JUDGED = {"safetrain": CLIP, "safetrain, fused": "plain + clip, fused"}
HEADER = ["variant", "ms/step", "fastest", "vs plain", "vs plain + clip", "in CPU time", "peak MB", "host reads/step"]
WINDOWS = {"mlp": 200, "gpt": 50, "resnet": 50, "many": 50}
"""Steps that are timed at once: whole fifties, because TensorBoard, snapshots and the check of the state come once in 50 steps;
and long enough for the caches, which the variant before has emptied."""
ROUNDS = {"mlp": 20, "gpt": 8, "resnet": 10, "many": 10}
SIZES = {"parameters": [10**4, 10**5, 10**6, 10**7, 10**8], "modules": [10, 100, 1000, 10_000]}


def machine() -> dict[str, Any]:
    import torch

    model = platform.processor()
    if Path("/proc/cpuinfo").exists():
        names = [
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ]
        model = f"{names[0]}, {len(names)} cores, 1 thread used" if names else model
    return {"date": str(date.today()), "cpu": model, "python": platform.python_version(), "torch": torch.__version__}


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def bench(name: str, chosen: list[str], num_rounds: int) -> tuple[list[str], dict[str, Any]]:
    """The table of a workload, and its numbers."""
    timings = {t.variant: t for t in rounds.compare(chosen, name, WINDOWS[name], num_rounds, warmup=60)}
    lines = [
        f"### {TITLES[name]}",
        "",
        row(HEADER),
        row(["---", *["---:"] * (len(HEADER) - 1)]),
    ]
    numbers: dict[str, Any] = {}
    for variant, timing in timings.items():
        with_clip = "plain + clip, fused" if "fused" in variant else CLIP
        numbers[variant] = {
            "median_ms": timing.median * 1e3,
            "min_ms": timing.least * 1e3,
            "ratio": timing.ratio(timings[BASE]),
            "ratio_to_clip": timing.ratio(timings[with_clip]),
            "min_ratio_to_clip": timing.least / timings[with_clip].least,
            "cpu_ratio": timing.cpu_ratio(timings[BASE]),
            "cpu_ratio_to_clip": timing.cpu_ratio(timings[with_clip]),
            "reads": rounds.host_reads(variant, name) if name == "mlp" else None,
            **timing.about,
        }
        each = numbers[variant]
        shown = [each["ratio"], each["ratio_to_clip"], each["cpu_ratio_to_clip"]]
        cells = [f"{each['median_ms']:.3f}", f"{each['min_ms']:.3f}", *(f"{ratio:.3f}" for ratio in shown)]
        reads = "" if each["reads"] is None else f"{each['reads']:.2f}"
        lines.append(row([variant, *cells, f"{each['peak_mb']:.0f}", reads]))
    lines += ["", *(verdict(name, ours, numbers[ours]) for ours in JUDGED if ours in numbers)]
    if "plain again (A/A)" in numbers:
        lines.append(f"- Noise floor (A/A): {100 * abs(numbers['plain again (A/A)']['ratio'] - 1):.1f}%.")
    for peer in (p for p in variants.PEERS if p in numbers):
        wall, cpu = timings[peer].ratio(timings["safetrain"]), timings[peer].cpu_ratio(timings["safetrain"])
        lines.append(
            f"- {peer}, unguarded: {wall:.2f}x of SafeTrainer's time with default guards ({cpu:.2f}x in CPU time)"
        )
    return [*lines, ""], numbers


def verdict(workload: str, ours: str, numbers: dict[str, Any]) -> str:
    """What the default guards cost, against the target."""
    ratio, limit, reads = numbers["ratio_to_clip"], LIMITS[workload], numbers["reads"]
    text = (
        f"- Default guards ({ours}): {ratio:.3f}x of {JUDGED[ours]} ({numbers['cpu_ratio_to_clip']:.3f}x in CPU time); "
        f"the target is {limit:.2f}x: {'reached' if ratio <= limit else 'missed'}."
    )
    if reads is not None:
        is_reached = "reached" if reads <= MOST_READS else "missed"
        text += f" Host reads per step: {reads:.2f}; the target is {MOST_READS:.0f}: {is_reached}."
    return text


def phase_table(name: str) -> tuple[list[str], dict[str, float]]:
    times = rounds.phases(name)
    lines = [f"### Time by phase, {TITLES[name]}", "", row(["phase", "µs, median"]), row(["---", "---:"])]
    return [*lines, *(row([phase, f"{seconds * 1e6:.0f}"]) for phase, seconds in times.items()), ""], times


def scale(kind: str, largest: int, num_rounds: int) -> tuple[list[str], list[dict[str, Any]]]:
    lines = [
        row([kind, "plain + clip, ms", "safetrain, ms", "ratio", "in CPU time", "extra MB", "snapshots, MB"]),
        row(["---:"] * 7),
    ]
    points = []
    for count in (n for n in SIZES[kind] if n <= largest):
        few = count >= 10**8 or (kind == "modules" and count >= 10**4)
        chosen = ["plain + clip, fused", "safetrain, fused"]
        # The warm-up is over when all snapshots have their memory.
        plain, ours = rounds.compare(chosen, f"{kind}:{count}", 50, 3 if few else num_rounds, warmup=160)
        extra = ours.about["peak_mb"] - plain.about["peak_mb"]
        points.append(
            {
                "count": count,
                "plain_ms": plain.median * 1e3,
                "ours_ms": ours.median * 1e3,
                "ratio": ours.ratio(plain),
                "cpu_ratio": ours.cpu_ratio(plain),
                "extra_mb": extra,
                "snapshot_mb": ours.about["snapshot_mb"],
            }
        )
        p = points[-1]
        cells = [
            f"{p['plain_ms']:.3f}",
            f"{p['ours_ms']:.3f}",
            f"{p['ratio']:.3f}",
            f"{p['cpu_ratio']:.3f}",
            f"{extra:.0f}",
            f"{p['snapshot_mb']:.0f}",
        ]
        lines.append(row([f"{count:,}", *cells]))
        print(lines[-1], flush=True)
    return [*lines, ""], points


def hosts(names: list[str], num_rounds: int | None) -> tuple[list[str], dict[str, Any]]:
    """Each loop of others with guards against itself, on steps that take long enough for the target to be fair."""
    lines = [row(["host", "workload", "ms/step", "guarded", "ratio", "in CPU time"]), row(["---"] * 2 + ["---:"] * 4)]
    numbers: dict[str, Any] = {}
    there = variants.installed()
    for host, (alone, _) in variants.HOSTS.items():
        for name in names if alone in there else ():
            pair = rounds.compare([alone, host], name, WINDOWS[name], num_rounds or ROUNDS[name], warmup=60)
            found = {"ratio": pair[1].ratio(pair[0]), "cpu_ratio": pair[1].cpu_ratio(pair[0])}
            numbers[f"{host}, {name}"] = found | {"ms": pair[0].median * 1e3}
            cells = [f"{each.median * 1e3:.2f}" for each in pair] + [f"{ratio:.3f}" for ratio in found.values()]
            lines.append(row([host, TITLES[name], *cells]))
            print(lines[-1], flush=True)
    slow = [each for each in numbers.values() if each["ms"] >= 5.0]
    worst = max((each["cpu_ratio"] for each in slow), default=0.0)
    verdict = "reached" if worst <= HOST_LIMIT else "missed"
    return [
        *lines,
        "",
        f"Steps of 5 ms or more: at most {worst:.3f}x in CPU time; the target is {HOST_LIMIT:.2f}x: {verdict}.",
        "",
    ], numbers


def soak(num_steps: int) -> tuple[list[str], dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "speed.soak", str(num_steps)], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    lines = [
        f"### {found['steps']:,} tiny steps, by tenths",
        "",
        row(["tenth", "µs/step", "resident MB", "journal MB"]),
        row(["---:"] * 4),
    ]
    for index, tenth in enumerate(found["tenths"], 1):
        cells = [f"{tenth['us_per_step']:.0f}", f"{tenth['resident_mb']:.0f}", f"{tenth['journal_mb']:.1f}"]
        lines.append(row([str(index), *cells]))
    return [*lines, ""], found


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--workloads", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--variants", nargs="*", help="names as in the table; all that are installed by default")
    parser.add_argument("--rounds", type=int, help="windows of 200 (mlp) or 50 steps for each variant")
    parser.add_argument("--scaling", action="store_true", help="parameters and modules instead of the table")
    parser.add_argument("--largest", type=int, default=10**8, help="with --scaling: the largest count to try")
    parser.add_argument("--soak", type=int, metavar="STEPS", help="one long run instead of the table")
    parser.add_argument("--startup", action="store_true", help="the way to the first step instead of the table")
    parser.add_argument(
        "--hosts", action="store_true", help="loops of others with and without guards instead of the table"
    )
    parser.add_argument(
        "--system-memory",
        action="store_true",
        help="freed memory goes back to the system in all variants; without it, all keep it as `safetrain fit` does",
    )
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    if not asked.system_memory:
        os.environ |= {
            "MALLOC_MMAP_THRESHOLD_": str(allocator.MAPPED_FROM),
            "MALLOC_TRIM_THRESHOLD_": str(allocator.MOST_KEPT),
        }
    about = machine()
    lines, numbers = (
        [f"{about['date']}, {about['cpu']}, Python {about['python']}, torch {about['torch']}", ""],
        {"machine": about},
    )
    kind = "table"
    if asked.startup:
        kind = "startup"
        with tempfile.TemporaryDirectory() as folder:
            numbers[kind] = taken = startup.measure(asked.rounds or 5, folder)
        lines += [
            f"To the first step of fit: {taken['fit']:.2f} s",
            f"import torch, accelerate, and the model: {taken['import']:.2f} s ({taken['ratio_to_import']:.2f}x)",
            f"the same and an optimizer: {taken['with_optimizer']:.2f} s ({taken['ratio_to_with_optimizer']:.2f}x)",
        ]
    elif asked.hosts:
        kind = "hosts"
        more, numbers[kind] = hosts([name for name in asked.workloads if name != "mlp"], asked.rounds)
        lines += more
    elif asked.soak:
        kind = "soak"
        more, numbers[kind] = soak(asked.soak)
        lines += more
    elif asked.scaling:
        kind = "scaling"
        series = {}
        for each in SIZES:
            more, numbers[each] = scale(each, asked.largest, asked.rounds or 6)
            lines += more
            series[each] = [(p["count"], p["cpu_ratio"]) for p in numbers[each]]
        draw(plots.scaling, asked.out / "scaling.svg", series)
    else:
        ratios = {}
        for name in asked.workloads:
            chosen = [
                v
                for v in variants.installed()
                if not asked.variants or v in (*asked.variants, BASE, *JUDGED, *JUDGED.values())
            ]
            more, numbers[name] = bench(name, chosen, asked.rounds or ROUNDS[name])
            print("\n".join(more), flush=True)
            ratios[TITLES[name]] = {v: numbers[name][v]["ratio"] for v in chosen if "again" not in v}
            lines += more
        more, numbers["phases"] = phase_table(asked.workloads[0])
        lines += more
        draw(plots.ratios, asked.out / "ratios.svg", ratios, BASE)
    (asked.out / f"{kind}.md").write_text("\n".join(lines) + "\n")
    (asked.out / f"{kind}.json").write_text(json.dumps(numbers, indent=1) + "\n")
    print("\n".join(lines))


def draw(plot: Any, path: Path, *what: Any) -> None:
    try:
        plot(path, *what)
    except ImportError:
        print("no plot: matplotlib is not installed (pip install -e .[bench])", file=sys.stderr)


main()
