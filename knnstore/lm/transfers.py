"""Copying numbers from main memory to a device such as a GPU, without waiting for the copy (`upload`)."""

from functools import lru_cache

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device, without waiting for the device to finish its earlier work.

    `Tensor.to` and ``torch.tensor(..., device=device)`` would wait.

    Args:
        values: a tensor in main memory or on the device. The caller must not change it afterwards.
        device: the device.

    Returns:
        The tensor on the device; `values` itself if it is already on the device.
    """
    if values.device == device:
        return values
    if device.type == "cuda":
        values = values.pin_memory()  # other memory is copied twice, and the driver may wait
    return values.to(device, non_blocking=True)


@lru_cache(maxsize=256)
def upload_floats(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Copy numbers to a device without waiting (see `upload`).

    The result is cached, because settings have the same numbers in each decoding step.

    Returns:
        float32, shape (len(values),), on the device; read only.
    """
    with torch.inference_mode(False):  # the tensor may be used again to train
        return upload(torch.tensor(values, dtype=torch.float32), device)
