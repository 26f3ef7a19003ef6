"""Drafts: what is written with them is what is written without."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, TopKLogitsWarper
from transformers.generation.streamers import BaseStreamer

import knnstore
from knnstore.lm import (
    CacheSettings,
    FixedLambda,
    KNNLMForCausalLM,
    KNNSettings,
    NGramSettings,
)
from knnstore.lm.drafts import Drafts, estimate_pass_costs, propose_together
from knnstore.lm.model import drafting
from knnstore.store import Selection, draft_continuation
from tests.lm.phrases import documents, phrases

RNG = np.random.default_rng(8)
MADE = phrases(RNG, 8, 4, 30, length=7)
STORED = documents(RNG, MADE, "s", 12, of=5)
PLAIN = KNNSettings(k=64, temperature=2.0, lam=0.9)
SETTINGS = {
    "store": PLAIN,
    "cells": replace(PLAIN, probes=4),
    "cache": replace(PLAIN, cache=CacheSettings(64, 20.0, 0.2)),
    "n-grams": replace(PLAIN, mixer=FixedLambda(0.3), ngrams=NGramSettings(order=4, lam=0.8)),
    "a domain": replace(PLAIN, selection=Selection(domains=("other",))),
}
OPTIONS = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
    "penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 6},
    "no repetition": {"no_repeat_ngram_size": 6},
    "ends": {"eos_token_id": list(range(5, 12))},
}
NEW = 25
"""Tokens of a text."""


def mark_slow(settings: str, options: str):
    """Return a case: the quick run has all settings with one option, and one of the settings with all."""
    is_quick = options == "greedy" or settings == "cache"
    return pytest.param(settings, options, marks=[] if is_quick else pytest.mark.slow)


@pytest.fixture(scope="module")
def lm(make_lm):
    return make_lm({"phrases": STORED, "other": STORED[:2]}, max_length=64, stride=32, states=2)


class Heard(BaseStreamer):
    """What a streamer is told."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.is_over = False

    def put(self, value) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.is_over = True


@pytest.fixture
def made(monkeypatch) -> list[Drafts]:
    """All that proposed something."""
    drafts: list[Drafts] = []

    def make(*args) -> Drafts:
        drafts.append(Drafts(*args))
        return drafts[-1]

    monkeypatch.setattr(drafting, "Drafts", make)
    return drafts


def written(lm, draft, knn, seed=0, **options):
    prompt = lm.reader.tokenize(STORED[3].text)[:9].tolist()
    heard = Heard()
    torch.manual_seed(seed)
    ids = lm.generate(
        torch.tensor([prompt]), max_new_tokens=NEW, pad_token_id=2, knn=knn, draft=draft,
        streamer=heard, tokenizer=lm.tokenizer, **options,
    )  # fmt: skip
    assert heard.is_over
    assert heard.tokens == ids[0].tolist()
    return ids[0].tolist()


@pytest.mark.parametrize(
    ("settings", "options"), [mark_slow(one, other) for one in SETTINGS for other in OPTIONS]
)
def test_what_is_written_is_the_same(lm, made, settings, options) -> None:
    for seed in range(2 if options == "sampled" else 1):
        given = SETTINGS[settings], seed
        assert written(lm, True, *given, **OPTIONS[options]) == written(lm, False, *given, **OPTIONS[options])
    assert made
    if (settings, options) == ("n-grams", "greedy"):
        assert made[0].tokens > 2 * made[0].passes


@pytest.mark.slow
def test_no_draft_spoils_the_text(lm, monkeypatch) -> None:
    expected = [written(lm, False, PLAIN, seed, do_sample=seed > 0) for seed in range(6)]
    rng = np.random.default_rng(1)

    def anything(each, texts, most):
        return [rng.integers(4, 60, rng.integers(0, min(limit, 9) + 1)) for limit in most]

    monkeypatch.setattr(drafting, "propose_together", anything)
    for seed, text in enumerate(expected):
        assert written(lm, True, PLAIN, seed, do_sample=seed > 0) == text


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4])
def test_sampled_text_has_the_distribution_of_the_mixture(lm, monkeypatch, rows) -> None:
    """Of the second token, given that the first is drafted always: against `forward`, by chi-square."""
    prompt = torch.tensor([[0, 5, 6]])
    with torch.no_grad():
        first = lm(prompt, knn=PLAIN).logits[0, -1].exp()
    likely = int(first.argmax())
    monkeypatch.setattr(
        drafting,
        "propose_together",
        lambda each, texts, most: [np.array([likely] * 2)[:limit] for limit in most],
    )
    torch.manual_seed(0)
    counts = np.zeros((2, 101))
    with torch.no_grad():
        second = lm(torch.tensor([[0, 5, 6, likely]]), knn=PLAIN).logits[0, -1].exp().numpy()
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 2, "pad_token_id": 2, "eos_token_id": None}
    for _ in range(600 // rows):
        texts = lm.generate(prompt.expand(rows, -1), knn=PLAIN, draft=True, **options)[:, 3:].tolist()
        for one, two in texts:
            counts[0, one] += 1
            counts[1, two] += one == likely
    for expected, found in ((first.numpy(), counts[0]), (second, counts[1])):
        mean = expected * found.sum()
        often = mean > 5
        chi = ((found - mean)[often] ** 2 / mean[often]).sum()
        assert chi < often.sum() + 4 * np.sqrt(2 * often.sum())


def test_what_cannot_be_drafted_is_written_without(lm, made) -> None:
    ids = torch.tensor([[0, 5, 6, 7], [0, 9, 8, 7]])
    several = {"input_ids": ids, "do_sample": False}
    for options in (
        {"num_beams": 2},
        {"return_dict_in_generate": True},
        {"use_cache": False},
        {"generation_config": GenerationConfig(num_beams=2, max_new_tokens=3)},
        {**several, "logits_processor": [TopKLogitsWarper(3)]},
        {**several, "repetition_penalty": 1.3},
        {**several, "encoder_repetition_penalty": 1.3},
        {**several, "encoder_no_repeat_ngram_size": 3},
        {**several, "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])},
    ):
        given = {"input_ids": ids[:1], "pad_token_id": 2, "max_new_tokens": 3, **options}
        drafted, plain = (lm.generate(draft=draft, **given) for draft in (True, False))
        assert torch.equal(getattr(drafted, "sequences", drafted), getattr(plain, "sequences", plain))
    assert not made


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        mark_slow(one, other)
        for one in ("cells", "cache", "n-grams")
        for other in ("greedy", "no repetition", "ends")
    ],
)
def test_texts_of_a_batch_are_each_what_they_are_without_drafts(lm, made, settings, options) -> None:
    """Prompts of different lengths, padded; each text gets another number of tokens from a pass."""
    prompts = [
        lm.reader.tokenize(STORED[number].text)[:length] for number, length in ((3, 9), (5, 4), (7, 7))
    ]
    ids, mask = np.full((3, 9), 2), np.zeros((3, 9), np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, 9 - len(prompt) :], mask[row, 9 - len(prompt) :] = prompt, 1
    given = {
        "attention_mask": torch.from_numpy(mask), "max_new_tokens": NEW, "pad_token_id": 2,
        "knn": SETTINGS[settings], "do_sample": False, **OPTIONS[options],
    }  # fmt: skip
    drafted, plain = (lm.generate(torch.from_numpy(ids), draft=draft, **given) for draft in (True, False))
    assert torch.equal(drafted, plain)
    assert len(made) == 3
    if (settings, options) == ("n-grams", "greedy"):
        assert sum(one.tokens for one in made) > 2 * sum(one.passes for one in made)
    if options == "ends":
        assert len({int((text[9:] != 2).sum()) for text in plain}) > 1


def test_no_draft_spoils_a_text_of_a_batch(lm, monkeypatch) -> None:
    """Drafts are right up to a random token, so the texts have gaps in the cache, which are closed."""
    first = [lm.reader.tokenize(STORED[number].text)[:9].astype(np.int64) for number in range(4)]
    prompts = torch.from_numpy(np.stack(first))
    options = {"max_new_tokens": 40, "pad_token_id": 2, "do_sample": False, "knn": SETTINGS["cache"]}
    plain = lm.generate(prompts, **options)
    rng, lengths, read, free = np.random.default_rng(1), set(), [], []

    def propose(each, texts, most):
        drafts = []
        for text, limit in zip(texts, most, strict=True):
            whole = next(row for row in plain.numpy() if np.array_equal(row[: len(text)], text))
            right = whole[len(text) :][: rng.integers(0, 8)]
            drafts.append(np.concatenate([right, rng.integers(4, 60, rng.integers(0, 3))])[:limit])
        lengths.add(tuple(map(len, drafts)))
        return drafts

    def note(_module, _args, given) -> None:
        read.append(given["input_ids"].shape)
        longest = int(given["position_ids"][:, 0].max())
        free.append(given["attention_mask"].shape[1] - read[-1][1] - longest)

    monkeypatch.setattr(drafting, "propose_together", propose)
    monkeypatch.setattr(drafting, "_MAX_FREE_COLUMNS", 8)
    handle = lm.base.register_forward_pre_hook(note, with_kwargs=True)
    drafted = lm.generate(prompts, draft=True, **options)
    handle.remove()
    assert torch.equal(drafted, plain)
    assert 0 < max(free) < 8
    assert any(later < earlier for earlier, later in pairwise(free))  # gaps were closed
    assert any(len(set(one)) > 2 for one in lengths)
    assert len(read) < 30
    assert read[-1][0] < 4  # texts that had ended were not read on


def test_a_long_draft_leads_no_other_text_of_a_batch_beyond_the_last_position(lm, monkeypatch) -> None:
    """One text is always drafted rightly and the other never, so one is at its end when the other is not."""
    first = np.stack([lm.reader.tokenize(STORED[number].text)[:9].astype(np.int64) for number in (3, 5)])
    options = {"max_length": lm.config.n_positions, "eos_token_id": None, "pad_token_id": 2, "knn": PLAIN}
    plain = lm.generate(torch.from_numpy(first), do_sample=False, **options)

    def propose(each, texts, most):
        wrong = np.full(9, 99)
        right = plain[0, len(texts[0]) :][:9].numpy() if len(texts) == 2 else wrong
        return [draft[: max(0, limit)] for draft, limit in zip((right, wrong), most, strict=False)]

    monkeypatch.setattr(drafting, "propose_together", propose)
    assert torch.equal(lm.generate(torch.from_numpy(first), do_sample=False, draft=True, **options), plain)


def test_a_string_that_ends_the_text_ends_it_within_a_draft(made, tmp_path) -> None:
    """Written with a tokenizer in whose tokens strings can be found."""
    model = Path(__file__).parents[2] / "examples" / "tiny-lm"
    text = "The ferry leaves the harbour at noon, and nobody waves. The ferry comes back at night. " * 3
    lm = knnstore.create(tmp_path / "home", str(model))
    with lm.store:
        lm.add([text], domain="harbour")
        options = {"max_new_tokens": 30, "knn": replace(lm.knn, lam=0.9), "use_cache": True}
        given = {**options, "stop_strings": ["nobody wav"], "tokenizer": lm.tokenizer}
        plain = lm.generate_text("The ferry leaves the harbour", **given)
        assert plain.rstrip().endswith(("wav", "waves"))
        for more in ({}, {"generation_config": GenerationConfig(stop_strings=["nobody wav"])}):
            given.pop("stop_strings" if more else "", None)
            assert lm.generate_text("The ferry leaves the harbour", draft=True, **given, **more) == plain
        assert made[0].passes < 4  # without drafts each of a dozen tokens takes one


def test_the_first_wrong_token_counts_and_none_after_it(lm) -> None:
    text = lm.reader.tokenize(STORED[3].text)[:12]
    lengths = []
    for drafted in (1, 8):
        drafts = Drafts(lm.store, PLAIN)
        for _ in range(2):
            drafts.propose(text, 40)
            drafts.learn(drafted, 0)
        lengths.append(len(drafts.propose(text, 40)))
    assert lengths[0] == lengths[1] > 0


def test_a_draft_is_longer_where_text_and_store_agree(lm) -> None:
    start = lm.reader.tokenize(STORED[3].text)[:3].astype(np.int64)
    stored = draft_continuation(lm.store.ngrams().text, start, 10).tokens
    agreed, differing = (
        Drafts(lm.store, PLAIN).propose(np.concatenate([start, after, [61], start]), 16)
        for after in (stored, np.arange(70, 80))
    )
    assert len(agreed) > len(differing) > 0
    assert np.array_equal(agreed[: len(stored)], stored[: len(agreed)])


def test_what_repeats_is_drafted_again_and_again(lm) -> None:
    loop = [61, 7, 61, 9, 8]
    draft = Drafts(lm.store, PLAIN).propose(np.array(loop * 4), 40).tolist()
    assert len(draft) > 2 * len(loop)
    assert draft == (loop * 4)[: len(draft)]


def test_the_source_in_which_more_tokens_match_is_copied(lm) -> None:
    stored = lm.reader.tokenize(STORED[3].text)[:30].tolist()
    once = [stored[11], 61, *stored[:12]]  # one token in the text itself, twelve in the store
    assert Drafts(lm.store, PLAIN).propose(np.array(once), 40)[0] == stored[12]
    often = [61, 62, *stored[10:12], 63]  # four in the text itself, two in the store
    assert Drafts(lm.store, PLAIN).propose(np.array((often * 4)[:-1]), 40)[0] == 63


def test_a_model_whose_state_cannot_be_cut_writes_without(lm, made, monkeypatch) -> None:
    monkeypatch.setattr(type(lm.base), "_is_stateful", True)
    lm.generate(torch.tensor([[0, 5, 6]]), max_new_tokens=2, pad_token_id=2, draft=True)
    assert not made


def test_drafts_shorten_where_they_fail_and_come_back(lm) -> None:
    drafts = Drafts(lm.store, PLAIN)
    text = lm.reader.tokenize(STORED[3].text)[:12]
    began = len(drafts.propose(text, 40))
    assert began >= 2
    for _ in range(30):
        drafts.learn(len(drafts.propose(text, 40)), 0)
    assert len(drafts.propose(text, 40)) == 0
    for _ in range(60):
        drafts.learn(len(drafts.propose(text, 40)), len(drafts.propose(text, 40)))
    assert len(drafts.propose(text, 40)) >= began
    assert len(drafts.propose(text, 1)) == 1


def test_drafts_that_always_fail_cost_little(lm) -> None:
    """Random tokens repeat short ends of the text and of the store, and nothing follows from them."""
    drafts, rng = Drafts(lm.store, PLAIN), np.random.default_rng(4)
    text = np.concatenate([lm.reader.tokenize(STORED[3].text), rng.integers(4, 20, 600)])
    at, drafted, cost = len(text) - 600, 0, 0.0
    while at < len(text):
        draft = drafts.propose(text[:at], len(text) - at - 1)
        accepted = int((draft == text[at : at + len(draft)]).cumprod().sum())
        drafts.learn(len(draft), accepted)
        at, drafted, cost = at + accepted + 1, drafted + len(draft), cost + estimate_pass_costs(1)[len(draft)]
    assert drafted > 50  # they are tried again and again
    assert 600 < cost < 1.005 * 600 + 5


def test_only_long_matches_are_drafted_in_a_pause(lm) -> None:
    """Drafts have cost too much, and then a block of 40 tokens comes again."""
    drafts = Drafts(lm.store, PLAIN)
    for _ in range(30):
        drafts.learn(16, 0)
    text = np.tile(np.arange(20, 60), 2)
    assert len(drafts.propose(text[:44], 16)) == 0
    assert np.array_equal(drafts.propose(text[:60], 16), text[60:76])


def test_texts_together_are_drafted_if_the_pass_is_worth_it_for_all(lm) -> None:
    """A text that repeats itself shares a pass with texts that nobody can guess."""
    loop, new = np.array([61, 7, 62, 9, 8] * 4), np.arange(70, 90)
    lengths = []
    for others in (0, 1, 2, 14):
        each = [Drafts(lm.store, PLAIN) for _ in range(others)] + [Drafts(lm.store, PLAIN)]
        drafts = propose_together(each, [new] * others + [loop], [40] * len(each))
        assert not any(map(len, drafts[:-1]))
        assert np.array_equal(drafts[-1], np.resize(loop, 40)[: len(drafts[-1])])
        lengths.append(len(drafts[-1]))
    assert lengths[0] >= lengths[1] >= lengths[2] > lengths[3] == 0


def test_texts_together_are_drafted_by_what_the_slow_texts_gain(lm) -> None:
    """One of four texts repeats itself: drafts would give more tokens a second and slow three texts down."""
    loop, new = np.array([61, 7, 62, 9, 8] * 4), np.arange(70, 90)
    each = [Drafts(lm.store, PLAIN) for _ in range(4)]
    length = len(each[0].propose(loop, 16))
    assert (4 + 0.8 * length) / estimate_pass_costs(4)[length] > 4.5
    assert not any(map(len, propose_together(each, [loop, new, new, new], [16] * 4)))


def test_texts_together_count_by_the_square_of_their_time_per_token(lm) -> None:
    """Three of four texts repeat themselves. Their mean time per token is least with longer drafts."""
    loop, new = np.array([61, 7, 62, 9, 8] * 4), np.arange(70, 90)
    each, costs = [Drafts(lm.store, PLAIN) for _ in range(4)], estimate_pass_costs(4)
    drafts = propose_together(each, [loop, loop, loop, new], [16] * 4)
    gains = np.append(0, np.cumsum(0.95 ** np.arange(1, len(costs))))  # about those of the loop
    best = [int((3 * (costs / (1 + gains)) ** power + costs**power).argmin()) for power in (1, 2)]
    assert [len(draft) for draft in drafts] == [best[1]] * 3 + [0]
    assert best[0] > best[1] > 0


def test_texts_together_each_have_their_own_limit_and_some_are_not_drafted(lm) -> None:
    loop = np.array([61, 7, 62, 9, 8] * 4)
    for is_drafted, limit in ((True, 2), (True, 0), (False, 40)):
        each = [Drafts(lm.store, PLAIN), Drafts(lm.store, PLAIN) if is_drafted else None]
        long, other = propose_together(each, [loop] * 2, [40, limit])
        assert len(long) > 0
        assert len(other) == (limit if is_drafted else 0)


def test_drafts_of_several_texts_that_always_fail_cost_little(lm) -> None:
    rng = np.random.default_rng(4)
    texts = [np.concatenate([lm.reader.tokenize(STORED[3].text), rng.integers(4, 20, 400)]) for _ in range(4)]
    each, costs, drafted, cost = [Drafts(lm.store, PLAIN) for _ in texts], estimate_pass_costs(4), 0, 0.0
    ends = [len(text) - 400 for text in texts]
    while max(ends) < len(texts[0]) - 20:
        drafts = propose_together(
            each, [text[:end] for text, end in zip(texts, ends, strict=True)], [16] * len(texts)
        )
        longest = max(map(len, drafts))
        for row, (one, draft) in enumerate(zip(each, drafts, strict=True)):
            right = int((draft == texts[row][ends[row] : ends[row] + len(draft)]).cumprod().sum())
            one.learn(len(draft), right, costs[longest])
            ends[row] += right + 1
        drafted, cost = drafted + longest, cost + costs[longest]
    tokens = sum(one.tokens for one in each) / len(each)
    assert drafted > 5  # they are tried again
    assert cost < 1.005 * tokens + 5


def test_a_model_that_was_saved_without_a_cache_writes_with_one(lm, monkeypatch):
    """Training leaves that in a model's file."""
    monkeypatch.setattr(lm.base.generation_config, "use_cache", False)
    written, read = [], []
    handle = lm.base.register_forward_pre_hook(
        lambda _, args, given: read.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    again = KNNLMForCausalLM.from_base(lm.base, lm.store, PLAIN)
    prompt = torch.tensor([[0, *lm.reader.tokenize(STORED[3].text)[:12].tolist()]])
    for draft in (False, True):
        options = {"max_new_tokens": 20, "min_new_tokens": 20, "pad_token_id": 2, "draft": draft}
        written.append(again.generate(prompt, **options))
    handle.remove()
    assert torch.equal(*written)
    assert read[:20] == [13] + [1] * 19
    assert len(read[20:]) < 12
    assert not lm.base.generation_config.use_cache  # which is not ours
