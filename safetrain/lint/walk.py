"""Walks the statements of a file: scopes, branches, loops, `with` blocks, and what is known after each."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import replace

from .context import autocast_type, dotted_name, is_no_grad
from .evaluate import Evaluator, element_of
from .events import Routine
from .scope import Scope
from .value import Value, join, named_value, number, reference

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Walker(Evaluator):
    """Evaluates a whole file. `finish` is called with the training-loop calls of each function."""

    def __init__(self, check: Callable[..., None], finish: Callable[[Routine], None]) -> None:
        super().__init__(check)
        self.finish = finish
        self.without_gradients = False
        self.waiting: list[tuple[Function, Scope, str]] = []
        self.routines: list[Routine] = []
        self.returned: dict[str, Value] = {}
        """What each function that was walked returns, by its name or `Class.method`."""

    def file(self, tree: ast.Module) -> None:
        bases = [base for node in tree.body if isinstance(node, ast.ClassDef) for base in node.bases]
        # An optimizer's helpers are called under no_grad.
        self.without_gradients = any(dotted_name(base).endswith("Optimizer") for base in bases)
        self.body(tree.body)
        self._routine("<module>")
        while self.waiting:  # after the top level, so that functions know every global
            function, scope, name = self.waiting.pop(0)
            self._function_body(function, scope, name)
        calls: dict[str, set[str]] = {}
        for routine in self.routines:
            calls.setdefault(routine.name.rpartition(".")[2], set()).update(routine.called)
        for routine in self.routines:
            routine.neighbours = calls
            self.finish(routine)

    def _routine(self, name: str) -> None:
        self.routines.append(Routine(name, self.events, self.called))
        self.events, self.called = [], set()

    def _returns(self, value: Value) -> None:
        known = self.returned.get(self.routine)
        self.returned[self.routine] = value if known is None else join(known, value)

    # --- definitions --------------------------------------------------------------------------------------------

    def _function_body(self, node: Function, scope: Scope, name: str) -> None:
        outside_scope, outside, outside_blocks = self.scope, self.context, self.blocks
        outside_events = self.events, self.called
        outside_routine, self.routine = self.routine, name
        self.events, self.called, self.blocks = [], set(), ()
        self.scope = Scope(scope, _parameters(node, self))
        self.context = replace(self.context, tested=frozenset(), autocast="", no_grad=self.without_gradients)
        for decorator in node.decorator_list:
            self._enter(self.value(decorator))
        self.body(node.body)
        self._routine(name)
        self.scope, self.context, self.blocks = outside_scope, outside, outside_blocks
        self.events, self.called = outside_events
        self.routine = outside_routine

    def _class(self, node: ast.ClassDef) -> None:
        attributes = Scope(self.scope)
        outside = self.scope
        self.scope = attributes
        methods = [child for child in node.body if isinstance(child, Function)]
        for child in node.body:
            if not isinstance(child, Function):
                self.statement(child)
        self.scope = outside
        shared = {f"self.{name}": value for name, value in attributes.names.items()}
        inside = Scope(outside, shared)
        for method in sorted(methods, key=lambda method: method.name != "__init__"):
            if method.name == "__init__":  # what it stores in self is known in every other method
                probe = Scope(inside, _parameters(method, self))
                shared.update(self._stored(method, probe))
            self.waiting.append((method, inside, f"{node.name}.{method.name}"))

    def _stored(self, method: Function, scope: Scope) -> dict[str, Value]:
        """`self.x` after `__init__`, evaluated without reporting findings."""
        silent = Walker(lambda value, context: None, lambda routine: None)
        silent.scope, silent.summary = scope, self.summary
        silent.body(method.body)
        return {name: value for name, value in scope.names.items() if name.startswith("self.") and not value.zero}

    # --- statements ---------------------------------------------------------------------------------------------

    def body(self, statements: Iterable[ast.stmt]) -> bool:
        """Walks statements in order; returns whether they always leave the block early (return, raise, continue, break)."""
        ended = False
        for statement in statements:
            try:
                ended = self.statement(statement) or ended
            except RecursionError:  # an expression nested hundreds of levels deep, such as generated code
                continue
        return ended

    def statement(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Import | ast.ImportFrom):
            self._import(node)
        elif isinstance(node, Function):
            self.waiting.append((node, self.scope, node.name))
            for default in node.args.defaults:
                self.value(default)
        elif isinstance(node, ast.ClassDef):
            self._class(node)
        elif isinstance(node, ast.Assign):
            value = self.value(node.value)
            for target in node.targets:
                self._assigned(target, value)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._assigned(node.target, self.value(node.value))
        elif isinstance(node, ast.AugAssign):
            value = self.binary(type(node.op), self.value(node.target), self.value(node.value), node)
            self._assigned(node.target, value)
        elif isinstance(node, ast.If):
            return self._if(node)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
            self._loop(node)
        elif isinstance(node, ast.With | ast.AsyncWith):
            return self._with(node)
        elif isinstance(node, ast.Assert):
            self.value(node.test)
            self.context = self.behind(node.test)
        elif isinstance(node, ast.Return):
            self._returns(self.value(node.value))
            return True
        elif isinstance(node, ast.Raise | ast.Continue | ast.Break):
            return True
        elif isinstance(node, ast.Expr):
            self.value(node.value)
            self._register_buffer(node.value)
        else:
            return self._other(node)
        return False

    def _assigned(self, target: ast.expr, value: Value) -> None:
        self.assign(target, value)
        if name := dotted_name(target):
            self.check(Value("assign", (value,), ref=name, node=value.node or target, host=value.host), self.context)

    def _other(self, node: ast.stmt) -> bool:
        """try, match, del, global and statements of later Python versions: every block in turn."""
        for _, content in ast.iter_fields(node):
            for child in content if isinstance(content, list) else [content]:
                if isinstance(child, ast.expr):
                    self.value(child)
                elif isinstance(child, ast.stmt):
                    self.body([child])
                elif isinstance(child, ast.ExceptHandler | ast.match_case):
                    self.body(child.body)
        return False

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.Import):
                dotted = alias.name if alias.asname else alias.name.partition(".")[0]
                self.scope.names[alias.asname or dotted] = reference(dotted)
            elif alias.name != "*":
                self.scope.names[alias.asname or alias.name] = reference(
                    f"{'.' * node.level}{node.module or ''}.{alias.name}"
                )

    def _register_buffer(self, node: ast.expr) -> None:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "register_buffer":
            if len(node.args) > 1 and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                self.scope.names[f"{dotted_name(node.func.value)}.{node.args[0].value}"] = self.value(node.args[1])

    # --- blocks -------------------------------------------------------------------------------------------------

    def _inside(self, kind: str, node: ast.AST, statements: list[ast.stmt]) -> bool:
        outside = self.blocks
        self.blocks = (*outside, (kind, node))
        ended = self.body(statements)
        self.blocks = outside
        return ended

    def _if(self, node: ast.If) -> bool:
        self.value(node.test)
        outside, decided = self.context, self.behind(node.test)
        before = dict(self.scope.names)
        self.context = decided
        then_ended = self._inside("if", node, node.body)
        then, self.scope.names = self.scope.names, dict(before)
        self.context = decided
        else_ended = self._inside("else", node, node.orelse) if node.orelse else False
        otherwise = self.scope.names
        if then_ended and isinstance(node.body[-1], ast.Continue):  # what follows in the loop runs only sometimes
            self.blocks = (*self.blocks, ("if", node))
        # After `if n == 0: return`, everything below depends on the condition.
        self.context = decided if then_ended != else_ended else outside
        if then_ended != else_ended:
            self.scope.names = otherwise if then_ended else then
        else:
            self.scope.names = _merged(then, otherwise)
        return then_ended and else_ended and bool(node.orelse)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        outside = self.context
        before = dict(self.scope.names)
        if isinstance(node, ast.While):
            self.value(node.test)
            self.context = self.behind(node.test)
        else:
            self.assign(node.target, element_of(self.value(node.iter)))
        self._inside("loop", node, node.body)
        self.scope.names = _merged(before, self.scope.names)
        self.context = outside
        self.body(node.orelse)

    def _with(self, node: ast.With | ast.AsyncWith) -> bool:
        outside = self.context
        for item in node.items:
            entered = self.value(item.context_expr)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, named_value("unknown"))
            self._enter(entered)
        ended = self._inside("with", node, node.body)
        self.context = replace(outside, tested=self.context.tested)
        return ended

    def _enter(self, value: Value) -> None:
        """Enters a `with` block or a decorator that sets autocast or disables gradients."""
        kind = autocast_type(value)
        if kind is not None:
            self.context = replace(self.context, autocast=kind)
        if is_no_grad(value):
            self.context = replace(self.context, no_grad=True)


def _merged(one: dict[str, Value], other: dict[str, Value]) -> dict[str, Value]:
    merged = {**one, **other}
    for name in one.keys() & other.keys():
        if one[name] is not other[name]:
            merged[name] = join(one[name], other[name])
    return merged


def _parameters(node: Function, evaluator: Evaluator) -> dict[str, Value]:
    """Arguments by name; one called eps with a number as its default is that number."""
    spec = node.args
    every = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
    values = {arg.arg: named_value(arg.arg) for arg in every}
    positional = [*spec.posonlyargs, *spec.args]
    defaults = [*zip(positional[len(positional) - len(spec.defaults) :], spec.defaults, strict=True)]
    defaults += [
        (arg, default) for arg, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if default is not None
    ]
    for arg, default in defaults:
        if values[arg.arg].op == "eps" and isinstance(default, ast.Constant) and isinstance(default.value, float):
            values[arg.arg] = number(default.value).but(host=False)
    for arg in every:
        if isinstance(arg.annotation, ast.Name) and arg.annotation.id in ("float", "int", "bool", "str"):
            values[arg.arg] = values[arg.arg].but(host=True, grad=False)
    return values
