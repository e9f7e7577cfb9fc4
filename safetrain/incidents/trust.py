"""Which code the config of a foreign run may name: `safetrain replay` imports and calls nothing else.

A config can name anything that Python can import, `os.system` too, so a bundle out of a bug report is a program. Without
`--trust` a target must be

    on the list of `harmless`: layers, losses, optimizers and schedules of torch by name, and the parts that ship with safetrain
    defined in a file of the current project: below the current directory, and not brought along by the run
    given by the user on the command line

A run brings along what lies in its own directory. Unless this user made it (see `core.ownership`), it also brings what it was unpacked
with: everything below the entry of the current directory that holds it, and the whole of the current directory if it lies directly there
or if this user has never trained there.
What matters is where the object that is called was defined: `./model.py:os.system` is not the project's.
"""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.ownership import has_trained_in, is_own
from ..core.rundir import JOURNAL
from ..errors import UsageError
from .harmless import NAMES, is_harmless

if TYPE_CHECKING:
    from .bundle import Bundle


class Trust:
    @classmethod
    def of_bundle(cls, bundle: Bundle, everything: bool, given: Iterable[str] = ()) -> Trust:
        asked = None if bundle.asked is None else bundle.asked.parent.parent
        return cls(bundle.run_dir, everything, given, asked)

    def __init__(
        self, run_dir: Path, everything: bool = False, given: Iterable[str] = (), asked: Path | None = None
    ) -> None:
        """`everything`: with `--trust`. `given`: targets that the user has typed. `asked`: the run's directory, before links were
        followed."""
        self.everything, self._given = everything, frozenset(given)
        self._project = Path.cwd().resolve()
        self._is_own = is_own(run_dir) or not run_dir.exists()
        self._is_known = self._is_own or has_trained_in(self._project)
        # A link in an archive may lead to where nothing of the archive seems to be.
        places = {run_dir.resolve(), Path(os.path.abspath(run_dir if asked is None else asked))}
        self._brought = [brought for place in places for brought in _brought_by(place, self._project, self._is_own)]

    def check(self, config: Any) -> None:
        """Raise UsageError if the config, or any argument in it, names something else. Imports only what may run."""
        if self.everything:
            return
        foreign = [target for target in dict.fromkeys(targets_in(config)) if not self.allows(target)]
        if not foreign:
            return
        made = "" if self._is_own else " (this run was made elsewhere, or its config was changed since)"
        if not self._is_known:
            made += "; you have not trained in this directory, so what is in it may have come with the run"
        raise UsageError(
            f"the config of this run names code that is not of the current project ({self._project}){made}. It would be imported "
            "and called, and was not run:\n"
            + "\n".join(f"  - {target}{self._where(target)}" for target in foreign)
            + "\nTo fix: run the command in the directory of a project of yours that has this code; or look at that code and at the "
            "config, and add --trust."
        )

    def allows(self, target: str) -> bool:
        """May the config name it?"""
        if self.everything or target in self._given or target in NAMES:
            return True
        found = self._found(target)
        return found is not None and (is_harmless(found) or self._is_of_project(found))

    def allows_in_batch(self, target: str) -> bool:
        """May an object of that class be in the batch? Only one of the project: its state is whatever the bundle says."""
        if self.everything:
            return True
        found = self._found(target)
        return found is not None and self._is_of_project(found)

    def _found(self, target: str) -> Any:
        """What the target names, if its modules may be imported."""
        from ..config import import_target
        from ..config.targets import split_target

        try:
            file, name = split_target(target)
        except ValueError:
            return None
        allowed = self._allows_file(file) if file is not None else self._allows_modules_of(name)
        return import_target(target) if allowed else None

    def _where(self, target: str) -> str:
        """Which file it is in, where the target does not say."""
        from ..config.targets import split_target

        try:
            file, name = split_target(target)
        except ValueError:
            return ""
        path = (
            next((path for path in reversed(list(_files_of(name))) if path is not None), None) if file is None else file
        )
        if path is None:
            return ""
        is_brought = any(path.resolve().is_relative_to(brought) for brought in self._brought)
        return (f" ({path})" if file is None else "") + (", which came with the run" if is_brought else "")

    def _allows_file(self, file: Path) -> bool:
        from ..config.sources import bundled_dir

        path = file.resolve()
        if path.is_relative_to(bundled_dir().resolve() / "recipes"):
            return True
        # Also if they lie below the current directory: their functions run code that they are given.
        libraries = (Path(__file__).resolve().parents[1], Path(sysconfig.get_path("stdlib")).resolve())
        if "site-packages" in path.parts or any(path.is_relative_to(library) for library in libraries):
            return False
        if not self._is_known or not path.is_relative_to(self._project):
            return False
        if any(path.is_relative_to(brought) for brought in self._brought):
            return False
        # Nor what another run brought along.
        between = path.relative_to(self._project).parents
        return not any((self._project / directory / JOURNAL).is_file() for directory in between if directory.parts)

    def _allows_modules_of(self, name: str) -> bool:
        """May every module on the way to a dotted name be imported? Found out without importing any."""
        if name.partition(".")[0] in ("torch", "safetrain"):
            # Under another of its names, or not to be run at all, which the object tells; but nothing more is imported for that.
            return name.rpartition(".")[0] in sys.modules
        files = list(_files_of(name))
        return bool(files) and all(file is not None and self._allows_file(file) for file in files)

    def _is_of_project(self, found: Any) -> bool:
        """Was it defined there?"""
        if inspect.ismethod(found):  # a class method
            found = found.__func__
        name = getattr(found, "__module__", None)
        if not (inspect.isclass(found) or inspect.isfunction(found)) or not isinstance(name, str):
            return False
        file = getattr(sys.modules.get(name), "__file__", None)
        return file is not None and self._allows_file(Path(file))


def targets_in(node: Any) -> Iterator[str]:
    """Every `_target_` in it, at any depth, and the rungs of `recovery.ladder`, which are written without."""
    if isinstance(node, Mapping):
        if isinstance(node.get("_target_"), str):
            yield node["_target_"]
        if isinstance(node.get("ladder"), (list, tuple)):
            yield from (rung for rung in node["ladder"] if isinstance(rung, str) and "." in rung)
        for child in node.values():
            yield from targets_in(child)
    elif isinstance(node, (list, tuple)):
        for child in node:
            yield from targets_in(child)


def _brought_by(run_dir: Path, project: Path, is_own: bool) -> list[Path]:
    """Directories whose code is not the project's although it may lie below the current directory."""
    if is_own:  # a run's directory may be the project itself
        return [] if project.is_relative_to(run_dir) else [run_dir]
    if project.is_relative_to(run_dir) or run_dir.parent == project:
        return [run_dir, project]
    if run_dir.is_relative_to(project):
        return [project / run_dir.relative_to(project).parts[0]]
    return [run_dir]


def _files_of(name: str) -> Iterator[Path | None]:
    """The files that importing a dotted name executes, outermost package first; None for one that is not a file of source."""
    from ..config.resolve import find_below

    search: list[str] = [os.getcwd(), *(path for path in sys.path if path)]
    parts = name.split(".")
    for count in range(1, len(parts)):
        loaded = sys.modules.get(".".join(parts[:count]))
        if count == 1 and parts[0] in sys.builtin_module_names:
            yield None
            return
        if loaded is not None and getattr(loaded, "__spec__", None) is not None:
            spec = loaded.__spec__
        else:
            spec = find_below(".".join(parts[:count]), search)
        if spec is None:
            return
        if spec.origin is not None and spec.loader is not None and spec.has_location:
            yield Path(spec.origin)
        elif not spec.submodule_search_locations:
            yield None
        search = list(spec.submodule_search_locations or ())
        if not search:
            return
