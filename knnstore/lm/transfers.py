"""Copies from main memory to a device such as a GPU for which the program does not wait (`upload`)."""

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device, without waiting until the device has done everything before the copy.

    `Tensor.to` waits, and so does `torch.tensor` with a device.

    Args:
        values: a tensor in main memory, which is not changed afterwards, or already on the device.
        device: the device.

    Returns:
        The tensor on the device; `values` itself if it is there already.
    """
    if values.device == device:
        return values
    if device.type == "cuda":
        values = values.pin_memory()  # other memory is copied twice, and the driver may wait
    return values.to(device, non_blocking=True)


def upload_floats(values: Sequence[float], device: torch.device) -> Tensor:
    """Copy numbers to a device without waiting: float32, shape (len(values),); see `upload`."""
    return upload(torch.tensor(values, dtype=torch.float32), device)
