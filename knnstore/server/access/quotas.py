"""Rate limits of an API key: concurrent requests, and tokens a minute."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from knnstore.server.errors import ApiError

_MINUTE = 60.0
_SOON = 1
"""Seconds in the header Retry-After if too many requests run."""


class Quota:
    """Rate limits of one key, and what it has used. Threads may share the object.

    Tokens are limited by a token bucket that refills in one minute. A request is accepted while the bucket is
    not empty, because the number of generated tokens is not known beforehand. The bucket can become negative;
    later requests wait until it has refilled.

    Args:
        requests: largest number of concurrent requests; None means no limit.
        tokens: tokens a minute, of prompts and generated ones together; None means no limit.
        now: returns the time in seconds.
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
        """Count a request as running while the context is open.

        Raises:
            ApiError: 429 if the largest number of requests runs already.
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
        """Count the tokens that a new request begins with, if the bucket is not empty.

        Raises:
            ApiError: 429 if it is empty. The header Retry-After says in how many seconds it is not.
        """
        with self._lock:
            if self.tokens is not None and self._filled() <= 0:
                wait = max(1, math.ceil(-self._left * _MINUTE / self.tokens))
                raise _too_many(f"this key may have {self.tokens:,} tokens a minute", wait)
            self._left -= tokens

    def take(self, tokens: int) -> None:
        """Count further tokens of an accepted request; the bucket may become negative."""
        with self._lock:
            self._left -= tokens

    def _filled(self) -> float:
        """Refill the bucket up to the current time, and return its tokens. The caller holds the lock."""
        assert self.tokens is not None
        now = self._now()
        self._left = min(self.tokens, self._left + self.tokens * (now - self._at) / _MINUTE)
        self._at = now
        return self._left


UNLIMITED = Quota()
"""Quota without limits, of clients without a key and of keys without limits."""


def _too_many(message: str, wait: int) -> ApiError:
    headers = {"Retry-After": str(wait)}
    return ApiError(429, f"{message}: try again later", code="rate_limit_exceeded", headers=headers)
