"""`safetrain check --fix` writes what it proposes for the config, as a config of its own."""

import pytest

from safetrain import load_config
from safetrain.cli.check_fix import _tree, proposed, write_fixed
from safetrain.errors import UsageError
from safetrain.preflight.outcome import failed, passed, warned
from safetrain.preflight.report import Checked, CheckReport

CONFIG = """
model: {_target_: torch.nn.Linear, in_features: 2, out_features: 1}
optimizer: {_target_: torch.optim.SGD, lr: 30}
"""


def report(**outcomes):
    checks = [Checked(o.status, o.reason, o.fix, o.numbers, name=name, seconds=0.0) for name, o in outcomes.items()]
    return CheckReport("my", checks)


def test_nested_keys():
    assert _tree(["optimizer.lr=0.3", "loop.precision=bf16", "guards.clip.mode=norm", "guards.clip.max_norm=1"]) == [
        *(
            "guards:",
            "  clip:",
            "    max_norm: 1",
            "    mode: norm",
            "loop:",
            "  precision: bf16",
            "optimizer:",
            "  lr: 0.3",
        ),
    ]


def test_what_is_written_extends_the_config_and_replaces_no_file(tmp_path):
    config = tmp_path / "my.yaml"
    config.write_text(CONFIG)
    target = write_fixed(str(config), ["optimizer.lr=0.3"])
    fixed = load_config(target)
    assert fixed.optimizer["lr"] == 0.3
    assert fixed.model["in_features"] == 2
    with pytest.raises(UsageError, match="is there already"):
        write_fixed(str(config), ["optimizer.lr=0.1"])


def test_only_what_the_config_accepts_is_proposed(tmp_path):
    config = tmp_path / "my.yaml"
    config.write_text(CONFIG)
    found = report(
        learning_rate=failed("diverges", "lower the learning rate: optimizer.lr=0.3"),
        amp_headroom=warned("near", "standardise the inputs, use loop.precision=bf16, or loop.precisoin=bf16"),
        initial_loss=warned("large", "use torch.nn.init.zeros_ with std=0.1"),
        replay=passed("fine"),
    )
    assert proposed(found, str(config), ()) == ["optimizer.lr=0.3", "loop.precision=bf16"]
