"""The code of `planted.py`, written so that it stays finite: nothing may be found here."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x, padding_mask):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(padding_mask[:, None], torch.finfo(scores.dtype).min)
        weights = self.softmax(scores)
        return weights @ v

    def entropy(self, scores):
        return -(self.softmax(scores) * F.log_softmax(scores, dim=-1)).sum(-1)


def half_scores(query, key, mask):
    scores = (query @ key.transpose(-2, -1)).half()
    return scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)


def additive_mask(scores, mask):
    return torch.zeros_like(scores).masked_fill(mask == 0, torch.finfo(scores.dtype).min)


def manual_softmax(scores):
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    return weights / weights.sum(dim=-1, keepdim=True)


def log_partition(scores):
    return torch.logsumexp(scores, dim=-1)


def gate(x):
    return torch.sigmoid(x)


def nll(logits, target):
    log_probs = F.log_softmax(logits, dim=-1)
    return -log_probs[torch.arange(len(target)), target].mean()


def focal(logits, target):
    p = torch.sigmoid(logits)
    return -(target * (1 - p) ** 2 * F.logsigmoid(logits) + (1 - target) * p**2 * F.logsigmoid(-logits)).mean()


def binary_loss(logits, target):
    return F.binary_cross_entropy_with_logits(logits, target)


def double_softmax(logits, target):
    return F.cross_entropy(logits, target)


def vae_sample(mean, logvar):
    logvar = logvar.clamp(-30, 20)
    return mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)


def gumbel(logits):
    uniform = torch.rand(logits.shape).clamp(1e-6, 1 - 1e-6)
    return logits - torch.log(-torch.log(uniform))


def standardize(x):
    return (x - x.mean(0)) / (x.std(0) + 1e-6)


def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum().clamp(min=1)


def cosine(a, b):
    return F.cosine_similarity(a, b, dim=-1)


def selected_loss(loss, labels):
    chosen = labels > 0
    return (loss * chosen).sum() / chosen.sum().clamp(min=1)


def distance(a, b):
    return torch.linalg.vector_norm(a - b, dim=-1)


def deviation(x, eps=1e-6):
    return torch.sqrt(x.var(dim=0) + eps)


def gamma_correct(image):
    return F.relu(image).clamp(min=1e-4) ** 0.45


def angle(a, b):
    return torch.acos(F.cosine_similarity(a, b).clamp(-1 + 1e-6, 1 - 1e-6))


def log_or_zero(x):
    positive = x > 0
    return torch.where(positive, torch.log(torch.where(positive, x, 1.0)), 0.0)


def relative_error(prediction, target):
    known = target != 0
    return ((prediction[known] - target[known]).abs() / target[known]).sum()


def hide(prediction, target):
    return F.mse_loss(prediction, target)


def half_entropy(probs):
    probs = probs.float()
    return -(probs * torch.log(probs + 1e-12)).sum(-1)


def build_half(width):
    model = nn.Linear(width, width)
    return model, torch.optim.Adam(model.parameters())


def is_bad(loss):
    return not torch.isfinite(loss).all()


def amp_loss(model, x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        logits = model(x)
    return F.cross_entropy(logits.float(), y)


def train_clip_after(model, data, optimizer):
    for x, y in data:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def train_scaled(model, data, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in data:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def train_accumulating(model, data, optimizer, accumulate):
    for i, (x, y) in enumerate(data):
        loss = F.mse_loss(model(x), y) / accumulate
        loss.backward()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


def train_in_order(model, data, optimizer):
    for x, y in data:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train_clearing_after(model, data, optimizer):
    for x, y in data:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train_with_scaler(model, data, optimizer, scaler):
    for x, y in data:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
