"""ST4xx: bad values masked too late, and masks that introduce bad values."""

from __future__ import annotations

import ast
from math import inf

from ..context import Context
from ..operations import singular_operand
from ..rule import value_rule
from ..value import HALF_MAX, Value
from .evidence import needs_gradient

NAMES = {"div": "a division", "pow": "a power", "sqrt": "a square root", "reciprocal": "a reciprocal"}


def hidden(branch: Value, condition: Value, context: Context) -> Value | None:
    """The operation in `branch` whose bad results `condition` masks, judged by the names that both use."""
    for operation in branch.unsafe:
        operand = singular_operand(operation)
        if operand is None or operand.names & context.tested:
            continue
        if _condition_names(condition) & (operand.spelling | branch.labels):
            return operation
    return None


def _masked_at_once(branch: Value, condition: Value, context: Context) -> Value | None:
    """where(mask, log(x), 0): the mask is unknown, but it is applied directly to an operation with a singularity."""
    operation = branch.unsafe[-1] if branch.unsafe and branch.unsafe[-1].node is branch.node else None
    operand = singular_operand(operation) if operation is not None else None
    if operand is None or condition.op not in ("mask", "name") or operand.op not in ("name", "call", "element"):
        return None
    return None if operand.names & context.tested else operation


def _condition_names(condition: Value) -> frozenset[str]:
    """The names in a condition, or in each part of a combined one."""
    if condition.op in ("logical_and", "logical_or", "logical_not", "isnan", "isfinite", "isinf"):
        return condition.surface.union(*(_condition_names(arg) for arg in condition.args))
    return condition.surface


def _named(operation: Value) -> str:
    return NAMES.get(operation.op, operation.op)


@value_rule(
    "ST401",
    "where or masked_fill over an unsafe branch",
    on=("where", "masked_fill"),
    why="Both branches are computed and differentiated: the gradient of the branch not taken is 0 * inf = NaN.",
    safe="Make the input safe, not the output: x_ok = where(ok, x, 1); where(ok, log(x_ok), 0). Or safetrain.safe.log / div / sqrt.",
    bad="""
        import torch

        def log_or_zero(x):
            return torch.where(x > 0, torch.log(x), torch.zeros_like(x))
        """,
    good="""
        import torch

        def log_or_zero(x):
            positive = x > 0
            return torch.where(positive, torch.log(torch.where(positive, x, 1.0)), 0.0)
        """,
)
def where_over_unsafe(value: Value, context: Context) -> str | None:
    if context.no_grad or len(value.args) < 2:
        return None
    condition = value.args[0] if value.op == "where" else value.args[1]
    for branch in value.args[1:3] if value.op == "where" else value.args[:1]:
        what = (
            (hidden(branch, condition, context) or _masked_at_once(branch, condition, context)) if branch.grad else None
        )
        if what:
            return f"{value.op} hides {_named(what)} in the forward pass only; the gradient is NaN where it is masked"
    return None


@value_rule(
    "ST402",
    "boolean index or mask product after an unsafe operation",
    on=("boolean_index", "mul"),
    why="Selecting the good elements afterwards does not undo the bad ones: their gradient is 0 * inf = NaN, and NaN * 0 is NaN.",
    safe="Select first, then compute: x[ok].log(), a[ok] / b[ok]. Or safetrain.safe.log / div / sqrt.",
    bad="""
        def relative_error(prediction, target):
            error = (prediction - target).abs() / target
            return error[target != 0].sum()
        """,
    good="""
        def relative_error(prediction, target):
            known = target != 0
            return ((prediction[known] - target[known]).abs() / target[known]).sum()
        """,
)
def select_after_unsafe(value: Value, context: Context) -> str | None:
    if context.no_grad or not value.args:
        return None
    if value.op == "boolean_index":
        what = hidden(value.args[0], value.args[1], context) if value.args[0].grad else None
        return f"a boolean index after {_named(what)}: its gradient is NaN where it was not selected" if what else None
    for one, other in (value.args, value.args[::-1]):
        if other.is_mask and one.grad and (what := hidden(one, other, context)):
            return f"a mask multiplied after {_named(what)}: NaN * 0 is NaN"
    return None


@value_rule(
    "ST403",
    "nan_to_num or nanmean on a loss or after an unsafe operation",
    on=("nan_to_num", "nanmean", "nansum"),
    why="It changes the value, not the gradient: the NaN reaches the weights unnoticed.",
    safe="Remove the cause instead: safetrain.safe.log / div / sqrt before, or let safetrain skip the step and name the operation.",
    bad="""
        import torch

        def training_loss(loss):
            return torch.nan_to_num(loss)
        """,
    good="""
        def training_loss(loss):
            return loss
        """,
)
def hides_nan(value: Value, context: Context) -> str | None:
    source = value.args[0]
    if not needs_gradient(source, context):
        return None
    if source.unsafe:
        return f"{value.op} after {_named(source.unsafe[-1])}: the gradient stays NaN"
    if value.op in ("nanmean", "nansum") and source.op in ("square", "abs", "sub"):
        return f"{value.op} over errors: the gradient of each NaN it leaves out is 0 * NaN = NaN"
    if any("loss" in name.lower() for name in _names_in(source)):
        return f"{value.op} on a loss hides that it is NaN; the gradient stays NaN"
    return None


def _names_in(value: Value) -> set[str]:
    found = [node for node in ast.walk(value.node or ast.Pass()) if isinstance(node, (ast.Name, ast.Attribute))]
    return {node.id if isinstance(node, ast.Name) else node.attr for node in found}


@value_rule(
    "ST404",
    "mask constant that does not fit in half precision",
    on=("masked_fill", "where", "mul", "full"),
    why="fp16 ends at 65504: -1e9 becomes -inf or raises, and a row of only -inf is NaN after softmax.",
    safe="torch.finfo(scores.dtype).min, scores.float() before, or safetrain.safe.softmax(scores, mask=mask).",
    bad="""
        def mask_scores(scores, mask):
            return scores.masked_fill(mask == 0, -1e9)
        """,
    good="""
        import torch

        def mask_scores(scores, mask):
            return scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
        """,
)
def mask_too_large(value: Value, context: Context) -> str | None:
    if any(arg.dtype in ("float", "bf16", "int") for arg in value.args) or context.no_grad:
        return None
    constants = [arg.constant for arg in (*value.args, *value.kwargs.values()) if arg.constant is not None]
    large = next((constant for constant in constants if -inf < constant < -HALF_MAX), None)
    if large is None:
        return None
    if value.op == "mul" and not any(_is_mask_like(arg) for arg in value.args):
        return None
    if value.op == "full" and not (
        context.autocast == "half" or value.kwargs.get("dtype", value).ref in ("torch.float16", "torch.half")
    ):
        return None
    return f"the mask constant {large:g} does not fit in half precision"


def _is_mask_like(value: Value) -> bool:
    return value.is_mask or (value.op in ("sub", "neg") and any(_is_mask_like(arg) for arg in value.args))


@value_rule(
    "ST405",
    "softmax over scores masked with -inf",
    on=("softmax", "log_softmax", "logsumexp"),
    why="A row in which everything is masked (an all-padding sequence) is softmax of only -inf: 0 / 0 = NaN.",
    safe="safetrain.safe.softmax(scores, mask=mask), F.scaled_dot_product_attention, or torch.finfo(scores.dtype).min for the mask.",
    bad="""
        def attention(scores, padding_mask):
            scores = scores.masked_fill(padding_mask, float("-inf"))
            return scores.softmax(-1)
        """,
    good="""
        import torch

        def attention(scores, padding_mask):
            scores = scores.masked_fill(padding_mask, torch.finfo(scores.dtype).min)
            return scores.softmax(-1)
        """,
)
def softmax_of_minus_inf(value: Value, context: Context) -> str | None:
    source = value.args[0]
    if not source.masked or source.causal or context.no_grad or not source.grad or value.op == "logsumexp":
        return None
    return f"{value.op} of scores masked with -inf is NaN where a whole row is masked"


@value_rule(
    "ST406",
    "product with an infinite constant",
    on=("mul",),
    why="0 * inf is NaN: an additive mask made by (1 - mask) * -inf is NaN exactly where nothing is masked.",
    safe="scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min), or where(mask, 0, -inf).",
    bad="""
        def additive_mask(mask):
            return (1.0 - mask) * float("-inf")
        """,
    good="""
        import torch

        def additive_mask(scores, mask):
            return torch.zeros_like(scores).masked_fill(mask == 0, torch.finfo(scores.dtype).min)
        """,
)
def infinite_product(value: Value, context: Context) -> str | None:
    for one, other in (value.args, value.args[::-1]):
        if one.low == one.high and abs(one.low) == inf and not other.host:
            if other.low <= 0 <= other.high and other.op not in ("ones", "full"):
                return "a product with inf is NaN where the other factor is 0"
    return None
