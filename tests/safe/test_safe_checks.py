"""check_tensor and check_gradients report what is non-finite, how many values and where; otherwise nothing."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from safetrain import NonFiniteError, UsageError, safe
from safetrain.cli.main import run

NAN, INF = math.nan, math.inf


def test_a_finite_tensor_comes_back_as_itself():
    for t in (torch.ones(2, requires_grad=True), torch.zeros(0), torch.tensor(3), torch.tensor([True])):
        assert safe.check_tensor(t, "t") is t
    extremes = torch.tensor([torch.finfo(torch.float32).max, torch.finfo(torch.float32).min])
    assert safe.check_tensor(extremes) is extremes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_error_has_counts_shape_dtype_index_and_range(dtype):
    t = torch.tensor([[1.5, -2.0, 0.0], [4.0, NAN, INF], [-INF, NAN, 1.0]], dtype=dtype)
    with pytest.raises(NonFiniteError) as caught:
        safe.check_tensor(t, "logits")
    message = str(caught.value)
    for part in (
        "logits",
        "2 NaN and 1 +Inf and 1 -Inf of 9 values",
        "shape (3, 3)",
        str(dtype).removeprefix("torch."),
        "first bad index (1, 1) (nan)",
        "finite values from -2 to 4",
        "To fix: ",
    ):
        assert part in message
    assert isinstance(caught.value, FloatingPointError)


def test_no_finite_values_scalars_and_float8():
    with pytest.raises(NonFiniteError, match=r"1 \+Inf of 1 values, shape \(\).*\(\) \(inf\), no finite values"):
        safe.check_tensor(torch.tensor(INF))
    with pytest.raises(NonFiniteError, match=r"1 NaN of 2 values.*float8_e4m3fn"):
        safe.check_tensor(torch.tensor([1.0, NAN]).to(torch.float8_e4m3fn))


def test_complex_tensors_are_checked_in_both_parts():
    healthy = torch.tensor([3 + 4j])
    assert safe.check_tensor(healthy.conj()) is not None
    with pytest.raises(
        NonFiniteError, match=r"1 NaN of 2 values, shape \(2,\), complex64, first bad index \(1,\).*magnitudes from 5"
    ):
        safe.check_tensor(torch.tensor([3 + 4j, complex(0, NAN)]))


def test_sparse_tensors_report_the_index_in_the_tensor():
    sparse = torch.sparse_coo_tensor([[4, 7]], torch.tensor([[1.0, 2.0], [3.0, NAN]]), (9, 2), check_invariants=True)
    with pytest.raises(NonFiniteError, match=r"1 NaN of 4 values, shape \(9, 2\).*first bad index \(7, 1\)"):
        safe.check_tensor(sparse)
    assert safe.check_tensor(torch.eye(3).to_sparse()).is_sparse


def test_non_tensors_are_refused():
    with pytest.raises(UsageError, match=r"batch is dict.*To fix"):
        safe.check_tensor({"x": torch.ones(1)}, "batch")


def test_a_failed_check_exits_like_an_exception_of_user_code(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("checked_loss.py").write_text(
        "import torch\n"
        "from safetrain import safe\n"
        "def data(): return [torch.full((2, 3), torch.inf)]\n"
        "def loss(model, batch): return model(safe.check_tensor(batch, 'the batch')).sum()\n"
    )
    Path("c.yaml").write_text(
        "model: {_target_: torch.nn.Linear, in_features: 3, out_features: 1}\n"
        "loss: {_target_: './checked_loss.py:loss'}\n"
        "data: {train: {_target_: './checked_loss.py:data'}}\n"
        "loop: {max_steps: 1, device: cpu}\n"
    )
    assert run(["fit", "c.yaml", "--out", "out", "-q"]) == 1
    text = capfd.readouterr().err
    assert "Traceback" in text
    assert "NonFiniteError: the batch is not finite: 6 +Inf of 6 values" in text


def model_with_gradients():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 1))
    model[2].requires_grad_(False)
    model[1](model[0](torch.ones(1, 2))).sum().backward()
    return model


def test_healthy_gradients_give_an_empty_list_and_frozen_parameters_do_not_count():
    assert safe.check_gradients(model_with_gradients()) == []


def test_bad_gradients_are_named_and_nothing_is_changed():
    model = model_with_gradients()
    model[0].weight.grad[1, 0] = NAN
    model[1].bias.grad[0] = -INF
    model[0].bias.grad = None
    before = [p.grad for p in model.parameters()]
    with pytest.raises(NonFiniteError) as caught:
        safe.check_gradients(model)
    message = str(caught.value)
    assert "2 of 3 gradients" in message
    assert "0.weight: 1 NaN of 6 values" in message
    assert "(1, 0)" in message
    assert "1.bias: 1 -Inf of 1 values" in message
    assert "1.weight" not in message
    problems = safe.check_gradients(model, raise_on_bad=False)
    assert [(p.parameter, p.kind) for p in problems] == [
        ("0.weight", "non-finite"),
        ("1.bias", "non-finite"),
        ("0.bias", "missing"),
    ]
    assert all(now is then for now, then in zip((p.grad for p in model.parameters()), before, strict=True))


def test_a_missing_gradient_alone_does_not_raise_but_none_at_all_does():
    model = model_with_gradients()
    model[0].bias.grad = None
    assert [str(p) for p in safe.check_gradients(model)] == ["0.bias: no gradient"]
    model.zero_grad()
    with pytest.raises(UsageError, match=r"call loss\.backward\(\)"):
        safe.check_gradients(model)
    assert len(safe.check_gradients(model, raise_on_bad=False)) == 4
    assert safe.check_gradients(nn.ReLU()) == []


def test_a_long_list_is_truncated_in_the_message_only():
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(8)))
    for p in model.parameters():
        p.grad = torch.full_like(p, NAN)
    with pytest.raises(NonFiniteError, match="and 6 more"):
        safe.check_gradients(model)
    assert len(safe.check_gradients(model, raise_on_bad=False)) == 16


def test_sparse_gradients_are_checked_and_left_uncoalesced():
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([3, 3])).sum().backward()
    gradient = table.weight.grad
    assert safe.check_gradients(table) == []
    assert table.weight.grad is gradient
    assert not gradient.is_coalesced()
    (table(torch.tensor([3])) * INF).sum().backward()
    with pytest.raises(NonFiniteError, match=r"weight: .*first bad index \(3, 0\)"):
        safe.check_gradients(table)
