"""Pointers in place of searches, against the algorithm written down for one token of one text at a time."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from knnstore.lm import (
    CacheSettings,
    KNNLMForCausalLM,
    KNNSettings,
    PointerSettings,
    TokenTable,
)
from knnstore.lm.scoring.held_out import score_texts
from tests.lm.phrases import phrases as phrases_of
from tests.lm.phrases import text as text_of

RNG = np.random.default_rng(11)
PHRASES = phrases_of(RNG, 6, 4, 30, length=5)
KNN = KNNSettings(k=6, temperature=15.0, lam=0.6, pointers=PointerSettings(2))
text = partial(text_of, RNG, PHRASES)


@pytest.fixture(scope="module")
def lm(make_lm):
    stored = {"one": [text(n) for n in (1, 2, 5, 8)], "two": [text(n) for n in (3, 6)]}
    made = make_lm(stored, max_length=16, stride=8)
    # Equal beginnings have equal keys, and of those at equal distances any may be found: make all different.
    for ids, keys, groups in list(made.store.datastore.iterate()):
        noise = RNG.normal(scale=0.1, size=keys.shape).astype(np.float32)
        made.store.datastore.add(ids, keys + noise, groups)
    return made


class Definition:
    """One text: which records count for its next token, in plain Python."""

    def __init__(self, lm: KNNLMForCausalLM, knn: KNNSettings) -> None:
        self.store, self.knn = lm.store, knn
        self.keys = {}
        for ids, keys, _ in lm.store.datastore.iterate():
            self.keys.update(zip(ids.tolist(), keys.astype(np.float64), strict=True))
        self.records = sorted(self.keys)
        self.snapshot = lm.store.view().snapshot
        self.starts = {int(start) for start in self.snapshot.starts}
        self.current: list[int] = []
        self.searches = 0

    def domain(self, id: int) -> int:
        return int(self.snapshot.groups[self.snapshot.documents_at(np.array([id >> 20]))[0]])

    def step(self, query: np.ndarray, read: int | None) -> dict[int, float]:
        """The records for one query with their distances, after a token was read."""
        after = dict(zip(self.records, self.records[1:], strict=False))
        leading = [id for id in self.current if id & 0xFFFFF == read][: self.knn.pointers.max_pointers]
        pointed = {after[id] for id in leading if id in after and after[id] >> 20 not in self.starts}
        least = self.knn.pointers.min_pointers
        if self.knn.pointers.cluster_size and len(pointed) >= least:
            domains = {self.domain(id) for id in pointed}  # each is one cluster
            pointed = {id for id in self.records if self.domain(id) in domains}
            pointed = set(sorted(pointed, key=lambda id: ((self.keys[id] - query) ** 2).sum())[: self.knn.k])
        elif least is None or len(pointed) < least:
            self.searches += 1
            pointed |= set(self.store.search(query[None], self.knn.k).ids[0].tolist()) - {-1}
        found = {id: float(((self.keys[id] - query) ** 2).sum()) for id in pointed}
        self.current = sorted(found, key=lambda id: (round(found[id], 3), id))
        return found


def p_knn(found: dict[int, float], temperature: float) -> dict[int, float]:
    """The distribution over tokens."""
    nearest, total, summed = min(found.values()), 0.0, {}
    for id, distance in found.items():
        weight = math.exp((nearest - distance) / temperature)
        total += weight
        summed[id & 0xFFFFF] = summed.get(id & 0xFFFFF, 0.0) + weight
    return {token: weight / total for token, weight in summed.items()}


@pytest.mark.parametrize(
    ("least", "cluster_size"), [(1, None), (2, None), (4, None), (None, None), (1, 10**6), (3, 10**6)]
)
def test_scoring_is_the_definition(lm, least, cluster_size) -> None:
    """Documents of several windows and of different lengths together give what each gives alone."""
    knn = replace(KNN, pointers=PointerSettings(least, cluster_size=cluster_size))
    held_out = [f"{text(n)} w40" for n in (1, 9, 4, 6)]
    table, plain = TokenTable(), TokenTable()
    evaluated = lm.evaluate(held_out, knn, table=table)
    lm.evaluate(held_out, replace(knn, pointers=None), table=plain)
    rows, searches = list(table.rows(lm.tokenizer)), 0
    keys = [keys_of(lm, document) for document in held_out]
    at = 0
    for document in range(len(held_out)):
        definition, read = Definition(lm, knn), None
        for query in keys[document]:
            row = rows[at]
            found = definition.step(query, read)
            read = row["token"]
            assert row["p_knn"] == pytest.approx(p_knn(found, knn.temperature).get(read, 0.0), abs=2e-4)
            assert row["distance"] == pytest.approx(min(found.values()), rel=1e-3, abs=1e-2)
            at += 1
        searches += definition.searches
    assert at == len(rows)
    assert evaluated.searched == pytest.approx(searches / at)
    assert [row["p_lm"] for row in rows] == pytest.approx([row["p_lm"] for row in plain.rows(lm.tokenizer)])
    assert least is not None or evaluated.searched == 1


def keys_of(lm, document: str) -> np.ndarray:
    """The keys of one document in order, as they are without pointers."""
    tokens = [lm.reader.tokens(document)]
    parts = list(score_texts(lm.store, lm.reader, tokens, replace(KNN, pointers=None)))
    positions = np.concatenate([part.positions for part in parts])
    return np.concatenate([part.read.keys.numpy() for part in parts])[positions.argsort()]


class Slow(KNNLMForCausalLM):
    """Reads each row alone from its beginning, and steps from the end of its prompt on."""

    prompts: list[list[int]]

    def forward(self, input_ids=None, attention_mask=None, knn=None, **_):
        logits, attention_mask = [], (input_ids != 2).long()
        for row, mask in zip(input_ids, attention_mask, strict=True):
            tokens = row[mask != 0].tolist()
            prompt = next(prompt for prompt in self.prompts if tokens[: len(prompt)] == prompt)
            definition, found = Definition(self, knn), {}
            for stop in range(len(prompt), len(tokens) + 1):
                seen = torch.tensor([tokens[:stop]])
                query = self.encoder.keys(seen, np.array([stop - 1])).numpy()[0]
                found = definition.step(query, tokens[stop - 1] if stop > len(prompt) else None)
            p = self.base(torch.tensor([tokens])).logits[0, -1].softmax(-1) * (1 - knn.mixer.lam)
            for token, share in p_knn(found, knn.temperature).items():
                p[token] += knn.mixer.lam * share
            logits.append(p.log())
        return CausalLMOutputWithPast(logits=torch.stack(logits)[:, None])


def written(model, prompts: list[list[int]], **mode) -> list[list[int]]:
    """Generate for a batch that is padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[2] * (width - len(prompt)) + prompt for prompt in prompts])
    torch.manual_seed(3)
    found = model.generate(
        ids, attention_mask=(ids != 2).long(), max_new_tokens=7, min_new_tokens=7, pad_token_id=2,
        knn=KNN, use_cache=not isinstance(model, Slow), **mode,
    )  # fmt: skip
    return found[:, width:].tolist()


@pytest.fixture
def slow(lm) -> Slow:
    return Slow.from_base(lm.base, lm.store, KNN, lm.tokenizer)


@pytest.fixture
def phrases(lm) -> list[list[int]]:
    return [[0, *lm.tokenizer(phrase, add_special_tokens=False)["input_ids"]] for phrase in PHRASES]


@pytest.mark.parametrize("mode", [{"do_sample": False}, {"num_beams": 3, "num_return_sequences": 3}], ids=str)
def test_rows_of_a_batch_are_as_each_alone(lm, slow, phrases, mode) -> None:
    """Of different lengths; each prompt is the beginning of another, so that texts meet."""
    prompts = [phrases[0], phrases[0][:3], phrases[0][:4], phrases[1][:2]]
    expected = []
    for prompt in prompts:
        slow.prompts = [prompt]
        expected += written(slow, [prompt], **mode)
    assert written(lm, prompts, **mode) == expected


@pytest.mark.parametrize("mode", [{"top_k": 0}, {"num_beams": 2, "num_return_sequences": 2}], ids=str)
def test_sampling_is_the_definition(lm, slow, phrases, mode) -> None:
    slow.prompts = [phrases[2], phrases[3][:3]]
    assert written(lm, slow.prompts, do_sample=True, **mode) == written(
        slow, slow.prompts, do_sample=True, **mode
    )


def test_generating_saves_searches_and_a_call_knows_nothing_of_another(lm, phrases, monkeypatch) -> None:
    searched = []
    search = lm.store.search
    monkeypatch.setattr(lm.store, "search", lambda q, *rest: searched.append(len(q)) or search(q, *rest))
    first = written(lm, [phrases[0]], do_sample=False)
    saved = 7 - sum(searched)
    assert saved > 0
    written(lm, [phrases[0][:3]], do_sample=False)
    searched.clear()
    assert written(lm, [phrases[0]], do_sample=False) == first
    assert 7 - sum(searched) == saved


@pytest.mark.parametrize("use_cache", [True, False])
def test_without_a_cache_it_is_said_that_no_pointer_is_followed(lm, phrases, caplog, use_cache) -> None:
    prompt = torch.tensor([phrases[0]])
    lm.generate(prompt, knn=KNN, use_cache=use_cache, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert ("no pointer is followed" in caplog.text) is not use_cache


def test_a_forward_pass_is_the_definition(lm, phrases) -> None:
    """All positions of a batch that is padded on the left."""
    rows = [phrases[0] + phrases[1][1:], [2] * 4 + phrases[2] + [40]]
    ids = torch.tensor(rows)
    mask = (ids != 2).long()
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        logits = lm(**inputs, knn=KNN).logits
        base = lm(**inputs, knn=KNNSettings(lam=0)).logits.softmax(-1)
    for row, tokens in enumerate(rows):
        text = [token for token in tokens if token != 2]
        definition, read = Definition(lm, KNN), None
        padding = len(tokens) - len(text)
        keys = lm.encoder.keys(np.array([text]), np.arange(len(text))).numpy()
        for at, query in enumerate(keys):
            expected = base[row, padding + at] * 0.4
            for token, share in p_knn(definition.step(query, read), KNN.temperature).items():
                expected[token] += 0.6 * share
            torch.testing.assert_close(logits[row, padding + at].exp(), expected, atol=2e-4, rtol=1e-3)
            read = text[at + 1] if at + 1 < len(text) else None


def test_with_a_cache_and_explained(lm) -> None:
    """What is explained is what is evaluated, token by token."""
    knn = replace(KNN, cache=CacheSettings(8, 15.0, 0.3))
    held_out, table = text(4), TokenTable()
    lm.evaluate([held_out, text(2)], knn, table=table)
    explained = lm.explain(held_out, knn)
    rows = list(table.rows(lm.tokenizer))[: len(explained)]
    assert [part.p for part in explained] == pytest.approx([row["p"] for row in rows], rel=1e-3)
