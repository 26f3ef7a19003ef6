"""Pairs and translations on the command line, with a tiny random encoder-decoder model."""

import json
import shlex
from contextlib import chdir

import pytest

from tests.cli.conftest import call
from tests.lm.seq2seq import make_model, make_pairs, make_tokenizer
from tests.repositories import Repository

PAIRS, HELD_OUT = make_pairs(30), make_pairs(8, 1)
SURE = "--lambda 0.95 --k 4 --probes 0 --knn-temperature 1"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a store of pairs, its model, and files of pairs and of sentences."""
    folder = tmp_path_factory.mktemp("pairs")
    make_model("bart").save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    rows = [f"{pair['id']}\t{pair['text']}\t{pair['source']}\n" for pair in HELD_OUT]
    (folder / "held-out.tsv").write_text("id\tde\ten\n" + "".join(rows))
    lines = [PAIRS[3]["source"], "", PAIRS[4]["source"], PAIRS[5]["source"]]
    (folder / "sentences.txt").write_text("\r\n".join(lines) + "\r\n")
    with chdir(folder):
        made = call("init --model model --json")
        assert made.json["key"] == "model.decoder.layers.1.fc1:input +0.5 +0.35"
        assert call("add pairs.jsonl --domain first --json").json["added"] == 30
    return folder


@pytest.fixture
def run(home, monkeypatch):
    monkeypatch.chdir(home)
    monkeypatch.delenv("KNNSTORE_HOME", raising=False)
    return call


def test_a_file_is_translated_line_by_line_in_its_order(run) -> None:
    done = run(f"translate sentences.txt --beams 3 {SURE}")
    texts = [PAIRS[3]["text"], "", PAIRS[4]["text"], PAIRS[5]["text"]]
    assert done.out.split("\n") == [*texts, ""]
    rows = run(f"translate sentences.txt --json {SURE}").json
    assert [row["text"] for row in rows] == texts
    assert rows[0]["source"] == PAIRS[3]["source"]


def test_pairs_are_read_from_tables_and_scored(run) -> None:
    found = run("eval held-out.tsv --text-field de --source-field en --json").json
    assert found["documents"] == 8
    assert found["tokens"] == sum(len(pair["text"].split()) + 1 for pair in HELD_OUT)
    assert found["base_ppl"] != found["knn_ppl"]
    refused = run("eval held-out.tsv --text-field de")
    assert "error: held-out.tsv row 2: no 'source': for this model" in refused.err


def test_translations_are_scored_beside_the_perplexities(run) -> None:
    found = run(f"eval pairs.jsonl --translate --beams 2 --json {SURE}").json["translation"]
    assert (found["pairs"], round(found["knn_bleu"], 6)) == (30, 100.0)
    shown = run(f"eval pairs.jsonl --translate --details {SURE}").out
    assert [line.split()[-1] for line in shown.splitlines() if line.startswith(("BLEU", "chrF"))] == [
        "100.00",
        "100.00",
    ]
    assert "bleu_signature" in shown
    assert "for encoder-decoder models" in run("eval pairs.jsonl --translate --audit").err
    assert "--beams needs --translate" in run("eval pairs.jsonl --beams 2").err
    assert "name the same field" in run("eval pairs.jsonl --text-field de --source-field de").err


def test_a_pair_is_shown_without_the_token_that_ends_it(run) -> None:
    shown = run("show p3 --text --json").json
    assert (shown["text"], shown["metadata"]["source"]) == (PAIRS[3]["text"], PAIRS[3]["source"])


def test_an_explanation_shows_the_sources_of_the_pairs(run) -> None:
    pair = PAIRS[3]
    shown = run(f"explain {shlex.quote(pair['text'])} --source {shlex.quote(pair['source'])} --neighbors 1")
    lines = shown.out.splitlines()
    assert len(lines) == 2 * (len(pair["text"].split()) + 1)
    assert all(line.endswith(f"<- {pair['source']}") for line in lines[1::2])


def test_a_domain_is_made_equal_to_a_file_of_pairs(run, home) -> None:
    """Another source is another version, and a pair under another id is the same records."""
    assert run("sync pairs.jsonl --domain first --json").json["unchanged"] == 30
    pairs = [{**PAIRS[0], "source": "w7 w8"}, {**PAIRS[1], "id": "new"}, *PAIRS[2:29]]
    (home / "changed.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (home / "half.jsonl").write_text('{"id": "x", "text": "w5"}')
    assert "half.jsonl row 1: no 'source'" in run("sync half.jsonl --domain first").err
    for line in ("--dry-run", ""):
        found = run(f"sync changed.jsonl --domain first --json {line}").json
        counts = [found[name] for name in ("added", "renamed", "replaced", "removed", "unchanged")]
        assert counts == [0, 1, 1, 1, 27]
    found = run("sync pairs.jsonl --domain first --json").json
    assert (found["added"], found["renamed"], found["replaced"]) == (1, 1, 1)


def test_what_is_not_built_for_pairs_is_refused(run, home) -> None:
    for line in ("generate w5", "search w5", "eval pairs.jsonl --audit",
                 "calibrate --stored 100 --repetition"):  # fmt: skip
        refused = run(line)
        assert (refused.status, refused.out) == (1, "")
        assert "(bart) is an encoder-decoder model, but a causal model is needed" in refused.err
    Repository(home / "code").commit({"a.txt": "w5"})
    assert "--git needs a store of a causal model" in run("sync --git code --domain first").err
    assert "needs the source of each text" in run("explain w5").err
    assert len(run("documents --domain first --json").json) == 30


def test_pairs_are_encoded_by_plan(run) -> None:
    """By plan, encode and commit; keys of one component, fitted to a table of pairs."""
    fields = "--text-field de --source-field en"
    made = run(f"--home small.knn init --model model --dim 1 --sample held-out.tsv {fields} --json")
    assert made.json["dim"] == 1
    assert run(f"--home small.knn add held-out.tsv --domain a {fields} --plan plan --json").json["added"] == 8
    assert run("encode plan --json").json["encoded"] == 1
    assert run("--home small.knn commit plan --json").json["documents"] == 8
    assert run("--home small.knn verify").status == 0


@pytest.mark.slow
def test_pairs_are_encoded_by_several_processes(run) -> None:
    run("--home workers.knn init --model model --json")
    added = run("--home workers.knn add pairs.jsonl --domain b --workers 2 --shard-tokens 80 --json")
    assert (added.json["added"], added.json["outdated"]) == (30, 0)
    assert run("--home workers.knn verify").status == 0
    texts = [PAIRS[3]["text"], "", PAIRS[4]["text"], PAIRS[5]["text"]]
    assert run(f"--home workers.knn translate sentences.txt {SURE}").out.split("\n") == [*texts, ""]


def test_a_causal_model_translates_nothing(knnstore, workplace, store) -> None:
    (workplace / "lines.txt").write_text("The harbour.\n")
    for line in ("translate lines.txt", "explain harbour --source wall"):
        assert "is a causal model, but an encoder-decoder model is needed" in knnstore(line).err
    (workplace / "pairs.jsonl").write_text('{"id": "a", "text": "The harbour.", "en": "Der Hafen."}')
    refused = knnstore("add pairs.jsonl --domain pairs --source-field en")
    assert "the document is a pair, but the model reads no source" in refused.err
    for line in (
        "sync pairs.jsonl --domain pairs --source-field en",
        "--home new init --model examples/tiny-lm --dim 2 --sample pairs.jsonl --source-field en",
    ):
        assert "--source-field is for encoder-decoder models" in knnstore(line).err
    assert (
        "are for the rows of --sample"
        in knnstore("--home new init --model examples/tiny-lm --source-field en").err
    )
    assert not (workplace / "new").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "the file is empty"), (b"w5\xff\n", "not UTF-8"), (b"w5 " * 90, "source 1: ")],
)
def test_a_file_that_cannot_be_translated_is_refused(run, home, content, reason) -> None:
    (home / "bad.txt").write_bytes(content)
    refused = run("translate bad.txt")
    assert (refused.status, refused.out) == (1, "")
    assert reason in refused.err
