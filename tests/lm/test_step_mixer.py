"""An engine that batches requests in its own way, next to `generate` and `forward` of the same store."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from knnstore.errors import CorruptDatastoreError
from knnstore.lm import CacheSettings, KNNSettings, NGramSettings, Purpose, resolve, save_settings
from knnstore.lm.hosts import RequestOptions, Step, StepMixer
from knnstore.lm.keys import KeyCapture
from knnstore.store import KNNStore
from tests.lm.phrases import documents, phrases

RNG = np.random.default_rng(11)
FIRST, SECOND = (phrases(RNG, 12) for _ in range(2))
ALL = KNNSettings(  # more neighbors than documents, whose first keys are all equal
    64, 6.0, lam=0.6, ngrams=NGramSettings(4, 0.4), cache=CacheSettings(30, 6.0, 0.2, NGramSettings(4, 0.3))
)
OPTIONS = [{}, {"knn_domains": "first"}, {"knn_domains": ["second"], "knn_lambda": 0.5}, {"knn_off": True}]
LENGTH = 12


@pytest.fixture(scope="module")
def lm(make_lm):
    texts = {"first": documents(RNG, FIRST, "f", 8), "second": documents(RNG, SECOND, "s", 8)}
    lm = make_lm(texts, max_length=64)
    save_settings(lm.store, ALL)
    return lm


@pytest.fixture(scope="module")
def reader(lm):
    with KNNStore.open(lm.store.home.path) as store:
        yield store


class Engine:
    """Passes parts of texts through a model, in steps that the test chooses, with logits after each token."""

    def __init__(self, lm, reader, drafts: int = 0) -> None:
        self.lm, self.mixer = lm, StepMixer(reader, lm.reader.prefix, drafts)
        self.texts: dict[str, list[int]] = {}

    def add(self, name: str, options: dict, prompt: list[int]) -> None:
        self.mixer.add_request(name, options, prompt, wants_prompt_scores=True)
        self.texts[name] = [*prompt]

    def step(self, parts: dict[str, tuple[int, list[int]]], purpose: Purpose) -> dict[str, torch.Tensor]:
        """Pass new tokens from a position on; returns the mixed logits after each of them."""
        starts, states, logits, tokens, positions = [0], [], [], [], []
        for name, (position, new) in parts.items():
            text = self.texts[name] = self.texts[name][:position] + new
            with torch.no_grad(), KeyCapture(self.lm.base, self.lm.key_encoder.location) as capture:
                output = self.lm.base(torch.tensor([text]))
            states.append(capture.take_keys(1, len(text))[0, position:])
            logits.append(output.logits[0, position:])
            tokens += new
            positions += range(position, len(text))
            starts.append(len(tokens))
        numbers = [np.array(values, np.int64) for values in (starts, tokens, positions)]
        self.mixer.begin_step(Step(list(parts), *numbers))
        self.mixer.extend_texts(torch.cat([*states, torch.full((3, states[0].shape[1]), torch.nan)]))
        mixed = self.mixer.mix(torch.cat(logits), np.arange(len(tokens)), purpose)
        self.mixer.begin_step(None)
        return dict(zip(parts, mixed.split([len(one) for _, one in parts.values()]), strict=True))


def settings_of(lm, options: dict, purpose: Purpose) -> KNNSettings:
    parsed = RequestOptions.parse(options)
    if parsed.is_off:
        return KNNSettings(lam=0.0)
    return resolve(lm.store, parsed.overrides(parsed.domains), purpose)


def prompts(lm) -> list[list[int]]:
    texts = [FIRST[0], SECOND[0], FIRST[3] + " " + FIRST[4], SECOND[2]]
    return [[*lm.reader.prefix, *lm.reader.tokenize(text).tolist()] for text in texts]


def test_requests_with_options_of_their_own_generate_what_generate_does(lm, reader) -> None:
    engine, texts = Engine(lm, reader), prompts(lm)
    names = [str(row) for row in range(len(texts))]
    for name, options, prompt in zip(names, OPTIONS, texts, strict=True):
        engine.add(name, options, prompt)
    parts = {name: (0, prompt) for name, prompt in zip(names, texts, strict=True)}
    generated = {name: [] for name in names}
    for _ in range(LENGTH):
        logits = engine.step(parts, Purpose.GENERATION)
        for name in names:
            generated[name].append(int(logits[name][-1].argmax()))
            position, new = parts[name]
            parts[name] = position + len(new), generated[name][-1:]
    for name, options, prompt in zip(names, OPTIONS, texts, strict=True):
        knn = settings_of(lm, options, Purpose.GENERATION)
        limits = {"min_new_tokens": LENGTH, "max_new_tokens": LENGTH, "do_sample": False}
        expected = lm.generate(torch.tensor([prompt]), knn=knn, **limits)[0, len(prompt) :]
        assert generated[name] == expected.tolist()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4), st.booleans()), min_size=1, max_size=12),
    st.sampled_from(OPTIONS),
)
def test_chunks_rejected_drafts_and_preemption_change_nothing(lm, reader, steps, options) -> None:
    """Steps pass new tokens, wrong drafts that the next step replaces, or the text again."""
    engine, text = Engine(lm, reader, drafts=4), prompts(lm)[2]
    engine.add("request", options, text)
    engine.add("other", {}, text)
    done, scores = 0, torch.empty(0)
    for count, drafts, is_preempted in steps:
        new = text[done : done + count]
        if not new:
            break
        logits = engine.step(
            {"other": (0, text[:3]), "request": (done, new + [7] * drafts)}, Purpose.SCORING
        )["request"]
        scores = torch.cat([scores, logits[: len(new)].log_softmax(-1)])
        done += len(new)
        if is_preempted:
            engine.step({"request": (0, text[:done])}, Purpose.SCORING)
    knn = settings_of(lm, options, Purpose.SCORING)
    with torch.no_grad():
        expected = lm(torch.tensor([text[:done]]), knn=knn).logits[0].log_softmax(-1)
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)


def test_tokens_of_a_reused_cache_are_known_to_n_grams(make_lm) -> None:
    """Single states and no recent text: predictions need only the tokens of what was not computed again."""
    lm = make_lm({"first": documents(RNG, FIRST, "f", 8)}, max_length=64, states=1)
    save_settings(lm.store, replace(ALL, cache=None))
    with KNNStore.open(lm.store.home.path) as store:
        text = prompts(lm)[0]
        engine = Engine(lm, store)
        engine.add("first", {}, text)
        whole = engine.step({"first": (0, text)}, Purpose.SCORING)["first"]
        engine.add("second", {}, text)
        rest = engine.step({"second": (5, text[5:])}, Purpose.SCORING)["second"]
        torch.testing.assert_close(rest, whole[5:], atol=1e-5, rtol=1e-5)


def test_an_error_of_one_request_leaves_the_others_alone(lm, reader, monkeypatch) -> None:
    engine, text = Engine(lm, reader), prompts(lm)[0]
    engine.add("good", {"knn_domains": "second"}, text)
    engine.add("bad", {"knn_domains": "first"}, text)
    engine.add("wrong", {"knn_lambda": 7}, text)
    parts = dict.fromkeys(("good", "bad", "wrong"), (0, text))
    expected = engine.step(parts, Purpose.GENERATION)
    assert engine.mixer.take_failures() == {"wrong"}
    search = type(reader).search

    def fail(self, queries, k, selection, *args, **kwargs):
        if selection.domains == ("first",):
            raise CorruptDatastoreError("damaged")
        return search(self, queries, k, selection, *args, **kwargs)

    monkeypatch.setattr(type(reader), "search", fail)
    found = engine.step(parts, Purpose.GENERATION)
    assert engine.mixer.take_failures() == {"bad"}
    assert engine.mixer.take_failures() == set()
    with torch.no_grad():
        alone = lm.base(torch.tensor([text])).logits[0]
    torch.testing.assert_close(found["good"], expected["good"])
    torch.testing.assert_close(found["bad"], alone)
    torch.testing.assert_close(found["wrong"], alone)
    assert not torch.allclose(expected["bad"], alone)


def test_n_grams_alone_need_no_states(make_lm) -> None:
    """Keys that join three states are not computed, so that a KV cache may be reused."""
    lm = make_lm({"first": documents(RNG, FIRST, "f", 8)}, max_length=64)
    save_settings(lm.store, KNNSettings(lam=0.0, ngrams=NGramSettings(4, 0.4)))
    with KNNStore.open(lm.store.home.path) as store:
        text = prompts(lm)[0]
        engine = Engine(lm, store)
        engine.add("first", {}, text)
        engine.add("second", {}, text)
        whole = engine.step({"first": (0, text)}, Purpose.SCORING)["first"]
        rest = engine.step({"second": (5, text[5:])}, Purpose.SCORING)["second"]
        assert engine.mixer.take_failures() == set()
        torch.testing.assert_close(rest, whole[5:], atol=1e-5, rtol=1e-5)
        with torch.no_grad():
            expected = lm(torch.tensor([text]), knn=settings_of(lm, {}, Purpose.SCORING)).logits[0]
        torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
