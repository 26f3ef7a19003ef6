"""The number of threads and how they wait: control groups, and what the user has set."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from knnstore import threads


@pytest.fixture
def limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Describe the control groups of the process by their files, and return the limit below 64 cores."""
    monkeypatch.setattr(threads, "_CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(threads, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)

    def count(membership: str | None, files: dict[str, str]) -> int:
        if membership is not None:
            (tmp_path / "membership").write_text(membership)
        for name, content in files.items():
            file = tmp_path / "groups" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        return threads.find_core_limit()

    return count


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        (None, {}, None),  # no control groups
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2),  # a container of version 2
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3),  # by the parent
        ("0::/outside\n", {"cpu.max": "20000 100000\n"}, 1),  # never none
        ("4:cpu,cpuacct:/docker/1\n0::/\n", {"cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
         "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 4),  # a container of version 1
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("5:memory:/\n", {"memory/cpu.max": "100000 100000\n"}, None),  # no group of the processor
        ("4:cpuacct,cpu:/\n", {"cpu/cpu.cfs_quota_us": "200000\n",
         "cpu/cpu.cfs_period_us": "100000\n"}, 2),  # the folder has another name, and a link
        ("0::/\n", {"cpu.max": "nonsense\n"}, None),
        ("\n0\n0::/\n", {"cpu.max": "200000 100000\n"}, 2),  # lines that make no sense are left out
        ("0::/\n", {"cpu.max": "6400000 100000\n"}, None),  # no limit below the cores
    ],
)  # fmt: skip
def test_control_groups_limit_the_cores(limit, membership, files, cores) -> None:
    assert limit(membership, files) == cores


@pytest.mark.parametrize(
    ("given", "limit", "expected"),
    [
        ({}, None, {"OMP_NUM_THREADS": None, "GOMP_SPINCOUNT": "10000"}),
        ({}, 3, {"OMP_NUM_THREADS": "3", "GOMP_SPINCOUNT": "10000"}),
        ({"OMP_NUM_THREADS": "7"}, 3, {"OMP_NUM_THREADS": "7", "GOMP_SPINCOUNT": "10000"}),
        ({"MKL_NUM_THREADS": "7"}, 3, {"OMP_NUM_THREADS": None, "GOMP_SPINCOUNT": "10000"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, 3, {"GOMP_SPINCOUNT": None, "OMP_NUM_THREADS": "3"}),
    ],
)
def test_the_command_line_sets_what_the_user_has_not_set(given, limit, expected) -> None:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    environment = {name: value for name, value in os.environ.items() if name not in names} | given
    program = (
        "import os, sys, knnstore.cli.root as root, knnstore.cli, knnstore.threads as threads\n"
        f"get, threads.find_core_limit = os.environ.get, lambda: {limit}\n"
        "root.run = lambda: print({name: get(name) for name in sys.argv[1:]}, 'torch' in sys.modules)\n"
        "knnstore.cli.main()"
    )
    command = [sys.executable, "-c", program, *expected]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{expected} False"
