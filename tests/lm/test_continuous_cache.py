"""The continuous cache: against its definition in numpy, never ahead of the text, in every way of reading."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from knnstore.datastore import tokens_from_ids
from knnstore.documents import TextDocument
from knnstore.errors import ConfigError
from knnstore.lm import FixedLambda, KNNLMForCausalLM, TokenTable
from knnstore.lm.components import CacheSettings, DocumentKeys, RecentFitting
from knnstore.lm.components.recent import compare_preceding_keys
from knnstore.lm.explanation.token_explanations import THIS_TEXT
from knnstore.lm.scoring import evaluate
from knnstore.lm.settings import KNNSettings, ReadingParts
from tests.lm.phrases import words
from tests.lm.scored import scored_text

STORED = [[0, 40, 41, 42, 50, 51, 52, 40, 41, 60, 70, 71], [0, 7, 5, 3, 40, 41, 99, 98, 97, 40]]
CACHE = CacheSettings(size=6, temperature=15.0, lam=0.3)
BOTH = KNNSettings(k=5, temperature=20.0, lam=0.4, cache=CACHE)
ALONE = replace(BOTH, mixer=FixedLambda(0.0))
IDS = torch.tensor([[2, 2, 2, 2, 0, 40, 41, 40], [0, 9, 8, 7, 9, 8, 6, 9]])
MASK = (IDS != 2).long()


def padded(mask):
    """What a forward pass must be told of padding on the left."""
    return {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


@pytest.fixture(scope="module")
def gpt2(make_model):
    return make_model("gpt2")


@pytest.fixture(scope="module")
def knn_gpt2(gpt2, make_store):
    return KNNLMForCausalLM.from_base(gpt2, make_store(gpt2, STORED), BOTH)


def keys_of(model, row):
    """The keys of one text by a plain hook."""
    seen = []
    handle = model.base.get_submodule("transformer.h.1.mlp").register_forward_pre_hook(
        lambda _, args: seen.append(args[0])
    )
    with torch.no_grad():
        lm = model.base(torch.tensor([row])).logits[0].double().softmax(-1).numpy()
    handle.remove()
    return seen[0][0].double().numpy(), lm


def p_cache(keys, tokens, at, cache):
    """The definition: the pairs (key i, token i + 1) with i + 1 <= at, at most M of them."""
    pairs = range(max(0, at - cache.size), at)
    scores = np.array([-((keys[at] - keys[i]) ** 2).sum() / cache.temperature for i in pairs])
    weights = np.exp(scores - scores.max())
    probs = np.zeros(101)
    np.add.at(probs, [tokens[i + 1] for i in pairs], weights / weights.sum())
    return probs


def definition(model, row, settings):
    keys, mixed = keys_of(model, row)
    for at, key in enumerate(keys):
        squares = ((model.store.keys - key) ** 2).sum(1)
        nearest = np.argsort(squares)[: settings.k]
        weights = np.exp(-(squares[nearest] - squares.min()) / settings.temperature)
        knn = np.zeros(101)
        np.add.at(knn, tokens_from_ids(model.store.ids[nearest]), weights / weights.sum())
        mixed[at] = settings.mixer.lam * knn + (1 - settings.mixer.lam) * mixed[at]
        if at:
            share = settings.cache.lam
            mixed[at] = share * p_cache(keys, row, at, settings.cache) + (1 - share) * mixed[at]
    return mixed


@pytest.mark.parametrize("knn", [BOTH, ALONE], ids=["with a store", "alone"])
def test_every_row_of_a_forward_pass_is_a_text_of_its_own(knn_gpt2, knn):
    searched = knn_gpt2.store.searched
    with torch.no_grad():
        logits = knn_gpt2(IDS, **padded(MASK), knn=knn).logits
        kept = knn_gpt2(IDS, **padded(MASK), knn=knn, logits_to_keep=torch.tensor([7, 0, 5])).logits
    torch.testing.assert_close(kept, logits[:, [7, 0, 5]], atol=1e-5, rtol=1e-5)
    for row, mask, found in zip(IDS, MASK.bool(), logits, strict=True):
        expected = definition(knn_gpt2, row[mask].tolist(), knn)
        np.testing.assert_allclose(found[mask].exp(), expected, atol=1e-5)
    assert knn_gpt2.store.searched - searched == (0 if knn is ALONE else MASK.sum() + 5)


@given(
    tokens=st.lists(st.integers(3, 12), min_size=2, max_size=24),
    size=st.integers(1, 30),
    data=st.data(),
)
def test_a_later_token_changes_no_earlier_probability(knn_gpt2, tokens, size, data):
    changed = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:changed], *data.draw(st.lists(st.integers(3, 12), max_size=5))]
    knn = replace(BOTH, cache=replace(CACHE, size=size))
    with torch.no_grad():
        one = knn_gpt2(torch.tensor([[0, *tokens]]), knn=knn).logits[0]
        two = knn_gpt2(torch.tensor([[0, *other]]), knn=knn).logits[0]
    torch.testing.assert_close(one[: changed + 1], two[: changed + 1], atol=1e-4, rtol=1e-4)


@given(
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=4),
    size=st.integers(1, 700),
    metric=st.sampled_from(["l2", "ip"]),
    seed=st.integers(0, 9),
)
def test_looking_back_stays_in_the_text_and_within_the_size(lengths, size, metric, seed):
    rng = np.random.default_rng(seed)
    keys = rng.normal(3.0, 1.0, (sum(lengths), 4)).astype(np.float32)
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    at = np.flatnonzero(rng.random(len(keys)) < 0.03)
    tokens = torch.arange(len(keys))
    found = compare_preceding_keys(
        torch.from_numpy(keys), tokens, torch.from_numpy(at), torch.from_numpy(starts[at]), size, metric
    )
    for query, distances, sources in zip(at, found.distances, found.tokens, strict=True):
        expected = np.arange(max(starts[query], query - size), query)
        near = distances.isfinite()
        assert sources[near].tolist() == expected.tolist()
        exact = -keys[expected] @ keys[query]
        if metric == "l2":
            exact = ((keys[expected] - keys[query]) ** 2).sum(1)
        np.testing.assert_allclose(distances[near], exact, atol=1e-4, rtol=1e-4)


# -- generation


def test_generation_scores_each_step_as_the_whole_text_does(knn_gpt2):
    out = knn_gpt2.generate(
        IDS, attention_mask=MASK, max_new_tokens=9, min_new_tokens=9, pad_token_id=2, do_sample=False,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    read = padded(torch.cat([MASK, torch.ones(2, 8, dtype=torch.long)], 1))
    with torch.no_grad():
        whole = knn_gpt2(out.sequences[:, :-1], **read).logits[:, IDS.shape[1] - 1 :]
        plain = knn_gpt2(out.sequences[:, :-1], **read, knn=replace(BOTH, cache=None)).logits
    torch.testing.assert_close(torch.stack(out.logits, 1), whole, atol=1e-4, rtol=1e-4)
    assert (plain[:, IDS.shape[1] - 1 :] - whole).abs().max() > 0.1


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True}, {"prompt_lookup_num_tokens": 3}])
def test_beams_samples_and_guesses_are_those_of_generation_without_kept_state(knn_gpt2, options):
    rows = slice(1, 2) if "prompt_lookup_num_tokens" in options else slice(None)  # for one text only

    def generate(**options):
        torch.manual_seed(3)
        return knn_gpt2.generate(
            IDS[rows],
            attention_mask=MASK[rows],
            max_new_tokens=9,
            min_new_tokens=9,
            pad_token_id=2,
            **options,
        )

    found = generate(**options)
    without = {name: value for name, value in options.items() if name != "prompt_lookup_num_tokens"}
    assert torch.equal(found, generate(use_cache=False, **without))


def test_what_the_cache_cannot_know_is_said(knn_gpt2):
    with torch.no_grad():
        with pytest.raises(ConfigError, match="has not read"):
            knn_gpt2(IDS[1:, 4:], past_key_values=knn_gpt2.base(IDS[1:, :4]).past_key_values)
        step = knn_gpt2(IDS[1:, 4:], past_key_values=knn_gpt2(IDS[1:, :4]).past_key_values).logits
        torch.testing.assert_close(step, knn_gpt2(IDS[1:]).logits[:, 4:], atol=1e-4, rtol=1e-4)
        with pytest.raises(ConfigError, match="input_ids"):
            knn_gpt2(inputs_embeds=knn_gpt2.get_input_embeddings()(IDS[1:]))


# -- reading documents longer than the window


@pytest.fixture(scope="module")
def lm(make_lm):
    return make_lm({"stored": ["w5 w6 w7 w8 w9 w10"]}, states=1, max_length=12, stride=6)


@pytest.mark.slow
@pytest.mark.parametrize("weighed_at_once", [256, 5])
def test_documents_longer_than_the_window_match_an_oracle_that_has_all_keys(lm, weighed_at_once, monkeypatch):
    compared = list[int]()

    def spied(*given):
        found = compare_preceding_keys(*given)
        compared.append(found.tokens.numel())
        return found

    monkeypatch.setattr("knnstore.lm.components.recent.compare_preceding_keys", spied)
    monkeypatch.setattr("knnstore.lm.components.recent._BLOCK_ROWS", weighed_at_once)
    rng = np.random.default_rng(1)
    texts = [words(rng, size, 4, 9) for size in (50, 7, 64, 1, 30)]
    cache = CacheSettings(size=20, temperature=15.0, lam=0.3)
    table = TokenTable()
    documents = [TextDocument(str(at), text) for at, text in enumerate(texts)]
    knn = replace(ALONE, cache=cache)
    few_at_once = ReadingParts(lm.store, replace(lm.reader, batch_tokens=30), knn)
    found = evaluate(few_at_once, documents, table=table)
    rows = list(table.rows(lm.tokenizer))
    assert len(rows) == found.tokens == 152
    assert max(compared) <= weighed_at_once * cache.size, "more is held in memory at once than may be"
    probs = []
    for text in texts:
        tokens = lm.reader.tokenize(text).tolist()
        keys, gold_lm = [], []
        for position in range(len(tokens)):
            # The window that predicts a token: its end is the first of 11, 17, 23, ... past the token.
            end = 11
            while end <= position:
                end = min(end + 6, len(tokens))
            window = [0, *tokens][max(0, end + 1 - 12) : position + 1]
            key, lm_probs = keys_of(lm, window)
            keys.append(key[-1])
            gold_lm.append(lm_probs[-1, tokens[position]])
        for position, token in enumerate(tokens):
            p = gold_lm[position]
            if position:
                p = 0.7 * p + 0.3 * p_cache(np.array(keys), [0, *tokens], position, cache)[token]
            probs.append(p)
    np.testing.assert_allclose([row["p"] for row in rows], probs, atol=1e-5)
    assert found.knn_ppl == pytest.approx(np.exp(-np.log(probs).mean()), rel=1e-4)
    assert (found.store_ppl, found.cache_ppl) == pytest.approx((found.base_ppl, found.knn_ppl), rel=1e-6)


def test_sources_in_the_text_itself_are_named(lm):
    explained = lm.explain("w20 w21 w22 w20 w21", BOTH, neighbors=30)
    last = explained[-1]
    here = {source.position: source for source in last.neighbors if source.document == THIS_TEXT}
    assert sorted(here) == [0, 1, 2, 3]
    assert (here[1].context, here[1].text, here[1].continuation) == ("w20", " w21", " w22 w20")
    assert [source.share for source in last.neighbors] == sorted(
        (source.share for source in last.neighbors), reverse=True
    )
    assert sum(source.share for source in last.neighbors) == pytest.approx(1, abs=1e-5)
    with torch.no_grad():
        ids = torch.tensor([[0, 20, 21, 22, 20]])
        assert last.p == pytest.approx(lm(ids, knn=BOTH).logits[0, -1, 21].exp().item(), rel=1e-4)


# -- the fit


@pytest.mark.parametrize(("length", "sizes"), [(90, 1), (102, 2), (1601, 3), (1602, 4)])
def test_no_reach_is_tried_that_no_document_has_use_for(length, sizes):
    reading = DocumentKeys(
        torch.zeros(length, 1), torch.arange(length), torch.zeros(length, dtype=torch.long), "l2"
    )
    assert RecentFitting.from_keys(reading).sizes == (100, 400, 1600, 6400)[:sizes]


def test_the_fit_finds_how_a_text_repeats_itself():
    # Each document repeats its 150 random tokens once: only a cache that reaches back so far helps.
    rng = np.random.default_rng(0)
    documents = [np.tile(rng.integers(0, 50, 150), 2) for _ in range(4)]
    gold = torch.from_numpy(np.concatenate(documents))
    codes = rng.normal(size=(50, 8)).astype(np.float32)
    before = np.concatenate([np.roll(document, 1) for document in documents])
    reading = DocumentKeys(
        torch.from_numpy(codes[before] + rng.normal(0, 0.02, (len(gold), 8)).astype(np.float32)),
        gold,
        torch.arange(4).repeat_interleave(300),
        "l2",
    )
    count = len(gold)
    scored = scored_text(
        torch.full((count,), 1 / 50).log(), torch.zeros(count), torch.full((count, 1), torch.inf),
        torch.zeros((count, 1), dtype=torch.bool), reading.documents, keys=reading.keys, targets=gold,
    )  # fmt: skip
    evidence = RecentFitting.from_keys(reading)
    cache = evidence.fit(scored.lm_log_probs, torch.ones(count, dtype=torch.bool))
    assert cache.size >= 150

    def loss(cache):
        knn = KNNSettings(k=1, lam=0, cache=cache)
        return -float(scored.log_probs(knn).log_probs.double().mean())

    mixed = evidence.mix(scored.lm_log_probs, cache)
    assert loss(cache) == pytest.approx(-float(mixed.double().mean()), rel=1e-5)
    assert loss(cache) < 0.9 * -float(scored.lm_log_probs.double().mean())
    for lam in (cache.lam - 0.1, min(1.0, cache.lam + 0.1)):
        assert loss(cache) < loss(replace(cache, lam=lam))
    for temperature in (cache.temperature / 2, cache.temperature * 2):
        assert loss(cache) < loss(replace(cache, temperature=temperature))
    assert loss(cache) < loss(replace(cache, size=100))
