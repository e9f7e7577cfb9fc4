"""What a step may change before it is judged, and how that is undone.

Weights, optimizer state, schedule, scaler and EMA move only in the trainer's commit. A forward pass, however, writes
buffers (BatchNorm statistics), draws random numbers and may switch modules between train and eval: those are remembered here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .gradients import peak
from .rng import RandomState


class Transaction:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._saved: list[Tensor] = []
        self._tensors: list[Tensor] = []
        self._find_modules()
        # Sentinels and observers hold NaN or Inf on purpose; only a buffer that was finite can turn bad.
        self.born_bad = {name for name, b in model.named_buffers() if not _is_finite(b)}
        self.begin()

    def _find_modules(self) -> None:
        modules = dict(self._model.named_modules())
        self._modules = list(modules.values())
        self._slots = [
            (f"{path}.{name}" if path else name, module, name)
            for path, module in modules.items()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def begin(self) -> None:
        """Remember buffers, modes and random state. One foreach copy into tensors that are kept."""
        self.random_state = RandomState.capture()
        self._modes = [module.training for module in self._modules]
        try:
            self._tensors = [module._buffers[name] for _, module, name in self._slots]
        except KeyError:  # a module removed one of its buffers
            self._find_modules()
            self._tensors = [module._buffers[name] for _, module, name in self._slots]
        if not _same_layout(self._saved, self._tensors):
            self._saved = [torch.empty_like(t) for t in self._tensors]
        if self._tensors:
            torch._foreach_copy_(self._saved, self._tensors)

    @torch.no_grad()
    def restore(self) -> None:
        """Buffers and modes as they were at `begin`. The random stream goes on, so no dropout mask is drawn twice."""
        for (_, module, name), tensor in zip(self._slots, self._tensors, strict=True):
            module._buffers[name] = tensor  # a forward may have put another tensor there
        if self._tensors:
            torch._foreach_copy_(self._tensors, self._saved)
        for module, training in zip(self._modules, self._modes, strict=True):
            module.training = training

    def rewind(self) -> None:
        """As `restore`, and the random state too: what follows sees exactly what the step saw."""
        self.restore()
        self.random_state.restore()

    @torch.no_grad()
    def restore_where(self, bad: Tensor) -> None:
        """Buffers as at `begin` if `bad` (0-d bool on the device) is true; decided on the device, without a host read."""
        for (_, module, name), saved in zip(self._slots, self._saved, strict=True):
            current = module._buffers[name]
            assert current is not None
            if current.shape == saved.shape:
                current.copy_(torch.where(bad, saved, current))

    def buffer_peak(self) -> Tensor | None:
        """Largest absolute value over the buffers as the forward pass left them."""
        return peak([tensor for _, tensor in self.buffers_now()])

    def buffers_now(self) -> list[tuple[str, Tensor]]:
        """Floating-point buffers that were finite when training began."""
        found = ((path, module._buffers.get(name)) for path, module, name in self._slots)
        return [(path, buffer) for path, buffer in found if buffer is not None and self._is_watched(path, buffer)]

    def buffers_before(self) -> list[tuple[str, Tensor]]:
        """The same as they were at `begin`."""
        found = ((path, saved) for (path, _, _), saved in zip(self._slots, self._saved, strict=True))
        return [(path, buffer) for path, buffer in found if self._is_watched(path, buffer)]

    def exempt_bad_buffers(self) -> list[str]:
        """No longer watch the buffers that are not finite now; their names."""
        names = [path for path, buffer in self.buffers_now() if not _is_finite(buffer)]
        self.born_bad.update(names)
        return names

    def _is_watched(self, path: str, buffer: Tensor) -> bool:
        return buffer.is_floating_point() and path not in self.born_bad


def _same_layout(saved: list[Tensor], current: list[Tensor]) -> bool:
    return len(saved) == len(current) and all(
        s.shape == c.shape and s.dtype == c.dtype and s.device == c.device for s, c in zip(saved, current, strict=True)
    )


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
