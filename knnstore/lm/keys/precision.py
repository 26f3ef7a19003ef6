"""Keeping automatic mixed precision (autocast) for the model's forward passes only.

Under ``torch.autocast`` each matrix product is rounded to bfloat16 or float16: also distances, projections
and the networks that choose weights. Rounded keys are harder to distinguish, and some operations refuse mixed
dtypes. So code that retrieves from a store runs in `full_precision`, and each forward pass of the model runs
in `model_precision`, which restores the caller's autocast.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_DEVICES = ("cpu", "cuda", "xpu", "mps")
_asked: ContextVar[tuple[tuple[str, torch.dtype], ...]] = ContextVar("_asked", default=())
"""Device types for which the caller had enabled autocast, each with its dtype."""

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def full_precision() -> Iterator[None]:
    """Disable autocast inside the context, and remember its settings for `model_precision`.

    Does nothing if autocast is not enabled.
    """
    asked = tuple((one, torch.get_autocast_dtype(one)) for one in _DEVICES if torch.is_autocast_enabled(one))
    if not asked:
        yield
        return
    with ExitStack() as switched_off:
        for device, _ in asked:
            switched_off.enter_context(torch.autocast(device, enabled=False))
        token = _asked.set(asked)
        try:
            yield
        finally:
            _asked.reset(token)


@contextmanager
def model_precision() -> Iterator[None]:
    """Enable autocast again as it was before `full_precision`. Does nothing outside of `full_precision`."""
    with ExitStack() as switched_on:
        for device, dtype in _asked.get():
            switched_on.enter_context(torch.autocast(device, dtype=dtype))
        yield


def in_full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it runs in `full_precision`. Generator functions are not supported."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with full_precision():
            return function(*args, **kwargs)

    return run
