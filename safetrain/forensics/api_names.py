"""Which torch function the user called, so that an op has the name in the source: `sqrt`, not the `div` in its
derivative."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode


class ApiNames(TorchFunctionMode):
    """Knows which torch function Python called, so that a composite op is named as it was typed."""

    def __init__(self) -> None:
        super().__init__()
        self.current: str | None = None
        self._failed: tuple[BaseException, str | None] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outer, self.current = self.current, api_name(func)
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            if self._failed is None or self._failed[0] is not error:  # the innermost function saw it first
                self._failed = error, self.current
            raise
        finally:
            self.current = outer

    def that_raised(self, error: BaseException) -> str | None:
        """The torch function that this exception came out of; None when it was raised by other code."""
        return self._failed[1] if self._failed is not None and self._failed[0] is error else None


_OPERATORS = {
    "truediv": "div", "rtruediv": "div", "itruediv": "div", "rdiv": "div", "idiv": "div", "true_divide": "div", "divide": "div",
    "rpow": "pow", "ipow": "pow", "rsub": "sub", "isub": "sub", "radd": "add", "iadd": "add", "rmul": "mul", "imul": "mul",
    "rmatmul": "matmul",
}  # fmt: skip


def api_name(func: Any) -> str | None:
    name = getattr(func, "__name__", "").strip("_")
    return None if name in ("", "get", "set", "backward") else _OPERATORS.get(name, name)
