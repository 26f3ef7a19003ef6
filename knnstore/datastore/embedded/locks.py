"""A lock for many readers or one writer, which the standard library lacks."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ReadersWriterLock:
    """Many threads may read at once; a writer is alone, and goes before readers that come later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._writers_waiting = 0
        self._written = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Share the lock with other readers."""
        with self._changed:
            while self._written or self._writers_waiting:
                self._changed.wait()
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                if self._writers_waiting:
                    self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock alone."""
        with self._changed:
            self._writers_waiting += 1
            try:
                self._changed.wait_for(lambda: not self._written and not self._readers)
            finally:
                self._writers_waiting -= 1
                self._changed.notify_all()  # who waits for this one, were it interrupted
            self._written = True
        try:
            yield
        finally:
            with self._changed:
                self._written = False
                self._changed.notify_all()
