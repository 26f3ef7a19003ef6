"""What docs/sizes.md calculates follows from the code's own byte counts."""

import re

import pytest

from knnstore.datastore import registry
from tests.pages.transcripts import ROOT

PAGE = (ROOT / "docs" / "sizes.md").read_text()
WIDTHS = (256, 768, 2048, 4096)


def rows(after):
    """The cells of the table that comes after some words, without its head."""
    table = re.search(r"(?:^\|.*\n)+", PAGE[PAGE.index(after) :], re.MULTILINE).group()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def number(text):
    return float(re.search(r"[\d,.]+", text).group().replace(",", ""))


def record_size(engine, width, kept_as=""):
    """As `add` counts it: with the parameters that a row of the page names."""
    options = dict(re.findall(r"--(codes) (\w+)", kept_as) + re.findall(r"--param (\w+)=(\w+)", kept_as))
    return registry.load_adapter(engine).record_size(width, **options)


@pytest.mark.parametrize("row", rows("asks the disk"), ids=" ".join)
def test_bytes_a_token(row):
    engine, kept_as, *stated = row
    pytest.importorskip(
        {"faiss": "faiss", "hnswlib": "hnswlib", "qdrant": "qdrant_client"}.get(engine.strip("`"), "numpy")
    )
    assert [number(size) for size in stated] == [record_size(engine.strip("`"), w, kept_as) for w in WIDTHS]


def test_which_codes_are_the_default():
    default = re.search(r"default: (.*?) \|", PAGE).group(1).split(", ")
    for kind, width in zip(default, WIDTHS, strict=True):
        assert record_size("cells", width) == record_size("cells", width, f"--codes {kind}")


def test_gigabytes_of_a_hundred_million_tokens():
    said = re.search(r"A hundred million tokens by default: (.*?) GB", PAGE).group(1)
    stated = [float(one) for one in re.split(", | and ", said)]
    assert stated == pytest.approx([record_size("cells", w) / 10 for w in WIDTHS], rel=0.01)


def test_a_large_model():
    (_, *keys), (_, *catalog), (_, *ngrams) = rows("## A model of 7B")
    wide, short, plain = (
        record_size("cells", 4096),
        record_size("cells", 256),
        record_size("cells", 4096, "--codes none"),
    )
    assert [number(size) for size in keys] == pytest.approx([wide / 10, short / 10, plain / 10], rel=0.01)
    assert {number(size) for size in catalog} == {0.4}
    assert {number(size) for size in ngrams} == {1.0}
