"""Training code as it is often written: every line marked with a code goes NaN sooner or later. `corrected.py` is its twin."""

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
        scores = scores.masked_fill(padding_mask[:, None], float("-inf"))
        weights = self.softmax(scores)  # ST405
        return weights @ v

    def entropy(self, scores):
        weights = self.softmax(scores)
        return -(weights * weights.log()).sum(-1)  # ST101


def half_scores(query, key, mask):
    scores = (query @ key.transpose(-2, -1)).half()
    return scores.masked_fill(mask == 0, -1e9)  # ST404


def additive_mask(mask):
    return (1.0 - mask) * float("-inf")  # ST406


def manual_softmax(scores):
    weights = torch.exp(scores)
    return weights / weights.sum(dim=-1, keepdim=True)  # ST301


def log_partition(scores):
    return torch.log(torch.exp(scores).sum(-1))  # ST302


def gate(x):
    return 1 / (1 + torch.exp(-x))  # ST205


def nll(logits, target):
    probs = F.softmax(logits, dim=-1)
    return -torch.log(probs[torch.arange(len(target)), target]).mean()  # ST101


def focal(logits, target):
    p = torch.sigmoid(logits)
    return -(target * (1 - p) ** 2 * p.log() + (1 - target) * p**2 * (1 - p).log()).mean()  # ST101 ST101


def binary_loss(logits, target):
    probs = torch.sigmoid(logits)
    return F.binary_cross_entropy(probs, target)  # ST451


def double_softmax(logits, target):
    return F.cross_entropy(logits.softmax(-1), target)  # ST452


def vae_sample(mean, logvar):
    return mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)  # ST303


def gumbel(logits):
    return logits - torch.log(-torch.log(torch.rand(logits.shape)))  # ST102


def standardize(x):
    return (x - x.mean(0)) / x.std(0)  # ST201


def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum()  # ST201


def cosine(a, b):
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))  # ST201


def selected_loss(loss, labels):
    return loss[labels > 0].mean()  # ST204


def distance(a, b):
    return torch.sqrt(torch.sum((a - b) ** 2, dim=-1))  # ST202


def deviation(x):
    return x.var(dim=0).sqrt()  # ST202


def gamma_correct(image):
    return F.relu(image) ** 0.45  # ST203


def angle(a, b):
    return torch.acos(F.cosine_similarity(a, b))  # ST251


def log_or_zero(x):
    return torch.where(x > 0, torch.log(x), torch.zeros_like(x))  # ST401


def relative_error(prediction, target):
    error = (prediction - target).abs() / target
    return error[target != 0].sum()  # ST402


def hide(prediction, target):
    loss = F.mse_loss(prediction, target)
    return torch.nan_to_num(loss)  # ST403


def half_entropy(probs):
    probs = probs.half()
    return -(probs * torch.log(probs + 1e-12)).sum(-1)  # ST502


def build_half(width):
    model = nn.Linear(width, width).half()
    return model, torch.optim.Adam(model.parameters())  # ST503


def is_bad(loss):
    return loss == float("nan")  # ST601


def amp_loss(model, x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        logits = model(x)
        loss = F.cross_entropy(logits, y)  # ST501
    return loss


def train_clip_first(model, data, optimizer):
    for x, y in data:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        clip_grad_norm_(model.parameters(), 1.0)  # ST701
        loss.backward()
        optimizer.step()


def train_scaled(model, data, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in data:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # ST702
        scaler.step(optimizer)
        scaler.update()


def train_accumulating(model, data, optimizer, accumulate):
    for i, (x, y) in enumerate(data):
        loss = F.mse_loss(model(x), y)
        loss.backward()  # ST703 ST704
        if (i + 1) % accumulate == 0:
            optimizer.step()


def train_step_first(model, data, optimizer):
    for x, y in data:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        optimizer.step()  # ST705
        loss.backward()


def train_wiping(model, data, optimizer):
    for x, y in data:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.zero_grad()  # ST706
        optimizer.step()


def train_unscaled(model, data, optimizer, scaler):
    for x, y in data:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        optimizer.step()  # ST707
