"""The launcher behind --nproc: torch's elastic agent, which torchrun uses too."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.text import prints_to_terminal
from .feature import Feature


def _probe() -> None:
    from torch.distributed.elastic.agent.server.api import SignalException  # type: ignore[attr-defined] # noqa: F401
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest, Std  # noqa: F401
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: F401
    from torch.distributed.launcher.api import elastic_launch  # noqa: F401

    with tempfile.TemporaryDirectory() as scratch:
        _launch_config(2, _rank_logs(Path(scratch), scratch))
    inspect.signature(DefaultLogsSpecs.reify).bind(None, {})


LAUNCHER = Feature(
    "nproc",
    relies_on="torch.distributed.launcher.api, torch.distributed.elastic.multiprocessing.api.DefaultLogsSpecs",
    lost="--nproc N",
    instead="an error that names torchrun, which does the same",
    probe=_probe,
)


class RanksFailed(Exception):
    """Some processes ended with an error."""

    def __init__(self, failures: dict[int, Any]) -> None:
        super().__init__(f"ranks {sorted(failures)} failed")
        self.failures = failures
        """By rank, each with `error_file`, `exitcode` and `timestamp`."""


class Interrupted(Exception):
    def __init__(self, signal: int) -> None:
        super().__init__(f"signal {signal}")
        self.signal = signal


def require(num_processes: int) -> None:
    """Raises if this torch's launcher cannot be used."""
    LAUNCHER.require(f"start it with torchrun --nproc-per-node {num_processes} -m safetrain, and leave --nproc out.")


def run(arguments: Sequence[str], num_processes: int, logs: Path) -> None:
    """`python ARGUMENTS` in `num_processes` processes, each with its output in the directory `logs`; that of rank 0 is also shown.

    The others are ended when one fails. Raises RanksFailed or Interrupted.
    """
    from torch.distributed.elastic.agent.server.api import SignalException  # type: ignore[attr-defined]
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    with tempfile.TemporaryDirectory() as scratch:  # for what torch itself would keep of the ranks
        try:
            elastic_launch(_launch_config(num_processes, _rank_logs(logs, scratch)), sys.executable)(*arguments)
        except ChildFailedError as error:
            raise RanksFailed(error.failures) from error
        except SignalException as error:
            raise Interrupted(int(error.sigval)) from error


def _launch_config(num_processes: int, logs_specs: Any) -> Any:
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        logs_specs=logs_specs,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        role="",
        log_line_prefix_template="${role_name}",  # nothing: what rank 0 prints is shown as it is
    )


def _rank_logs(directory: Path, scratch: str) -> Any:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest, Std

    class RankLogs(DefaultLogsSpecs):
        """Files that are named after their rank, in one directory."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            made = super().reify(envs)

            def renamed(paths: dict[int, str]) -> dict[int, str]:
                return {rank: _named_after_rank(path, rank, directory) for rank, path in paths.items()}

            names = ("stdouts", "stderrs", "tee_stdouts", "tee_stderrs", "error_files")
            changes: dict[str, Any] = {name: renamed(getattr(made, name)) for name in names}
            dest = dataclasses.replace(made, **changes)
            for rank, file in dest.error_files.items():
                envs[rank]["TORCHELASTIC_ERROR_FILE"] = file
            return dest

    # A terminal stays rank 0's own, so that it can draw on it; its errors are kept in any case.
    shown = Std.ERR if prints_to_terminal() else Std.ALL
    redirected = dict.fromkeys(range(1, 4096), Std.ALL) | {0: shown}
    return RankLogs(log_dir=scratch, redirects=redirected, tee={0: shown})


def _named_after_rank(path: str, rank: int, directory: Path) -> str:
    if not path or path == os.devnull:
        return path
    return str(directory / f"rank-{rank}.{Path(path).name}")
