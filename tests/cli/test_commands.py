"""Each command does what its help says."""

import json
import re
import shutil
import sqlite3
from pathlib import Path

import pytest

from knnstore.cli.commands.calibrating import _describe_generation
from knnstore.cli.commands.generating import credit_documents
from knnstore.lm import KNNLMForCausalLM, Source, TokenExplanation


def test_domains_and_documents(knnstore, store):
    assert [(row["name"], row["documents"]) for row in knnstore("domains --json").json] == [
        ("letters", 2),
        ("news", 3),
    ]
    assert knnstore("domains").out.splitlines()[0].split() == ["domain", "documents", "tokens", "records"]
    rows = knnstore("documents --json").json
    assert [row["id"] for row in rows] == [
        "first.txt",
        "second.txt",
        "n-17",
        "n-18",
        "n-19",
    ]
    assert [row["id"] for row in knnstore("documents --tag final --json").json] == [
        "first.txt",
        "second.txt",
    ]
    assert "n-18" in knnstore("documents --domain news").out


def test_the_home_is_named_before_or_after_the_command_or_in_the_environment(
    knnstore, store, monkeypatch, workplace
):
    store.rename(workplace / "moved")
    assert knnstore("domains").status == 1
    expected = knnstore("--home moved domains --json").json
    assert len(expected) == 2
    assert knnstore("domains --home moved --json").json == expected
    assert knnstore("--home nowhere domains --home moved --json").json == expected
    monkeypatch.setenv("KNNSTORE_HOME", "moved")
    assert knnstore("domains --json").json == expected
    assert knnstore("--home nowhere domains").status == 1
    assert knnstore("db upgrade").status == 0


def test_show_gives_the_text_back(knnstore, store):
    text = Path("letters/first.txt").read_text()
    assert knnstore("show first.txt --text --json").json["text"] == text
    assert knnstore("show first.txt --text").out.endswith(f"\n\n{text}\n")


def test_adding_again_changes_nothing_and_new_text_replaces(knnstore, store):
    again = knnstore("add letters --domain letters --json").json
    assert (again["unchanged"], again["added"], again["tokens"]) == (2, 0, 0)
    Path("letters/first.txt").write_text("The harbour is not quiet any more.")
    changed = knnstore("add letters --domain letters --json").json
    assert (changed["unchanged"], changed["replaced"], changed["added"]) == (1, 1, 0)
    # A tag given once stays.
    assert knnstore("show first.txt --json").json["tags"] == ["final"]


def test_standard_input(knnstore, store):
    rows = b'{"id": "p-1", "text": "The boat came in."}\n{"id": "p-2", "text": "The boat went out."}\n'
    assert knnstore("add - --domain piped --json", stdin=rows).json["added"] == 2
    assert knnstore("show p-2 --json").json["domain"] == "piped"
    assert knnstore("eval - --json", stdin=rows).json["documents"] == 2


def test_eval_agrees_with_the_store(knnstore, store):
    line = "eval held-out.jsonl --domain news --k 4 --temperature 2 --lambda 0.5"
    found = knnstore(f"{line} --json")
    assert found.err == ""
    assert found.out.count("\n") == 1
    fields = {"tokens", "base_ppl", "knn_ppl", "k", "temperature", "lambda", "mixer", "tokens_per_s"}
    assert fields <= found.json.keys()
    assert found.json["bytes"] > found.json["words"] > 0
    assert 1 < found.json["knn_byte_ppl"] < found.json["knn_ppl"] < found.json["knn_word_ppl"]
    assert (found.json["k"], found.json["temperature"], found.json["lambda"]) == (4, 2.0, 0.5)
    for slices in (found.json["by_frequency"], found.json["by_distance"]):
        assert sum(part["tokens"] for part in slices) == found.json["tokens"]
    alone = knnstore("eval held-out.jsonl --lambda 0 --json").json
    assert alone["knn_ppl"] == alone["base_ppl"] == found.json["base_ppl"]
    shown = knnstore(line)
    assert shown.err == ""
    lines = shown.out.splitlines()
    assert len(lines) == 10
    whole = found.json
    assert lines[1].split() == ["perplexity", f"{whole['base_ppl']:,.2f}", f"{whole['knn_ppl']:,.2f}"]
    assert lines[-3].split() == ["helped", f"{whole['helped']:.1%}"]
    assert lines[-2].split(maxsplit=1)[1] == "fixed, lambda 0.5, T 2, k 4"
    detailed = knnstore(f"{line} --details").out
    assert detailed.startswith("\n".join(lines[:-1]))
    for part in whole["by_frequency"] + whole["by_distance"]:
        row = [f"{part['tokens']:,}", f"{part['base_ppl']:,.2f}", f"{part['knn_ppl']:,.2f}"]
        assert row in [line.split()[-4:-1] for line in detailed.splitlines()]


def test_eval_warns_of_stored_documents_and_can_leave_them_out(knnstore, store):
    inside = knnstore("eval news.jsonl --lambda 0.9 --json")
    assert inside.err.startswith("warning: 3 of these documents are also in the store (for example 'n-17')")
    elsewhere = knnstore("eval news.jsonl --domain letters --json")
    assert (elsewhere.err, elsewhere.json["stored"]) == ("", [])
    without = knnstore("eval news.jsonl --lambda 0.9 --leave-out --json")
    assert without.err == ""
    assert without.json["knn_ppl"] > 2 * inside.json["knn_ppl"]


def test_eval_audits_its_figures(knnstore, store):
    sound = knnstore("eval held-out.jsonl --audit --json")
    assert (sound.status, sound.json["audit"]["passed"]) == (0, True)
    assert sound.err.count("passed: ") == len(sound.json["audit"]["checks"]) == 5
    stored = knnstore("eval news.jsonl --audit")
    assert stored.status == 1
    assert "FAILED: no evaluated text in the store" in stored.err
    assert stored.err.endswith(
        "error: the audit found problems that make these figures unreliable: see above\n"
    )


@pytest.mark.slow
def test_calibrated_settings_are_used_and_named(knnstore, store):
    before = knnstore("eval dev.jsonl --domain news --json").json
    found = knnstore("calibrate dev.jsonl --domain news --max-k 16 --json").json
    assert found["saved"]["domains"] == ["news"]
    names = [row["mixer"] for row in found["candidates"]]
    assert names[:3] == ["model alone", "current", "fixed"]
    assert found["candidates"][0]["ppl"] == pytest.approx(before["base_ppl"], rel=1e-5)
    after = knnstore("eval dev.jsonl --domain news --json")
    assert after.err.startswith("settings calibrated for news on 20")
    assert (before["fitted"], len(after.json["fitted"])) == ([], before["documents"])
    assert f"warning: the settings were fitted to {before['documents']} of these documents" in after.err
    assert (after.json["mixer"], after.json["probes"]) == (
        "gate over all" if found["settings"]["gate"] else found["settings"]["mixer"]["name"],
        found["settings"]["probes"],
    )
    assert after.json["knn_ppl"] < before["knn_ppl"]
    for line in ("generate 'The harbour' --max-new-tokens 2", "explain 'The harbour'"):
        assert knnstore(f"{line} --domain news").err.startswith("settings calibrated for news")
        assert knnstore(line).err == ""
    assert knnstore("eval dev.jsonl --domain news --k 4 --temperature 2 --lambda 0.5").err == ""
    knnstore("remove n-18")
    assert "warning: these settings are stale" in knnstore("explain 'The harbour' --domain news").err
    table = knnstore("calibrate dev.jsonl --max-k 16 --repetition")
    assert table.out.splitlines()[0].split() == [
        "mixer",
        "probes",
        "T",
        "lambda",
        "ppl",
        "low",
        "high",
        "ratio",
    ]
    assert "\nsaved for the whole store: " in table.err
    assert "are in the store" not in table.err, "given a file it is fitted to that alone"
    (writing,) = [line for line in table.err.splitlines() if "repeated 4-grams of generated text" in line]
    assert re.search(r"\(repeated 4-grams of .*: .*\b\d\.\d\d without, \d\.\d\d the model alone", writing)
    stars = [line.split() for line in table.out.splitlines() if line.startswith("*")]
    assert writing in " ".join(knnstore("calibrate --show").out.split())
    shown = knnstore("calibrate --show --json").json
    assert len(stars) == 2  # the winner, and what a star means
    assert " ".join(stars[0][1:]).startswith(shown["calibration"]["mixer"])
    assert shown["domains"] == []
    assert knnstore("calibrate --show --domain news --json").json["domains"] == ["news"]
    assert knnstore("calibrate --reset --domain news --json").json == {"reset": True, "domains": ["news"]}
    assert knnstore("calibrate --show --domain news --json").json == shown
    for said in ("deleted the settings saved", "no settings are saved"):
        assert knnstore("calibrate --reset").out == f"{said} for the whole store\n"
    assert knnstore("calibrate --show").out == "no settings are saved: the defaults are used\n"
    assert knnstore("eval dev.jsonl --json").json["mixer"] == "bins"


def test_it_is_said_what_text_is_written_with():
    rows = [{"of": of, "repeated_4grams": 0.5} for of in ("model", "all", "all but cache")]
    assert _describe_generation((), rows).startswith("generation uses all components (repeated 4-grams of ")
    assert _describe_generation(("cache",), rows).startswith("used in scoring only: cache (repeated")
    every = _describe_generation(("cache", "keys"), rows)
    assert every.startswith("the model generates alone, used in scoring only: cache, keys (repeated")
    assert "generates alone" not in _describe_generation(("cache",), ())


def test_calibrate_refuses_what_it_cannot_fit(knnstore, store):
    refused = knnstore("calibrate held-out.jsonl")
    assert (refused.status, refused.out) == (1, "")
    assert refused.err.startswith("error: 2 documents of ")
    inside = knnstore("calibrate dev.jsonl news.jsonl")
    assert inside.status == 1
    assert "3 of the held-out documents (for example 'n-17') are in the store, whole or" in inside.err


@pytest.mark.slow
def test_settings_fitted_to_stored_documents_go_with_them(knnstore, store):
    for more in ("--stored 500 --show", "--show --reset", "dev.jsonl --reset"):
        refused = knnstore(f"calibrate {more}")
        assert (refused.status, refused.out) == (2, "")
        assert "give either --show or --reset, without FILE and --stored" in " ".join(refused.err.split())
    held_out = len(Path("dev.jsonl").read_text().splitlines())
    found = knnstore("calibrate dev.jsonl --stored 500 --max-k 16 --domain news")
    assert (
        "3 of the documents are in the store, so these settings are deleted when one of them is removed or"
        in found.err
    )
    assert knnstore("calibrate --show --domain news --json").json["calibration"]["documents"] == 3 + held_out
    assert "when one of the 3 stored documents" in knnstore("calibrate --show --domain news").out
    knnstore("remove n-18")
    assert knnstore("calibrate --show --domain news --json").json["calibration"] is None
    left = knnstore("info --json").json["documents"]
    assert knnstore("calibrate").err.startswith(f"error: {left} documents of ")


def test_eval_writes_a_row_for_each_token(knnstore, store):
    found = knnstore("eval held-out.jsonl --per-token tokens.jsonl --json").json
    rows = [json.loads(line) for line in Path("tokens.jsonl").read_text().splitlines()]
    assert len(rows) == found["tokens"]
    first = json.loads(Path("held-out.jsonl").read_text().splitlines()[0])
    assert "".join(row["text"] for row in rows if row["document"] == first["id"]) == first["text"]
    knnstore("eval held-out.jsonl --per-token tokens.tsv")
    assert len(Path("tokens.tsv").read_text().splitlines()) == 1 + found["tokens"]
    assert knnstore("eval held-out.jsonl --per-token missing/tokens.tsv").status == 1


def test_a_table_replaces_no_input_and_is_only_replaced_by_a_whole_one(knnstore, store):
    Path("texts").mkdir()
    Path("held-out.jsonl").rename("texts/held-out.jsonl")
    Path("tokens.tsv").write_text("of last week")
    Path("link.tsv").symlink_to("texts/held-out.jsonl")
    before = {file: file.read_bytes() for file in Path().rglob("*") if file.is_file()}
    for texts, table in (("texts/held-out.jsonl", "texts/held-out.jsonl"), ("texts", "link.tsv")):
        refused = knnstore(f"eval {texts} --per-token {table}")
        assert (refused.status, refused.out) == (1, "")
        assert refused.err.startswith(f"error: --per-token would replace {table}, which is to be evaluated")
    assert knnstore("eval texts --domain nothing --per-token tokens.tsv").status == 1
    assert {file: file.read_bytes() for file in Path().rglob("*") if file.is_file()} == before
    assert knnstore("eval texts --per-token tokens.tsv").status == 0
    assert Path("tokens.tsv").read_text().startswith("document\tposition")


def test_generate_and_its_sources(knnstore, store):
    line = "generate 'The harbour' --max-new-tokens 6 --lambda 1 --k 2 --domain letters"
    done = knnstore(f"{line} --explain --json").json
    assert knnstore(line).out == f"The harbour{done['continuation']}\n"
    assert {source["domain"] for source in done["sources"]} == {"letters"}
    assert done["sources"][0]["share"] > 0
    sampled = f"{line} --temperature 2 --seed 3"
    assert knnstore(sampled).out == knnstore(sampled).out
    piped = knnstore("generate - --max-new-tokens 2", stdin=b"The boat")
    assert piped.out.startswith("The boat")


def test_generate_drafts_where_n_grams_are_in_use(knnstore, store, monkeypatch):
    asked = []
    generate = KNNLMForCausalLM.generate

    def noted(*args, draft, **options):
        asked.append(draft)
        return generate(*args, draft=draft, **options)

    monkeypatch.setattr(KNNLMForCausalLM, "generate", noted)
    line = "generate 'The harbour' --max-new-tokens 12"
    options = ("", "--draft", "--ngrams 4", "--ngrams 4 --no-draft")
    written = [knnstore(f"{line} {given}").out for given in options]
    assert asked == [False, True, True, False]
    assert written[0] == written[1]
    assert written[2] == written[3]


def test_credit_goes_to_the_very_token_and_not_to_one_that_looks_like_it():
    """Halves of a character all look like �."""
    wrong, right = (
        Source(token, "�", 0.5, 1.0, document, "d", 0, "", "")
        for token, document in ((7, "wrong"), (8, "right"))
    )
    token = TokenExplanation(0, 8, "�", p_lm=0.1, p_knn=0.5, lam=0.5, p=0.3, neighbors=(wrong, right))
    assert [source["document"] for source in credit_documents([token])] == ["right"]


def test_search_shows_the_nearest_passages(knnstore, store):
    for domain, id, text in (
        ("news", "n-19", "Prices of grain rose again"),
        ("letters", "first.txt", "The harbour"),
    ):
        passages = knnstore("search", text, "--domain", domain, "--json").json
        assert (passages[0]["domain"], passages[0]["document"]) == (domain, id)
        assert text.split()[-1] in passages[0]["text"]
        shares = [passage["share"] for passage in passages]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) <= 1 + 1e-6
    assert len(knnstore("search boat --limit 2 --json").json) == 2
    shown = knnstore("search 'Prices of grain' --limit 1").out
    assert shown.split()[1].startswith("news/n-19:")
    assert "rose" in shown
    refused = knnstore("search ''")
    assert (refused.status, refused.err) == (1, "error: the text is empty\n")
    nothing = knnstore("search boat --where \"autor = 'Ida'\"")
    assert (nothing.status, nothing.out) == (0, "")
    why = "nothing was found: no selected document meets \"autor = 'Ida'\", no document has autor\n"
    assert nothing.err == why
    for line in ("documents --json", "documents --count", "remove", "tag --add old"):
        assert knnstore(f"{line} --where \"autor = 'Ida'\"").err == why
    assert knnstore("documents --tag nothing").err == (
        "nothing was found: no selected document has the tag 'nothing'\n"
    )


def test_a_key_for_a_domain_that_is_not_there_is_made_and_said(knnstore, store):
    for domains, warned in (
        ("letters", ""),
        ("letters --domain nws", "warning: there is no domain nws yet\n"),
    ):
        made = knnstore(f"key add --right read --domain {domains} --json")
        assert (made.status, made.json["domains"]) == (0, domains.split(" --domain "))
        assert (
            made.err
            == f"{warned}the key is printed only now, so keep it safe: anyone who has it has its rights\n"
        )


def test_explain_names_the_neighbors(knnstore, store):
    tokens = knnstore("explain 'The harbour wall' --neighbors 2 --domain news --lambda 0.25 --json").json
    assert "".join(token["text"] for token in tokens) == "The harbour wall"
    assert knnstore("explain ''").err == "error: the text is empty\n"
    for token in tokens:
        assert token["p"] == pytest.approx(0.25 * token["p_knn"] + 0.75 * token["p_lm"], rel=1e-4)
        assert [source["domain"] for source in token["neighbors"]] == ["news", "news"]
    shown = knnstore("explain 'The harbour wall' --neighbors 2 --domain news").out
    assert len(shown.splitlines()) == 3 * len(tokens)


def test_the_model_may_be_elsewhere_now(knnstore, store, model, monkeypatch):
    with sqlite3.connect(store / "catalog.db") as catalog:
        catalog.execute("UPDATE knnstore_store SET model = '/gone/model'")
    missing = (
        "error: the model '/gone/model' cannot be loaded: no such folder; "
        "give its new location with --model-at"
    )
    lines = "add letters --domain new", "generate 'The boat' --max-new-tokens 2", "show n-17 --text", "serve"
    for line in lines:
        refused = knnstore(line)
        assert (refused.status, refused.err.startswith(missing)) == (1, True), refused.err
    for line in lines[:-1]:
        assert knnstore(f"{line} --model-at {model}").status == 0
    monkeypatch.setenv("KNNSTORE_MODEL", str(model))
    assert knnstore(lines[1]).status == 0


def test_tags(knnstore, store):
    assert knnstore("tag n-17 --add storm --add wall --json").json["tags"] == ["storm", "wall"]
    assert knnstore("tag n-17 --remove wall").out == "tags of n-17 in news: storm\n"
    tagged = knnstore("eval held-out.jsonl --tag storm --json").json
    only = knnstore("eval held-out.jsonl --domain news --json").json
    assert tagged["knn_ppl"] != only["knn_ppl"]


@pytest.mark.slow
def test_what_selects_nothing_is_warned_of(knnstore, store):
    for line in ("eval held-out.jsonl", "generate x --max-new-tokens 1", "explain 'The boat'"):
        done = knnstore(f"{line} --tag nope")
        assert done.status == 0
        assert done.err == (
            "warning: nothing is retrieved, so the model is used alone: "
            "no selected document has the tag 'nope'\n"
        )
        assert knnstore(f"{line} --tag nope --lambda 0").err == ""
        assert knnstore(f"{line} --tag nope --cache 100").err.startswith("warning: nothing is retrieved: no")
    knnstore("init --model examples/tiny-lm --home empty")
    empty = knnstore("eval held-out.jsonl --home empty")
    assert (empty.status, empty.err.count("warning: nothing is retrieved")) == (0, 1)


def test_documents_are_listed_used_tagged_and_removed_by_their_metadata(knnstore, store, workplace):
    rows = [
        {
            "id": f"y-{year}",
            "text": f"The harbour in {year} was quiet.",
            "year": year,
            "author": {"name": "Ida"},
        }
        for year in range(2018, 2023)
    ]
    (workplace / "years.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    knnstore("add years.jsonl --domain years")
    asked = "--where \"year >= 2020 and author.name like 'I%'\""
    listed = knnstore(f"documents {asked} --json").json
    assert [row["id"] for row in listed] == ["y-2020", "y-2021", "y-2022"]
    counted = knnstore(f"documents {asked} --count --json").json
    assert counted == {"documents": 3, "tokens": sum(row["tokens"] for row in listed)}
    assert knnstore(f"tag {asked} --add recent --json").json == {"documents": 3}
    given = knnstore(f"eval held-out.jsonl {asked} --json").json
    assert given["knn_ppl"] == knnstore("eval held-out.jsonl --tag recent --json").json["knn_ppl"]
    assert given["knn_ppl"] != knnstore("eval held-out.jsonl --domain years --json").json["knn_ppl"]
    warned = knnstore("eval held-out.jsonl --where 'year > 3000'").err
    assert (
        "nothing is retrieved, so the model is used alone: no selected document meets 'year > 3000'" in warned
    )
    assert knnstore("remove --where 'year < 2020' --domain news").status == 0  # there is none
    assert knnstore("remove --where 'year < 2020' --json").json["removed"]["documents"] == 2
    left = [row["id"] for row in knnstore("documents --domain years --json").json]
    assert left == ["y-2020", "y-2021", "y-2022"]
    for line in ("documents --where 'year >'", "eval held-out.jsonl --where 'year >'"):
        done = knnstore(line)
        assert (done.status, done.err.count("\n")) == (1, 1)
        assert "its end" in done.err


def test_what_is_removed_is_gone(knnstore, store):
    before = knnstore("eval held-out.jsonl --domain letters --json").json
    done = knnstore("remove n-17 --json").json["removed"]
    assert (done["ids"], done["documents"]) == (["n-17"], 1)
    assert knnstore("show n-17").status == 1
    refused = knnstore("remove --domain news")
    assert (refused.status, refused.out) == (1, "")
    assert refused.err.startswith("error: all 2 documents of news will be removed: confirm with --yes")
    assert knnstore("remove --domain news --yes").out.startswith("removed news: 2 documents")
    assert [row["name"] for row in knnstore("domains --json").json] == ["letters"]
    after = knnstore("eval held-out.jsonl --json").json
    assert after["knn_ppl"] == before["knn_ppl"]


def test_what_is_erased_is_in_no_file(knnstore, store):
    ids = knnstore("show n-17 --json").json["id"].encode()
    home = Path(knnstore("info --json").json["home"])

    def files():
        return [path.name for path in home.rglob("*") if path.is_file() and ids in path.read_bytes()]

    assert files()
    done = knnstore("remove n-17 --erase --json").json
    assert done["removed"]["ids"] == ["n-17"]
    assert done["erased"]["unreached"] == []
    assert files() == []
    again = knnstore("erase")
    assert (again.status, again.err) == (0, "")
    assert again.out.startswith("erased the removed documents in ")


def test_a_document_of_several_domains_is_named_with_its_domain(knnstore, store):
    knnstore("add news.jsonl --domain archive")
    unclear = knnstore("remove n-17")
    assert (unclear.status, unclear.out) == (1, "")
    assert unclear.err.startswith("error: document 'n-17' is in several domains")
    assert knnstore("remove --document n-17 --in archive --json").json["removed"]["domain"] == "archive"
    assert knnstore("show n-17 --json").json["domain"] == "news"


@pytest.mark.slow
def test_move_keeps_every_prediction(knnstore, store):
    before = knnstore("eval held-out.jsonl --json").json["knn_ppl"]
    moved = knnstore("move --store faiss --location elsewhere --param index=exact --json").json
    assert (moved["location"], moved["before"]["location"]) == ("elsewhere", "keys")
    assert moved["after"]["params"] == {"index": "exact"}
    assert moved["records"] == moved["copied"] == knnstore("info --json").json["records"]
    assert (moved["recall"], moved["left"]) == (1, None)
    assert knnstore("eval held-out.jsonl --json").json["knn_ppl"] == pytest.approx(before, rel=1e-6)
    assert not (store / "keys").exists()
    said = f"moved {moved['records']} records to faiss at keys; it finds 100.00% of the {moved['neighbors']} "
    assert knnstore("move --store faiss --location keys").out.startswith(said)
    assert knnstore("move --abandon").out == "there is no unfinished move\n"
    assert knnstore("move --abandon --json").json == {"abandoned": None}


def test_another_engine_makes_the_same_predictions(knnstore, store):
    pytest.importorskip("hnswlib")
    before = knnstore("eval held-out.jsonl --domain news --json").json["knn_ppl"]
    assert knnstore("move --store hnswlib --json").json["recall"] == 1
    assert knnstore("eval held-out.jsonl --domain news --json").json["knn_ppl"] == pytest.approx(
        before, rel=1e-6
    )
    assert knnstore("verify").status == 0


def test_info_and_upkeep(knnstore, store, model):
    found = knnstore("info --json").json
    assert found["model"] == str(model)
    assert (found["domains"], found["documents"], found["store"]) == (2, 5, "cells")
    assert knnstore("info").out.splitlines()[0].split() == ["home", ".knnstore"]
    for line in ("verify --json", "repair --json"):
        assert knnstore(line).json == {"records": found["records"], "problems": []}
    assert knnstore("optimize --json").json["records"] == found["records"]
    assert {row["name"] for row in knnstore("adapters --json").json} >= {"faiss", "memory"}


def test_verify_finds_damage(knnstore, store):
    files = [file for file in (store / "keys").rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    done = knnstore("verify --json")
    assert done.status == 1
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1


def test_a_store_of_cells_visits_them_if_nothing_else_is_said(knnstore, workplace):
    """Until settings are saved for it, or k is given; both is refused."""
    init = "--home cells init --model examples/tiny-lm --store cells"
    made = knnstore(f"{init} --codes pq8")
    assert made.status == 0
    assert "keys are compressed (pq8)" in made.err
    narrow = knnstore(
        f"{init} --json".replace("cells init", "narrow init")
    )  # so narrow that codes are not worth it
    assert (narrow.status, narrow.err) == (0, "")
    refused = knnstore("--home bad init --model nowhere --codes pq")  # before a model is looked for
    assert (refused.status, refused.err.count("\n")) == (1, 1)
    assert "codes must be" in refused.err
    for kind in ("none", "auto", "int8"):
        assert "codes" not in knnstore(f"--home bad init --model nowhere --codes {kind}").err
    assert knnstore("--home cells add letters --domain letters").status == 0
    found = [
        knnstore(f"--home cells eval news.jsonl {given} --json").json
        for given in ("", "--probes 16", "--probes 0", "--k 9")
    ]
    assert [(one["probes"], one["k"]) for one in found] == [(16, 1024), (16, 1024), (None, 1024), (None, 9)]
    assert (
        found[0]["knn_ppl"]
        == found[1]["knn_ppl"]
        == pytest.approx(found[2]["knn_ppl"])
        != found[3]["knn_ppl"]
    )
    refused = knnstore("--home cells eval news.jsonl --k 9 --probes 2")
    assert (refused.status, refused.err.count("\n")) == (1, 1)
    assert "not both" in refused.err


def test_keys_of_several_states_are_made_told_and_used(knnstore, workplace):
    init = "--home joined init --model examples/tiny-lm"
    made = knnstore(f"{init} --discount 0.6 --discount 0.3 --json")
    assert made.status == 0, made.err
    assert (made.json["key"], made.json["dim"]) == ("transformer.h.1.mlp:input +0.6 +0.3", 16)
    assert knnstore("--home joined info --json").json["key"] == made.json["key"]
    assert knnstore("--home joined add news.jsonl --domain news").status == 0
    found = knnstore("--home joined eval letters --k 5 --json").json
    assert found["knn_ppl"] != found["base_ppl"]
    assert knnstore("--home joined verify").status == 0
    for options, said in (
        ("--states 2 --discount 0.6 --discount 0.3", "before the last: 1, got 2"),
        ("--states 2 --discount 0", "above 0"),
        ("--discount 0.5", "before the last: 2, got 1"),
        ("--sample articles.jsonl", "belong together"),
        ("--dim 8", "belong together"),
    ):
        refused = knnstore(f"{init.replace('joined', 'other')} {options}")
        assert (refused.status, refused.err.count("\n")) == (1, 1), refused.err
        assert said in refused.err
    assert knnstore(f"{init} --states 0").status == 2


def test_without_keys_text_is_added_by_the_tokenizer_alone(knnstore, workplace):
    shutil.copytree("examples/tiny-lm", "lm")
    for home, key in (("words", "none"), ("keys", "ffn_input")):
        assert knnstore(f"--home {home} init --model lm --key {key}").status == 0
    Path("lm/model.safetensors").rename("kept")
    assert knnstore("--home words add letters --domain letters --json").json["added"] == 2
    Path("letters/first.txt").write_text("A new letter.")
    assert knnstore("--home words sync letters --domain letters --json").json["replaced"] == 1
    assert "cannot be loaded" in knnstore("--home keys add letters --domain letters").err
    Path("kept").rename("lm/model.safetensors")
    assert "n-grams" in knnstore("--home words eval held-out.jsonl").out
    tokenizer = json.loads(Path("lm/tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 8192, "content": "<new>"})
    Path("lm/tokenizer.json").write_text(json.dumps(tokenizer))
    refused = knnstore("--home words add letters --domain others")
    assert "the store was made with the tokenizer of" in refused.err


def test_a_model_that_knnstore_cannot_run_has_a_store_of_n_grams(knnstore, workplace):
    shutil.copytree("examples/tiny-lm", "t5", ignore=shutil.ignore_patterns("*.safetensors"))
    sizes = {"d_model": 32, "num_layers": 1, "vocab_size": 8192}
    Path("t5/config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True, **sizes}))
    made = knnstore("--home words init --model t5 --key none")
    assert (made.status, "NGramLogitsProcessor" in made.err) == (0, True)
    assert knnstore("--home words add letters --domain letters --json").json["added"] == 2
    refused = knnstore("--home words eval held-out.jsonl")
    assert (refused.status, refused.out, refused.err.count("error: ")) == (1, "", 1)
    assert "(t5) is an encoder-decoder model, but a causal model is needed" in refused.err
    assert "--dim has no effect" in knnstore("--home keys init --model t5 --key none --dim 4").err
    assert not Path("keys").exists()


def test_a_store_without_keys_knows_its_text_by_n_grams(knnstore, workplace):
    made = knnstore("--home words init --model examples/tiny-lm --key none")
    assert made.status == 0
    assert "the store keeps no keys: only the n-grams" in made.err
    empty = knnstore("--home words eval held-out.jsonl")
    assert "warning: nothing is retrieved, so the model is used alone: no document is stored" in empty.err
    assert knnstore("--home words add letters --domain letters --json").json["tokens"] > 0
    info = knnstore("--home words info --json").json
    assert (info["store"], info["key"], info["records"], info["documents"]) == ("none", None, 0, 2)
    found = knnstore("--home words eval held-out.jsonl --json").json
    assert found["ngram_ppl"] == found["knn_ppl"] < found["store_ppl"] == found["base_ppl"]
    text = Path("letters/first.txt").read_text().split(".")[0]
    assert knnstore("--home", "words", "search", text, "--json").json[0]["document"] == "first.txt"
    assert knnstore("--home words verify").status == 0
    for line in ("move --store faiss", "eval held-out.jsonl --lambda 0.5"):
        refused = knnstore(f"--home words {line}")
        assert (refused.status, refused.out) == (1, "")
        assert refused.err.splitlines()[-1].startswith("error: ")
        assert "keys" in refused.err.splitlines()[-1]
    assert "--cache-temperature" in knnstore("--home words generate hello --cache 9").err
