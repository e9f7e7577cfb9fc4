"""Guards that do not fire leave the weights bit-identical to a hand-written loop."""

import itertools

import pytest
import torch
from small import assert_same, make_batches, make_model, mse

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
}
SCHEDULERS = {
    "constant": lambda optimizer: None,
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200),
    "one_cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=300),
}


def hand_written_loop(model, optimizer, scheduler, batches, accum, max_norm, num_steps):
    model.train()
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


@pytest.mark.parametrize(
    ("optimizer", "accum", "schedule", "max_norm"),
    [
        *itertools.product(["sgd", "adamw"], [1, 4], ["constant", "cosine"], [None, 0.5]),
        ("adamw_fused", 1, "one_cycle", 0.5),
    ],
)
def test_weights_equal_a_hand_written_loop_after_200_steps(make_trainer, optimizer, accum, schedule, max_norm):
    batches = make_batches(50)  # 50 is no multiple of 4: every epoch ends with a short window
    results = []
    for by_hand in (True, False):
        torch.manual_seed(1)
        model = make_model()
        opt = OPTIMIZERS[optimizer](model.parameters())
        scheduler = SCHEDULERS[schedule](opt)
        torch.manual_seed(2)
        if by_hand:
            hand_written_loop(model, opt, scheduler, batches, accum, max_norm, 200)
        else:
            clip = {"mode": "norm", "max_norm": max_norm if max_norm is not None else 1e9}
            config = {"loop": {"max_steps": 200, "grad_accum": accum}, "guards": {"clip": clip}}
            trainer = make_trainer(model, optimizer=opt, scheduler=scheduler, train_data=batches, config=config)
            result = trainer.fit()
            assert result.healthy
            assert result.steps == 200
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
            config = {"guards": {"clip": {"mode": "norm", "max_norm": 1e9}}}
            assert make_trainer(model, optimizer=opt, train_data=batches, config=config).fit().steps == 20
        weights.append(model.state_dict())
    assert_same(*weights)
