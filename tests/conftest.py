"""What every test starts from: one thread, known random numbers, and no setting left over from the test before."""

import gc
import logging
import os
import random
import tempfile

# Some virtual machines announce AMX and then kill the process at its first use: bf16 tests stay below it.
# oneDNN reads this once, so it is set before torch is imported; child processes inherit it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Runs are marked as made by this user with a key of the user's; tests have one of their own.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="safetrain-tests-")

import numpy as np
import pytest
import torch
from small import make_model, mse

from safetrain import SafeTrainer
from safetrain.core import containment

containment.strict = True  # what is contained in a run of the user's is a failure here


@pytest.fixture(autouse=True)
def undisturbed_logging():
    """Command lines and frameworks that run in a test change loggers of the whole process."""
    loggers = [logging.getLogger(), logging.getLogger("safetrain")]
    before = [(each, each.disabled, each.level, each.propagate) for each in loggers]
    yield
    logging.disable(logging.NOTSET)
    for each, disabled, level, propagate in before:
        each.disabled, each.propagate = disabled, propagate
        each.setLevel(level)


@pytest.fixture(autouse=True)
def known_state():
    torch.set_num_threads(1)  # small tensors, and results that do not depend on the number of cores
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    leaks = {
        "deterministic algorithms are still on": torch.are_deterministic_algorithms_enabled(),
        "anomaly detection is still on": torch.is_anomaly_enabled(),
        "gradients are still off": not torch.is_grad_enabled(),
        "the default dtype is changed": torch.get_default_dtype() != torch.float32,
    }
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    assert not any(leaks.values()), "; ".join(what for what, leaked in leaks.items() if leaked)


@pytest.fixture
def one_process():
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()  # the group waits for models that are still wrapped
    torch.distributed.destroy_process_group()


@pytest.fixture
def make_trainer(tmp_path):
    """SafeTrainer with a small model and quiet output; keyword arguments of the constructor, `config` merged with the quiet
    defaults. `optimizer` may be a function of the model's parameters, and `scheduler` one of the optimizer."""
    made = []

    def make(model=None, cls=SafeTrainer, *, config=None, optimizer=None, scheduler=None, **parts):
        config = {"logging": {"console": "off", "tensorboard": False}, **(config or {})}
        run_dir = parts.pop("run_dir", tmp_path / f"run-{len(made)}")
        model = make_model() if model is None else model
        optimizer = optimizer(model.parameters()) if callable(optimizer) else optimizer
        scheduler = scheduler(optimizer) if callable(scheduler) else scheduler
        parts.setdefault("loss_fn", mse)
        trainer = cls(model, optimizer=optimizer, scheduler=scheduler, config=config, run_dir=run_dir, **parts)
        made.append(trainer)
        return trainer

    return make
