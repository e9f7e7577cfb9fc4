"""The signature of a target, read from source files: nothing is imported or run.

Imports cost seconds (torch) and run code; a config must be checkable without either. The answer is one of three: a
definition with its signature, "surely not there" (`NotDefined`), or None when the source does not tell for certain.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from .resolve import (
    MAX_HOPS,
    Found,
    Module,
    NotDefined,
    Unclear,
    dotted_name,
    is_overload,
    last_word,
    resolve,
    resolve_in_file,
    statements,
    walk,
)

_HARMLESS_DECORATORS = {
    "staticmethod", "classmethod", "no_grad", "inference_mode", "cache", "lru_cache", "final", "override", "abstractmethod",
    "runtime_checkable", "total_ordering", "typing_extensions.deprecated", "deprecated",
}  # fmt: skip
_BASES_WITHOUT_INIT = {"object", "ABC", "Generic", "Protocol"}


@dataclass(frozen=True)
class Definition:
    """A class or function found in a source file; its signature is without `self`, None when it is unclear."""

    is_class: bool
    signature: Signature | None


def find_definition(name: str, file: Path | None = None) -> Definition | None:
    """The definition of `package.module.Name`, or of `Name` in a file. Raises NotDefined."""
    try:
        return _define(resolve(name) if file is None else resolve_in_file(file, name))
    except Unclear:
        return None


def _define(found: Module | Found) -> Definition:
    if isinstance(found, Module):
        raise NotDefined(f"{found.name!r} is a module; name a class or a function in it")
    node = found.node
    try:
        if isinstance(node, ast.ClassDef):
            return Definition(True, _class_signature(found.module, node, 0) or Signature())
        return Definition(False, _function_signature(node, in_class=found.owner is not None))
    except Unclear:
        return Definition(isinstance(node, ast.ClassDef), None)


def _class_signature(module: Module, cls: ast.ClassDef, hops: int) -> Signature | None:
    """What the class is called with; None when neither it nor its bases define a constructor."""
    decorators = {last_word(decorator) for decorator in cls.decorator_list}
    if hops > MAX_HOPS or not decorators <= _HARMLESS_DECORATORS | {"dataclass"}:
        raise Unclear
    if any(keyword.arg != "metaclass" or last_word(keyword.value) != "ABCMeta" for keyword in cls.keywords):
        raise Unclear
    own = {name: _last_method(cls, name) for name in ("__init__", "__new__")}
    if own["__init__"] is not None and own["__new__"] is not None:
        raise Unclear
    constructor = own["__init__"] or own["__new__"]
    if constructor is not None:
        return _function_signature(constructor, in_class=True)
    if "dataclass" in decorators:
        return _dataclass_signature(module, cls, hops)
    for base in _base_classes(module, cls):
        signature = _class_signature(base.module, _as_class(base), hops + 1)
        if signature is not None:
            return signature
    return None


def _base_classes(module: Module, cls: ast.ClassDef) -> list[Found]:
    bases = []
    for expression in cls.bases:
        inner = expression.value if isinstance(expression, ast.Subscript) else expression
        if last_word(inner) in _BASES_WITHOUT_INIT:
            continue
        names = dotted_name(inner)
        try:
            base = walk(module, names, 1)
        except NotDefined:  # a builtin, or defined in a way the source does not show
            raise Unclear from None
        if isinstance(base, Module):
            raise Unclear
        bases.append(base)
    return bases


def _as_class(found: Found) -> ast.ClassDef:
    if not isinstance(found.node, ast.ClassDef):
        raise Unclear
    return found.node


def _last_method(cls: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    methods = [item for item in statements(cls.body) if isinstance(item, ast.FunctionDef) and item.name == name]
    if any(not is_overload(method) for method in methods[:-1]):
        raise Unclear
    return methods[-1] if methods else None


def _function_signature(node: ast.FunctionDef | ast.AsyncFunctionDef, in_class: bool) -> Signature:
    decorators = {last_word(decorator) for decorator in node.decorator_list}
    if not decorators <= _HARMLESS_DECORATORS:
        raise Unclear
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    num_required = len(positional) - len(arguments.defaults)
    parameters = []
    for index, argument in enumerate(positional):
        only = index < len(arguments.posonlyargs)
        kind = Parameter.POSITIONAL_ONLY if only else Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(_parameter(argument.arg, kind, index >= num_required))
    if in_class and "staticmethod" not in decorators:
        parameters = parameters[1:]
    if arguments.vararg:
        parameters.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(_parameter(argument.arg, Parameter.KEYWORD_ONLY, default is not None))
    if arguments.kwarg:
        parameters.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(parameters)


def _dataclass_signature(module: Module, cls: ast.ClassDef, hops: int) -> Signature:
    if any(isinstance(decorator, ast.Call) and decorator.keywords for decorator in cls.decorator_list):
        raise Unclear
    parameters: dict[str, Parameter] = {}
    for base in reversed(_base_classes(module, cls)):
        inherited = _class_signature(base.module, _as_class(base), hops + 1)
        parameters.update({} if inherited is None else inherited.parameters)
    for item in cls.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        if "ClassVar" in ast.unparse(item.annotation):
            continue
        if isinstance(item.value, ast.Call) or "KW_ONLY" in ast.unparse(item.annotation):
            keywords = {keyword.arg for keyword in item.value.keywords} if isinstance(item.value, ast.Call) else set()
            if not keywords <= {"default", "default_factory", "metadata", "repr", "compare"} or not keywords:
                raise Unclear
            has_default = bool(keywords & {"default", "default_factory"})
        else:
            has_default = item.value is not None
        # Keyword-only, because a config gives keywords and then the order of fields does not matter.
        parameters[item.target.id] = _parameter(item.target.id, Parameter.KEYWORD_ONLY, has_default)
    return Signature(list(parameters.values()))


def _parameter(name: str, kind: Any, has_default: bool) -> Parameter:
    return Parameter(name, kind, default=... if has_default else Parameter.empty)
