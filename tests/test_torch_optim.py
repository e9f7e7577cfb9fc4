"""A run that compiles nothing does not load torch's compiler; one that does has all of it."""

import subprocess
import sys

RUN = """
import sys, torch
from torch import nn
from safetrain import SafeTrainer

data = [(x, x.sum(1, keepdim=True)) for x in torch.randn(20, 8, 3)]
config = {"loop": {"max_steps": 30}, "optimizer": {"_target_": OPTIMIZER, "lr": 0.01}, "checkpoint": {"every_steps": 10}}
trainer = SafeTrainer(nn.Linear(3, 1), loss_fn=nn.MSELoss(), train_data=data, config=config, run_dir=sys.argv[1])
trainer.fit()
"""


def run(code, path):
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_run_does_not_load_the_compiler(tmp_path):
    for name in ("AdamW", "SGD"):
        code = RUN.replace("OPTIMIZER", f"'torch.optim.{name}'") + "\nprint('torch._dynamo' in sys.modules)"
        assert run(code, tmp_path / name) == "False"


def test_an_optimizer_that_is_made_before_its_trainer_does_not_load_it(tmp_path):
    code = (
        "import sys, torch\n"
        "from safetrain import SafeTrainer\n"
        "model = torch.nn.Linear(3, 1)\n"
        "optimizer = torch.optim.AdamW(model.parameters(), fused=True)\n"
        "scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)\n"
        "data = [(x, x.sum(1, keepdim=True)) for x in torch.randn(20, 8, 3)]\n"
        "parts = {'optimizer': optimizer, 'scheduler': scheduler, 'train_data': data}\n"
        "SafeTrainer(model, loss_fn=torch.nn.MSELoss(), run_dir=sys.argv[1], **parts).fit()\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    assert run(code, tmp_path / "run") == "False"


def test_whoever_loads_it_has_optimizers_as_torch_made_them(tmp_path):
    code = RUN.replace("OPTIMIZER", "'torch.optim.AdamW'") + (
        "import torch._dynamo\n"
        "kept = torch.optim.Optimizer.state_dict.__wrapped__\n"
        "ours = getattr(kept, '__dynamo_disable')\n"
        "trainer.optimizer.state_dict()\n"
        "theirs = getattr(kept, '__dynamo_disable')\n"
        "print(type(ours).__name__, theirs is not ours, hasattr(theirs, '_torchdynamo_disable'))\n"
    )
    assert run(code, tmp_path / "run") == "partial True True"
