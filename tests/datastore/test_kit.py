"""The conformance kit notices defects: run, as its users run it, on stores that have one each."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

_HERE = Path(__file__).parent
_EXPECTED = {
    "ReturnsRootOfDistance": ["test_finds_the_nearest"],
    "IgnoresFilter": ["test_by_ids", "test_by_groups"],
    "EmptyFilterIsNone": ["test_filter_of_no_ids"],
    "OverFetchesOnce": ["test_by_ids", "test_fewer_match_than_asked_for"],
    "PadsLikeFaiss": ["test_new_store_is_empty", "test_more_than_there_are"],
    "SaysExactAndIsNot": ["test_finds_the_nearest", "test_searching_beside_a_writer"],
    "HasPoorRecall": ["test_finds_the_nearest", "test_finds_itself_first"],
    "PassesIdsThroughFloats": ["test_ids_survive_whole"],
    "KeepsOldGroup": ["test_adding_again_moves_to_the_new_group"],
    "StoresGoodRowsOfBadCall": ["test_key_that_is_not_finite_is_refused"],
    "GetsInItsOwnOrder": ["test_getting_keys"],
    "YieldsItsOwnArrays": ["test_what_iterate_yields_is_the_caller_s", "test_iterating_in_batches"],
    "NamesAParameterOtherwise": ["test_has_the_protocol_s_signatures"],
    "FlushesNothing": ["test_flushed_records_survive_kill_9", "test_closing_keeps_everything"],
    "ReadsOnce": ["test_reader_sees_what_is_flushed"],
    "SaysSharedAndIsNot": ["test_second_writer"],
    "SaysItChecksAndDoesNot": ["test_checks_keys_is_true"],
    "SharesThroughTheClass": ["test_persistent_is_true"],
    "ErasesTheFolder": ["test_erasing_leaves_nothing_and_takes_nothing_else"],
    "KeepsItsFirstOwner": ["test_its_owner_is_remembered"],
    "ItsOwnerIsARecord": ["test_its_owner_is_remembered"],
    "VacuumsNothing": ["test_vacuum_leaves_no_byte_of_what_was_deleted"],
    "UploadReplaces": ["test_an_upload_adds_and_changes_nothing"],
    "DropsACase": ["test_no_case_is_missing_or_overridden"],
    "OverridesACase": ["test_no_case_is_missing_or_overridden"],
}
"""The classes of broken_stores.py and the cases that must notice their defects."""


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """The cases that failed, as (class, function), of all that are expected to."""
    folder = tmp_path_factory.mktemp("kit")
    cases = [f"{_HERE / 'broken_stores.py'}::Test{name}::{c}" for name, cs in _EXPECTED.items() for c in cs]
    options = ["-q", "-p", "no:cacheprovider", f"--junit-xml={folder / 'report.xml'}", f"--rootdir={folder}"]
    paths = [str(_HERE), str(_HERE / "stranger"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *cases],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    report = ElementTree.parse(folder / "report.xml")
    return {
        (case.attrib["classname"].rpartition(".Test")[2], case.attrib["name"].partition("[")[0])
        for case in report.iter("testcase")
        if case.find("failure") is not None
    }


@pytest.mark.slow
@pytest.mark.parametrize(("defect", "case"), [(name, c) for name, cs in _EXPECTED.items() for c in cs])
def test_defect_is_noticed(failed, defect, case):
    assert (defect, case.partition("[")[0]) in failed
