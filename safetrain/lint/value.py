"""What is known about an expression without running it: the operation, its bounds, and whether it can be 0."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

EPS_NAME = re.compile(r"(^|_)(eps|epsilon|tiny|smooth|smoothing|jitter|tol)\d*$", re.I)
MASK_NAME = re.compile(r"((^|_)(valid|keep|selection|padding|is_pad)|masks?)\d*(_(float|bool|flat|expanded))?$", re.I)
CAUSAL_NAME = re.compile(r"causal|tril|triu|subsequent|future|lookahead|look_ahead", re.I)
SMALLEST_NAMED_EPS = 1e-30  # a name like `eps` means "small and positive", not how small
HALF_MAX = 65504.0
HALF_ROUNDS_TO_ZERO = 2.0**-25  # half of fp16's smallest number: anything up to it rounds to 0


@dataclass(frozen=True, eq=False)
class Value:
    """The result of one expression. Views, casts and variables keep the `op` of their source."""

    op: str
    args: tuple[Value, ...] = ()
    kwargs: dict[str, Value] = field(default_factory=dict)
    node: ast.AST | None = None
    ref: str = ""
    """Dotted name of an import, or of the class of an instance."""
    low: float = -inf
    high: float = inf
    zero: str = ""
    """Why it can be exactly 0, as text; empty if nothing indicates that it can."""
    dtype: str = ""
    """`half`, `bf16`, `float`, `int`, `bool`; empty if unknown."""
    grad: bool = True
    """False if no gradient can flow through it."""
    host: bool = False
    """Not a tensor: a Python number, a NumPy array, a string."""
    sanitised: bool = False
    """Bad elements were already replaced by where, clamp or the like."""
    causal: bool = False
    """From a triangular mask, which keeps at least one entry in each row."""
    masked: bool = False
    """Contains -inf from a mask that is not causal."""
    names: frozenset[str] = frozenset()
    """Every name it was computed from, directly or not."""
    labels: frozenset[str] = frozenset()
    """The variables it is assigned to."""
    surface: frozenset[str] = frozenset()
    """The names in its expression, or in the expressions of its unnamed operands."""
    unsafe: tuple[Value, ...] = ()
    """Elementwise operations it was computed by that are infinite for an input which cannot be ruled out."""

    def arg(self, index: int, *names: str) -> Value | None:
        """A positional argument (of a method: the object is argument 0), or the keyword of that name."""
        for name in names:
            if name in self.kwargs:
                return self.kwargs[name]
        return self.args[index] if index < len(self.args) else None

    @property
    def constant(self) -> float | None:
        """The number, if it is a literal (or the default of an argument called eps)."""
        return self.low if self.low == self.high and abs(self.low) < inf else None

    @property
    def is_mask(self) -> bool:
        return self.dtype == "bool" or self.op == "mask"

    def named(self, name: str) -> Value:
        return replace(self, names=self.names | {name}, labels=self.labels | {name})

    @property
    def spelling(self) -> frozenset[str]:
        """The names by which a reader would recognise it."""
        return self.labels | self.surface

    def but(self, **changes: Any) -> Value:
        return replace(self, **changes).settled()

    def settled(self) -> Value:
        """Without the reason for 0 where the bounds exclude it."""
        return replace(self, zero="") if self.zero and (self.low > 0 or self.high < 0) else self


UNKNOWN = Value("unknown")


def reference(dotted: str) -> Value:
    return Value("ref", ref=dotted, host=True, grad=False)


def number(value: float, node: ast.AST | None = None) -> Value:
    return Value("const", node=node, low=float(value), high=float(value), grad=False, host=True)


def named_value(name: str, node: ast.AST | None = None) -> Value:
    """A variable of which only the name is known."""
    last, own = name.rpartition(".")[2], frozenset({name})
    if EPS_NAME.search(last):
        return Value("eps", node=node, low=SMALLEST_NAMED_EPS, names=own, labels=own, grad=False)
    causal = bool(CAUSAL_NAME.search(last))
    if causal or MASK_NAME.search(last):
        return Value("mask", node=node, causal=causal, names=own, labels=own, grad=False)
    return Value("name", node=node, names=own, labels=own)


def join(one: Value, other: Value) -> Value:
    """What holds after either of two branches."""
    if one is other:
        return one
    same = one.op == other.op
    return Value(
        one.op if same else "join",
        args=one.args if same else (one, other),
        kwargs=one.kwargs if same else {},
        node=other.node,
        ref=one.ref if one.ref == other.ref else "",
        low=min(one.low, other.low),
        high=max(one.high, other.high),
        zero=one.zero and other.zero,
        dtype=one.dtype if one.dtype == other.dtype else "",
        grad=one.grad or other.grad,
        host=one.host and other.host,
        sanitised=one.sanitised or other.sanitised,
        causal=one.causal or other.causal,
        masked=one.masked and other.masked,
        names=one.names | other.names,
        labels=one.labels & other.labels,
        surface=one.surface | other.surface,
        unsafe=(one.unsafe + tuple(u for u in other.unsafe if u not in one.unsafe))[:8],
    )
