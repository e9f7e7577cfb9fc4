"""The signature of a target, read from source files: nothing is imported or run.

Imports cost seconds (torch) and run code; a config must be checkable without either. The answer is one of three: a
definition with its signature, "certainly not there" (`NotDefined`), or None when the source leaves it open.
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
    *("staticmethod", "classmethod", "abstractmethod", "final", "override", "deprecated", "runtime_checkable"),
    *("total_ordering", "cache", "lru_cache", "no_grad", "inference_mode"),
}
_HARMLESS_DATACLASS = {"frozen", "slots", "eq", "order", "repr", "kw_only", "unsafe_hash"}
_HARMLESS_FIELD = {"default", "default_factory", "metadata", "repr", "compare", "hash", "kw_only"}
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
            options = _guard_options(found.module, node, 0)
            return Definition(True, options or _class_signature(found.module, node, 0) or Signature())
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
        return _dataclass_signature(module, cls)
    for base in _base_classes(module, cls):
        signature = _class_signature(base.module, _as_class(base), hops + 1)
        if signature is not None:
            return signature
    return None


def _guard_options(module: Module, cls: ast.ClassDef, hops: int) -> Signature | None:
    """A guard that has no constructor of its own is called with the fields of its `Config`; None for any other class."""
    if hops > MAX_HOPS or _last_method(cls, "__init__") is not None:
        return None
    try:
        bases = [(base.module, _as_class(base)) for base in _base_classes(module, cls)]
    except Unclear:
        return None
    if any(base.name == "Guard" and home.name == "safetrain.guards.base" for home, base in bases):
        for item in cls.body:
            if isinstance(item, ast.ClassDef) and item.name == "Config":
                return _dataclass_signature(module, item)
            if isinstance(item, ast.Assign) and any(last_word(target) == "Config" for target in item.targets):
                config = walk(module, dotted_name(item.value), 1)
                if isinstance(config, Module):
                    raise Unclear
                return _dataclass_signature(config.module, _as_class(config))
        return Signature()
    return next(
        (options for home, base in bases if (options := _guard_options(home, base, hops + 1)) is not None), None
    )


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
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    parameters = []
    for index, (argument, default) in enumerate(zip(positional, defaults, strict=True)):
        only = index < len(arguments.posonlyargs)
        kind = Parameter.POSITIONAL_ONLY if only else Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(_parameter(argument.arg, kind, default))
    if in_class and "staticmethod" not in decorators:
        parameters = parameters[1:]
    if arguments.vararg:
        parameters.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(_parameter(argument.arg, Parameter.KEYWORD_ONLY, default))
    if arguments.kwarg:
        parameters.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(parameters)


def _dataclass_signature(module: Module, cls: ast.ClassDef) -> Signature:
    return Signature(list(_dataclass_parameters(module, cls, 0).values()))


def _dataclass_parameters(module: Module, cls: ast.ClassDef, hops: int) -> dict[str, Parameter]:
    """The fields by name: keyword-only, because a config gives keywords and then their order does not matter."""
    if hops > MAX_HOPS:
        raise Unclear
    parameters: dict[str, Parameter] = {}
    for base in reversed(_base_classes(module, cls)):
        parameters.update(_dataclass_parameters(base.module, _as_class(base), hops + 1))
    decorator = next((d for d in cls.decorator_list if last_word(d) == "dataclass"), None)
    if decorator is None:  # its own annotations are no fields
        return parameters
    if isinstance(decorator, ast.Call) and not {keyword.arg for keyword in decorator.keywords} <= _HARMLESS_DATACLASS:
        raise Unclear
    for item in cls.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        annotation = ast.unparse(item.annotation)
        if "KW_ONLY" in annotation or "InitVar" in annotation:
            raise Unclear
        if "ClassVar" not in annotation:
            name = item.target.id
            parameters[name] = _parameter(name, Parameter.KEYWORD_ONLY, _field_default(item.value))
    return parameters


def _field_default(value: ast.expr | None) -> ast.expr | None:
    if not isinstance(value, ast.Call):
        return value
    keywords = {keyword.arg: keyword.value for keyword in value.keywords}
    if last_word(value) == "option":
        return value.args[0] if value.args else keywords.get("default", keywords.get("factory"))
    if last_word(value) != "field" or value.args or not keywords.keys() <= _HARMLESS_FIELD:
        raise Unclear
    return keywords.get("default", keywords.get("default_factory"))


class _Written(str):
    """A default as its source spells it."""

    def __repr__(self) -> str:
        return str(self)


def _parameter(name: str, kind: Any, default: ast.expr | None) -> Parameter:
    return Parameter(name, kind, default=Parameter.empty if default is None else _Written(ast.unparse(default)))
