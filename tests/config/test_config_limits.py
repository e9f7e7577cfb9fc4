"""Files that are small and would take for ever: refused at once, in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from safetrain import load_config
from safetrain.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return path


ALIASES = "a0: &a0 [1, 2, 3]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
MERGES = "b0: &b0 {x: 1}\n" + "".join(
    f"b{n}: &b{n} {{p: *b{n - 1}, q: *b{n - 1}, r: *b{n - 1}}}\n" for n in range(1, 20)
)
DOUBLING = "name: ${n0}\n" + "".join(f"n{n}: '${{n{n + 1}}}${{n{n + 1}}}'\n" for n in range(40)) + "n40: x\n"
SECTIONS = (
    "name: ${model.n0}\nmodel:\n"
    + "".join(f"  n{n}: '${{model.n{n + 1}}}${{model.n{n + 1}}}'\n" for n in range(40))
    + "  n40: x\n"
)
RELATIVE = "model:\n" + "".join(f"  n{n}: '${{.n{n + 1}}}${{.n{n + 1}}}'\n" for n in range(40)) + "  n40: x\n"
CREATED = "model: {a: \"${oc.create:'{a: &a [1,1], b: &b [*a,*a]}'}\"}\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (ALIASES, "with its aliases written out it has more than"),
        (MERGES, "with its aliases written out it has more than"),
        ("model: " + "[" * 5000, "nested more than"),
        ("model: " + "[" * 200 + "]" * 200, "nested more than"),
        ("model: " + "{a: " * 200 + "1" + "}" * 200, "nested more than"),
        ("".join(f"{' ' * n}a:\n" for n in range(900)), "nested more than"),
        (f"name: {'x' * 600_000}", "too much for a config"),
        ("name: " + "${" * 1000 + "}" * 1000, "not a valid interpolation"),
        (f"name: ${{{'x' * 5000}}}", "an interpolation of"),
        (DOUBLING, "the interpolations multiply"),
        (SECTIONS, "the interpolations multiply"),
        (RELATIVE, "the interpolations multiply"),
        (CREATED, "the interpolations multiply"),
    ],
)
def test_a_bomb_is_a_problem_of_the_config(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_config(write(tmp_path, text))


def test_files_that_extend_each_other_many_times(tmp_path: Path) -> None:
    for n in range(30):
        (tmp_path / f"{n}.yaml").write_text(f"extends: [{n + 1}.yaml, {n + 1}.yaml]\n")
    (tmp_path / "30.yaml").write_text("name: x\n")
    with pytest.raises(ConfigError, match="files extend each other"):
        load_config(tmp_path / "0.yaml")


def test_a_package_without_init_inside_another_can_hold_a_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outer_space" / "inner").mkdir(parents=True)
    (tmp_path / "outer_space" / "inner" / "net.py").write_text("class Net:\n    def __init__(self, width=1): ...\n")
    node = {"_target_": "outer_space.inner.net.Net", "width": 3}
    assert load_config({"model": node}).model == node
    with pytest.raises(ConfigError, match="unknown argument 'depth'"):
        load_config({"model": {**node, "depth": 3}})
    with pytest.raises(ConfigError, match="outer_space"):
        load_config({"model": {"_target_": "outer_space.inner.missing.Net"}})
