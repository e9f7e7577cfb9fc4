"""The run that `scripts/chaos --ranks` does harm to: one rank of it has a fault at a given step."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from safetrain import SafeTrainer

GUILTY, STEP, NUM_STEPS = 1, 12, 24
PAUSE_SECONDS = 20.0
"""How long a rank is stopped or slow that goes on afterwards."""
NETWORK = "cut"
"""The network device that each side has when the network is cut."""

fault = noted = ""
"""Set in each process: the name of the fault, and the file where the time of it goes."""


def has_happened() -> bool:
    return Path(noted).exists()


def note() -> None:
    """When the fault happened, in a file that survives the process."""
    Path(noted).write_text(repr(time.time()))


def raise_in_backward(gradient: Any) -> None:
    raise KeyError("a mistake in backward")


def continue_later() -> None:
    code = f"import os, signal, time; time.sleep({PAUSE_SECONDS}); os.kill({os.getpid()}, signal.SIGCONT)"
    subprocess.Popen([sys.executable, "-S", "-c", code])


class Samples(torch.utils.data.Dataset[Any]):
    calls = 0

    def __len__(self) -> int:
        return 8 * 4 * NUM_STEPS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        Samples.calls += 1
        is_due = os.environ["RANK"] == str(GUILTY) and Samples.calls == 4 * STEP + 1
        if is_due and fault in ("raise in data", "hang in data"):
            note()
            if fault == "raise in data":
                raise OSError("a sample cannot be read")
            os.open(f"{noted}.fifo", os.O_RDONLY)  # nobody writes: as a network disk that does not answer
        inputs = torch.randn(8, generator=torch.Generator().manual_seed(index))
        if is_due and fault == "nan":
            note()
            inputs[0] = -99.0
        return inputs, inputs.sum().reshape(1)


class Victim(SafeTrainer):
    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def build_data(self) -> Any:
        return Samples(), [(torch.zeros(4, 8), torch.zeros(4, 1))] * 4

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        if fault == "nan":
            return loss + 0.0 * torch.log(batch[0][:, 0] + 50.0).mean()
        if self.machine.rank != GUILTY or self.step != STEP:
            return loss
        if not has_happened() and (act := IN_FORWARD.get(fault)) is not None:
            note()
            act(loss)
        return loss

    def evaluation_step(self, model: nn.Module, batch: Any) -> Any:
        if fault == "raise in evaluation" and self.machine.rank == GUILTY and self.run.result.steps >= STEP:
            note()
            raise KeyError("a mistake in the evaluation")
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def on_commit(self, view: Any) -> None:
        rank = self.machine.rank
        if fault == "raise in hook" and rank == GUILTY and view.step == STEP:
            note()
            raise LookupError("a mistake in a hook")
        if fault == "bit flip" and rank == GUILTY and view.step == STEP and not has_happened():
            note()
            flip(next(self.model.parameters()))
        if fault == "disk full on rank 0" and rank == 0 and view.step in (STEP, STEP + 6):
            filler = self.run.shared_dir.parent / "filler"
            if view.step == STEP:
                note()
                with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
                    while file.write(bytes(4096)):
                        pass
            else:
                filler.unlink()


def flip(parameter: torch.Tensor) -> None:
    """One bit of the mantissa, past everything that torch could notice."""
    local = parameter.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    local.numpy().view("int32").reshape(-1)[3] ^= 1 << 19


def raise_in_forward(loss: torch.Tensor) -> None:
    raise KeyError("a mistake in forward")


def stop_for_a_while(loss: torch.Tensor) -> None:
    continue_later()
    os.kill(os.getpid(), signal.SIGSTOP)


IN_FORWARD: dict[str, Any] = {
    "raise in forward": raise_in_forward,
    "raise in backward": lambda loss: loss.register_hook(raise_in_backward),
    "killed": lambda loss: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda loss: threading.Event().wait(300),
    "stopped for ever": lambda loss: os.kill(os.getpid(), signal.SIGSTOP),
    "stopped for 20 s": stop_for_a_while,
    "slow": lambda loss: time.sleep(PAUSE_SECONDS),
    "sigterm": lambda loss: os.kill(os.getpid(), signal.SIGTERM),
    "network cut": lambda loss: subprocess.run(["ip", "link", "set", NETWORK, "down"], check=True),
}
