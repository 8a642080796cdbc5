"""What was made on one CUDA stream and is used on another."""

from typing import Any

import torch
from torch import Tensor


class Made:
    """When, and on which stream, tensors were made; other streams wait for that once."""

    def __init__(self, device: torch.device) -> None:
        stream = torch.cuda.current_stream(device)
        self._device = device
        self._known = {stream.cuda_stream}
        self._event = torch.cuda.Event()
        if not torch.cuda.is_current_stream_capturing():
            self._event.record(stream)

    def wait(self, value: Any) -> None:
        r"""Makes the current stream wait, and keeps the memory until what runs there is done.

        Args:
            value (Any): What was made; see :meth:`tensors_of`.
        """
        raw = torch._C._cuda_getCurrentRawStream(self._device.index)
        # The start of a capture waits for all that was queued before.
        if raw in self._known or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._event)
        for tensor in tensors_of(value):
            tensor.record_stream(stream)
        self._known.add(raw)


def made_now(device: torch.device) -> Made | None:
    """Notes that something is made on a device now; None where there are no streams."""
    return Made(device) if device.type == "cuda" else None


def is_capturing(device: torch.device) -> bool:
    """Tells whether work on a device goes to a CUDA graph instead of being done."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def tensors_of(value: Any) -> list[Tensor]:
    """Returns the tensors that a kept value consists of."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple):
        return [t for t in value if isinstance(t, Tensor)]
    found: list[Tensor] = getattr(value, "tensors", [])
    return found
