"""Names of torch's operations: synonyms, methods, and groups that behave alike."""

from __future__ import annotations


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Synonyms. A trailing underscore (in place) is removed before.
SYNONYMS = {
    "absolute": "abs", "arccos": "acos", "arcsin": "asin", "arctanh": "atanh", "vector_norm": "norm", "matrix_norm": "norm",
    "multiply": "mul", "divide": "div", "true_divide": "div", "subtract": "sub", "expit": "sigmoid", "clip": "clamp",
    "clamp_max": "clamp_max", "special_log_softmax": "log_softmax", "negative": "neg", "bmm": "matmul", "mm": "matmul",
    "einsum": "matmul", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne",
    "rand_like": "rand", "randn_like": "randn", "zeros_like": "zeros", "ones_like": "ones", "full_like": "full", "empty_like": "empty",
    "float_power": "pow", "linalg_norm": "norm", "hardtanh": "clamp", "threshold": "relu", "relu6": "relu",
}  # fmt: skip

# The same numbers in another shape, order, device or dtype.
VIEWS = words(
    "view reshape unsqueeze squeeze transpose permute t expand expand_as repeat contiguous clone flatten unflatten chunk split "
    "unbind gather index_select cpu cuda to float double half bfloat16 type type_as detach requires_grad roll flip narrow "
    "movedim swapaxes repeat_interleave view_as tile broadcast_to take diagonal ravel mH mT"
)
COMPARISONS = words("gt ge lt le eq ne isnan isinf isfinite logical_and logical_or logical_not isin")
REDUCTIONS = words("sum mean nansum nanmean norm std var amax amin max min prod logsumexp count_nonzero")
FACTORIES = words(
    "zeros ones full empty rand randn randint arange linspace eye tensor as_tensor tril_indices scalar_tensor"
)
# Under autocast these return half precision whatever their inputs are.
CAST_TO_HALF = words("matmul linear conv1d conv2d conv3d baddbmm addmm scaled_dot_product_attention call")
LOSSES = words(
    "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy "
    "binary_cross_entropy_with_logits gaussian_nll_loss poisson_nll_loss cosine_embedding_loss triplet_margin_loss "
    "margin_ranking_loss hinge_embedding_loss soft_margin_loss multi_margin_loss ctc_loss"
)

# Tensor methods by their number of positional arguments, so that `logger.log("text")` is not taken for a logarithm.
UNARY = words(
    "log log2 log10 log1p exp expm1 sqrt rsqrt reciprocal sigmoid tanh abs square relu acos asin atanh acosh neg isnan isinf "
    "isfinite logical_not float double half bfloat16 detach contiguous long int bool item tolist numpy erfinv softplus cosh sinh tan"
)
BINARY = words("add sub mul div pow gt ge lt le eq ne maximum minimum matmul clamp_min clamp_max nan_to_num xlogy")
NEEDS_TWO = words("add sub mul div pow")
OTHER_METHODS = words(
    "softmax log_softmax logsumexp clamp where masked_fill cumsum scatter_add index_add triu tril std var"
)
METHODS = UNARY | BINARY | OTHER_METHODS | REDUCTIONS | VIEWS | COMPARISONS
# Their output does not contain the bad elements of their input.
CLEARS_UNSAFE = frozenset({"where", "masked_fill", "nan_to_num", "softmax"}) | COMPARISONS


def canonical(name: str) -> str:
    """The name of an operation without synonyms and without the underscore of its in-place form."""
    if name.startswith("_"):
        return name
    name = name.rstrip("_")
    return SYNONYMS.get(name, name)


def fits_method(op: str, num_positional: int) -> bool:
    """Whether a method call with this name and this number of arguments can be a tensor's."""
    if op in VIEWS:
        return op not in UNARY or num_positional == 0 or op == "type"
    if op in UNARY:
        return num_positional == 0
    return num_positional <= 1 if op in BINARY - {"nan_to_num", "where"} else op in METHODS
