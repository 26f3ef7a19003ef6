"""Threads of torch: their number, and how they wait for each other. This module does not import torch.

Torch divides an operation among threads that meet at a barrier, and by default a thread spins while it waits
for the others. On a machine with other work, or in a container with a limit of CPU time, the others may not
run at that moment: spinning then takes the time that they need, and everything takes several times as long.
"""

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
"""Folder where Linux shows control groups, which limit the CPU time of containers and services."""
_MEMBERSHIP = Path("/proc/self/cgroup")
"""File that names the control groups of this process."""

_NUMBERS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables by which a user chooses the number of threads."""
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which a user chooses how threads wait."""

_SPINS = "10000"
"""Number of times that a waiting thread checks the barrier before it sleeps. A smaller number makes an idle
machine slower, a larger number a loaded machine; `benchmarks/threads.py` measures it."""


def configure_threads() -> None:
    """Set the environment variables that torch's threads read when torch is loaded; call this before that.

    If control groups limit the CPU time to fewer cores than there are, the number of threads is this limit.
    Otherwise torch chooses the number. A thread that waits spins for a short time only, then sleeps.
    Variables that the user has set stay as they are.
    """
    limit = find_core_limit()
    if limit is not None and not any(name in os.environ for name in _NUMBERS):
        os.environ["OMP_NUM_THREADS"] = str(limit)
    if not any(name in os.environ for name in _WAITING):
        os.environ["GOMP_SPINCOUNT"] = _SPINS


def find_core_limit() -> int | None:
    """Return the limit of CPU time that control groups set for this process, in cores.

    The limit is rounded, and at least 1. None if there is no limit below the number of cores that the process
    may use.
    """
    is_linux = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1
    limit = min((max(1, round(limit)) for limit in _iterate_cpu_limits()), default=cores)
    return limit if limit < cores else None


def _iterate_cpu_limits() -> Iterator[float]:
    """Yield the limits of CPU time, in cores, that control groups set for this process.

    Nothing is yielded on systems without control groups. Files that cannot be read are left out.
    """
    for group in _iterate_groups():
        try:
            if (group / "cpu.max").exists():  # version 2
                quota, period = (group / "cpu.max").read_text().split()
            else:
                quota, period = (
                    (group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
                )
            if quota not in ("max", "-1"):
                yield int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):
            continue


def _iterate_groups() -> Iterator[Path]:
    """Yield the folders of this process's control groups that may limit CPU time, and their parent folders.

    The last parent is always the folder at the top. In a container this is the folder of the container, and
    the other folders may not exist, because the system can name their path outside of the container.
    """
    try:
        lines = _MEMBERSHIP.read_text(errors="replace").splitlines()
    except OSError:
        return
    for fields in (line.split(":", 2) for line in lines):
        if len(fields) != 3:
            continue
        _, controllers, path = fields
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Version 1 has a folder for each set of controllers, or a link with the name of one.
        tops = [_CGROUPS / controllers, _CGROUPS / "cpu"] if controllers else [_CGROUPS]
        parts = Path(path.lstrip("/")).parts
        for top in tops:
            for length in range(len(parts), -1, -1):
                yield top.joinpath(*parts[:length])
