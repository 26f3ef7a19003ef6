"""The lock of many readers or one writer, where the writer gives up waiting."""

import threading

import pytest

from knnstore.datastore.embedded.group import ReadersWriterLock


def test_readers_go_on_where_a_writer_was_interrupted_as_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, late = ReadersWriterLock(), threading.Event()

    def read() -> None:
        with lock.read_lock():
            late.set()

    def interrupted(_: object) -> None:
        reader.start()  # which waits, for the writer goes first
        while not lock._changed._waiters:  # type: ignore[attr-defined]
            lock._changed.release()
            lock._changed.acquire()
        raise KeyboardInterrupt

    reader = threading.Thread(target=read, daemon=True)
    monkeypatch.setattr(lock._changed, "wait_for", interrupted)
    with lock.read_lock(), pytest.raises(KeyboardInterrupt), lock.write_lock():
        pass
    assert late.wait(240)
