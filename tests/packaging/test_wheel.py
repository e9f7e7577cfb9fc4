"""The wheel, built from the sdist and installed in an environment that cannot import this checkout."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import safetrain

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def run(*command, cwd):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=clean, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A directory with the sdist, and the wheel built from it."""
    directory = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", directory, ROOT, cwd=directory)
    return directory


@pytest.fixture(scope="module")
def wheel(dist):
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The `bin` directory of an environment with the wheel, which uses the dependencies of the current one."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=False, symlinks=os.name != "nt")
    scripts = environment / ("Scripts" if os.name == "nt" else "bin")
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site_packages = Path(run(scripts / "python", "-c", purelib, cwd=environment).strip())
    # Nested .pth files are not processed, so an editable install in the current environment cannot be imported.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", scripts / "python"]
    run(*pip, "install", "--no-deps", "--no-index", "--force-reinstall", wheel, cwd=environment)
    return scripts


def test_wheel_installs_one_package_only(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"safetrain", f"safetrain-{safetrain.__version__}.dist-info"}


def test_wheel_holds_types_recipes_and_configs(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    bundled = {
        f"safetrain/bundled/{path.relative_to(ROOT).as_posix()}"
        for pattern in ("recipes/**/*.py", "recipes/**/*.npz", "configs/**/*.yaml")
        for path in ROOT.glob(pattern)
    }
    assert bundled
    assert bundled | {"safetrain/py.typed"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith("safetrain/bundled/tests")]


def test_wheel_holds_the_templates_of_init(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    templates = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("safetrain/scaffold/*.template")}
    assert len(templates) == 4
    assert templates <= names


def test_sdist_holds_the_licence_and_the_tests(dist):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "constraints.txt", "tests/conftest.py", "scripts/test"} <= names


def test_installed_package_is_the_wheels(installed, tmp_path):
    program = "import safetrain, json, sys; print(json.dumps([safetrain.__file__, sys.prefix]))"
    file, prefix = json.loads(run(installed / "python", "-c", program, cwd=tmp_path))
    assert Path(file).is_relative_to(prefix)
    assert Path(prefix) == installed.parent


def test_installed_command_trains_from_an_empty_directory(installed, tmp_path):
    out = tmp_path / "out"
    working_directory = tmp_path / "empty"
    working_directory.mkdir()
    run(installed / "safetrain", "fit", "quickstart", "loop.max_steps=3", "--out", out, cwd=working_directory)
    (summary,) = out.rglob("summary.json")
    assert json.loads(summary.read_text(encoding="utf-8"))["steps"] == 3


def test_module_is_the_same_program(installed, tmp_path):
    as_module = run(installed / "python", "-m", "safetrain", "--help", cwd=tmp_path)
    assert as_module == run(installed / "safetrain", "--help", cwd=tmp_path)
