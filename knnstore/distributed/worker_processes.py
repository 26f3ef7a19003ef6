"""Encoding the shards of a plan with several processes on one machine."""

import multiprocessing
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty
from typing import Any

import torch
from transformers.utils import logging

from knnstore.child_process import run_with_parent
from knnstore.distributed.encoding import encode_shards
from knnstore.distributed.plan_folder import PlanFolder
from knnstore.errors import ConfigError, KnnstoreError, PlanError
from knnstore.progress import Progress

_SECONDS_BETWEEN_CHECKS = 1.0


class _Report(Progress):
    """Progress display of a worker, which sends the amount of work done to the parent process.

    Args:
        messages: queue to the parent process. A message is a number of encoded tokens (int), or the text of
            an error (str).
    """

    def __init__(self, messages: Any) -> None:
        self._messages = messages

    def advance(self, amount: int) -> None:
        self._messages.put(amount)


def encode_shards_in_processes(
    folder: PlanFolder,
    workers: int,
    *,
    model: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    upload: bool = False,
    progress: Progress | None = None,
) -> None:
    """Encode all shards of a plan in several processes, and wait until all processes have ended.

    The number of threads that torch uses in this process is divided among the processes. No process is
    started if all shards are complete; with `upload` they must also be uploaded.

    Args:
        folder: folder of the plan.
        workers: number of processes, >= 1; at most one for each shard is started.
        model: folder or hub id of the model; default is the name with which the store was made.
        device: device of all models. By default, the processes are distributed over all GPUs; without GPUs
            they use the CPU.
        dtype: dtype of the weights; see `encode_shards`.
        upload: True also uploads the keys to the engine of the store; see `encode_shards`.
        progress: progress display, which receives the number of tokens of each batch.

    Raises:
        ConfigError: `workers` is below 1.
        PlanError: a process failed or was killed; the message says why. The other processes are ended, and
            complete shards stay.
    """
    if workers < 1:
        raise ConfigError(f"workers must be at least 1, got {workers}")
    shown, plan = progress or Progress(), folder.plan
    complete = folder.find_complete_shards(plan.shards)
    left = [shard for shard in plan.shards if shard.number not in complete]
    if not left and (not upload or all(map(folder.is_uploaded, plan.shards))):
        return
    # With uploads, the processes also go through the complete shards.
    shown.start("encoding", total=sum(shard.records for shard in (plan.shards if upload else left)))
    # 1) Start the processes.
    workers = min(workers, len(plan.shards))
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    messages = context.Queue()
    threads = max(1, torch.get_num_threads() // workers)
    gpus = torch.cuda.device_count() if device is None else 0
    processes: list[BaseProcess] = [
        context.Process(
            target=run_with_parent,
            args=(
                __name__, "encode_in_child", folder.path, worker, workers, threads, messages, model,
                f"cuda:{worker % gpus}" if gpus else device, dtype, upload,
            ),
            daemon=True,
        )
        for worker in range(workers)
    ]  # fmt: skip
    problem: str | None = None
    try:
        with _ignore_interrupts():  # Ctrl-C reaches this process, which ends the others
            for process in processes:
                process.start()
        # 2) Show their progress until all have ended, or one has failed.
        while problem is None:
            is_running = any(process.is_alive() for process in processes)
            statuses = [process.exitcode for process in processes if process.exitcode]
            try:
                message = messages.get(timeout=_SECONDS_BETWEEN_CHECKS if is_running else 0.01)
            except Empty:
                if statuses:  # a process that was killed may hold a lock for which the others would wait
                    problem = f"a process ended with {_format_exit_status(statuses[0])}"
                elif not is_running:
                    break
                continue
            if isinstance(message, int):
                shown.advance(message)
            else:
                problem = message
    finally:
        for process in processes:
            if process.pid is not None:
                process.terminate()
        for process in processes:
            if process.pid is not None:
                process.join()
    if problem is not None:
        raise PlanError(f"{problem}; run the same command again to continue")
    shown.finish()


@contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Ignore SIGINT in the ``with`` block, and in the processes that are started in it.

    Does nothing if the current thread is not the main thread, because only the main thread may set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _format_exit_status(status: int | None) -> str:
    """Return the exit status of a process as text, for example "SIGKILL" or "status 1"."""
    if status is not None and status < 0:
        with suppress(ValueError):
            return signal.Signals(-status).name
    return f"status {status}"


def encode_in_child(
    path: Path,
    worker: int,
    workers: int,
    threads: int,
    messages: Any,
    model: str | None,
    device: str | None,
    dtype: str | None,
    upload: bool,
) -> None:
    """Encode the shards of one worker; the main function of a worker's process.

    `run_with_parent` calls it. Errors are not raised: their messages are put into `messages`.

    Args:
        path: folder of the plan.
        worker: number of the worker, from 0.
        workers: number of workers.
        threads: number of threads that torch uses.
        messages: queue of messages to the parent process; see `_Report`.
        model: folder or hub id of the model; None means the name with which the store was made.
        device: device of the model; None means the default of `encode_shards`.
        dtype: dtype of the weights; see `encode_shards`.
        upload: True also uploads the keys to the engine of the store.
    """
    torch.set_num_threads(threads)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        encode_shards(
            PlanFolder(path),
            worker=worker,
            workers=workers,
            model=model,
            device=device,
            dtype=dtype,
            upload=upload,
            progress=_Report(messages),
        )
    except (KnnstoreError, OSError, RuntimeError) as error:
        messages.put(f"{error}".partition("\n")[0] or type(error).__name__)
