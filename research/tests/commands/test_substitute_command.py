"""The commands that train a substitute and measure it, and what is said once a document of it is gone."""

import inspect
import json
from dataclasses import replace

import pytest
from knnstore_research.substitute import Substitute, train_substitute
from knnstore_research.substitute_command import substitute

import knnstore as library
from knnstore.lm.components import registry


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the component be known, also where the package's entry points are of another version."""
    monkeypatch.setitem(registry._registered, "substitute", Substitute())


@pytest.mark.slow
def test_a_substitute_is_trained_and_measured_and_goes_with_its_documents(knnstore, store):
    none = knnstore("research eval-substitute held-out.jsonl --domain news")
    assert none.status == 1
    assert none.err.endswith(
        "error: no substitute was trained on exactly these domains: "
        "run knnstore research substitute --domain news\n"
    )
    trained = knnstore("research substitute --domain news --epochs 1 --json")
    assert trained.status == 0, trained.err
    assert (trained.json["rows"], trained.json["held_out_tokens"] > 0) == (1, True)
    measured = knnstore("research eval-substitute held-out.jsonl --domain news --json").json
    assert 0 < measured["substitute_ppl"] != measured["base_ppl"]
    refused = knnstore("research eval-substitute held-out.jsonl --domain news --tag final")
    assert "leave out --tag" in refused.err

    with library.open(store, "a") as opened:  # as calibrate would, if that were best
        saved = opened.settings(["news"])
        query = {**saved.query, "others": {"substitute": saved.trained["substitute"]["substitute"]}}
        opened.save_settings(replace(saved, query=query), ["news"])
    explained = knnstore("explain harbour --domain news --json")
    parts = [{part["name"]: part for part in token["parts"]} for token in json.loads(explained.out)]
    assert all(0 <= of_token["substitute"]["p"] <= 1 for of_token in parts)
    alone = knnstore("eval held-out.jsonl --domain news --lambda 0 --json").json
    assert alone["knn_ppl"] == pytest.approx(alone["base_ppl"]), "lambda 0 is the model alone"
    without, both = (
        knnstore(f"research eval-substitute held-out.jsonl --domain news {given} --json").json
        for given in ("--lambda 0.5", "--lambda 0.5 --cache 20")
    )
    assert both == without, "of the store's gain alone"
    assert knnstore("info --json").json["trained"] == ["substitute of news: ready"]
    knnstore("remove n-17")
    outdated = ["substitute of news: outdated, because documents were removed"]
    assert knnstore("info --json").json["trained"] == outdated
    measured = knnstore("research eval-substitute held-out.jsonl --domain news")
    assert "was trained on documents" in measured.err
    without = knnstore("explain harbour --domain news --neighbors 0")
    assert "the component substitute in these settings was trained on documents that were" in without.err
    assert "substitute" not in without.out

    # A new one takes the place of the old one.
    assert knnstore("research substitute --domain news --epochs 1 --json").status == 0
    again = knnstore("explain harbour --domain news --json")
    assert again.err == ""
    assert "substitute" in {part["name"] for part in json.loads(again.out)[0]["parts"]}


def test_a_store_without_keys_is_refused_in_one_line(knnstore, workplace):
    assert knnstore("--home words init --model examples/tiny-lm --key none").status == 0
    refused = knnstore("--home words research substitute")
    assert (refused.status, refused.out) == (1, "")
    assert refused.err.splitlines()[-1] == "error: a substitute is trained on keys, but this store has none"


def test_its_defaults_are_those_of_the_library():
    ours, theirs = (
        {one.name: one.default for one in inspect.signature(function).parameters.values()}
        for function in (substitute, train_substitute)
    )
    shared = {"rows", "epochs", "learning_rate", "seed"}
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
