"""Was this run made here, by this user? A run that came in an archive, or whose config was changed since, was not.

A mark in the run's directory says so: a keyed hash of the directory's identity and of the config. The key lies in the user's state
directory and never in a run, so nobody else can make such a mark, and a copy of a run has none that fits. The directories in which this
user has trained are remembered there too: code in another one may have been unpacked together with the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path

from .rundir import CONFIG

MARK = ".made_here"


def mark(run_dir: Path) -> None:
    """Say that this user made the run, in the current directory. Nothing is said if that is impossible: its replay then asks for
    `--trust` more often."""
    with contextlib.suppress(OSError):
        if (key := _key(make=True)) is not None:
            (run_dir / MARK).write_text(_expected(run_dir, key))
        project = Path.cwd()
        (place := _place_of(project)).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        place.write_text(str(project.stat().st_ino))


def is_own(run_dir: Path) -> bool:
    """Whether the mark in the run's directory is one that this user made for it."""
    try:
        key = _key(make=False)
        found = (run_dir / MARK).read_bytes()[:200].strip()
        return key is not None and hmac.compare_digest(found, _expected(run_dir, key).encode())
    except OSError:
        return False


def has_trained_in(project: Path) -> bool:
    """Whether this user has trained with that as the current directory."""
    try:
        return _place_of(project).read_text() == str(project.stat().st_ino)
    except (OSError, ValueError):
        return False


def _expected(run_dir: Path, key: bytes) -> str:
    config = hashlib.sha256((run_dir / CONFIG).read_bytes()).hexdigest()
    return hmac.new(key, f"{run_dir.stat().st_ino} {config}".encode(), "sha256").hexdigest()


def _state_home() -> Path:
    home = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(home) / "safetrain"


def _place_of(project: Path) -> Path:
    """The file by which a project is remembered."""
    return _state_home() / "projects" / hashlib.sha256(os.fsencode(project.resolve())).hexdigest()[:32]


def _key(make: bool) -> bytes | None:
    path = _state_home() / "key"
    if make and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_hex(32).encode())
    key = path.read_bytes()
    return key if len(key) == 64 else None
