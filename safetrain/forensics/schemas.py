"""What an aten op reads and writes, learned once from its schema."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torch import Tensor

from .._private.autograd import op_schema
from ..tensors.nest import in_code, named_tensors

# torch.tensor(...) and the like: the value was typed or came from the host.
LITERALS = {"lift_fresh", "lift_fresh_copy", "lift"}
UNINITIALISED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_"}
# In-place ops that do not read what they overwrite.
OVERWRITES = {
    "copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_",
    "log_normal_", "cauchy_", "set_",
}  # fmt: skip
# Writes that the schema does not declare: BatchNorm's running statistics.
_HIDDEN_WRITES = dict.fromkeys(
    ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_with_update"), (3, 4)
)
SELECTING = {"where", "masked_fill", "masked_fill_"}


@dataclass(frozen=True)
class Schema:
    name: str
    arguments: tuple[str, ...]
    written: frozenset[str]
    hidden_writes: tuple[int, ...]
    is_view: bool

    @property
    def overwrites(self) -> bool:
        return self.name in OVERWRITES


@cache
def schema_of(func: Any) -> Schema:
    schema = op_schema(func)
    written = frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    name = schema.name.split("::")[-1]
    aliases = any(r.alias_info is not None for r in schema.returns)
    return Schema(
        name,
        tuple(a.name for a in schema.arguments),
        written,
        _HIDDEN_WRITES.get(name, ()),
        is_view=not written and aliases and name not in LITERALS,
    )


def named_operands(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Every tensor among the arguments, with the argument's name; lists are numbered."""
    named = [(names[index] if index < len(names) else str(index), value) for index, value in enumerate(args)]
    found: list[tuple[str, Tensor]] = []
    for name, value in [*named, *kwargs.items()]:
        if isinstance(value, Tensor):
            found.append((name, value))
        elif isinstance(value, (list, tuple)):
            found += named_tensors(value, partial(in_code, name=name))
    return found


def literal_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[float]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, float):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, float))


def base_name(argument: str) -> str:
    return argument.split("[")[0]
