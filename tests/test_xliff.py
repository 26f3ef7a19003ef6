"""XLIFF 1.2 and 2.x: units and segments become pairs, and hostile files are refused."""

import re

import pytest

from knnstore.documents import Fields, read_documents, translation_memory
from knnstore.errors import UnusableDocumentError

PAIR = Fields("de", "id", "en")
OLD = """<?xml version="1.0" encoding="UTF-8"?>
<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2" xmlns:x="urn:example">
<file original="menu.txt" source-language="en-GB" target-language="de" datatype="plaintext">
 <header><note>Of the file.</note></header>
 <body><group><note>Of the group.</note>
  <trans-unit id="1" approved="yes">
   <source>The <g id="1">quiet</g> harbour<ph id="2">{0}<sub>not</sub></ph>.</source>
   <seg-source><mrk mtype="seg" mid="0">The harbour.</mrk></seg-source>
   <target state="final">Der <mrk mtype="seg" mid="0">stille</mrk> Hafen<x id="2"/>.</target>
   <note from="client">Checked.</note><note>Twice.</note>
   <alt-trans><source>A wall.</source><target state="new">Eine Mauer.</target><note>Other.</note></alt-trans>
   <x:info><x:note>No.</x:note><x:source>No.</x:source></x:info>
  </trans-unit>
 </group></body>
</file>
<file original="b.txt" source-language="en" datatype="plaintext"><body>
  <trans-unit id="1"><source>A boat.</source><target xml:lang="de-AT">Ein Boot.</target></trans-unit>
</body></file>
</xliff>"""
NEW = """<?xml version="1.0" encoding="UTF-8"?>
<xliff version="2.1" xmlns="urn:oasis:names:tc:xliff:document:2.0" srcLang="en" trgLang="de"
 xmlns:mtc="urn:oasis:names:tc:xliff:matches:2.0">
<file id="f1"><notes><note>Of the file.</note></notes>
 <unit id="u1">
  <mtc:matches><mtc:match ref="#m1">
   <source>A wall.</source><target>Eine Mauer.</target>
  </mtc:match></mtc:matches>
  <notes><note id="n1">Checked.</note><note>Twice.</note></notes>
  <originalData><data id="d1">&lt;b&gt;</data></originalData>
  <segment id="s1" state="final"><source>The <pc id="1">quiet</pc> harbour<ph id="2" dataRef="d1"/>.</source>
   <target>Der <mrk id="m1">stille</mrk> Hafen<cp hex="0001"/>.</target></segment>
  <ignorable><source> </source><target> </target></ignorable>
  <segment state="reviewed"><source>A boat.</source><target>Ein Boot.</target></segment>
 </unit>
 <group id="g1"><unit id="u2">
  <segment><source>A tree.</source><target>Ein Baum.</target></segment>
 </unit></group>
</file>
</xliff>"""
FIRST = ("Der stille Hafen.", "The quiet harbour.")
NOTES = {"note": "Checked.\nTwice.", "state": "final"}


def read(folder, content, fields=PAIR, name="memory.xlf", **options):
    (folder / name).write_text(content)
    return [
        (document.id, document.text, document.source, dict(document.metadata))
        for document in read_documents([folder / name], fields=fields, **options)
    ]


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_units_are_pairs_of_the_languages_of_their_file(tmp_path, monkeypatch, size) -> None:
    monkeypatch.setattr(translation_memory, "_PIECE_BYTES", size)
    assert read(tmp_path, OLD) == [
        ("menu.txt/1", *FIRST, {**NOTES, "approved": "yes", "source": FIRST[1]}),
        ("b.txt/1", "Ein Boot.", "A boat.", {"source": "A boat."}),
    ]
    assert [text for _, text, *_ in read(tmp_path, OLD, Fields("en", "id", "de"), "a.xliff")] == [
        "The quiet harbour.",
        "A boat.",
    ]
    plain = OLD.replace(' xmlns="urn:oasis:names:tc:xliff:document:1.2"', "")
    assert read(tmp_path, plain) == read(tmp_path, OLD)


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_segments_are_pairs_with_the_notes_of_their_unit(tmp_path, monkeypatch, size) -> None:
    monkeypatch.setattr(translation_memory, "_PIECE_BYTES", size)
    assert read(tmp_path, NEW) == [
        ("f1/u1/s1", *FIRST, {**NOTES, "source": FIRST[1]}),
        ("f1/u1/2", "Ein Boot.", "A boat.", {**NOTES, "state": "reviewed", "source": "A boat."}),
        ("f1/u2", "Ein Baum.", "A tree.", {"source": "A tree."}),
    ]


@pytest.mark.parametrize(("content", "kept"), [(OLD, ""), (NEW, "<target/>")])
def test_a_pair_without_a_target_is_named_and_left_out(tmp_path, content, kept) -> None:
    problems = []
    changed = re.sub("<target[^>]*>Der .*</target>", kept, content)
    assert changed != content
    found = read(tmp_path, changed, on_bad=problems.append)
    assert found == read(tmp_path, content)[1:]
    assert [str(problem) for problem in problems] == [f"{tmp_path}/memory.xlf unit 1: the text is empty"]


def test_a_language_that_the_file_does_not_have_is_named(tmp_path) -> None:
    with pytest.raises(
        UnusableDocumentError, match=r"unit 1: no language 'fr'.* the languages are 'en', 'de': name"
    ):
        read(tmp_path, NEW, Fields("fr", "id", "en"))
    without = OLD.replace(' xml:lang="de-AT"', "")
    with pytest.raises(UnusableDocumentError, match=r"unit 2: no language 'de'.* the languages are 'en', ''"):
        read(tmp_path, without)


def test_a_target_may_have_a_variant_of_the_language_of_its_file(tmp_path) -> None:
    changed = OLD.replace("<target state", '<target xml:lang="de-AT" state')
    assert read(tmp_path, changed) == read(tmp_path, OLD)
    assert read(tmp_path, changed, Fields("de-AT", "id", "en")) == read(tmp_path, OLD)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (OLD.replace("<xliff", '<!DOCTYPE xliff [<!ENTITY a "b">]><xliff', 1), "it declares the entity 'a'"),
        ('<tmx version="1.4"/>', "not XLIFF: its first element is 'tmx'"),
        ('<xliff xmlns="urn:example"/>', "not XLIFF: its first element is 'urn:example xliff'"),
        ('<xliff srcLang="en" trgLang="de"/>', "the file has no translation unit"),
        (
            '<xliff><trans-unit><unit/><target state="new"/></trans-unit></xliff>',
            "a unit is inside another unit",
        ),
        ("<xliff><segment><unit/><source/></segment></xliff>", "a unit is inside another unit or a segment"),
    ],
)
def test_a_file_that_is_hostile_or_no_xliff_is_refused(tmp_path, content, reason) -> None:
    with pytest.raises(UnusableDocumentError) as refused:
        read(tmp_path, content)
    assert reason in str(refused.value)
