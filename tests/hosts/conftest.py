import pytest

from safetrain import watch


@pytest.fixture
def make_guard(tmp_path):
    """`watch` with quiet output and a run directory of its own; every guard is closed at the end."""
    made = []

    def make(model, optimizer, *, config=None, **options):
        config = {"logging": {"console": "off", "tensorboard": False}, **(config or {})}
        options.setdefault("run_dir", tmp_path / f"run-{len(made)}")
        made.append(watch(model, optimizer, config=config, **options))
        return made[-1]

    yield make
    for guard in made:
        guard.close()
