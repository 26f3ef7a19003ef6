"""A small Qdrant server for tests: the real client works against it, and it can be told to misbehave.

Its points are in Qdrant's in-process engine, so they outlive it. In a thread it is a `QdrantServer`;
as a process of its own

    python qdrant_server.py --folder FOLDER [--port N] [--grpc-port N] [--api-key KEY]

prints its two ports, and misbehaves as told through `/faults` (see `qdrant_http`).
"""

import argparse
import signal
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from qdrant_engine import Engine
from qdrant_faults import Faults
from qdrant_grpc import serve
from qdrant_http import HttpServer


class QdrantServer:
    """A server in a thread of this process.

    Args:
        folder: where its collections are kept.
        port: for HTTP; 0 takes a free one, which it keeps when it is started again.
        grpc_port: for gRPC; likewise.
        api_key: what clients must present; None lets everybody in.
    """

    faults: Faults
    """How it misbehaves, and what it was asked; a new one for each start."""

    def __init__(
        self, folder: Path, *, port: int = 0, grpc_port: int = 0, api_key: str | None = None
    ) -> None:
        self.port = port
        self.grpc_port = grpc_port
        self._folder = folder
        self._api_key = api_key
        self._engine: Engine | None = None
        self._http: HttpServer
        self._grpc: grpc.Server

    @property
    def url(self) -> str:
        """Where it listens for HTTP."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_running(self) -> bool:
        """Whether it was started and not stopped since."""
        return self._engine is not None

    def start(self) -> None:
        """Open the collections and listen."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._engine = Engine(self._folder)
        self.faults = Faults(self._engine.forget)
        self._http = HttpServer(self.port, self._engine, self.faults, self._api_key)
        self.port = self._http.server_port
        self._grpc, self.grpc_port = serve(self.grpc_port, self._engine, self.faults, self._api_key)
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Refuse and end connections; does nothing if it does not run."""
        if self._engine is None:
            return
        self.faults.clear()
        self._http.shutdown()
        self._http.server_close()
        self._grpc.stop(0).wait()
        self._engine.close()
        self._engine = None

    def finish_abandoned_calls(self) -> None:
        """Wait for the calls whose client gave up: what they change must not change later.

        A client on a busy machine may give up before its call has reached the engine.
        """
        while self.faults.is_answering or self._http.has_abandoned_requests:
            time.sleep(0.001)

    def restart(self) -> None:
        """Stop and start; what was stored is still there."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def main() -> None:
    """Serve until a signal ends it."""
    parser = argparse.ArgumentParser(description="A small Qdrant server for tests.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--grpc-port", type=int, default=0)
    parser.add_argument("--api-key")
    options = parser.parse_args()
    ending = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)  # before there are threads that could get them
    with QdrantServer(
        options.folder, port=options.port, grpc_port=options.grpc_port, api_key=options.api_key
    ) as server:
        print(server.port, server.grpc_port, flush=True)
        signal.sigwait(ending)


if __name__ == "__main__":
    main()
