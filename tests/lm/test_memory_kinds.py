"""Generation with every kind of cache: the text is that of one pass over all of it for each token."""

import threading
from dataclasses import replace

import pytest
import torch

import knnstore
from knnstore.errors import ConfigError
from knnstore.lm import CacheSettings, FixedLambda, KNNSettings, NGramSettings
from knnstore.server.engine import Engine, Prompt, Sampling, Task, Ticket
from tests.lm.kinds import ATTENTION, RECURRENT, make_kind, phrases, words

PLAIN = KNNSettings(k=16, temperature=5.0, lam=0.6)
EVERYTHING = replace(
    PLAIN, mixer=FixedLambda(0.3), ngrams=NGramSettings(order=4, lam=0.6), cache=CacheSettings(32, 5.0, 0.2)
)
PROMPT = torch.tensor([[0, *phrases(3, 4)]])
NEW = 20
IN_CI = ("mistral", "lfm2", "mamba", "falcon_h1")
"""Kinds that CI drafts for: with a window, with convolutions, and recurrent ones."""


@pytest.fixture(scope="module")
def stores(tokenizer, tmp_path_factory):
    """Make a store for a kind of model, once in a module."""
    made = {}

    def store_for(kind: str, states: int = 3):
        if (kind, states) not in made:
            home = tmp_path_factory.mktemp("kinds") / "home"
            place = "ffn_input" if kind in ATTENTION else "final_hidden"
            lm = knnstore.create(
                home, make_kind(kind), tokenizer=tokenizer, key=place, states=states, max_length=64
            )
            lm.add([words(phrases(8, seed)) for seed in range(12)], domain="d")
            made[kind, states] = lm
        return made[kind, states]

    yield store_for
    for lm in made.values():
        lm.store.close()


def read_anew(lm, knn, count=NEW):
    """Choose each token from one pass over the whole text, without any cache."""
    text = PROMPT
    for _ in range(count):
        with torch.no_grad():
            logits = lm(text, knn=knn, use_cache=False).logits
        text = torch.cat([text, logits[:, -1:].argmax(-1)], 1)
    return text


def check_drafts(lm, caplog, *, drafts: bool, **options) -> None:
    passes = []
    handle = lm.register_forward_pre_hook(lambda *_: passes.append(1))
    for knn in (PLAIN, EVERYTHING):
        expected = read_anew(lm, knn)
        passes.clear()
        written = {}
        for draft in (False, True):
            caplog.clear()
            passes.clear()
            written[draft] = lm.generate(
                PROMPT, knn=knn, max_new_tokens=NEW, do_sample=False, draft=draft, **options
            )
            said = [record.getMessage() for record in caplog.records if record.name.startswith("knnstore")]
        assert torch.equal(written[False], expected)
        assert torch.equal(written[True], expected)
        if drafts:
            assert len(passes) < NEW
            assert not said
        else:
            assert len(passes) == NEW
            (line,) = said
            assert line.startswith("generating without drafts: the model")
    handle.remove()


@pytest.mark.slow
def test_a_static_cache_is_not_drafted_for_and_one_line_says_so(stores, caplog) -> None:
    check_drafts(stores("mistral"), caplog, drafts=False, cache_implementation="static")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in IN_CI else pytest.param(kind, marks=pytest.mark.exhaustive)
        for kind in (*ATTENTION, *RECURRENT)
    ],
)
def test_every_kind_generates_the_same_with_drafts(stores, caplog, kind) -> None:
    check_drafts(stores(kind), caplog, drafts=kind in ATTENTION)
    if kind in ATTENTION:
        check_drafts(stores(kind, 1), caplog, drafts=False, cache_implementation="static")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, "num_beams is 2"),
        ({"use_cache": False}, "use_cache is False"),
        ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens is 2"),
        (
            {"input_ids": PROMPT.repeat(2, 1)},
            "the model's attention counts the columns of its cache, which padding and several texts change",
        ),
    ],
)
def test_what_cannot_be_drafted_is_named_in_one_line(stores, caplog, options, reason) -> None:
    lm = stores("mistral")
    given = {"input_ids": PROMPT, "max_new_tokens": 3, "do_sample": False, "knn": PLAIN, **options}
    plain = lm.generate(**given)
    assert not caplog.records
    assert torch.equal(lm.generate(draft=True, **given), plain)
    assert [record.getMessage() for record in caplog.records] == [f"generating without drafts: {reason}"]


@pytest.mark.slow
def test_a_prompt_in_chunks_is_drafted_for_as_a_whole_one(stores, caplog) -> None:
    check_drafts(stores("mistral"), caplog, drafts=True, prefill_chunk_size=5)


def served(lm, knn):
    """Return what the server's engine generates after the prompt, alone and beside another text."""
    engine = Engine(lm, lambda _: knn)
    engine.start()
    found = []
    for copies in (1, 2):
        tokens, left = [], [copies]
        done = threading.Event()

        def hear(piece, tokens=tokens, left=left, done=done) -> None:
            if isinstance(piece, Exception):
                tokens.append(piece)
                done.set()
                return
            if piece.index == 0:
                tokens.extend(one.token for one in piece.tokens)
            left[0] -= piece.finish is not None
            if not left[0]:
                done.set()

        task = Task(
            (Prompt(tuple(PROMPT[0].tolist())),), "knn", NEW, copies, sampling=Sampling(temperature=0), top=0
        )
        engine.submit(Ticket(task, hear))
        assert done.wait(60)
        found.append(tokens)
    engine.stop()
    return found


@pytest.mark.parametrize(
    "kind",
    ["mistral", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", "gemma2", "qwen2"))],
)
def test_the_server_generates_the_same_with_drafts(stores, kind) -> None:
    lm = stores(kind)
    expected = lm.generate(PROMPT, knn=EVERYTHING, max_new_tokens=NEW, do_sample=False)
    assert served(lm, EVERYTHING) == [expected[0, PROMPT.shape[1] :].tolist()] * 2


@pytest.mark.parametrize("kind", ["lfm2", "mamba"])
def test_the_server_refuses_at_its_start_what_it_cannot_pad(stores, kind) -> None:
    with pytest.raises(ConfigError, match="cannot be served"):
        Engine(stores(kind), lambda _: PLAIN)
