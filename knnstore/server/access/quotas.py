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
    """Rate limits of one API key: counts the running requests and the tokens used. Threads may share it.

    Tokens are limited by a token bucket: an account of `tokens` tokens that refills at the rate of `tokens` a
    minute. A request is accepted while the bucket is not empty, because the number of tokens that it will
    generate is not known beforehand. So the bucket can become negative; later requests are refused until it
    has refilled.

    Args:
        requests: largest number of requests of the key that may run at the same time; None means no limit.
        tokens: number of tokens a minute, prompt tokens and generated tokens together; None means no limit.
        now: function that returns the time in seconds.
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
        """Count one more request as running while the context is open.

        Raises:
            ApiError: 429 if `requests` requests are running already; the request is not counted then.
        """
        with self._lock:
            if self.requests is not None and self._running >= self.requests:
                raise _rate_limit_error(
                    f"this key has reached its limit of {self.requests:,} requests at once", _RETRY_SECONDS
                )
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1

    def check_and_spend(self, tokens: int) -> None:
        """Accept a new request if the bucket is not empty, and subtract its prompt tokens from the bucket.

        The bucket may become negative. Without a token limit every request is accepted.

        Args:
            tokens: number of tokens to subtract, 0 or more.

        Raises:
            ApiError: 429 if the bucket is empty or negative; nothing is subtracted then. The header
                Retry-After has the number of seconds after which the bucket is no longer empty.
        """
        with self._lock:
            if self.tokens is not None and self._refill_bucket() <= 0:
                wait = max(1, math.ceil(-self._tokens_left * _MINUTE / self.tokens))
                raise _rate_limit_error(
                    f"this key has reached its limit of {self.tokens:,} tokens a minute", wait
                )
            self._tokens_left -= tokens

    def spend_unchecked(self, tokens: int) -> None:
        """Subtract further tokens of a request that was accepted before. The bucket may become negative."""
        with self._lock:
            self._tokens_left -= tokens

    def _refill_bucket(self) -> float:
        """Refill the bucket up to the current time, and return the number of tokens in it.

        The bucket holds at most the tokens of one minute. The caller holds the lock. There must be a token
        limit.
        """
        assert self.tokens is not None
        now = self._now()
        self._tokens_left = min(
            self.tokens, self._tokens_left + self.tokens * (now - self._refilled_at) / _MINUTE
        )
        self._refilled_at = now
        return self._tokens_left


UNLIMITED = Quota()
"""Quota without limits, for requests without a key and for keys without limits."""


def _rate_limit_error(message: str, wait: int) -> ApiError:
    """Return, but do not raise, the error 429 for a client that has reached a rate limit.

    Args:
        message: the text for the client, which names the limit.
        wait: number of seconds after which the client may try again, for the header Retry-After.
    """
    headers = {"Retry-After": str(wait)}
    return ApiError(429, f"{message}: try again later", code="rate_limit_exceeded", headers=headers)
