import pytest

NEEDS = {"exact": "faiss", "lists": "faiss", "graphs": "hnswlib", "coded": "torch"}
AT_LEAST = {
    ("exact", "ingest"): (44, 30),
    ("exact", "replace"): (64, 45),
    ("exact", "remove-document"): (20, 13),
    ("exact", "remove-domain"): (20, 16),
    ("exact", "commit"): (170, 100),
    ("exact", "compact"): (50, 15),
    ("lists", "compact"): (16, 6),
    ("graphs", "replace"): (34, 24),
    ("graphs", "commit"): (44, 20),
    ("graphs", "compact"): (16, 4),
    ("graphs", "erase"): (16, 2),
    # Keys are coded file by file: most kills leave one for recovery, which has one point then, where the
    # trials kill it at its first to eighth in turn.
    ("coded", "compact"): (16, 3),
    ("coded", "commit"): (44, 20),
}
"""How often a writer is killed in each operation, and again in the recovery, at least."""
IN_NO_CI = {
    ("exact", "replace"),
    ("exact", "remove-domain"),
    ("lists", "compact"),
    ("graphs", "replace"),
    ("graphs", "compact"),
    ("coded", "compact"),
    ("exact", "commit"),
    ("graphs", "commit"),
}
"""Operations whose parts others have, and engines whose files are of the same log."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "operation"),
    [one if one not in IN_NO_CI else pytest.param(*one, marks=pytest.mark.exhaustive) for one in AT_LEAST],
)
def test_nothing_is_lost_or_half_there_wherever_a_writer_is_killed(
    trials, engine: str, operation: str
) -> None:
    pytest.importorskip(NEEDS[engine])
    report = trials("crash_trials.py", "kill", operation, engine)
    killed, recoveries = AT_LEAST[engine, operation]
    assert len(report["killed"]) >= killed
    assert report["recoveries_killed"] >= recoveries


def test_every_engine_is_killed_and_hundreds_of_kills_are_survived() -> None:
    assert {NEEDS[engine] for engine, _ in AT_LEAST} == set(NEEDS.values())
    assert sum(writers + recoveries for writers, recoveries in AT_LEAST.values()) >= 450


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["replace", "compact", "commit"])
def test_a_full_disk_is_an_error_and_costs_nothing_that_was_there(trials, operation: str) -> None:
    pytest.importorskip("faiss")
    assert len(trials("crash_trials.py", "disk-full", operation, "exact")["trials"]) == 10
