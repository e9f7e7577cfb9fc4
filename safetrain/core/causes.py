"""The closed list of root causes. What is said of a cause anywhere is said here; the rules that find it are in forensics.causes.

To add one: an entry here, its rule there (unless it is silent: then a guard names it), a failure in the tests that it explains,
and its row in docs/incidents.md.
tests/forensics/test_labels.py fails for what was forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RootCause:
    label: str
    """As in `incident.cause.label`: other programs read it, so it never changes."""
    meaning: str
    """A sentence for people who have not read the documentation."""
    advice: str
    """What to change; the place is added to it."""
    is_fault_of_data: bool = False
    """It lies in a sample or a formula, not in the way training goes: a lower learning rate would not help."""
    shown_by: tuple[str, ...] = ()
    """Remedies that are what the advice says, so that the proof is of the advice and not of something else."""
    is_silent: bool = False
    """Every number is finite, so there is no operation to find: a guard names it (see `core.verdict.Finding`)."""


UNKNOWN = "unknown"
_ALL = (
    RootCause(
        "division_by_zero",
        "Something is divided by 0.",
        "keep the divisor away from 0, or leave out what has nothing to divide by",
        is_fault_of_data=True,
    ),
    RootCause(
        "log_of_nonpositive",
        "The logarithm of 0 or of a negative number is not a finite number.",
        "keep the argument above 0, or stay in log space (log_softmax, logsigmoid, logsumexp)",
        is_fault_of_data=True,
    ),
    RootCause(
        "invalid_domain",
        "The function is not defined there.",
        "clamp the argument strictly inside the domain of the function",
        is_fault_of_data=True,
    ),
    RootCause(
        "singular_gradient",
        "The value is finite, but its derivative at this point is infinite.",
        "the derivative is infinite there: add eps inside the function, or use a form with a finite derivative",
        is_fault_of_data=True,
    ),
    RootCause(
        "masked_branch_gradient",
        "A bad value is masked out of the result, but its derivative is not: 0 times infinity is NaN.",
        "make the *input* safe before the op (x = where(ok, x, 1)), not only its output: masking afterwards leaves 0 * inf in "
        "backward",
        is_fault_of_data=True,
    ),
    RootCause(
        "neg_inf_mask",
        "A mask of −inf covers a whole row, or reaches an operation for which −inf is not neutral.",
        "use a large finite number instead of -inf, or give rows without any valid position something to attend to",
        is_fault_of_data=True,
    ),
    RootCause(
        "exp_overflow",
        "The exponential is larger than the largest number of its type.",
        "bound the exponent, subtract the maximum first, or use logsumexp / softplus",
    ),
    RootCause(
        "fp16_overflow",
        "The value is larger than half precision can hold.",
        "keep this module in float32 (guards.islands) or use bf16; for gradients, use a dynamic loss scale",
        shown_by=("fp32_island", "fp32"),
    ),
    RootCause(
        "fp16_underflow",
        "A small number becomes 0 in half precision.",
        "use an eps that half precision can hold (1e-5 or more), or compute this in float32",
        shown_by=("fp32_island", "fp32"),
    ),
    RootCause(
        "empty_reduction",
        "There are too few values to reduce.",
        "guard the count: return 0 when there is nothing to reduce, or use correction=0 for one value",
        is_fault_of_data=True,
    ),
    RootCause(
        "degenerate_decomposition",
        "The matrix has repeated or zero singular values, where the derivative does not exist.",
        "add a small graded ridge to the matrix, or skip matrices with repeated singular values",
        is_fault_of_data=True,
    ),
    RootCause(
        "infeasible_target",
        "The loss of this target is infinite whatever the model predicts.",
        "leave out targets that cannot be reached (zero_infinity=True for CTC)",
        is_fault_of_data=True,
    ),
    RootCause(
        "bad_input_data",
        "The data has NaN or Inf in it before anything is computed.",
        "clean or drop these samples before they reach the model",
        is_fault_of_data=True,
    ),
    RootCause(
        "corrupt_parameter",
        "A parameter or buffer of the model has NaN or Inf in it before the step.",
        "initialise it, or reload it from a checkpoint that holds finite values",
    ),
    RootCause(
        "divergence",
        "Values grow from step to step, or from layer to layer, until they exceed the range of numbers.",
        "lower the learning rate, clip the gradient norm after backward(), or normalise the values",
        shown_by=("clip",),
    ),
    RootCause(
        "optimizer_numerics",
        "Loss and gradients are finite; the optimizer's own arithmetic is not.",
        "guard the division in the optimizer (a larger eps), and check the learning rate schedule",
        shown_by=("optimizer_eps", "learning_rate"),
    ),
    RootCause(
        "custom_backward_bug",
        "A hand-written backward returns values that are not finite.",
        "fix the backward of this autograd.Function: initialise what it returns, and guard its divisions",
        is_fault_of_data=True,
    ),
    RootCause(
        "weights_unchanged",
        "Steps are applied, and the weights stay bit for bit what they were.",
        "make the optimizer from the parameters of this very model, look at the learning rate and its schedule, and keep the weights in a "
        "type that can hold so small an update (float32)",
        is_silent=True,
    ),
    RootCause(
        "not_in_optimizer",
        "A parameter gets a gradient, and no optimizer moves it.",
        "make the optimizer after the last change to the model, from its parameters(); what shall not be trained needs "
        "requires_grad_(False)",
        is_silent=True,
    ),
    RootCause(
        "not_registered",
        "The loss depends on parameters that belong to no module of the model: they are neither trained nor saved.",
        "keep layers as attributes or in nn.ModuleList / nn.ModuleDict instead of a list or dict, and make the optimizer after that",
        is_silent=True,
    ),
    RootCause(
        "not_reached",
        "The optimizer holds a parameter that the loss does not depend on.",
        "use its module in forward (without detach or no_grad), or freeze it and leave it out of the optimizer",
        is_silent=True,
    ),
    RootCause(
        "loss_mismatch",
        "The loss is given something that it does not expect, so its gradient is wrong or nearly nothing.",
        "give the loss what its documentation asks for: cross_entropy and binary_cross_entropy_with_logits take raw outputs, nll_loss "
        "takes log_softmax",
        is_silent=True,
    ),
    RootCause(
        "wrong_mode",
        "Dropout or BatchNorm are in evaluation mode while training, or in training mode during an evaluation.",
        "call model.train() after every evaluation of your own, let train() of your modules call super().train(mode), and pass "
        "training=self.training to functional dropout",
        is_silent=True,
    ),
    RootCause(
        "precision_not_in_effect",
        "Half precision was asked for, and the matrix products are computed in float32.",
        "remove what turns autocast off (autocast(enabled=False), .float()), or set loop.precision=fp32",
        is_silent=True,
    ),
    RootCause(
        "schedule_ended",
        "The learning rate is practically zero while most steps are still to come, or it swings up and down.",
        "give the schedule the number of optimizer steps, not of epochs or batches: it is stepped after every optimizer step",
        is_silent=True,
    ),
    RootCause(
        "rate_too_low",
        "The updates are so small that all steps of the run together would hardly change the weights.",
        "raise the learning rate: safetrain check CONFIG --only learning_rate finds one that works; look at what scales the gradient down "
        "(clipping, a loss that is divided twice)",
        is_silent=True,
    ),
    RootCause(
        "repeated_data",
        "The same data comes again and again, or two ranks train on the same data.",
        "look at the data loader: what it shuffles, how it is split over ranks, and whether it returns the batch that was asked for",
        is_silent=True,
    ),
    RootCause(
        "replicas_differ",
        "The copies of the model on the ranks are no longer the same.",
        "look for what only some ranks do: clipping, an extra optimizer step, another random initialisation; and at the hardware of "
        "the rank that differs",
        is_silent=True,
    ),
    RootCause(
        "memory_corruption",
        "A weight or a moment changed between two steps, and no operation of torch wrote to it.",
        "if your code writes through .data, use torch.no_grad() and in-place operations instead; otherwise test the memory of this machine",
        is_silent=True,
    ),
    RootCause(
        "no_progress",
        "After hundreds of steps the loss is no better than that of a constant answer.",
        "check that targets belong to their inputs, then try another learning rate (safetrain check CONFIG --only learning_rate)",
        is_silent=True,
    ),
    RootCause(
        "oscillation",
        "The loss jumps up and down from step to step and does not fall.",
        "lower the learning rate or use larger batches; clip the gradient norm",
        is_silent=True,
    ),
    RootCause(
        "vanishing_gradients",
        "Hardly any gradient arrives at the first layers.",
        "use ReLU or GELU instead of sigmoid or tanh, normalise between layers (BatchNorm, LayerNorm), initialise with "
        "kaiming_uniform_, or add residual connections",
        is_silent=True,
    ),
    RootCause(
        "dead_network",
        "The output is the same for every input, and no gradient flows any more.",
        "lower the learning rate, start biases at 0 and weights at kaiming_uniform_, use LeakyReLU or GELU, or normalise between layers",
        is_silent=True,
    ),
    RootCause(UNKNOWN, "", "no rule explains this; look at the operands and at the remedies that worked"),
)
CAUSES = {cause.label: cause for cause in _ALL}
SAFE_CALLS = {
    "log": "safe.log({})", "log2": "safe.log({}) / math.log(2)", "log10": "safe.log({}) / math.log(10)", "log1p": "safe.log(1 + {})",
    "sqrt": "safe.sqrt({})", "rsqrt": "1 / safe.sqrt({})", "reciprocal": "safe.div(1, {})", "acos": "safe.acos({})",
    "arccos": "safe.acos({})", "asin": "safe.asin({})", "arcsin": "safe.asin({})", "atanh": "safe.atanh({})", "arctanh": "safe.atanh({})",
}  # fmt: skip
"""By the name of an operation of one operand: the same with `safetrain.safe`."""
