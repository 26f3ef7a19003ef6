"""A worker whose plan is on a full disk."""

import pytest

from knnstore.distributed import PlanFolder
from knnstore.errors import DiskFullError, PlanError
from tests.cli.conftest import call
from tests.distributed.test_plans import DOCUMENTS, Workshop
from tests.record.behaviour import MODEL


@pytest.mark.parametrize("shards", [*(pytest.param(of, marks=pytest.mark.slow) for of in (0.0, 0.5)), 1.5])
def test_a_worker_says_so_in_one_line_and_leaves_no_half_shard(shards, disk, tmp_path) -> None:
    """With room for some of the keys, whole shards stay. With room for all, encoding completes the plan."""
    small = disk(4 << 20)
    workshop = Workshop(tmp_path, model=str(MODEL))
    workshop.folder = PlanFolder(small.path / "plan")
    plan = workshop.plan()
    assert plan is not None
    workshop.folder.key_files.mkdir()
    small.fill()
    with (small.path / "filling").open("ab") as file:
        file.truncate(file.tell() - round(shards * plan.shards[0].records * plan.identity.dim * 2))
    with pytest.raises(DiskFullError) as refused:
        workshop.encode()
    assert str(refused.value) == (
        f"{workshop.folder.key_files} cannot be written, the disk is full: free some space"
    )
    done = call("encode", workshop.folder.path)
    assert (done.status, done.err.count("\n")) == (1, 1)
    assert "the disk is full" in done.err
    assert workshop.folder.find_complete_shards(plan.shards) == set(range(int(shards)))
    assert not list(workshop.folder.path.rglob("*.tmp"))
    with pytest.raises(PlanError, match=rf"^shard {int(shards)} of \d+ is not encoded"):
        workshop.commit()
    small.relieve()
    workshop.encode()
    assert workshop.commit().documents == len(DOCUMENTS)
    assert workshop.problems() == []


def test_a_plan_on_a_full_disk_is_not_made(disk, tmp_path) -> None:
    small = disk(4 << 20)
    workshop = Workshop(tmp_path, model=str(MODEL))
    workshop.folder = PlanFolder(small.path / "plan")
    small.fill()
    with pytest.raises(DiskFullError, match="the disk is full"):
        workshop.plan()
    assert not workshop.folder.path.exists()
    small.relieve()
    assert workshop.plan() is not None
    assert workshop.problems() == []
