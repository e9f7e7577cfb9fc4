"""Undocumented names are used in `safetrain/_private` only, and whatever relies on them is in its table."""

import ast
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import safetrain
from safetrain._private import feature, table
from safetrain.errors import UsageError

PACKAGE = Path(safetrain.__file__).parent
LIBRARIES = {"torch", "accelerate", "numpy"}
CPYTHON = {"ctypes", "_ctypes"}
DOCUMENTED = {"_getframe", "_current_frames", "_fields", "_asdict", "_replace", "_make"}
"""By Python, underscore and all."""
EXCEPTIONS = {
    "_buffers": "a module's own buffers are replaced where a state is put back; there is no public way to",
    "_version": "of a tensor: how a write between two moments is noticed, the core promise",
}
UNTIL_REWRITTEN = {
    ("step/deferred.py", "_step_supports_amp_scaling"),
}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def private_names(tree):
    """Private modules and members of libraries; and private members of anything but `self`, `cls` and our own classes."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                path = f"{module}.{alias.name}" if module else alias.name
                if isinstance(node, ast.ImportFrom) and node.level:
                    continue
                parts = path.split(".")
                if parts[0] in CPYTHON:
                    yield parts[0]
                if parts[0] in LIBRARIES:
                    yield from filter(is_private, parts)
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and root_of(node) in LIBRARIES:
            yield node.attr
        elif isinstance(node, ast.Call) and called(node) in ("getattr", "hasattr") and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and is_private(name.value):
                yield name.value
    for node in ast.walk(tree):
        is_foreign = isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and (node.value.id in ("self", "cls") or node.value.id in own)
        )
        if is_foreign and is_private(node.attr) and node.attr in MEMBERS:
            yield node.attr


def members(kind):
    return {name for name in dir(kind) if is_private(name)}


MEMBERS = (
    members(torch.Tensor)
    | set(filter(is_private, vars(torch.nn.Module())))
    | members(torch.nn.Module)
    | members(torch.nn.parallel.DistributedDataParallel)
    | members(torch.distributed.ProcessGroup)
    | members(torch.distributed.Reducer)
    | members(torch.amp.GradScaler)
    | set(filter(is_private, vars(torch.amp.GradScaler("cpu"))))
    | members(torch.UntypedStorage)
) - {"_forward", "_backward", "_parameters", "_modules"}
"""What torch calls so and does not document. Left out is what our own classes call so, too: ruff's SLF001 looks after that."""


def root_of(node):
    while isinstance(node, (ast.Attribute, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def called(node):
    return node.func.id if isinstance(node.func, ast.Name) else ""


def test_nobody_else_uses_private_names_of_a_library():
    found = {
        (path.relative_to(PACKAGE).as_posix(), name)
        for path in sorted(PACKAGE.rglob("*.py"))
        if PACKAGE / "_private" not in path.parents
        for name in private_names(ast.parse(path.read_text()))
    }
    assert {(file, name) for file, name in found if name not in DOCUMENTED | set(EXCEPTIONS)} - UNTIL_REWRITTEN == set()


def test_the_search_finds_what_it_is_for():
    source = """
import ctypes
import torch._dynamo
from torch.nn.modules.batchnorm import _BatchNorm
from .._private import foreach
torch._foreach_mul_(x, 2)
torch.nn.modules.conv._ConvNd
model._sync_buffers()
getattr(model, "_orig_mod")
self._version
"""
    expected = {"ctypes", "_dynamo", "_BatchNorm", "_foreach_mul_", "_ConvNd", "_sync_buffers", "_orig_mod"}
    assert set(private_names(ast.parse(source))) == expected


def test_everything_works_on_this_version_of_torch():
    assert {each.name: each.failure for each in table.FEATURES if not each.works} == {}


def test_every_feature_is_in_the_table_once():
    names = [each.name for each in table.FEATURES]
    assert len(names) == len(set(names))
    declared = {id(each) for each in vars(feature)["_features"] if each.name != "test"}
    assert declared == {id(each) for each in table.FEATURES}


def test_trying_out_draws_no_random_number():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with feature.without():  # asks again
        assert all(each.works for each in table.FEATURES)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


def test_a_probe_that_raises_says_why():
    missing = feature.Feature("test", "torch._nothing", "nothing", "nothing", lambda: torch._nothing)
    assert not missing.works
    assert "_nothing" in missing.failure
    with pytest.raises(UsageError, match=r"torch\._nothing cannot be used here: AttributeError.*\nTo fix: wait"):
        missing.require("wait")


def test_a_misspelt_name_is_an_error():
    with feature.without("foreech"), pytest.raises(UsageError, match="did you mean 'foreach'"):
        table.check_names()
