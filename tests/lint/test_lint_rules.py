"""Each rule on many spellings of its pattern, and on the same code written safely."""

from __future__ import annotations

import re
import textwrap

import pytest

from safetrain.lint import RULES, check_source

HEADER = """
import math
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import log, nn as layers
from torch.nn.utils import clip_grad_norm_
from torch.optim import Adam
"""


def codes(source: str) -> set[str]:
    return {finding.code for finding in check_source(HEADER + textwrap.dedent(source))}


def function(body: str, arguments: str = "x, y, mask, eps=1e-6, **kwargs") -> str:
    return f"def f({arguments}):\n" + textwrap.indent(textwrap.dedent(body), "    ")


@pytest.mark.parametrize("code", RULES)
def test_examples_of_every_rule(code: str) -> None:
    rule = RULES[code]
    assert {finding.code for finding in check_source(rule.bad)} == {code}
    assert not check_source(rule.good)


def test_all_examples_in_one_file() -> None:
    source, expected = "", []
    for code, rule in RULES.items():
        bad = re.sub(r"def (\w+)", rf"def \1_{code}", rule.bad)  # functions of one name would be taken for each other
        expected += [(source.count("\n") + finding.line, code) for finding in check_source(bad)]
        source += bad
    assert [(finding.line, finding.code) for finding in check_source(source)] == expected
    assert check_source("".join(rule.good for rule in RULES.values())) == []


# One row: a rule, and code in which it must find something and the other rules nothing.
BAD = [
    ("ST101", "return torch.log(torch.softmax(x, -1))"),
    ("ST101", "return x.softmax(-1).log()"),
    ("ST101", "return log(F.softmax(x, dim=1) )"),
    ("ST101", "return torch.log2(torch.sigmoid(x))"),
    ("ST101", "p = x.sigmoid()\nreturn y * p.log() + (1 - y) * (1 - p).log()"),
    ("ST101", "p = F.softmax(x, -1)\nq = p[:, 1].unsqueeze(0)\nreturn q.log()"),
    ("ST101", "p = torch.special.expit(x)\nreturn -torch.log(p).mean()"),
    ("ST101", "if y is not None:\n    p = torch.softmax(x, -1)\nelse:\n    p = torch.softmax(y, -1)\nreturn p.log()"),
    ("ST101", "soft = nn.Softmax(dim=-1)\nreturn torch.log(soft(x))"),
    ("ST101", "net = nn.Sequential(nn.Linear(2, 2), nn.Sigmoid())\nreturn torch.log(net(x))"),
    ("ST101", "ln = torch.log\nreturn ln(torch.sigmoid(x))"),
    ("ST101", "return sum(torch.log(torch.softmax(v, -1)).mean() for v in x)"),
    ("ST101", "g = lambda v: torch.log(v.softmax(-1))\nreturn g(x)"),
    ("ST101", "p = F.softmax(x, dim=-1)\nreturn -torch.log(p[torch.arange(len(y)), y]).mean()"),
    ("ST101", "p = x.sigmoid()\nreturn -(y * (1 - p) ** 2 * p.log() + (1 - y) * p**2 * (1 - p).log()).mean()"),
    ("ST102", "return x - torch.log(-torch.log(torch.rand(x.shape)))"),
    ("ST102", "return torch.log((x == y).float().mean(0).sum())"),
    ("ST102", "return -torch.log(torch.rand(3))"),
    ("ST102", "return torch.relu(x).log()"),
    ("ST102", "return x.norm(dim=-1).log()"),
    ("ST102", "return mask.sum().log()"),
    ("ST201", "return x / x.sum(-1, keepdim=True)"),
    ("ST201", "return x / x.mean()"),
    ("ST201", "return x / x.norm()"),
    ("ST201", "return 1 / x.norm()"),
    ("ST201", "return 1.0 / torch.linalg.vector_norm(x, dim=-1)"),
    ("ST201", "return (x - x.mean()) / x.std()"),
    ("ST201", "return x / x.var()"),
    ("ST201", "m, s = x.mean(0), x.std(0)\nreturn (x - m) / s"),
    ("ST201", "x /= x.norm()\nreturn x"),
    ("ST201", "return (x * mask).sum() / mask.sum()"),
    ("ST201", "n = (y != 0).sum()\nreturn x.sum() / n.float()"),
    ("ST201", "n = int((y > 0).sum())\nreturn x.sum() / n"),
    ("ST201", "return x.sum() / mask.sum().item()"),
    ("ST201", "return (x - x.min()) / (x.max() - x.min())"),
    ("ST201", "low, high = x.amin(), x.amax()\nreturn (x - low) / (high - low)"),
    ("ST201", "return 127 / x.abs().max()"),
    ("ST201", "return (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))"),
    ("ST201", "return 2 * (x * y).sum() / (x.sum() + y.sum())"),
    ("ST201", "return torch.div(x, torch.norm(x))"),
    ("ST201", "return x.div(x.sum())"),
    ("ST201", "return x * x.norm().reciprocal()"),
    ("ST201", "p = torch.sigmoid(x)\nreturn p / (1 - p)"),
    ("ST201", "return x / torch.bincount(y)"),
    ("ST201", "return x / torch.count_nonzero(y)"),
    ("ST201", "return (x - y).abs() / (x.abs() + y.abs())"),
    ("ST202", "return torch.sqrt(torch.sum(x ** 2))"),
    ("ST202", "return torch.sqrt((x ** 2).sum(-1))"),
    ("ST202", "return x.pow(2).sum(-1).sqrt()"),
    ("ST202", "return (x * x).sum() ** 0.5"),
    ("ST202", "return ((x - y) ** 2).sum() ** (1 / 2)"),
    ("ST202", "return x.square().mean().sqrt()"),
    ("ST202", "return x.var().sqrt()"),
    ("ST202", "mask_logits = F.linear(x, y)\nreturn mask_logits.pow(2).sum().sqrt()"),
    ("ST202", "return torch.sqrt(torch.var(x, dim=0))"),
    ("ST202", "return torch.sqrt(F.mse_loss(x, y))"),
    ("ST202", "d = x - y\nsq = d.pow(2)\ntotal = sq.sum(1)\nreturn total.sqrt()"),
    ("ST202", "return torch.sqrt(x[0] ** 2 + x[1] ** 2)"),
    ("ST202", "return torch.pow(x.pow(2).sum(), 0.5)"),
    ("ST202", "return torch.rsqrt(x.pow(2).mean(-1))"),
    ("ST202", "return torch.sqrt(sum(x ** 2))"),
    ("ST203", "return torch.relu(x) ** 0.5"),
    ("ST203", "return mask.sum().pow(-0.5)"),
    ("ST203", "return x.norm().sqrt()"),
    ("ST204", "return x[mask].mean()"),
    ("ST204", "return x[y > 0].mean()"),
    ("ST204", "pos = y == 1\nreturn x[pos].std()"),
    ("ST205", "return 1.0 / (1.0 + torch.exp(-x))"),
    ("ST251", "return torch.acos(x)"),
    ("ST251", "return x.asin()"),
    ("ST251", "return torch.acos(x.clamp(-1, 1))"),
    ("ST251", "return torch.acos(torch.clamp(x, min=-1.0, max=1.0))"),
    ("ST251", "return torch.atanh(torch.tanh(x))"),
    ("ST251", "return torch.arccos((x * y).sum(-1))"),
    ("ST301", "return torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)"),
    ("ST301", "e = x.exp()\nreturn e / e.sum(dim=-1, keepdim=True)"),
    ("ST301", "e = torch.exp(x / 0.1)\nreturn e / torch.sum(e)"),
    ("ST301", "e = torch.exp(x)\nreturn e / (e.sum() + 1e-8)"),
    ("ST302", "return torch.log(torch.exp(x).sum(-1))"),
    ("ST302", "return torch.log(torch.sum(torch.exp(x), dim=1))"),
    ("ST302", "return torch.log(1 + torch.exp(x))"),
    ("ST302", "return torch.log1p(x.exp())"),
    ("ST302", "return torch.exp(x).mean().log()"),
    ("ST303", "logvar = F.linear(x, y)\nreturn torch.exp(logvar)"),
    ("ST303", "mu, log_std = x.chunk(2)\nreturn log_std.exp()"),
    ("ST401", "return torch.where(x > 0, torch.log(x), torch.zeros_like(x))"),
    ("ST401", "return torch.where(mask, torch.sqrt(x), 0)"),
    ("ST401", "return torch.where(y != 0, x / y, 0.0)"),
    ("ST401", "ok = y.abs() > 1e-6\nq = x / y\nreturn torch.where(ok, q, torch.zeros_like(q))"),
    ("ST401", "return (x / y).masked_fill(y == 0, 0.0)"),
    ("ST401", "q = x.log()\nreturn torch.where(torch.isinf(q), 0.0, q)"),
    ("ST401", "return torch.log(x).where(x > 0, 0.0)"),
    ("ST401", "cond = kwargs['c']\nreturn torch.where(y, torch.log(x), torch.tensor(0.0))"),
    ("ST401", "return torch.where(x < 10, torch.exp(x), x)"),
    ("ST401", "q = x / y\nq[y == 0] = 0\nreturn q"),
    ("ST402", "return (x / y)[y != 0].sum()"),
    ("ST402", "q = torch.log(x)\nreturn q[torch.isfinite(q)].sum()"),
    ("ST402", "return (torch.log(x) * (x > 0)).sum()"),
    ("ST403", "loss = F.mse_loss(x, y)\nreturn torch.nan_to_num(loss)"),
    ("ST403", "return torch.log(x).nan_to_num(0.0)"),
    ("ST403", "return torch.nanmean((x - y) ** 2)"),
    ("ST404", "return x.masked_fill(mask, -1e9)"),
    ("ST404", "return x.masked_fill_(mask == 0, value=-1e10)"),
    ("ST404", "return torch.where(mask, x, -1e9)"),
    ("ST404", "return x + (1.0 - mask) * -1e9"),
    ("ST404", "return x + (1.0 - mask.to(x.dtype)) * -100000.0"),
    ("ST404", "x = x.half()\nreturn x.masked_fill(mask, -1e9)"),
    ("ST404", "x[mask] = -1e9\nreturn x"),
    ("ST404", "return torch.where(mask, x, torch.tensor(-1e9, dtype=torch.half))"),
    ("ST405", "return F.softmax(x.masked_fill(mask, float('-inf')), dim=-1)"),
    ("ST405", "x = x.masked_fill(mask == 0, -torch.inf)\nreturn x.softmax(-1) @ y"),
    ("ST405", "x = x.masked_fill(mask == 0, -math.inf)\nreturn torch.softmax(x / 8, dim=-1)"),
    ("ST405", "x[mask] = float('-inf')\nreturn torch.softmax(x, -1)"),
    ("ST405", "x = torch.where(mask, x, float('-inf'))\nreturn torch.log_softmax(x, -1)"),
    ("ST405", "b = torch.zeros(3).masked_fill(mask, float('-inf'))\nreturn torch.softmax(x + b, -1).masked_fill(mask, 0)"),
    ("ST406", "return x + (1 - mask) * float('-inf')"),
    ("ST406", "return mask * -math.inf"),
    ("ST451", "return F.binary_cross_entropy(torch.sigmoid(x), y)"),
    ("ST451", "return nn.BCELoss()(x.sigmoid(), y)"),
    ("ST451", "p = torch.sigmoid(x)\ncriterion = nn.BCELoss()\nreturn criterion(p.squeeze(1), y)"),
    ("ST452", "return F.cross_entropy(x.softmax(-1), y)"),
    ("ST452", "return nn.BCEWithLogitsLoss()(torch.sigmoid(x), y)"),
    ("ST452", "return F.nll_loss(torch.softmax(x, 1), y)"),
    ("ST501", "with torch.autocast('cuda'):\n    return F.cross_entropy(kwargs['m'](x), y)"),
    ("ST501", "with torch.cuda.amp.autocast():\n    out = kwargs['m'](x)\n    loss = nn.MSELoss()(out, y)\nreturn loss"),
    ("ST501", "m, criterion = kwargs['m'], kwargs['c']\nwith torch.amp.autocast('cuda', dtype=torch.bfloat16):\n    loss = criterion(m(x), y)\nreturn loss"),
    ("ST501", "m = kwargs['m']\nwith torch.autocast('cuda'):\n    loss = ((m(x) - y) ** 2).mean()\nreturn loss"),
    ("ST501", "m = kwargs['m']\nwith torch.autocast('cuda'):\n    return m.criterion(m(x), y)"),
    ("ST502", "x = x.half()\nreturn torch.log(x + 1e-12)"),
    ("ST502", "x = x.to(torch.float16)\nreturn y / (x + 1e-8)"),
    ("ST502", "with torch.autocast('cuda', dtype=torch.float16):\n    return torch.log(x.softmax(-1) + 1e-12)"),
    ("ST502", "x = x.half()\nreturn torch.log(x.clamp(min=1e-10))"),
    ("ST502", "with torch.autocast('cuda', torch.float16):\n    h = torch.matmul(x, y)\n    return h / (h.norm() + 1e-8)"),
    ("ST503", "model = nn.Linear(2, 2)\nmodel = model.half()\nreturn Adam(model.parameters())"),
    ("ST503", "model = nn.Linear(2, 2).to(torch.float16)\nreturn torch.optim.AdamW(model.parameters(), lr=1e-3)"),
    ("ST601", "return x == float('nan')"),
    ("ST601", "if x.item() != math.nan:\n    return y"),
    ("ST601", "return (x == torch.nan).any()"),
]  # fmt: skip

# The same patterns written safely, and similar code that is no problem: nothing may be found.
GOOD = [
    "return torch.log(torch.softmax(x, -1) + eps)",
    "return torch.log(x)",
    "return math.log(mask.sum())",
    "return torch.log(x.clamp(min=1e-6))",
    "return torch.log(x.clamp_min(eps))",
    "return torch.log(torch.clamp(torch.sigmoid(x), 1e-6, 1 - 1e-6))",
    "return torch.log(torch.maximum(x.norm(), torch.tensor(1e-6)))",
    "return torch.log1p(torch.relu(x))",
    "return torch.log(1 + x.pow(2))",
    "return F.log_softmax(x, -1)",
    "p = F.log_softmax(x, dim=-1)\nreturn -p[torch.arange(len(y)), y].mean()",
    "p = x.sigmoid()\nreturn -(y * (1 - p) ** 2 * F.logsigmoid(x) + (1 - y) * p**2 * F.logsigmoid(-x)).mean()",
    "return x - torch.log(-torch.log(torch.rand(x.shape).clamp(1e-6, 1 - 1e-6)))",
    "return F.relu(x).clamp(min=1e-4) ** 0.45",
    "return torch.zeros_like(x).masked_fill(mask == 0, torch.finfo(x.dtype).min)",
    "logvar = F.linear(x, y).clamp(-30, 20)\nreturn x + torch.randn_like(x) * torch.exp(0.5 * logvar)",
    "kwargs['logger'].log('loss', x)",
    "return x / y",
    "return x / len(x)",
    "return x.sum() / x.numel()",
    "return x.sum() / x.size(0)",
    "return x / (x.norm() + 1e-6)",
    "return x / (x.norm(dim=-1, keepdim=True) + eps)",
    "return x / x.norm().clamp(min=1e-6)",
    "return x / x.norm().clamp_min(kwargs['floor'])",
    "return x / torch.clamp(x.norm(), min=eps)",
    "return x / max(mask.sum(), 1)",
    "return x / torch.max(mask.sum(), torch.ones(()))",
    "n = mask.sum()\nif n == 0:\n    return x.sum() * 0\nreturn x.sum() / n",
    "n = mask.sum()\nif n > 0:\n    return x.sum() / n\nreturn x.sum() * 0",
    "if mask.any():\n    return x.sum() / mask.sum()",
    "if not mask.any():\n    return 0\nreturn x[mask].mean()",
    "n = mask.sum()\nreturn x.sum() / n if n else x.sum()",
    "n = mask.sum() or 1\nreturn x.sum() / n",
    "n = mask.sum()\nassert n > 0\nreturn x / n",
    "n = mask.sum()\nn[n == 0] = 1\nreturn x / n",
    "n = mask.sum()\nn.clamp_(min=1)\nreturn x / n",
    "n = mask.sum(1)\nn = torch.where(n == 0, 1, n)\nreturn x / n",
    "n = mask.sum(1).masked_fill(y == 0, 1)\nreturn x / n",
    "n = mask.sum()\nn += 1e-6\nreturn x / n",
    "n = mask.sum()\nn.add_(1e-6)\nreturn x / n",
    "return x / (x.std() + torch.finfo(x.dtype).eps)",
    "return x / (1 + x.norm())",
    "return x / (x.pow(2).sum() + y.pow(2).sum() + 1e-6)",
    "return x / (1 + x.exp())[0].detach().clamp(min=1)",
    "u = torch.randn(3)\nreturn u / u.norm()",
    "p = torch.softmax(x, -1).topk(2).values\nreturn p / p.sum(-1, keepdim=True)",
    "return F.normalize(x, dim=-1)",
    "return torch.sqrt(x.pow(2).sum() + 1e-8)",
    "return (x.pow(2).sum() + eps).sqrt()",
    "return torch.sqrt(x.var(0, unbiased=False) + eps)",
    "return x.norm(dim=-1)",
    "return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)",
    "with torch.no_grad():\n    return x.pow(2).sum().sqrt()",
    "return x.detach().pow(2).sum().sqrt()",
    "return x.pow(2).sum().sqrt().item()",
    "return math.sqrt(sum(v ** 2 for v in x))",
    "return x * y.size(-1) ** -0.5",
    "return x ** 2",
    "return x[mask].sum()",
    "return x[mask].mean(-1)",
    "return x[0].mean()",
    "return x[kwargs['selected_idx']].mean()",
    "return torch.sigmoid(x)",
    "return torch.acos(x.clamp(-1 + 1e-6, 1 - 1e-6))",
    "return torch.acos(x.clamp(-1 + eps, 1 - eps))",
    "return torch.acos(torch.clamp(x, -0.9999, 0.9999))",
    "with torch.no_grad():\n    return torch.acos(x.clamp(-1, 1))",
    "return math.acos(0.5)",
    "m = x.max(-1, keepdim=True).values\ne = torch.exp(x - m)\nreturn e / e.sum(-1, keepdim=True)",
    "e = (x - x.amax(-1, keepdim=True)).exp()\nreturn e / e.sum(-1, keepdim=True)",
    "m = x.max()\nreturn m + torch.log(torch.exp(x - m).sum())",
    "e = torch.exp(-x.pow(2) / 2)\nreturn e / (e.sum() + 1e-8)",
    "return torch.exp(x)",
    "logvar = F.linear(x, y).clamp(-10, 10)\nreturn torch.exp(logvar)",
    "ok = x > 0\nsafe = torch.where(ok, x, 1.0)\nreturn torch.where(ok, torch.log(safe), 0.0)",
    "ok = y != 0\nreturn torch.where(ok, x / torch.where(ok, y, torch.ones_like(y)), 0)",
    "return torch.where(x > 0, x, torch.log(x.clamp(min=1e-6)))",
    "return torch.where(x < 10, torch.exp(x.clamp(max=10)), x)",
    "q = x.clone()\nq[y == 0] = 0\nreturn q",
    "with torch.no_grad():\n    return torch.where(x > 0, torch.log(x), 0)",
    "ok = y != 0\nreturn (x[ok] / y[ok]).sum()",
    "return (F.log_softmax(x, -1) * mask).sum()",
    "return torch.nan_to_num(x)",
    "return x.masked_fill(mask, torch.finfo(x.dtype).min)",
    "return x.masked_fill(mask, -1e4)",
    "return x.float().masked_fill(mask, -1e9)",
    "x = x.masked_fill(mask, torch.finfo(x.dtype).min)\nreturn x.softmax(-1)",
    "causal = torch.triu(torch.ones(3, 3), 1).bool()\nreturn x.masked_fill(causal, float('-inf')).softmax(-1)",
    "a = x.masked_fill(mask, float('-inf')).softmax(-1)\nreturn a.masked_fill(mask, 0.0)",
    "a = torch.softmax(x.masked_fill(mask, float('-inf')), -1)\nreturn torch.nan_to_num(a)",
    "return F.binary_cross_entropy_with_logits(x, y)",
    "return F.binary_cross_entropy(x, y)",
    "return F.cross_entropy(x, y.softmax(-1))",
    "return F.nll_loss(F.log_softmax(x, 1), y)",
    "return F.kl_div(F.log_softmax(x, 1), torch.softmax(y, 1))",
    "with torch.autocast('cuda'):\n    out = kwargs['m'](x)\nreturn F.cross_entropy(out, y)",
    "with torch.autocast('cuda'):\n    return F.cross_entropy(kwargs['m'](x).float(), y)",
    "with torch.autocast('cuda'):\n    return F.cross_entropy(kwargs['m'](x).to(torch.float32), y)",
    "with torch.autocast('cuda', enabled=False):\n    return F.cross_entropy(x, y)",
    "m = kwargs['m']\nwith torch.autocast('cuda'):\n    return m.loss_fn(model, x)",
    "if abs(y) < 1e-6:\n    return x\nq = x / y\nreturn torch.where(torch.isinf(q), 0.0, q)",
    "x = x.half()\nreturn torch.log(x + 1e-4)",
    "x = x.half()\nreturn torch.log(x.float() + 1e-12)",
    "x = x.bfloat16()\nreturn torch.log(x + 1e-12)",
    "with torch.autocast('cuda', dtype=torch.bfloat16):\n    return torch.log(x + 1e-12)",
    "with torch.autocast('cpu'):\n    return torch.log(x + 1e-12)",
    "return torch.log(x + 1e-12)",
    "model = nn.Linear(2, 2).half()\nreturn Adam(model.parameters(), eps=1e-4)",
    "return torch.isnan(x).any()",
    "return x == float('inf')",
]  # fmt: skip


@pytest.mark.parametrize(("code", "body"), BAD, ids=range(len(BAD)))
def test_found(code: str, body: str) -> None:
    assert codes(function(body)) == {code}


@pytest.mark.parametrize("body", GOOD)
def test_not_found(body: str) -> None:
    assert codes(function(body)) == set()


def test_every_value_rule_has_rows() -> None:
    assert {code for code, _ in BAD} == {code for code, rule in RULES.items() if rule.check is not None}


# --- across functions -------------------------------------------------------------------------------------------------


def test_attributes_of_a_module_are_known_in_its_other_methods() -> None:
    source = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.softmax, self.criterion = nn.Softmax(dim=-1), nn.BCELoss()
            self.register_buffer("tri", torch.tril(torch.ones(8, 8)))

        def forward(self, x):
            return torch.log(self.softmax(x))

        def loss(self, x, y):
            return self.criterion(torch.sigmoid(x), y)

        def attend_causally(self, x):
            return x.masked_fill(self.tri == 0, float("-inf")).softmax(-1)

        def attend(self, x, padding_mask):
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            return self.softmax(scores.masked_fill(padding_mask[:, None], float("-inf"))) @ v

        def attend_safely(self, x, padding_mask):
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            return self.softmax(scores.masked_fill(padding_mask[:, None], torch.finfo(scores.dtype).min)) @ v
    """
    assert [finding.code for finding in check_source(HEADER + textwrap.dedent(source))] == ["ST101", "ST451", "ST405"]


def test_globals_and_import_aliases_are_known() -> None:
    source = """
    from torch.nn import functional as funcs
    import torch as t
    CRITERION = nn.BCELoss()
    SMALL = 1e-6
    def f(x, y):
        return CRITERION(funcs.sigmoid(x), y) + t.log(x.norm() + SMALL)
    def g(x):
        return t.log(funcs.softmax(x, -1))
    """
    assert codes(source) == {"ST101", "ST451"}


def test_a_shadowed_name_is_not_torchs_function() -> None:
    assert codes("def f(x, log):\n    return log(torch.softmax(x, -1))\n") == set()


def test_files_of_other_array_libraries_are_skipped() -> None:
    body = "def f(x):\n    return x / x.sum()\n"
    assert check_source("import torch\n" + body)
    assert check_source(body)
    assert not check_source("import numpy as np\n" + body)
    assert check_source("import numpy as np\nimport torch\n" + body)


def test_numpy_values_are_ignored() -> None:
    assert (
        codes("import numpy as np\ndef f(x):\n    w = np.exp(x)\n    return w / w.sum() + np.log(np.sum(x))\n") == set()
    )


def test_no_grad_decorators() -> None:
    assert codes("@torch.no_grad()\ndef f(x):\n    return x.pow(2).sum().sqrt()\n") == set()
    assert codes("@torch.inference_mode()\ndef f(x):\n    return x.pow(2).sum().sqrt()\n") == set()


def test_line_and_column() -> None:
    (finding,) = check_source("import torch\n\ndef f(x):\n    return 3 + torch.log(torch.softmax(x, -1))\n", "a.py")
    assert (finding.path, finding.line, finding.column, finding.code) == ("a.py", 4, 16, "ST101")
    first, why, safe = finding.render().splitlines()
    assert first == "a.py:4:16: ST101 log of softmax"
    assert "NaN" in why
    assert "safetrain.safe.log_softmax" in safe
