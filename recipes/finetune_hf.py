"""Fine-tunes a language model of `transformers` to follow instructions. Run it with `safetrain fit finetune_hf`.

By default the model is a tiny one with random weights and the tokens are bytes, so nothing is downloaded. With the name of a
model on the hub, its weights and its tokenizer are used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

IGNORED = -100
"""The label of tokens without a loss: prompt and padding."""


def transformers() -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise ImportError("this recipe needs transformers. To fix: pip install 'safetrain[hf]'.") from error
    return transformers


def build_model(name: str | None = None, **tiny: Any) -> nn.Module:
    """A causal language model: pretrained, by its name on the hub; or a GPT-2 of the size given in `tiny`, with random weights."""
    hf = transformers()
    if name is not None:
        return hf.AutoModelForCausalLM.from_pretrained(name)
    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **tiny}
    return hf.AutoModelForCausalLM.from_config(hf.GPT2Config(bos_token_id=0, eos_token_id=0, **options))


def arithmetic(num_examples: int) -> list[dict[str, str]]:
    """Generated exercises, for a run without files."""
    words = ["add", "join", "sum up", "put together"]
    return [
        {"prompt": f"{words[i % 4]} {i // 10 % 10} and {i % 10}: ", "answer": str(i // 10 % 10 + i % 10)}
        for i in range(num_examples)
    ]


class Instructions(Dataset[dict[str, Tensor]]):
    """Prompts with answers, with a loss on the answer only; truncated to `max_length` tokens, padded at the end.

    `path` is a JSON-lines file with `prompt` and `answer`; without it the examples are exercises in arithmetic.
    `long_prompts` lists examples whose prompt fills the whole length, so that no token of the answer is left.
    """

    def __init__(
        self,
        split: str,
        max_length: int,
        path: str | None = None,
        num_examples: int = 400,
        tokenizer: str | None = None,
        long_prompts: Sequence[int] = (),
    ) -> None:
        if split not in ("train", "eval"):
            raise ValueError(f"split is {split!r}; use 'train' or 'eval'")
        if path is None:
            examples = arithmetic(num_examples)
        else:
            lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
            examples = [json.loads(line) for line in lines if line.strip()]
        self.examples = [example for i, example in enumerate(examples) if (i % 5 == 4) == (split == "eval")]
        for i in long_prompts:
            self.examples[i] = {**self.examples[i], "prompt": "please " * max_length + self.examples[i]["prompt"]}
        self.max_length = max_length
        self.tokenizer = None if tokenizer is None else transformers().AutoTokenizer.from_pretrained(tokenizer)

    def __len__(self) -> int:
        return len(self.examples)

    def encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            return list(text.encode())
        return self.tokenizer.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        prompt, answer = (self.encode(self.examples[index][part]) for part in ("prompt", "answer"))
        tokens = [*prompt, *answer, *self.encode("\n")][: self.max_length]
        padding = self.max_length - len(tokens)
        labels = [*[IGNORED] * len(prompt), *tokens[len(prompt) :]][: self.max_length]
        return {
            "input_ids": torch.tensor([*tokens, *[0] * padding]),
            "attention_mask": torch.tensor([*[1] * len(tokens), *[0] * padding]),
            "labels": torch.tensor([*labels, *[IGNORED] * padding]),
        }


def answer_loss(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Mean negative log-likelihood of the tokens of the answers, and the share that is predicted correctly."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)
    learned = labels != IGNORED
    accuracy = (logits.argmax(-1) == labels)[learned].float().mean()
    return {"loss": loss, "accuracy": accuracy}
