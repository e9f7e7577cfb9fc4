"""A loop in the manner of nanoGPT's train.py: micro-steps, autocast, a GradScaler that may be off, clipping, a learning rate set by hand."""

import math
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F

from safetrain import watch

max_iters, warmup_iters, learning_rate, min_lr = 30, 5, 1e-2, 1e-3
gradient_accumulation_steps, batch_size, block_size, vocab_size, n_embd = 2, 4, 16, 32, 16
grad_clip, dtype = 1.0, "bfloat16"
torch.manual_seed(1337)
ctx = nullcontext() if dtype == "float32" else torch.autocast("cpu", dtype=getattr(torch, dtype))
train_data = torch.randint(vocab_size, (2000,))


def get_batch():
    starts = torch.randint(len(train_data) - block_size - 1, (batch_size,)).tolist()
    x = torch.stack([train_data[i : i + block_size] for i in starts])
    return x, torch.stack([train_data[i + 1 : i + 1 + block_size] for i in starts])


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.block = nn.TransformerEncoderLayer(n_embd, 2, 4 * n_embd, 0.0, "gelu", batch_first=True, norm_first=True)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1])
        logits = self.lm_head(self.block(x, src_mask=mask, is_causal=True))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


model = GPT()
scaler = torch.amp.GradScaler("cpu", enabled=(dtype == "float16"))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
guard = watch(model, optimizer, precision="bf16", run_dir="runs/gpt")

X, Y = get_batch()
for iter_num in range(max_iters):
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    guard.begin()
    for _micro_step in range(gradient_accumulation_steps):
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    guard.end()
guard.close()

print("weights are finite:", all(p.isfinite().all().item() for p in model.parameters()))
