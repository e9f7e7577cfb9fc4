"""Writes tensors in the safetensors format, with a checksum and a check for non-finite values in the same pass.

Both read each chunk right before it is written, while it is in the CPU cache, and the file is flushed as it grows instead of
once at the end. That pays for them: a save takes about as long as safetensors' own.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from ..core import progress
from ..core.files import sync

TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
CHUNK = 2**20
"""Bytes handled at a time; must fit the CPU cache."""
FLUSH = 2**23
"""Bytes after which a flush is started in the background."""


def is_storable(tensor: Tensor) -> bool:
    return tensor.dtype in TYPES and tensor.layout is torch.strided


@dataclass
class Written:
    num_bytes: int = 0
    checksum: str = ""
    suspects: list[str] = field(default_factory=list)
    """Tensors that may hold a non-finite value; all others are finite."""


@torch.no_grad()
def write_tensors(path: Path, tensors: Mapping[str, Tensor], not_negative: Iterable[str] = ()) -> Written:
    """Write a file that `safetensors` loads, fsynced. Tensors in `not_negative` are also suspect if a value is negative."""
    # Wide dtypes first, so that each tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    watched = set(not_negative)
    done, digest = Written(), xxhash.xxh3_128()
    with open(path, "xb", buffering=0) as file, ThreadPoolExecutor(1) as background:
        flushed: Future[None] | None = None
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        num_unflushed = 0
        _write(file, header := _header(ordered))
        digest.update(header)
        for name, tensor in ordered:
            flat = tensor.cpu().contiguous().reshape(-1)
            per_chunk = CHUNK // max(flat.element_size(), 1)
            finite = True
            for start in range(0, flat.numel(), per_chunk):
                chunk = flat[start : start + per_chunk]
                finite = finite and _is_finite(chunk, name in watched)
                content = memoryview(chunk.view(torch.uint8).numpy())  # type: ignore[arg-type]
                digest.update(content)
                _write(file, content)
                num_unflushed += len(content)
                progress.note("MB written", file.tell() >> 20, num_bytes >> 20)
                if num_unflushed >= FLUSH and (flushed is None or flushed.done()):
                    num_unflushed = 0
                    flushed = background.submit(sync, file.fileno())
            if not finite:
                done.suspects.append(name)
        done.num_bytes = file.tell()
        if flushed is not None:
            flushed.result()
        sync(file.fileno())
    done.checksum = digest.hexdigest()
    return done


def _header(ordered: list[tuple[str, Tensor]]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _is_finite(chunk: Tensor, not_negative: bool) -> bool:
    """NaN and Inf show in the sum. The sum of finite values may overflow too, so False is only a suspicion."""
    if not chunk.is_floating_point():
        return True
    if chunk.element_size() <= 2:
        chunk = chunk.float()
    return math.isfinite(float(chunk.sum())) and not (not_negative and float(chunk.min()) < 0.0)


def _write(file: Any, content: bytes | memoryview) -> None:
    """Write all of it: an unbuffered write may accept only a part, before the next one reports that the disk is full."""
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]
