"""Translation memories (TMX): units become pairs, and hostile files are refused."""

import gzip

import pytest

from knnstore.documents import Fields, read_documents, translation_memory
from knnstore.errors import UnusableDocumentError

PAIR = Fields("de", "id", "en")
UNITS = """
<tu tuid="1" creationdate="20240131T120000Z" changedate="20250131T120000Z">
  <note>Checked.</note><note>Twice.</note><prop type="client">Hull &amp; Sons</prop>
  <tuv xml:lang="en-GB">
    <seg>The <bpt i="1">&lt;b&gt;</bpt>quiet<ept i="1">&lt;/b&gt;</ept> harbour.</seg>
  </tuv>
  <tuv xml:lang="DE"><seg>Der <hi>stille</hi> Hafen<ph>{0}<sub>nicht</sub></ph>.</seg></tuv>
  <tuv xml:lang="fr"><note>Of the variant.</note><seg>Le port.</seg></tuv>
</tu>
<tu>
  <tuv xml:lang="en-GB"><seg>A boat.</seg></tuv>
  <tuv xml:lang="de"><seg>Ein Boot &#8211; größer.</seg></tuv>
</tu>
"""


def tmx(units=UNITS, before="", declared="UTF-8"):
    return (
        f'<?xml version="1.0" encoding="{declared}"?>\n{before}<tmx version="1.4">'
        f'<header srclang="en"><note>Of the file.</note></header><body>{units}</body></tmx>'
    )


def read(folder, content, fields=PAIR, name="memory.tmx", **options):
    file = folder / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read_documents([file], fields=fields, **options))


def check_units(documents):
    one, two = documents
    assert (one.id, one.text, one.source) == ("1", "Der stille Hafen.", "The quiet harbour.")
    assert one.metadata == {
        "source": one.source,
        "client": "Hull & Sons",
        "note": "Checked.\nTwice.\nOf the variant.",
        "creationdate": "20240131T120000Z",
        "changedate": "20250131T120000Z",
    }
    assert (two.text, two.source) == ("Ein Boot \u2013 größer.", "A boat.")
    assert two.id.startswith("sha256:")


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_units_are_pairs_of_two_languages_wherever_the_file_is_divided(tmp_path, monkeypatch, size) -> None:
    monkeypatch.setattr(translation_memory, "_PIECE_BYTES", size)
    check_units(read(tmp_path, tmx(before='<!DOCTYPE tmx SYSTEM "tmx14.dtd">')))


def test_a_file_may_be_compressed_and_in_another_encoding(tmp_path) -> None:
    check_units(read(tmp_path, gzip.compress(tmx().encode()), name="a.tmx.gz"))
    check_units(read(tmp_path, tmx(declared="UTF-16").encode("utf-16")))
    check_units(read(tmp_path, tmx(declared="iso-8859-1").replace("&#8211;", "&#x2013;").encode("latin-1")))
    check_units(read(tmp_path, tmx(declared="UTF-8").encode("cp1252"), encoding="cp1252"))


def test_one_language_alone_is_a_document(tmp_path) -> None:
    one, _ = read(tmp_path, tmx(), Fields("EN"))
    assert (one.text, one.source) == ("The quiet harbour.", None)
    assert "source" not in one.metadata


def test_a_unit_without_a_language_is_named_and_left_out(tmp_path) -> None:
    problems = []
    (one,) = read(tmp_path, tmx(), Fields("fr", "id", "en"), on_bad=problems.append)
    assert one.text == "Le port."
    assert str(problems[0]).startswith(f"{tmp_path}/memory.tmx unit 2: no language 'fr'")
    assert "the languages are 'en-gb', 'de': name the languages" in str(problems[0])
    variants = "".join(f'<tuv xml:lang="en-{one}"><seg>a</seg></tuv>' for one in ("GB", "US"))
    with pytest.raises(
        UnusableDocumentError, match="several texts or variants of it; the languages are 'en-gb', 'en-us'"
    ):
        read(tmp_path, tmx(f"<tu>{variants}</tu>"), Fields("en"))


LAUGHS = "".join(f'<!ENTITY a{at} "{f"&a{at - 1};" * 10}">' for at in range(1, 10))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (tmx(before=f'<!DOCTYPE tmx [<!ENTITY a0 "ha">{LAUGHS}]>'), "it declares the entity 'a0'"),
        (tmx(before='<!DOCTYPE tmx [<!ENTITY x SYSTEM "/etc/passwd">]>'), "it declares the entity 'x'"),
        (tmx(before='<!DOCTYPE tmx [<!ENTITY % x SYSTEM "/etc/passwd">%x;]>'), "it declares the entity 'x'"),
        ("<html><body/></html>", "not TMX: its first element is 'html'"),
        ("", "not XML, or damaged: no element found"),
        ("id,text\n1,a\n", "not XML, or damaged"),
        (tmx(""), "the file has no translation unit"),
        (tmx("<tu>" * 300), "its elements are nested more than 256 deep"),
        (tmx().encode()[:40] + b"\xff" + tmx().encode()[40:], "not XML, or damaged"),
    ],
)
def test_a_file_that_is_hostile_or_no_translation_memory_is_refused(tmp_path, content, reason) -> None:
    with pytest.raises(UnusableDocumentError) as refused:
        read(tmp_path, content)
    assert reason in str(refused.value)


def test_units_before_damage_are_read(tmp_path) -> None:
    problems = []
    check_units(read(tmp_path, tmx().removesuffix("</body></tmx>"), on_bad=problems.append))
    assert "not XML, or damaged: no element found" in str(problems[0])
    unknown = "<tu><tuv xml:lang='de'><seg>&name;</seg></tuv></tu>"
    found = read(
        tmp_path,
        tmx(UNITS + unknown, '<!DOCTYPE tmx SYSTEM "tmx14.dtd">'),
        on_bad=problems.append,
    )
    check_units(found)
    assert "the entity 'name' is not declared here" in str(problems[1])


def test_a_segment_is_as_long_as_a_document_may_be(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(translation_memory, "MAX_DOCUMENT_BYTES", 30)
    with pytest.raises(UnusableDocumentError, match="a segment has more than"):
        read(tmp_path, tmx("<tu><tuv xml:lang='de'><seg>" + "Boot " * 7 + "</seg></tuv></tu>"))


def test_a_unit_with_two_texts_in_one_language_is_refused(tmp_path):
    unit = "<tu><tuv xml:lang='en'><seg>A</seg></tuv>" + 2 * "<tuv xml:lang='de'><seg>B</seg></tuv>" + "</tu>"
    with pytest.raises(UnusableDocumentError, match="no language 'de', or several texts or variants of it"):
        read(tmp_path, tmx(unit))


def test_properties_with_names_of_fields_are_renamed(tmp_path):
    texts = "<tuv xml:lang='en'><seg>A</seg></tuv><tuv xml:lang='de'><seg>B</seg></tuv>"
    properties = "".join(f"<prop type='{name}'>x</prop>" for name in ("source", "id", "de", "client"))
    (document,) = read(tmp_path, tmx(f"<tu tuid='1'>{properties}{texts}</tu>"))
    assert (document.id, document.source, document.text) == ("1", "A", "B")
    metadata = {"prop:source": "x", "prop:id": "x", "prop:de": "x", "client": "x", "source": "A"}
    assert dict(document.metadata) == metadata
