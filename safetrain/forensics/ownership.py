"""Whose code a file is: the user's own, an installed library's, Python's, or safetrain's.

The user's own is what can be edited: not below site-packages, not the standard library, not safetrain. A package that is
installed as editable lies where it is developed, and so counts as the user's.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sysconfig
from functools import cache
from pathlib import Path

OWN, LIBRARY, PYTHON, SAFETRAIN, GENERATED = "own", "library", "python", "safetrain", "generated"

_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_BUNDLED = _PACKAGE + "bundled" + os.sep
_INSTALLED = re.compile(r"[\\/](site-packages|dist-packages)[\\/]")
_STANDARD = tuple(
    {
        os.path.realpath(path) + os.sep
        for name in ("stdlib", "platstdlib")
        if (path := sysconfig.get_paths().get(name)) is not None
    }
    | {str(Path(os.__file__).parent) + os.sep}
)
_INTERACTIVE = ("<stdin", "<ipython")


@cache
def owner_of(file: str) -> str:
    if file.startswith("<") and not file.startswith(_INTERACTIVE):
        return GENERATED
    if file.startswith(_PACKAGE) and not file.startswith(_BUNDLED):
        return SAFETRAIN
    if _INSTALLED.search(file):
        return LIBRARY
    if file.startswith(_STANDARD) or os.path.realpath(file).startswith(_STANDARD):
        return PYTHON
    return OWN


def is_own(file: str) -> bool:
    return owner_of(file) == OWN


def below_site_packages(file: str) -> str:
    """`kornia/geometry/conversions.py` of an installed file; the file as it is otherwise."""
    found = list(_INSTALLED.finditer(file))
    return file[found[-1].end() :] if found else file


@cache
def library_of(file: str) -> str | None:
    """`kornia 0.9.0`: the installed package that a file belongs to; None for other files."""
    if owner_of(file) != LIBRARY:
        return None
    package = re.split(r"[\\/]", below_site_packages(file))[0].removesuffix(".py")
    names = _distributions().get(package, [package])
    try:
        return f"{package} {importlib.metadata.version(names[0])}"
    except importlib.metadata.PackageNotFoundError:
        return package


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())
