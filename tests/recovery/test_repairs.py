"""Rungs that repair a step and commit it: each alone recovers the run, and each ends with its budget."""

import math

import pytest
import torch
from records import journal
from small import Scaled, assert_same, deep_state, float_mse, make_batches, make_model, with_bad_samples
from torch import nn

from safetrain import SafeTrainer


class Transient(SafeTrainer):
    """Its loss is NaN once at each of these steps, and fine when the step is run again."""

    at = (4,)

    def training_step(self, model, batch):
        loss = super().training_step(model, batch)
        if self.step in self.at and self.step not in vars(self).setdefault("over", set()):
            self.over.add(self.step)
            return loss * math.nan
        return loss


class Always(Transient):
    at = range(4, 12)


@pytest.mark.parametrize("investigated", [True, False])
def test_a_transient_fault_leaves_no_trace(make_trainer, check_saved, investigated):
    """Dropout included: the step that is run again draws the numbers it drew."""
    batches, states = make_batches(12), []
    for cls in (SafeTrainer, Transient):
        torch.manual_seed(1)
        model = make_model(dropout=0.3)
        config = {"forensics": {"enabled": investigated}}
        trainer = make_trainer("retry", model=model, cls=cls, train_data=batches, config=config)
        torch.manual_seed(2)
        if cls is SafeTrainer:
            assert trainer.fit().healthy
        else:
            reason = "the same step was run again and committed"
            result = check_saved(trainer, steps=12, incidents={4: "commit"}, rung="retry", reason=reason)
            assert math.isnan(result.losses[4])  # what was refused is not filtered from the record
        states.append(deep_state(trainer))
    assert_same(*states)


def test_retries_end_with_their_budget(make_trainer, check_stopped):
    trainer = make_trainer("retry", cls=Always, train_data=make_batches(12), recovery={"max_retries": 3})
    result = check_stopped(trainer, "retry: its budget of 3 is spent", "nothing is left to try")
    assert (result.steps, [i.step for i in result.incidents]) == (7, [4, 5, 6, 7])


def test_guilty_samples_are_left_out_and_the_rest_is_committed(make_trainer, check_saved):
    """As if they had never been in the batch."""
    batches = with_bad_samples(make_batches(10), (4, 2), (4, 5), (7, 0))
    kept = [tuple(tensor[batch[0].isfinite().all(1)] for tensor in batch) for batch in batches]
    states = []
    for data in (kept, batches):
        torch.manual_seed(1)
        trainer = make_trainer("samples", train_data=data)
        if data is kept:
            assert trainer.fit().healthy
        else:
            reason = "left out, the rest committed"
            incidents = {4: "commit", 7: "commit"}
            result = check_saved(trainer, steps=10, incidents=incidents, rung="samples", reason=reason)
            assert [incident.samples for incident in result.incidents] == [[2, 5], [0]]
            assert f"samples: sample 2, 5 of the batch {reason}" in result.incidents[0].decision.reasons
        states.append(deep_state(trainer))
    assert_same(*states)


def test_leaving_samples_out_ends_with_its_budget(make_trainer, check_stopped):
    batches = with_bad_samples(make_batches(10), (3, 1), (5, 1), (7, 1))
    trainer = make_trainer("samples", train_data=batches, recovery={"max_healed": 2})
    assert check_stopped(trainer, "samples: its budget of 2 is spent").steps == 7


def test_a_bad_micro_batch_is_left_out_until_the_budget_is_spent(make_trainer, check_saved, check_stopped):
    def trainer(*bad, **recovery):
        config = {"loop": {"grad_accum": 2}, "guards": {"finite": {"drop_micro_batch": True}}}
        return make_trainer("micro_batch", train_data=make_batches(12, bad=bad), config=config, recovery=recovery)

    reason = "micro-batch 1 of 2 left out"
    check_saved(trainer(5), steps=6, incidents={2: "commit"}, rung="micro_batch", reason=reason)
    assert check_stopped(trainer(5, 8, max_healed=1), "micro_batch: its budget of 1 is spent").steps == 4
    check_stopped(trainer(4, 5), "micro_batch: no finite micro-batches are left")


def make_overflowing(later=1e6):
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), Scaled(nn.Linear(16, 16)), nn.ReLU(), Scaled(nn.Linear(16, 1), later)
    )


class SecondLayer(SafeTrainer):
    """From step 6 on its second scaled layer overflows too."""

    def on_commit(self, view):
        if view.step >= 5:
            self.model[4].factor = 1e6


@pytest.fixture
def make_island(make_trainer):
    """An fp16 run whose first scaled layer overflows."""

    def make(num_batches=10, loss_fn=float_mse, **parts):
        config = {"loop": {"precision": "fp16", "max_steps": 10}}
        parts |= {"model": make_overflowing(1.0), "loss_fn": loss_fn, "train_data": make_batches(num_batches)}
        return make_trainer("island", config=config, **parts)

    return make


def test_the_overflowing_module_becomes_an_island(make_island, check_saved):
    reason = "2 is kept in float32 from now on"
    result = check_saved(make_island(), steps=10, incidents={0: "commit"}, rung="island", reason=reason)
    assert result.islands["modules"] == ["2"]


def test_a_repaired_fp16_step_is_committed_at_a_smaller_loss_scale(make_island):
    result = make_island(loss_fn=lambda m, b: 1e3 * float_mse(m, b)).fit()
    first = next(line for line in journal(result) if line["event"] == "step")
    assert (first["step"], first["action"]) == (0, "commit")
    assert first["loss_scale"] < 2.0**16
    assert [incident.decision.action for incident in result.incidents] == ["commit"]


def test_islands_end_with_their_budget(make_island, check_saved, check_stopped):
    for budget in (2, 1):
        torch.manual_seed(1)
        trainer = make_island(cls=SecondLayer, recovery={"max_islands": budget})
        if budget == 2:
            expected = {"incidents": {0: "commit", 6: "commit"}, "rung": "island", "reason": "is kept in float32"}
            assert check_saved(trainer, steps=10, **expected).islands["modules"] == ["2", "4"]
        else:
            result = check_stopped(trainer, "island: its budget of 1 is spent")
            assert [incident.step for incident in result.incidents] == [0, 6]


PATCH = {"heal": ["patch"]}


def rooted(model, batch):
    out = model(batch[0])
    size = (out * batch[1]).square()
    return out.square().mean() + size.sqrt().mean()  # its derivative at 0 is infinite


def twice_rooted(model, batch):
    out = model(batch[0])
    first = (out * batch[1]).square().sqrt()
    second = (out * batch[0][:, :1]).square().sqrt()
    return out.square().mean() + first.mean() + second.mean()


def with_zeros(batches, *indices, field=1):
    for index in indices:
        batches[index][field][:, 0] = 0.0
    return batches


def test_the_safe_variant_runs_at_the_blamed_line(make_trainer, check_saved):
    trainer = make_trainer("patch", loss_fn=rooted, train_data=with_zeros(make_batches(10), 3, 6), recovery=PATCH)
    reason = "runs as its safe variant from now on; to make it permanent: "
    result = check_saved(trainer, steps=10, incidents={3: "commit"}, rung="patch", reason=reason)
    (patch,) = result.patches
    assert (patch["operations"], patch["code"]) == (["sqrt"], "return out.square().mean() + size.sqrt().mean()  # its derivative at 0 is infinite")  # fmt: skip
    assert patch["num_uses"] == 7
    assert "safetrain.safe.sqrt" in patch["fix"]


def test_patches_end_with_their_budget(make_trainer, check_stopped):
    batches = with_zeros(with_zeros(make_batches(12), 3), 7, field=0)
    for budget, steps in ((1, 7), (0, 3)):
        recovery = {**PATCH, "max_patches": budget}
        trainer = make_trainer("patch", loss_fn=twice_rooted, train_data=batches, recovery=recovery)
        assert check_stopped(trainer, f"patch: its budget of {budget} is spent").steps == steps


class NormRatio(torch.optim.Optimizer):
    """Divides 0 by 0 where a matrix has no gradient."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            unit = parameter.grad / (parameter.grad.abs().mean() + 1e-8)
            parameter.add_(unit * (parameter.grad.norm() / unit.norm()), alpha=-self.param_groups[0]["lr"])


def test_an_update_that_divides_zero_by_zero_is_patched_too(make_trainer):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    nn.init.zeros_(model[2].weight)
    parts = {"model": model, "optimizer": NormRatio, "train_data": make_batches(12)}
    result = make_trainer("patch", "rollback", recovery=PATCH, **parts).fit()
    # That the state is ruined shows a step later; back at the start, each update is looked at before it counts.
    assert [incident.decision.action for incident in result.incidents] == ["rollback", "commit"]
    assert any("patch: div at" in reason for reason in result.incidents[1].decision.reasons)
    assert result.steps == 10
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert result.patches[0]["num_uses"] >= result.steps


def test_later_investigations_run_with_the_installed_patch(make_trainer, caplog):
    """A later fault is not blamed on the line that runs safely."""
    batches = with_zeros(make_batches(12, bad=(7,)), 3)
    result = make_trainer("patch", "skip", loss_fn=rooted, train_data=batches, recovery=PATCH).fit()
    assert [(i.step, i.decision.action) for i in result.incidents] == [(3, "commit"), (7, "skip")]
    assert [i.cause.label for i in result.incidents] == ["singular_gradient", "bad_input_data"]
    assert result.patches[0]["num_uses"] == 12 - 3  # what is only looked at does not count
    assert "forward wrote to" not in caplog.text  # nor is an update that is only tried a write of the step


def test_nothing_is_repaired_that_heal_does_not_allow(make_trainer):
    """Then a refused step is skipped, and the run is as if its batch had not been there."""
    batches = with_bad_samples(make_batches(10), (4, 2))
    states = []
    for data in (batches, batches[:4] + batches[5:]):
        torch.manual_seed(1)
        trainer = make_trainer(train_data=data, recovery={"heal": []})
        result = trainer.fit()
        assert (result.steps, result.islands, result.patches) == (9, {}, [])
        states.append(deep_state(trainer))
    assert_same(*states)
    parts = {"loss_fn": rooted, "train_data": with_zeros(make_batches(8), 3), "recovery": {"heal": []}}
    result = make_trainer("samples", "island", "patch", "skip", **parts).fit()
    assert [(i.step, i.decision.action) for i in result.incidents] == [(3, "skip")]
    assert result.patches == []


def test_a_repair_that_did_not_help_is_undone(make_island, check_stopped):
    """Two layers overflow at once, and the batch is refused for another reason too."""

    def loss_fn(model, batch):
        return float_mse(model, batch) * (math.nan if torch.is_grad_enabled() and loss_fn.is_bad else 1.0)

    loss_fn.is_bad = False
    trainer = make_island(3, loss_fn)
    bench_try = trainer.ladder.rungs[0].climb

    def climb(case, bench):
        loss_fn.is_bad = True  # the fault is another one than that which was investigated
        return bench_try(case, bench)

    trainer.ladder.rungs[0].climb = climb
    result = check_stopped(trainer, "island: it did not keep the step finite")
    assert result.islands == {}
