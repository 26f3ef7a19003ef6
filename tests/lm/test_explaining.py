"""What an explanation adds up to, what p would be without a document, and what a notebook shows of it."""

import re
from collections import defaultdict
from dataclasses import replace
from html import unescape

import numpy as np
import pytest

from knnstore.lm import CacheSettings, KNNSettings, NGramSettings, Part
from knnstore.lm.explanation.token_explanations import MAX_OPACITY, Explanation, Source, TokenExplanation
from knnstore.store import EVERYTHING
from tests.lm.phrases import documents, phrases

# All records are retrieved: then a search without a document finds no other in its place.
ALL = KNNSettings(k=5000, temperature=25.0, lam=0.4)
MIXED = replace(
    ALL, ngrams=NGramSettings(order=4, lam=0.3), cache=CacheSettings(size=20, temperature=25.0, lam=0.2)
)


@pytest.fixture(scope="module")
def stored():
    rng = np.random.default_rng(3)
    made = phrases(rng, 6, 4, 40, length=6)
    return {name: documents(rng, made, name, 4, of=4) for name in ("news", "mail")}


@pytest.fixture(scope="module")
def lm(make_lm, stored):
    return make_lm(stored, max_length=24, stride=12)


def without(explained, document):
    """p of each token by an explanation, but those that a document changes as it says."""
    found = next(
        one for one in explained.documents if (one.domain, one.document) == (document.domain, document.id)
    )
    changed = dict(zip(found.positions, found.p_without, strict=True))
    return [changed.get(token.position, token.p) for token in explained]


@pytest.mark.parametrize("only", [None, "news"], ids=["eight", "four"])
def test_p_without_a_document_is_that_of_a_search_without_it(lm, stored, only):
    text = stored["news"][1].text
    selection = replace(EVERYTHING, domains=(only,)) if only else EVERYTHING
    explained = lm.explain(text, replace(ALL, selection=selection))
    there = [one for one in lm.store.documents() if only in (None, one.domain)]
    assert len(explained.documents) == len(there)
    for document in there:
        content = next(one for one in stored[document.domain] if one.id == document.id).content_hash
        expected = lm.explain(text, replace(ALL, selection=selection.without_content(content)))
        assert without(explained, document) == pytest.approx([token.p for token in expected], rel=0.011)
    gains = [one.gain for one in explained.documents]
    assert gains == sorted(gains, reverse=True)
    assert explained.documents[0].document == "news1"
    assert explained.documents[0].gain > 1


def test_without_its_only_document_p_is_that_of_the_model(lm, stored):
    alone = replace(ALL, selection=replace(EVERYTHING, documents=("mail2",)))
    explained = lm.explain(stored["mail"][2].text, alone)
    (only,) = explained.documents
    p_lm = {token.position: token.p_lm for token in explained}
    assert only.p_without == pytest.approx([p_lm[at] for at in only.positions], rel=1e-4)


def test_parts_add_up_and_what_sources_gave_is_what_documents_take_away(lm, stored):
    explained = lm.explain(stored["mail"][0].text, MIXED, neighbors=5000)
    gave = defaultdict(float)
    mass = defaultdict(float)
    for token in explained:
        assert [part.name for part in token.parts] == ["model", "keys", "n-grams", "cache"]
        assert sum(part.weight for part in token.parts) == pytest.approx(1, abs=1e-5)
        assert sum(part.weight * part.p for part in token.parts) == pytest.approx(token.p, rel=1e-4)
        for part in token.parts[1:]:
            found = [one for one in token.neighbors if one.part == part.name and one.token == token.token]
            given = token.lam * sum(one.share for one in found)
            assert given <= part.weight * part.p + 1e-5
            assert part.name == "n-grams" or given == pytest.approx(part.weight * part.p, abs=1e-5)
        by_name = {part.name: part for part in token.parts}
        store = sum(by_name[name].weight * by_name[name].p for name in ("keys", "n-grams"))
        assert token.store_share == pytest.approx(store / token.p, rel=1e-4)
        for one in token.neighbors:
            key = token.position, one.document
            if one.part == "n-grams":
                gave[key] += token.lam * one.share
            elif one.part == "keys":
                mass[key] += token.lam * one.share / by_name["keys"].weight
                gave[key, "hit"] += (one.token == token.token) * token.lam * one.share
        found = [one for one in token.neighbors if one.token == token.token]
        assert sorted(token.causes, key=repr) == sorted((one for one in found if one.share > 0), key=repr)
        assert [one.share for one in token.causes] == sorted(
            (one.share for one in token.causes), reverse=True
        )
    assert explained.documents
    for document in explained.documents:
        for position, p in zip(document.positions, document.p_without, strict=True):
            token, key = explained[position], (position, document.document)
            keys = token.parts[1]
            others = (keys.weight * keys.p - gave[key, "hit"]) / (1 - mass[key])
            assert p == pytest.approx(token.p - keys.weight * keys.p + others - gave[key], abs=2e-5)


def test_of_the_model_alone_nothing_else_is_said(lm, stored):
    explained = lm.explain(stored["mail"][0].text, replace(ALL, lam=0))
    assert explained.documents == ()
    assert all(token.p == pytest.approx(token.p_lm) and token.store_share == 0 for token in explained)
    assert not any(token.neighbors or token.causes for token in explained)


def test_without_neighbors_nothing_is_named(lm, stored):
    explained = lm.explain(stored["mail"][0].text, MIXED, neighbors=0)
    assert explained.documents == ()
    assert not any(token.neighbors for token in explained)


def test_a_notebook_shows_the_text_colored_and_runs_none_of_it():
    evil = '<script>alert(1)</script>\u202e<img src=x onerror="alert(2)">\x07'
    source = Source(5, "x", 1.0, 0.5, 'd"<b>', "news\u2066", 0, "", "")
    texts, shares = ["The", evil, "\n", ""], [0.0, 0.5, 1.0, 0.25]
    tokens = [
        TokenExplanation(at, 5, text, 0.5, 0.5, 0.5, 0.5, (source,),
                         (Part("model", 1 - share, 0.5), Part("keys", share, 0.5)), (source,))
        for at, (text, share) in enumerate(zip(texts, shares, strict=True))
    ]  # fmt: skip
    shown = Explanation(tuple(tokens))._repr_html_()
    assert not re.search(r"<script|<img|<b>|[\u202e\u2066\x07]", shown)
    assert set(re.findall(r"<(\w+)", shown)) <= {"div", "span"}
    spans = re.findall(
        r'<span title="([^"]*)" style="background:rgb\([\d ]+ / ([\d.]+)\)">(.*?)</span>', shown, re.DOTALL
    )
    assert [float(alpha) for _, alpha, _ in spans] == [round(share * MAX_OPACITY, 2) for share in shares]
    assert unescape(spans[1][2]) == (
        '<script>alert(1)</script>‹U+202E›<img src=x onerror="alert(2)">␇'.replace("␇", "\u2407")
    )
    assert "p 0.5" in spans[0][0]
    assert 'news‹U+2066›/d"<b>' in unescape(spans[0][0])
    assert spans[2][2] == "↵\n"
