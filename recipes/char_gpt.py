"""A small character-level GPT on short documents from the standard library. Run it with `safetrain fit char_gpt`.

Three things make a recipe: data (`Documents`), a model (`CharGPT`) and a loss (`document_loss`). None of them knows the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

PAD = 0
FIRST, LAST = ord(" "), ord("~")
VOCAB_SIZE = LAST - FIRST + 2
"""The printable ASCII characters and the padding."""


def encode(text: str) -> list[int]:
    """Token numbers of a text; a character outside the vocabulary becomes `?`."""
    return [1 + (ord(c) if FIRST <= ord(c) <= LAST else ord("?")) - FIRST for c in text]


def split_topics(split: str) -> list[str]:
    """The topics of Python's help: every fifth for `eval`, the others for `train`."""
    if split not in ("train", "eval"):
        raise ValueError(f"split is {split!r}; use 'train' or 'eval'")
    return [topic for i, topic in enumerate(sorted(topics)) if (i % 5 == 4) == (split == "eval")]


def documents(topic: str, length: int) -> list[str]:
    """The paragraphs of a topic of Python's help, white space collapsed, cut into pieces of at most `length` characters."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in topics[topic].split("\n\n"))
    pieces = (text[i : i + length] for text in paragraphs for i in range(0, len(text), length))
    return [piece for piece in pieces if len(piece) > length // 4]


class Documents(Dataset[dict[str, Tensor]]):
    """Documents of at most `context + 1` characters, padded at the end.

    The first `num_documents` of a split are used, so that the order of a shuffled epoch does not depend on how much help a
    version of Python has. `empty_documents` lists those without any text, like an empty file in a corpus: all padding.
    """

    def __init__(self, split: str, context: int, num_documents: int, empty_documents: Sequence[int] = ()) -> None:
        self.texts = [text for topic in split_topics(split) for text in documents(topic, context + 1)]
        if len(self.texts) < num_documents:
            raise ValueError(f"num_documents is {num_documents}, but the {split} split has only {len(self.texts)}")
        self.texts = self.texts[:num_documents]
        for i in empty_documents:
            self.texts[i] = ""
        self.length = context + 1

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.full((self.length,), PAD)
        text = encode(self.texts[index])
        tokens[: len(text)] = torch.tensor(text, dtype=torch.long)
        return {"tokens": tokens}


class Block(nn.Module):
    """Attention and a perceptron, each added to a residual stream that is normalised on the way in."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        # Padding is at the end, so the causal mask already hides it from every real character.
        mixed = F.scaled_dot_product_attention(*qkv.unbind(0), dropout_p=dropout, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.mlp_norm(x))


class CharGPT(nn.Module):
    """Tokens [batch, time] to logits [batch, time, vocabulary]; 0.11 million parameters by default."""

    def __init__(self, context: int, width: int = 64, depth: int = 2, num_heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCAB_SIZE, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB_SIZE, bias=False)
        # A start near the uniform distribution (loss ln 96 = 4.6): with PyTorch's unit-variance embeddings it learns later.
        for embedding in (self.token_embedding, self.position_embedding):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def document_loss(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Mean over the documents of each one's mean negative log-likelihood, so that a short document counts as much as a long one."""
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    real = (targets != PAD).float()
    nll = F.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none") * real
    per_document = nll.sum(1) / real.sum(1)
    bits_per_char = nll.detach().sum() / real.sum() / math.log(2)
    return {"loss": per_document.mean(), "bits_per_char": bits_per_char}
