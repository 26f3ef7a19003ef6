"""`knnstore substitute`, `eval --substitute`, and what is said once a document of it is gone."""

import json
from dataclasses import replace

import pytest

import knnstore as library


def test_a_substitute_is_trained_and_measured_and_goes_with_its_documents(knnstore, store):
    none = knnstore("eval held-out.jsonl --substitute --domain news")
    assert none.status == 1
    assert none.err == (
        "error: no substitute was trained on exactly this: run knnstore substitute --domain news\n"
    )
    trained = knnstore("substitute --domain news --epochs 1 --json")
    assert trained.status == 0, trained.err
    assert (trained.json["rows"], trained.json["held_out_tokens"] > 0) == (1, True)
    measured = knnstore("eval held-out.jsonl --substitute --domain news --json").json
    assert 0 < measured["substitute_ppl"] != measured["base_ppl"]
    assert knnstore("eval held-out.jsonl --domain news --json").json["substitute_ppl"] is None
    assert "leave out --tag" in knnstore("eval held-out.jsonl --substitute --domain news --tag final").err

    with library.open(store, "a") as opened:  # as calibrate would, if that were best
        saved = opened.settings(["news"])
        query = {**saved.query, "substitute": saved.trained_substitute["substitute"]}
        opened.save_settings(replace(saved, query=query), ["news"])
    explained = knnstore("explain harbour --domain news --neighbors 0")
    assert " p_sub 0." in explained.out
    alone = knnstore("eval held-out.jsonl --domain news --lambda 0 --json").json
    assert alone["knn_ppl"] == pytest.approx(alone["base_ppl"]), "lambda 0 is the model alone"
    without, both = (
        knnstore(f"eval held-out.jsonl --substitute --domain news {given} --json").json
        for given in ("--lambda 0.5", "--lambda 0.5 --cache 20")
    )
    assert both["knn_ppl"] != pytest.approx(without["knn_ppl"])
    assert both["substitute_share"] == pytest.approx(without["substitute_share"]), "of the store's gain alone"
    assert knnstore("info --json").json["substitutes"] == ["of news: ready"]
    knnstore("remove n-17")
    assert knnstore("info --json").json["substitutes"] == ["of news: outdated, documents of it are gone"]
    assert "was trained on documents" in knnstore("eval held-out.jsonl --substitute --domain news").err
    without = knnstore("explain harbour --domain news --neighbors 0")
    assert "is left out: run knnstore substitute again" in without.err
    assert "p_sub" not in without.out

    assert knnstore("substitute --domain news --epochs 1 --json").status == 0  # takes the old one's place
    again = knnstore("explain harbour --domain news --json")
    assert again.err == ""
    assert all(0 <= token["p_sub"] <= 1 for token in json.loads(again.out))
