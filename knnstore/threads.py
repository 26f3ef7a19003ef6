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
"""How often a waiting thread looks before it sleeps. With fewer an idle machine is slower, with more a loaded
machine; see docs/benchmarks.md, "Threads"."""


def configure_threads() -> None:
    """Set the environment variables that torch's threads read when torch is loaded; call this before that.

    Without a choice of the user, there are as many threads as `count_usable_cores`, and a thread that waits
    spins for a short time only, then sleeps. Variables that the user has set stay as they are.
    """
    if not any(name in os.environ for name in _NUMBERS):
        os.environ["OMP_NUM_THREADS"] = str(count_usable_cores())
    if not any(name in os.environ for name in _WAITING):
        os.environ["GOMP_SPINCOUNT"] = _SPINS


def count_usable_cores() -> int:
    """Return the number of cores that this process may use, at least 1.

    This is the number of cores of the machine, or the number of cores to which the process is bound, or the
    limit of CPU time of its control groups, rounded: the smallest of them.
    """
    is_linux = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1
    return max(1, min([cores, *(round(limit) for limit in _iterate_limits())]))


def _iterate_limits() -> Iterator[float]:
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
    """Yield the folders of the control groups of this process that may limit CPU time, and of their parents.

    In a container the path that the system names may be the path outside of it. So the folder at the top is
    always yielded; it is the container's own.
    """
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if controllers and "cpu" not in names:
            continue
        top = (
            _CGROUPS / controllers if controllers else _CGROUPS
        )  # version 1 has a folder for its controllers
        parts = Path(path.lstrip("/")).parts
        for length in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:length])
