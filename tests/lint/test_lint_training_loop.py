"""The order of calls in training loops: short loops, with what must be found in each."""

from __future__ import annotations

import textwrap

import pytest

from safetrain.lint import check_source

FORWARD = "loss = F.mse_loss(model(x), y)"
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


def loop(*statements: str) -> str:
    return "\n".join(["for i, (x, y) in enumerate(data):", *(textwrap.indent(line, "    ") for line in statements)])


def codes(body: str, rest: str = "") -> list[str]:
    imports = "import torch\nimport torch.nn.functional as F\n"
    train = "def train(model, data, optimizer, scaler, accelerator, n):\n" + textwrap.indent(body, "    ")
    return [finding.code for finding in check_source(f"{imports}{train}\n{textwrap.dedent(rest)}")]


STEP = "if (i + 1) % n == 0:\n    optimizer.step()\n    optimizer.zero_grad()"
ROWS = [
    ([], loop("optimizer.zero_grad()", FORWARD, "loss.backward()", CLIP, "optimizer.step()")),
    ([], loop(FORWARD, "loss.backward()", "optimizer.step()", "model.zero_grad()")),
    ([], loop("optimizer.zero_grad(set_to_none=True)", FORWARD, "accelerator.backward(loss)", "optimizer.step()")),
    ([], loop("with accelerator.accumulate(model):", "    loss = model(x)", "    accelerator.backward(loss)",
              "    accelerator.clip_grad_norm_(model.parameters(), 1.0)", "    optimizer.step()", "    optimizer.zero_grad()")),
    ([], loop(FORWARD, "optimizer.zero_grad()", "scaler.scale(loss).backward()", "scaler.unscale_(optimizer)", CLIP,
              "scaler.step(optimizer)", "scaler.update()")),
    ([], loop(FORWARD, "optimizer.zero_grad()", "if scaler:", "    scaler.scale(loss).backward()", "    scaler.unscale_(optimizer)",
              "else:", "    loss.backward()", CLIP, "scaler.step(optimizer)")),
    ([], loop(FORWARD, "optimizer.zero_grad()", "if scaler:", "    scaler.scale(loss).backward()", "    scaler.step(optimizer)",
              "else:", "    loss.backward()", f"    {CLIP}", "    optimizer.step()")),
    ([], loop("optimizer.zero_grad()", FORWARD, "scaler.scale(loss).backward()", "scaler.step(optimizer)", "scaler.update()")),
    ([], loop(FORWARD, "(loss / n).backward()", STEP)),
    ([], loop(FORWARD, "loss = loss / n", "loss.backward()", STEP)),
    ([], loop(FORWARD, "loss /= n", "loss.backward()", STEP)),
    ([], loop(FORWARD, "scaler.scale(loss / n).backward()", STEP.replace("optimizer.step()", "scaler.step(optimizer)"))),
    ([], loop(FORWARD, "optimizer.zero_grad()", "loss.backward()", "optimizer.step()", "if i % 100 == 0:\n    print(loss)")),
    ([], loop("d_optimizer.zero_grad()", "model(x).mean().backward()", "d_optimizer.step()", "g_optimizer.zero_grad()",
              "model(y).mean().backward()", "g_optimizer.step()")),
    ([], "loss = model(data)\nloss.backward()\n" + CLIP),
    ([], "env.step(1)\nscheduler.step()\nmodel(data).backward()"),
    ([], loop("opt = torch.optim.SGD([x], lr=1)", "model(x).backward()", "opt.step()")),
    (["ST701"], loop("optimizer.zero_grad()", FORWARD, CLIP, "loss.backward()", "optimizer.step()")),
    (["ST701"], loop("optimizer.zero_grad()", "torch.nn.utils.clip_grad_value_(model.parameters(), 1)", "model(x).backward()",
                     "optimizer.step()")),
    (["ST702"], loop("optimizer.zero_grad()", FORWARD, "scaler.scale(loss).backward()", CLIP, "scaler.unscale_(optimizer)",
                     "scaler.step(optimizer)")),
    (["ST702"], loop(FORWARD, "scaler.scale(loss / n).backward()", "if i % n == 0:", f"    {CLIP}", "    scaler.step(optimizer)",
                     "    optimizer.zero_grad()")),
    (["ST703"], loop(FORWARD, "loss.backward()", "optimizer.step()")),
    (["ST703"], loop(FORWARD, "scaler.scale(loss).backward()", "scaler.step(optimizer)", "scaler.update()")),
    (["ST703"], "for epoch in range(3):\n" + textwrap.indent(loop(FORWARD, "loss.backward()", "optimizer.step()"), "    ")),
    (["ST703"], "loss = F.mse_loss(model(data), n)\nloss.backward()\noptimizer.step()"),
    (["ST703", "ST704"], loop(FORWARD, "loss.backward()", "if (i + 1) % n == 0:\n    optimizer.step()")),
    (["ST704"], loop(FORWARD, "loss.backward()", STEP)),
    (["ST704"], loop(FORWARD, "scaler.scale(loss).backward()", STEP.replace("optimizer.step()", "scaler.step(optimizer)"))),
    (["ST704"], loop(FORWARD, "loss.backward()", "if (i + 1) % n != 0:\n    continue", "optimizer.step()", "optimizer.zero_grad()")),
    (["ST705"], loop("optimizer.zero_grad()", FORWARD, "optimizer.step()", "loss.backward()")),
    (["ST706"], loop(FORWARD, "loss.backward()", "optimizer.zero_grad()", "optimizer.step()")),
    (["ST707"], loop("optimizer.zero_grad()", FORWARD, "scaler.scale(loss).backward()", "optimizer.step()")),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "body"), ROWS)
def test_order_of_calls(expected: list[str], body: str) -> None:
    assert codes(body) == expected


def test_gradients_cleared_by_a_helper_or_by_the_caller_count() -> None:
    body = "loss = model(data).mean()\nloss.backward()\noptimizer.step()"
    assert codes(body) == ["ST703"]
    caller = "def epoch(model, data, optimizer):\n    for batch in data:\n        optimizer.zero_grad()\n        train(model, batch)\n"
    assert codes(body, caller) == []
    assert codes(body + "\nclear(model)", "def clear(model):\n    model.zero_grad()\n") == []


def test_a_part_of_a_step_is_not_judged_alone() -> None:
    source = "import torch\ndef backward_and_step(loss, optimizer):\n    loss.backward()\n    optimizer.step()\n"
    assert check_source(source) == []
