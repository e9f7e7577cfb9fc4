"""Small healthy trainers for pre-flight checks: a classifier of points, and a tagger of token sequences."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from safetrain import SafeTrainer

NUM_SAMPLES, NUM_FEATURES, NUM_CLASSES = 192, 8, 3


def make_data():
    """Points whose class is the largest of their first three features."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(NUM_SAMPLES, NUM_FEATURES, generator=generator)
    return x, x[:, :NUM_CLASSES].argmax(1)


class Net(nn.Module):
    def __init__(self, num_classes=NUM_CLASSES, width=32):
        super().__init__()
        self.hidden = nn.Linear(NUM_FEATURES, width)
        self.act = nn.ReLU()
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.head(self.dropout(self.act(self.hidden(x))))


def cross_entropy(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def make_trainer(data=None, model=None, loss_fn=cross_entropy, lr=3e-3, cls=SafeTrainer, eval_data=None, **sections):
    torch.manual_seed(3)
    if data is None:
        data = TensorDataset(*make_data())
    config = {
        "seed": 5,
        "data": {"batch_size": 16},
        "loop": {"max_steps": 24, "device": "cpu", **sections.pop("loop", {})},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": lr},
        "logging": {"console": "off", "tensorboard": False},
        **sections,
    }
    model = Net() if model is None else model
    return cls(model, loss_fn=loss_fn, train_data=data, eval_data=eval_data, config=config)


VOCABULARY, LENGTH = 12, 10


class Tokens(Dataset[dict[str, Tensor]]):
    """Sequences of 1 to 11, padded at the end with 0. The label of a token is the next one; of padding it is `ignored`."""

    def __init__(self, empty=False, pad_inside=False, ignored=-100):
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(1, VOCABULARY, (96, LENGTH + 1), generator=generator)
        lengths = torch.randint(4, LENGTH + 1, (96,), generator=generator)
        self.tokens[torch.arange(LENGTH + 1) >= lengths[:, None]] = 0
        if pad_inside:
            self.tokens[::2, 2] = 0
        if empty:
            self.tokens[[11, 40]] = 0
        self.ignored = ignored

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        labels = self.tokens[index, 1:].clone()
        labels[labels == 0] = self.ignored
        return {"tokens": self.tokens[index, :-1], "labels": labels}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16, padding_idx=0)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def token_loss(model, batch):
    """Every sequence counts the same: a mean per sequence, then over sequences."""
    logits = model(batch["tokens"]).transpose(1, 2)
    per_token = F.cross_entropy(logits, batch["labels"], reduction="none")
    return (per_token.sum(1) / (batch["labels"] != -100).sum(1)).mean()


def make_text_trainer(**options):
    return make_trainer(Tokens(**options), Tagger(), token_loss, lr=1e-2)
