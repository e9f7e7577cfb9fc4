"""Each test is in a directory of its own, with a config and the module of parts that it names."""

import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def project(request, tmp_path, monkeypatch):
    """What the test module calls `CONFIG` is `c.yaml`; its `PARTS` are a module of the name `MODULE`."""
    monkeypatch.chdir(tmp_path)
    if (parts := getattr(request.module, "PARTS", None)) is None:
        return
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, request.module.MODULE, raising=False)
    Path(f"{request.module.MODULE}.py").write_text(parts)
    Path("c.yaml").write_text(request.module.CONFIG)
