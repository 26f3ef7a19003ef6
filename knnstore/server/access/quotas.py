"""How much each key may ask for: requests at once, and tokens a minute."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from knnstore.server.errors import ApiError

_MINUTE = 60.0
_SOON = 1
"""Seconds after which to ask again while other requests run."""


class Quota:
    """What is left to one key; threads may share it.

    Tokens are a bucket that fills in a minute. A request is taken while there is something in it, for nobody
    knows how much will be written; what goes beyond is missing later.

    Args:
        requests: at once; None is any number.
        tokens: a minute, read and written; None is any number.
        now: the time in seconds.
    """

    def __init__(
        self,
        requests: int | None = None,
        tokens: int | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.requests, self.tokens = requests, tokens
        self._now = now
        self._running = 0
        self._left, self._at = float(tokens or 0), now()
        self._lock = threading.Lock()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let a request run.

        Raises:
            ApiError: 429 where as many run as may.
        """
        with self._lock:
            if self.requests is not None and self._running >= self.requests:
                raise _too_many(f"this key may have {self.requests:,} requests at once", _SOON)
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1

    def spend(self, tokens: int) -> None:
        """Take what a request begins with.

        Raises:
            ApiError: 429 where nothing is left, with the seconds until there is.
        """
        with self._lock:
            if self.tokens is not None and self._filled() <= 0:
                wait = max(1, math.ceil(-self._left * _MINUTE / self.tokens))
                raise _too_many(f"this key may have {self.tokens:,} tokens a minute", wait)
            self._left -= tokens

    def take(self, tokens: int) -> None:
        """Take what a request goes on with."""
        with self._lock:
            self._left -= tokens

    def _filled(self) -> float:
        assert self.tokens is not None
        now = self._now()
        self._left = min(self.tokens, self._left + self.tokens * (now - self._at) / _MINUTE)
        self._at = now
        return self._left


UNLIMITED = Quota()
"""Of whoever needs no key."""


def _too_many(message: str, wait: int) -> ApiError:
    headers = {"Retry-After": str(wait)}
    return ApiError(429, f"{message}: try again later", code="rate_limit_exceeded", headers=headers)
