"""Where configs come from: files, the recipes that ship with safetrain, and the files that a config extends."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from ..core.files import relative_to
from .merge import merge
from .targets import with_absolute_targets
from .tree import MAX_BYTES, Node, Place, Problems, YamlError, from_yaml

EXTENDS = "extends"
MAX_FILES = 100
SUFFIXES = (".yaml", ".yml")


def bundled_dir() -> Path:
    """The directory that holds `configs/` and `recipes/`: inside an installed package, or the source checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "bundled"
    return installed if installed.is_dir() else package.parent


def recipe_names() -> list[str]:
    """The names by which the bundled configs can be loaded."""
    configs = bundled_dir() / "configs"
    return sorted(path.relative_to(configs).with_suffix("").as_posix() for path in configs.rglob("*.yaml"))


def find_config(source: str | Path, directory: Path) -> Path:
    """The file that `source` names: a path relative to `directory`, or a recipe. Raises LookupError with what to do."""
    path = Path(os.path.abspath(directory / Path(source).expanduser()))
    if path.is_file():
        return path
    if isinstance(source, str) and Path(source).suffix not in SUFFIXES:
        recipe = bundled_dir() / "configs" / f"{source}.yaml"
        if recipe.is_file():
            return recipe
    what = "is a directory, not a config file" if path.is_dir() else "is neither a file nor a recipe"
    files = sorted(file for file in path.parent.glob("*") if file.suffix in SUFFIXES)
    nearby = [str(file.relative_to(directory)) for file in files if file.is_relative_to(directory)]
    names = recipe_names()
    close = difflib.get_close_matches(str(source), [*nearby, *names], n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(name) for name in close)}? " if close else ""
    whole = [name for name in names if not name.endswith("_broken")]
    raise LookupError(
        f"{str(source)!r} {what}; {hint}give the path of a YAML file, or a recipe: {', '.join(whole) or 'none'}"
    )


class FileReader:
    """Reads a config file and, recursively, the files it extends."""

    def __init__(self, main: Path, problems: Problems) -> None:
        self.main = main
        self.problems = problems
        self._num_read = 0

    def read(self, path: Path, chain: tuple[Path, ...] = ()) -> Node | None:
        """The file laid over everything it extends; None if it is empty or cannot be read."""
        self._num_read += 1
        if self._num_read > MAX_FILES:
            if self._num_read == MAX_FILES + 1:
                self.problems.append(f"{display(path)}: more than {MAX_FILES} files extend each other; remove some")
            return None
        node = self._parse(path)
        if node is None:
            return None
        if not isinstance(node.value, dict):
            kind = "list" if isinstance(node.value, list) else "single value"
            message = f"the file must hold sections such as 'model:' and 'loop:', not a {kind}"
            self.problems.add(node.place, (), message)
            return None
        guards = node.get("guards")
        if guards is not None and guards.value is None and guards.text == "":
            message = (
                "nothing after the colon; write 'null' to turn every guard off, or delete the line for the defaults"
            )
            self.problems.add(guards.place, ("guards",), message)
        return self.extend(node, path.parent, (*chain, path))

    def extend(self, node: Node, directory: Path, chain: tuple[Path, ...]) -> Node:
        """The node laid over the files in its `extends`."""
        own = {key: child for key, child in node.value.items() if key != EXTENDS}
        result: Node | None = None
        for name in self._parents(node.value.get(EXTENDS)):
            parent = self._extended(name, directory, chain)
            if parent is not None:
                result = parent if result is None else merge(result, parent)
        return merge(Node({}, node.place) if result is None else result, Node(own, node.place))

    def _parents(self, extends: Node | None) -> list[Node]:
        if extends is None or extends.value is None:
            return []
        names = extends.value if isinstance(extends.value, list) else [extends]
        if not all(isinstance(name.value, str) for name in names):
            self.problems.add(extends.place, (EXTENDS,), "must be a file or recipe name, or a list of them")
            return []
        return names

    def _extended(self, name: Node, directory: Path, chain: tuple[Path, ...]) -> Node | None:
        try:
            path = find_config(name.value, directory)
        except LookupError as error:
            self.problems.add(name.place, (EXTENDS,), str(error.args[0]))
            return None
        if path in chain:
            names = " → ".join(display(p) for p in (*chain[chain.index(path) :], path))
            self.problems.add(
                name.place, (EXTENDS,), f"files extend each other in a circle: {names}; remove one of them"
            )
            return None
        return self.read(path, chain)

    def _parse(self, path: Path) -> Node | None:
        label = display(path)
        origin = relative_to(path, self.main.parent)
        try:
            if path.stat().st_size > 4 * MAX_BYTES:
                raise YamlError(
                    f"{path.stat().st_size >> 10} KB are too much for a config; keep data in files of its own",
                    None,
                    None,
                )
            text = path.read_text(encoding="utf-8")
            node = from_yaml(
                text, lambda line: Place(f"{label}:{line}", f"{origin}:{line}", path.parent), self.problems
            )
            return None if node is None else with_absolute_targets(node)
        except YamlError as error:
            where = label if error.line is None else f"{label}:{error.line}:{error.column}"
            self.problems.append(f"{where}: {error}")
        except UnicodeDecodeError as error:
            self.problems.append(f"{label}: not UTF-8 text (byte {error.start}); save the file as UTF-8")
        except OSError as error:
            self.problems.append(f"{label}: cannot be read: {error.strerror}")
        return None


def display(path: Path) -> str:
    """The path as people would type it: relative when it is below the current directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
