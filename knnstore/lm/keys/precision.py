"""Automatic mixed precision is for passes of the model alone: all else computes in float32.

Under ``torch.autocast`` every product of matrices is rounded to bfloat16 or float16: distances, projections,
the networks that choose weights, in the engines too. Keys that differ only there could not be told apart, and
some operations refuse mixed types. So whatever asks a store runs in `full_precision`, and each pass of the
model in `model_precision`, which is that of the caller.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_DEVICES = ("cpu", "cuda", "xpu", "mps")
_asked: ContextVar[tuple[tuple[str, torch.dtype], ...]] = ContextVar("_asked", default=())
"""The devices for which the caller wants mixed precision, and the dtype for each."""

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def full_precision() -> Iterator[None]:
    """Switch autocast off; `model_precision` switches it on again inside."""
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
    """Switch autocast on as it was outside of `full_precision`; change nothing elsewhere."""
    with ExitStack() as switched_on:
        for device, dtype in _asked.get():
            switched_on.enter_context(torch.autocast(device, dtype=dtype))
        yield


def in_full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function that is no generator run in `full_precision`; for use as a decorator."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with full_precision():
            return function(*args, **kwargs)

    return run
