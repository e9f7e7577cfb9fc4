"""A small GPT, on characters of short documents or on token files of any size. Run it with `safetrain fit char_gpt`.

Three things make a recipe: data (`Documents` or `TokenFile`), a model (`CharGPT`) and a loss (`document_loss` or
`next_token_loss`). None of them depends on the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

PAD = 0
FIRST, LAST = ord(" "), ord("~")
VOCAB_SIZE = LAST - FIRST + 2
"""The printable ASCII characters and the padding."""


def encode(text: str) -> list[int]:
    """Token ids of a text; a character outside the vocabulary becomes `?`."""
    return [1 + (ord(c) if FIRST <= ord(c) <= LAST else ord("?")) - FIRST for c in text]


def split_topics(split: str) -> list[str]:
    """The topics of Python's help: every fifth for `eval`, the others for `train`."""
    if split not in ("train", "eval"):
        raise ValueError(f"split is {split!r}; use 'train' or 'eval'")
    return [topic for i, topic in enumerate(sorted(topics)) if (i % 5 == 4) == (split == "eval")]


def documents(text: str, length: int) -> list[str]:
    """The paragraphs of a text, white space collapsed, cut into pieces of at most `length` characters."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    pieces = (text[i : i + length] for text in paragraphs for i in range(0, len(text), length))
    return [piece for piece in pieces if len(piece) > length // 4]


class Documents(Dataset[dict[str, Tensor]]):
    """Documents of at most `context + 1` characters, padded at the end: paragraphs of a text file, or of Python's help.

    The first `num_documents` of a split are used (None: all), so that the order of a shuffled epoch does not depend on the
    version of Python. `empty_documents` lists documents without any text, like an empty file in a corpus: all padding.
    `left_padded` lists documents with the padding in front, as some tokenizers do.
    """

    def __init__(
        self,
        split: str,
        context: int,
        num_documents: int | None,
        empty_documents: Sequence[int] = (),
        left_padded: Sequence[int] = (),
        path: str | None = None,
    ) -> None:
        if path is None:
            self.texts = [text for topic in split_topics(split) for text in documents(topics[topic], context + 1)]
        else:
            pieces = documents(Path(path).expanduser().read_text(encoding="utf-8"), context + 1)
            self.texts = [text for i, text in enumerate(pieces) if (i % 5 == 4) == (split == "eval")]
        if num_documents is not None and len(self.texts) < num_documents:
            raise ValueError(f"num_documents is {num_documents}, but the {split} split has only {len(self.texts)}")
        self.texts = self.texts[:num_documents]
        for i in empty_documents:
            self.texts[i] = ""
        self.left_padded = set(left_padded)
        self.length = context + 1

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.full((self.length,), PAD)
        text = encode(self.texts[index])
        start = self.length - len(text) if index in self.left_padded else 0
        tokens[start : start + len(text)] = torch.tensor(text, dtype=torch.long)
        return {"tokens": tokens}


class TokenFile(Dataset[dict[str, Tensor]]):
    """Chunks of `context + 1` tokens from a memory-mapped file of token ids, of any size.

    Each chunk begins with the last token of the previous one. The last tenth of the file is for `eval`. Use it with
    `next_token_loss` and with `model.vocab_size` of the tokenizer.
    """

    def __init__(self, path: str, split: str, context: int, dtype: str = "uint16") -> None:
        if split not in ("train", "eval"):
            raise ValueError(f"split is {split!r}; use 'train' or 'eval'")
        tokens = np.memmap(Path(path).expanduser(), dtype=dtype, mode="r")
        cut = len(tokens) * 9 // 10
        self.tokens = tokens[:cut] if split == "train" else tokens[cut:]
        self.context = context

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.context

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * self.context
        piece = self.tokens[start : start + self.context + 1]
        return {"tokens": torch.from_numpy(piece.astype(np.int64))}


class Block(nn.Module):
    """A pre-norm transformer block: attention and an MLP, each with a residual connection."""

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

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        if mask is None:
            mixed = F.scaled_dot_product_attention(*qkv.unbind(0), dropout_p=dropout, is_causal=True)
        else:
            mixed = masked_attention(*qkv.unbind(0), mask, dropout)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.mlp_norm(x))


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """Attention with a mask that is added to the scores."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1]) + mask
    weights = F.softmax(scores, dim=-1)
    return F.dropout(weights, dropout) @ value


class CharGPT(nn.Module):
    """Tokens [batch, time] to logits [batch, time, vocabulary]; 0.11 million parameters by default.

    The causal mask hides padding at the end from all characters. For padding in front, `padding_mask` is added to the
    attention scores of padding: a large negative number, but not -inf, because padding in front attends to nothing but
    padding, and a softmax of only -inf is NaN.
    """

    def __init__(
        self,
        context: int,
        width: int = 64,
        depth: int = 2,
        num_heads: int = 4,
        dropout: float = 0.0,
        vocab_size: int = VOCAB_SIZE,
        padding_mask: float | None = None,
    ) -> None:
        super().__init__()
        self.padding_mask = padding_mask
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        # Starts near the uniform distribution (loss ln 96 = 4.6); PyTorch's unit-variance embeddings learn more slowly.
        for embedding in (self.token_embedding, self.position_embedding):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        mask = None if self.padding_mask is None else self._mask(tokens, self.padding_mask)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))

    def _mask(self, tokens: Tensor, padding_mask: float) -> Tensor:
        """What is added to the scores [batch, head, query, key]."""
        future = torch.full((tokens.shape[1],) * 2, -torch.inf, device=tokens.device).triu(1)
        padding = torch.zeros(tokens.shape, device=tokens.device).masked_fill(tokens == PAD, padding_mask)
        return future + padding[:, None, None, :]


def document_loss(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Mean over the documents of each one's mean negative log-likelihood, so that a short document counts as much as a long one."""
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    real = (targets != PAD).float()
    nll = F.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none") * real
    per_document = nll.sum(1) / real.sum(1)
    bits_per_char = nll.detach().sum() / real.sum() / math.log(2)
    return {"loss": per_document.mean(), "bits_per_char": bits_per_char}


def next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Mean negative log-likelihood of every token; there is no padding."""
    logits = model(batch["tokens"][:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())
    return {"loss": loss, "bits_per_token": loss.detach() / math.log(2)}
