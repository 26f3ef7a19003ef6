"""Rate limits of an API key: concurrent requests, and tokens a minute."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from knnstore.server.errors import ApiError

_MINUTE = 60.0
_RETRY_SECONDS = 1
"""Seconds in the header Retry-After of an answer 429, if too many requests run at once."""


class Quota:
    """Rate limits of one API key, with its running requests and spent tokens. Threads may share the object.

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
        self._tokens_left, self._refilled_at = float(tokens or 0), now()
        self._lock = threading.Lock()

    @contextmanager
    def count_running(self) -> Iterator[None]:
        """Count a request as running while the context is open.

        Raises:
            ApiError: 429 if the largest number of concurrent requests is already running.
        """
        with self._lock:
            if self.requests is not None and self._running >= self.requests:
                raise _rate_limit_error(
                    f"this key may have {self.requests:,} requests at once", _RETRY_SECONDS
                )
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1

    def check_and_spend(self, tokens: int) -> None:
        """Accept a new request if the bucket is not empty, and subtract its first `tokens` from the bucket.

        The bucket may become negative. Without a token limit every request is accepted.

        Raises:
            ApiError: 429 if the bucket is empty or negative; nothing is subtracted then. The header
                Retry-After has the number of seconds after which the bucket is no longer empty.
        """
        with self._lock:
            if self.tokens is not None and self._refill_bucket() <= 0:
                wait = max(1, math.ceil(-self._tokens_left * _MINUTE / self.tokens))
                raise _rate_limit_error(f"this key may have {self.tokens:,} tokens a minute", wait)
            self._tokens_left -= tokens

    def spend_unchecked(self, tokens: int) -> None:
        """Subtract further tokens of an accepted request from the bucket, which may become negative."""
        with self._lock:
            self._tokens_left -= tokens

    def _refill_bucket(self) -> float:
        """Refill the bucket up to the current time, and return its tokens. The caller holds the lock."""
        assert self.tokens is not None
        now = self._now()
        self._tokens_left = min(
            self.tokens, self._tokens_left + self.tokens * (now - self._refilled_at) / _MINUTE
        )
        self._refilled_at = now
        return self._tokens_left


UNLIMITED = Quota()
"""Quota without limits, of clients without a key and of keys without limits."""


def _rate_limit_error(message: str, wait: int) -> ApiError:
    headers = {"Retry-After": str(wait)}
    return ApiError(429, f"{message}: try again later", code="rate_limit_exceeded", headers=headers)
