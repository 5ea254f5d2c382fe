"""Numbers from the host to the attention's device, without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor of the host to a device.

    On CUDA it goes through page-locked memory: from other memory the copy would first wait for all work that is
    queued. PyTorch does not reuse the page-locked block before the copy is done.

    Args:
        values: a tensor on the host, any shape and dtype.
        device: where to.

    Returns:
        The copy; ``values`` itself if the device is the host.
    """
    if device.type == "cpu":
        return values
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
