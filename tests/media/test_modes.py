"""What a store writes is its owner's alone, whatever the umask says."""

import stat

import pytest

N = 300


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["faiss", "hnswlib"])
def test_nobody_else_can_read_what_is_written(engine, tmp_path, steps) -> None:
    home = tmp_path / "home"
    steps.well("create", home, engine, umask=0)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert stat.S_IMODE((home / "catalog.db").stat().st_mode) == 0o600
    assert steps.well("open_to_others", home, N, 0).ids == ["a", "seen:"]
    steps.well("create", tmp_path / "second", engine, location=tmp_path / "keys", umask=0)
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_verify_says_so_where_everybody_can_read(tmp_path, steps) -> None:
    home = tmp_path / "home"
    steps.well("create", home, "faiss")
    (home / "catalog.db").chmod(0o644)
    assert "every user" not in steps.well("command", "verify", "--home", home).err
    home.chmod(0o755)
    assert f"can read {home}/catalog.db" in steps.well("command", "verify", "--home", home).err
