"""Exceptions that a step raises because of its numbers: they are incidents like a NaN."""

from __future__ import annotations

import re

from ..core.incident import Cause
from ..errors import SafetrainError

# (label, pattern, what it means). The patterns are the messages of torch, and match none of Python's or NumPy's own.
_MESSAGES = [
    ("bad_input_data", r"Target -?\d+ is out of bounds", "a class index is outside of the range of the scores"),
    ("bad_input_data", r"index -?\d+ is out of bounds(?! for axis)|index out of range in self|out of bounds for dimension", "an index is outside of the table it is used on"),
    ("bad_input_data", r"Class values must be smaller than num_classes|Class values must be non-negative", "a class index is outside of the range of the classes"),
    ("empty_reduction", r"more than 1 (value per channel|spatial element) when training", "a normalisation over one value has no variance (drop_last=True leaves out a last batch of one sample)"),
    ("empty_reduction", r"(reduction|operation) over .*(empty|zero)|Expected reduction dim .* to have non-zero size|numel\(\) == 0", "a reduction over no values"),
    ("degenerate_decomposition", r"failed to converge|not positive.definite|is singular|ill-conditioned|linalg\.(svd|eigh|eig|cholesky|inv|solve|lu)", "the matrix cannot be decomposed"),
    ("fp16_overflow", r"cannot be converted to type .*(Half|BFloat16) without overflow", "a constant exceeds the range of half precision"),
    ("invalid_domain", r"all elements of input should be between 0 and 1", "probabilities are expected here; for raw outputs there is binary_cross_entropy_with_logits (BCEWithLogitsLoss)"),
    ("invalid_domain", r"should be between 0 and 1|to satisfy the constraint|to be within the support|invalid multinomial distribution|probability tensor contains either|p(robability)? has to be between|expects p_in", "a value is outside of the domain of the function"),
    ("division_by_zero", r"^(float |complex )?(division|modulo)( or modulo)? by zero|^integer (division|modulo)", "a number of Python is divided by 0"),
    ("invalid_domain", r"^math domain error|expected a (non)?(negative|positive)", "a value is outside of the domain of the function"),
    ("exp_overflow", r"^math range error|^\(34, |Numerical result out of range", "the result exceeds the range of floats"),
    ("infeasible_target", r"(input|target)_lengths? must be|Expected (input|target)_lengths", "a target does not fit its input"),
]  # fmt: skip


def explain_error(error: BaseException) -> Cause:
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    for label, pattern, meaning in _MESSAGES:
        if re.search(pattern, str(error), re.IGNORECASE):
            return Cause(label, f"{meaning}: {text}")
    return Cause("unknown", f"the step raised {type(error).__name__}: {text}")


def is_numeric(error: BaseException) -> bool:
    """Was this raised because of the values, not because of a mistake in the program?"""
    return explain_error(error).label != "unknown"


def complains_of_bad_values(error: BaseException) -> bool:
    """Does it say that a value it was given is NaN, infinite or out of its domain?"""
    if explain_error(error).label in ("invalid_domain", "degenerate_decomposition"):
        return True
    return re.search(r"\b(nan|inf|infs|nans|non-?finite|infinite|infinity)\b", str(error), re.IGNORECASE) is not None


# What a mistake in the program raises, whatever the numbers are.
_PROGRAM = (
    NameError,
    AttributeError,
    ImportError,
    SyntaxError,
    TypeError,
    NotImplementedError,
    MemoryError,
    OSError,
    EOFError,
)
_PROGRAM_WORDS = re.compile(
    r"shapes? cannot be multiplied|size mismatch|must match the size|sizes? of tensors must match|not implemented for|same device|scalar type"
    r"|backward through the graph|does not require grad|modified by an inplace|out of memory|must have the same dtype|expected .* dtype"
)


def is_of_the_program(error: BaseException) -> bool:
    """Is this a mistake of the program for certain, so that there is no need to look for a number behind it?"""
    if isinstance(error, (SafetrainError, *_PROGRAM)):
        return not is_numeric(error) and not complains_of_bad_values(error)
    return _PROGRAM_WORDS.search(str(error)) is not None
