"""Guards that do not fire leave the weights bit-identical to a hand-written loop."""

import itertools
from functools import partial

import pytest
import torch
from small import assert_same, make_batches, make_model, mse
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

SGD, ADAMW = partial(torch.optim.SGD, lr=0.05, momentum=0.9), partial(torch.optim.AdamW, lr=1e-2)
CONSTANT, COSINE = lambda optimizer: None, partial(CosineAnnealingLR, T_max=200)
HOOKED = {
    "islands": {"modules": ["*"], "loss": True},
    "activations": {"every": 2, "max_abs": 1e6},
    "batch": {"only_if_bad": False},
    "clip": None,
}
"""Guards that install hooks, and no clipping."""


def hand_written_loop(model, optimizer, scheduler, batches, accum, max_norm, num_steps):
    step = 0
    while True:
        for start in range(0, len(batches), accum):
            window = batches[start : start + accum]
            for batch in window:
                loss = mse(model, batch)
                (loss / len(window) if len(window) > 1 else loss).backward()
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step == num_steps:
                return


def clip(max_norm):
    return {"clip": {"mode": "norm", "max_norm": 1e9 if max_norm is None else max_norm}}


@pytest.mark.parametrize(
    ("optimizer", "accum", "schedule", "max_norm", "guards"),
    [
        *((*case, clip(case[-1])) for case in itertools.product([SGD, ADAMW], [1, 4], [CONSTANT, COSINE], [None, 0.5])),
        (partial(ADAMW, fused=True), 1, partial(OneCycleLR, max_lr=0.05, total_steps=300), 0.5, clip(0.5)),
        (ADAMW, 1, CONSTANT, None, {**HOOKED, "anomaly": {"mode": "replay"}}),
        (ADAMW, 1, CONSTANT, None, {**HOOKED, "anomaly": {"mode": "always"}}),
    ],
)
def test_weights_equal_a_hand_written_loop_after_200_steps(make_trainer, optimizer, accum, schedule, max_norm, guards):
    batches = make_batches(50)  # 50 is no multiple of 4: every epoch ends with a short window
    results = []
    for by_hand in (True, False):
        torch.manual_seed(1)
        model = make_model()
        opt = optimizer(model.parameters())
        scheduler = schedule(opt)
        torch.manual_seed(2)
        if by_hand:
            hand_written_loop(model, opt, scheduler, batches, accum, max_norm, 200)
        else:
            config = {"loop": {"max_steps": 200, "grad_accum": accum}, "guards": guards}
            trainer = make_trainer(model, optimizer=opt, scheduler=scheduler, train_data=batches, config=config)
            result = trainer.fit()
            assert result.healthy
            assert result.steps == 200
            assert not [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m)]
        results.append((model.state_dict(), opt.state_dict()))
    assert_same(*results)


def test_guards_and_evaluation_do_not_change_the_order_of_the_data(make_trainer):
    """The same run with guards on, off, and with evaluation in between: equal bits."""
    inputs, targets = torch.randn(40, 6), torch.randn(40, 1)
    data = torch.utils.data.TensorDataset(inputs, targets)
    weights = []
    for guards, eval_data in (({}, None), (None, None), ({}, data)):
        torch.manual_seed(1)
        model = make_model()
        config = {"seed": 7, "loop": {"max_steps": 30, "eval_every": 3}, "guards": guards, "data": {"batch_size": 8}}
        make_trainer(model, train_data=data, eval_data=eval_data, config=config).fit()
        weights.append(model.state_dict())
    assert_same(weights[0], weights[1])
    assert_same(weights[0], weights[2])


@pytest.mark.parametrize("optimizer", ["SGD", "SparseAdam"])
def test_sparse_gradients_with_duplicate_rows(make_trainer, optimizer):
    batches = [(torch.randint(10, (64,)), torch.randn(64, 3)) for _ in range(20)]
    weights = []
    for by_hand in (True, False):
        torch.manual_seed(1)
        model = torch.nn.Embedding(10, 3, sparse=True)
        opt = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
        if by_hand:
            for batch in batches:
                opt.zero_grad()
                mse(model, batch).backward()
                opt.step()
        else:
            config = {"guards": clip(None)}
            assert make_trainer(model, optimizer=opt, train_data=batches, config=config).fit().steps == 20
        weights.append(model.state_dict())
    assert_same(*weights)
