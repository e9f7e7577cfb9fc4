"""A directory of checkpoints.

    checkpoints/step-00000500/   model.safetensors  the model's weights and buffers, by the names of its state_dict
                                 frozen.safetensors its weights that are not trained, if they are large: the same file in all checkpoints
                                 ema.safetensors    their moving average, if there is one
                                 training.safetensors, state.pt    the rest of the training state
                                 manifest.json      sizes and checksums
                                 .metadata, __0_0.distcp, …  instead of safetensors, if the state was sharded
    checkpoints/last, best       links to the newest, and to the best by `loop.monitor`

A checkpoint is written to a temporary directory next to its final path, fsynced and renamed: what has the final name is complete.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, load_file
from torch import Tensor

from ..core.files import sync
from ..errors import CheckpointError
from .frozen_file import FrozenFile
from .manifest import NAME, Damaged, Manifest, UnknownSchema, checksum, read_manifest
from .plain import load_plain
from .shards import METADATA, plain_memory, read_shards
from .soundness import is_second_moment, peaks_of, problems_in
from .state import TrainState
from .tensorfile import is_storable, write_tensors

STEP = re.compile(r"step-(\d{8,})(?:-(\d+))?$")
OWN_FILE = {"model": "model.safetensors", "ema": "ema.safetensors"}
FROZEN = "frozen.safetensors"
SHARED_FROM = 2**24
"""Bytes of weights that are not trained, from which on they are written once for all checkpoints of a process."""
OTHERS, REST = "training.safetensors", "state.pt"


class BadState(Exception):
    """The state has non-finite values and was not saved; `problems` names the tensors."""

    def __init__(self, problems: dict[str, str]) -> None:
        super().__init__(", ".join(f"{name} ({problem})" for name, problem in list(problems.items())[:5]))
        self.problems = problems


@dataclass
class Loaded:
    path: Path
    manifest: Manifest
    state: TrainState
    passed_over: dict[str, str] = field(default_factory=dict)
    """Newer checkpoints that could not be used, with the reason."""


class CheckpointStore:
    def __init__(self, directory: Path, frozen: FrozenFile | None = None) -> None:
        """`frozen`: of another store of the same run, so that both link to the same file."""
        self.directory = directory
        self.frozen = FrozenFile() if frozen is None else frozen

    def paths(self) -> list[Path]:
        """All complete checkpoints, oldest first."""
        if not self.directory.is_dir():
            return []
        found = [(STEP.match(path.name), path) for path in self.directory.iterdir() if not path.is_symlink()]
        numbered = [((int(match[1]), int(match[2] or 0)), path) for match, path in found if match and path.is_dir()]
        return [path for _, path in sorted(numbered)]

    @staticmethod
    def step_of(path: Path) -> int:
        """The step in the name of a checkpoint; -1 if it is not one."""
        match = STEP.match(path.name)
        return -1 if match is None else int(match[1])

    # ---- writing -----------------------------------------------------------------------------------------------

    def write(self, state: TrainState, about: dict[str, Any]) -> Path:
        """Write a new checkpoint; returns when it is safely on disk. Raises OSError, or BadState for non-finite values."""
        final, temporary = self.new_names(about["step"])
        try:
            temporary.mkdir()
            files, problems = _write_files(temporary, state, self.frozen)
            if problems:
                raise BadState(problems)
            write_bytes(temporary / NAME, Manifest(**about, files=files).render().encode())
            sync_directory(temporary)
            os.rename(temporary, final)
            if FROZEN in files:
                self.frozen.written_to(final / FROZEN, files[FROZEN])
            sync_directory(self.directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return final

    def new_names(self, step: int) -> tuple[Path, Path]:
        """The final and the temporary path for a checkpoint of that step."""
        if not self.directory.parent.is_dir():
            raise FileNotFoundError(f"the run directory {self.directory.parent} is gone")
        self.directory.mkdir(exist_ok=True)
        final = self._free_name(step)
        return final, self.directory / f".{final.name}.{os.getpid()}.tmp"

    def _free_name(self, step: int) -> Path:
        path, again = self.directory / f"step-{step:08d}", 0
        while path.exists():
            again += 1
            path = self.directory / f"step-{step:08d}-{again}"
        return path

    def point(self, link: str, target: Path) -> None:
        """Atomically point the symlink at a checkpoint. Does nothing on file systems without symlinks."""
        temporary = self.directory / f".{link}.{os.getpid()}.tmp"
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(target.name)
            os.replace(temporary, self.directory / link)

    def rotate(self, keep: Callable[[list[tuple[Path, Manifest]]], set[Path]]) -> None:
        """Delete the intact checkpoints that `keep` does not choose (it is given them oldest first).

        The newest is always kept, and nothing is deleted unless it still verifies. Damaged ones are left for inspection.
        """
        sound = []
        for path in self.paths():
            with contextlib.suppress(Damaged):
                sound.append((path, read_manifest(path)))
        if not sound:
            return
        newest, manifest = sound[-1]
        kept = keep(sound) | {newest, *self._linked()}
        doomed = [path for path, _ in sound if path not in kept]
        if doomed:
            try:
                # A file that all of them share is not lost with those that are deleted.
                own = [n for n in manifest.files if n != FROZEN or not all(_is_same(newest / n, p / n) for p in doomed)]
                manifest.verify_files(newest, own)
            except Damaged:
                return
        for path in doomed:
            # Renamed first, so that a half-deleted one is never taken for a checkpoint.
            with contextlib.suppress(OSError):
                gone = path.with_name(f".{path.name}.{os.getpid()}.tmp")
                os.rename(path, gone)
                shutil.rmtree(gone, ignore_errors=True)

    def _linked(self) -> Iterable[Path]:
        for link in ("last", "best"):
            with contextlib.suppress(OSError):
                yield self.directory / os.readlink(self.directory / link)

    def clean(self) -> None:
        """Delete the temporary files of a killed process. Call it only while holding the run's lock."""
        for path in self.directory.glob(".*.tmp") if self.directory.is_dir() else ():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    def set_aside(self, names: Iterable[str]) -> None:
        """Rename damaged checkpoints to `step-….damaged`, so that they are no longer considered."""
        for name in names:
            with contextlib.suppress(OSError):
                os.rename(self.directory / name, self.directory / f"{name}.damaged")

    def remember(self, loaded: Loaded) -> None:
        """Weights that are not trained are in its file already, and need not be written again."""
        if FROZEN in loaded.manifest.files:
            own = _by_own_name(_frozen_tensors(loaded.state))
            self.frozen.loaded_from(loaded.path / FROZEN, own, loaded.manifest.files[FROZEN])

    # ---- reading -----------------------------------------------------------------------------------------------

    @staticmethod
    def problem_of(path: Path) -> Damaged | None:
        """Read again, and compared with what was written."""
        try:
            read_manifest(path).verify_files(path)
        except Damaged as problem:
            return problem
        return None

    def load(self, path: Path) -> Loaded:
        """Verify and load. Raises Damaged."""
        manifest = read_manifest(path)
        manifest.verify_files(path)
        with _damaged_if_unreadable():
            rest = read_rest(path)
            tensors = rest.pop("tensors")
            if METADATA in manifest.files:
                tensors |= read_shards(path, plain_memory)
            for part, name in (*OWN_FILE.items(), ("model", FROZEN)):
                if name in manifest.files:
                    tensors |= {f"{part}/{key}": tensor for key, tensor in _load_tensors(path / name).items()}
            if OTHERS in manifest.files:
                tensors |= _load_tensors(path / OTHERS)
        return Loaded(path, manifest, TrainState(tensors, rest))

    def load_newest(self, but: Collection[int] = ()) -> Loaded | None:
        """The newest that verifies, and is not of one of the steps `but`; None if there is no such checkpoint. Raises CheckpointError
        if none of them is usable."""
        passed_over: dict[str, str] = {}
        for path in self._newest_first():
            if self.step_of(path) in but:
                continue
            try:
                loaded = self._load_candidate(path)
            except UnknownSchema as problem:
                raise unusable(path, problem) from problem
            except Damaged as problem:
                passed_over[path.name] = str(problem)
                continue
            loaded.passed_over = passed_over
            return loaded
        if passed_over:
            raise self.none_left(passed_over)
        return None

    def _newest_first(self) -> list[Path]:
        return list(reversed(self.paths()))

    def _load_candidate(self, path: Path) -> Loaded:
        """Raises Damaged or UnknownSchema, with several processes on all of them."""
        return self.load(path)

    def none_left(self, passed_over: dict[str, str]) -> CheckpointError:
        reasons = "\n".join(f"  {name}: {reason}" for name, reason in passed_over.items())
        return CheckpointError(
            f"no checkpoint in {self.directory} can be used:\n{reasons}\n"
            "To fix: restore one from a backup, or start a new run in another directory."
        )


def unusable(path: Path, problem: UnknownSchema) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be used: {problem}.\nTo fix: use the version of safetrain that wrote it, or a newer one."
    )


@contextlib.contextmanager
def _damaged_if_unreadable() -> Iterator[None]:
    """Whatever reading a corrupt or forged file raises becomes Damaged; no reader used here can run code."""
    try:
        yield
    except Damaged:
        raise
    except Exception as error:
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Damaged(f"it cannot be loaded: {what}") from error


MAX_HEADER = 32 * 2**20
"""Bytes of the names and shapes in one file: a quarter of a million tensors."""


def _load_tensors(path: Path) -> dict[str, Tensor]:
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > MAX_HEADER:
        raise Damaged(f"{path.name} has a header of {size} bytes, more than {MAX_HEADER}")
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:  # safetensors opens no other names
        return load(path.read_bytes())
    return load_file(path)


def read_rest(path: Path) -> dict[str, Any]:
    """The state of a checkpoint apart from its tensors, and those tensors that safetensors cannot hold."""
    with _damaged_if_unreadable():
        rest: dict[str, Any] = load_plain(path / REST)
        if (problem := _wrong_in(rest)) is not None:
            raise Damaged(f"{REST} is not as it was written: {problem}")
    return rest


KINDS = {
    "num_committed": int, "optimizer": dict, "guards": dict, "extra_state": dict, "born_bad": list, "buffers": list, "eval_mode": list,
    "tied": dict, "random": dict, "tensors": dict,
}  # fmt: skip


def _wrong_in(rest: Any) -> str | None:
    """What a state has of another type than it should."""
    if not isinstance(rest, dict):
        return f"it is a {type(rest).__name__}"
    wrong = [name for name, kind in KINDS.items() if not isinstance(rest.get(name, kind()), kind)]
    optimizer = rest.get("optimizer", {})
    if "optimizer" not in wrong and not all(
        isinstance(optimizer.get(name, {}), dict) for name in ("packed", "tensors")
    ):
        wrong.append("optimizer")
    return f"of another type than they should be: {', '.join(wrong)}" if wrong else None


def _write_files(
    directory: Path, state: TrainState, shared: FrozenFile
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Write every file but the manifest, fsynced; returns their sizes and checksums, and the problems of the state."""
    groups: dict[str, dict[str, Tensor]] = {OTHERS: {}}
    odd: dict[str, Tensor] = {}
    frozen = _frozen_tensors(state)
    for name, tensor in state.tensors.items():
        if name in frozen:
            continue
        file = OWN_FILE.get(name.partition("/")[0], OTHERS)
        if is_storable(tensor):
            groups.setdefault(file, {})[name if file == OTHERS else name.partition("/")[2]] = tensor
        else:
            odd[name] = tensor.cpu()
    files: dict[str, dict[str, Any]] = {}
    suspects = dict(odd)
    if frozen:
        by_own_name = _by_own_name(frozen)
        if (linked := shared.link(directory / FROZEN, by_own_name)) is not None:
            files[FROZEN] = linked
        else:
            groups[FROZEN] = by_own_name
    for file, tensors in groups.items():
        written = write_tensors(
            directory / file, tensors, [n for n in tensors if file == OTHERS and is_second_moment(n)]
        )
        files[file] = {"bytes": written.num_bytes, "xxh3_128": written.checksum}
        prefix = "" if file == OTHERS else "model/" if file == FROZEN else f"{file.partition('.')[0]}/"
        suspects |= {prefix + name: tensors[name] for name in written.suspects}
    files[REST] = write_rest(directory / REST, state.rest, odd)
    return files, problems_in(peaks_of(suspects), state.rest["born_bad"])


def _frozen_tensors(state: TrainState) -> dict[str, Tensor]:
    """None, if they are small: each checkpoint is then whole without the others."""
    names = set(state.rest.get("frozen", ()))
    found = {name: tensor for name, tensor in state.tensors.items() if name in names and is_storable(tensor)}
    return found if sum(tensor.nbytes for tensor in found.values()) >= SHARED_FROM else {}


def _by_own_name(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.partition("/")[2]: tensor for name, tensor in tensors.items()}


def _is_same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False


def write_rest(path: Path, rest: dict[str, Any], odd: dict[str, Tensor]) -> dict[str, Any]:
    """Returns size and checksum."""
    buffer = io.BytesIO()
    torch.save({**rest, "tensors": odd}, buffer)
    write_bytes(path, buffer.getvalue())
    return {"bytes": buffer.tell(), "xxh3_128": checksum(path)}


def write_bytes(path: Path, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        sync(file.fileno())


def sync_directory(path: Path) -> None:
    """fsync a directory, so that files created or renamed in it survive a power cut. Not every system supports it."""
    with contextlib.suppress(PermissionError, NotImplementedError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            sync(descriptor)
        finally:
            os.close(descriptor)
