"""One variant in a process of its own."""

from __future__ import annotations

import json
import os
import sys

import torch

from . import variants, workloads
from .gate import Gate


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    work = workloads.make(asked["workload"])
    gate = Gate(asked["warmup"], asked["window"], asked["rounds"], asked["reads"], asked["phases"])
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # the gate keeps the real one; output is made, and goes nowhere
    variants.run(asked["variant"], work, gate, asked["fused"])
    gate.finish()
    os._exit(0)  # other trainers leave threads behind


main()
