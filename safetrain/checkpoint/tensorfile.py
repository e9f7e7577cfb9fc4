"""Writes tensors in the safetensors format, and looks at every value on the way.

The checksum and the audit see each piece of memory right before it is written, while it is in the processor's cache, and the
disk works all the while instead of waiting for the final flush. That pays for both: a save takes about as long as a plain one.
"""

from __future__ import annotations

import json
import math
import os
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
PIECE = 2**20
"""Bytes handled at a time; must fit the processor's cache."""
FLUSH = 2**23
"""Bytes after which the disk is set to work."""


def is_storable(tensor: Tensor) -> bool:
    return tensor.dtype in TYPES and tensor.layout is torch.strided


@dataclass
class Written:
    num_bytes: int = 0
    checksum: str = ""
    suspects: list[str] = field(default_factory=list)
    """Tensors that may hold a value that is not finite; no other does."""


@torch.no_grad()
def write_tensors(path: Path, tensors: Mapping[str, Tensor], not_negative: Iterable[str] = ()) -> Written:
    """A new file that `safetensors` loads, flushed to disk. Tensors named in `not_negative` are suspect if a value is."""
    # Wide types first: each tensor is then aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    watched = set(not_negative)
    done, digest = Written(), xxhash.xxh3_128()
    with open(path, "xb", buffering=0) as file, ThreadPoolExecutor(1) as beside:
        flushed: Future[None] | None = None
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        num_unflushed = 0
        _write(file, header := _header(ordered))
        digest.update(header)
        for name, tensor in ordered:
            flat = tensor.cpu().contiguous().reshape(-1)
            per_piece = PIECE // max(flat.element_size(), 1)
            sound = True
            for start in range(0, flat.numel(), per_piece):
                piece = flat[start : start + per_piece]
                sound = sound and _is_sound(piece, name in watched)
                content = memoryview(piece.view(torch.uint8).numpy())  # type: ignore[arg-type]
                digest.update(content)
                _write(file, content)
                num_unflushed += len(content)
                progress.note("MB written", file.tell() >> 20, num_bytes >> 20)
                if num_unflushed >= FLUSH and (flushed is None or flushed.done()):
                    num_unflushed = 0
                    flushed = beside.submit(os.fsync, file.fileno())
            if not sound:
                done.suspects.append(name)
        done.num_bytes = file.tell()
        if flushed is not None:
            flushed.result()
        os.fsync(file.fileno())
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


def _is_sound(piece: Tensor, not_negative: bool) -> bool:
    """No NaN or Inf: each would show in the sum. A sum that overflows is only a suspicion."""
    if not piece.is_floating_point():
        return True
    if piece.element_size() <= 2:
        piece = piece.float()
    return math.isfinite(float(piece.sum())) and not (not_negative and float(piece.min()) < 0.0)


def _write(file: Any, content: bytes | memoryview) -> None:
    """All of it: the system may take less than it is given, before it says that the disk is full."""
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]
