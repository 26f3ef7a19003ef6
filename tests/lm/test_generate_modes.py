"""Modes and arguments of `generate`: the mixture's numbers, or an error that says why not."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from knnstore.errors import ConfigError
from knnstore.lm import CacheSettings, FixedLambda, KNNSettings, NGramSettings
from knnstore.lm.reading import as_cache_argument
from tests.lm.phrases import documents, phrases

RNG = np.random.default_rng(8)
MADE = phrases(RNG, 8, 4, 30, length=7)
STORED = documents(RNG, MADE, "s", 12, of=5)
KEYS = KNNSettings(k=16, temperature=5.0, lam=0.6)
SETTINGS = {
    "keys": KEYS,
    "n-grams": replace(KEYS, mixer=FixedLambda(0.3), ngrams=NGramSettings(order=4, lam=0.6)),
    "cache": replace(KEYS, cache=CacheSettings(32, 5.0, 0.4, ngrams=NGramSettings(order=4, lam=0.4))),
}
NEW = 4


@pytest.fixture(scope="module")
def single(make_lm):
    return make_lm({"d": STORED}, max_length=64, stride=32, states=1)


@pytest.fixture(scope="module")
def joined(make_lm):
    return make_lm({"d": STORED}, max_length=64, stride=32, states=3)


@pytest.fixture(params=[pytest.param("single", marks=pytest.mark.slow), "joined"])
def lm(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(params=SETTINGS)
def knn(request):
    return SETTINGS[request.param]


@pytest.fixture
def prompt(single):
    return torch.tensor([[0, *single.reader.tokenize(STORED[3].text)[:19].tolist()]])


def check_steps(lm, knn, prompts, **options) -> None:
    """Compare the distribution of each step with that of one pass over the whole text without a cache."""
    found = lm.generate(
        knn=knn, do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=2,
        return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip
    for row, (text, before) in enumerate(zip(found.sequences, prompts, strict=True)):
        whole = torch.tensor([[*before, *text[-NEW:].tolist()]])
        with torch.no_grad():
            expected = lm(whole, knn=knn, use_cache=False).logits[0, len(before) - 1 : -1].exp()
        steps = torch.stack([logits[row] for logits in found.logits]).exp()
        torch.testing.assert_close(steps, expected, atol=2e-4, rtol=1e-3)


def cache_of(lm, prompt, count, *, model=None):
    """Let a model read some of a prompt."""
    cache = DynamicCache(config=lm.config)
    with torch.no_grad():
        (model or lm)(prompt[:, :count], use_cache=True, **as_cache_argument(model or lm, cache))
    return cache


# -- the text in pieces


@pytest.mark.parametrize("size", [1, 5, pytest.param(64, marks=pytest.mark.slow)])
def test_a_prompt_in_chunks_gives_what_a_whole_one_gives(lm, knn, prompt, size) -> None:
    check_steps(lm, knn, prompt.tolist(), inputs=prompt, prefill_chunk_size=size)


def test_padded_prompts_in_chunks(lm, knn, prompt) -> None:
    (tokens,) = prompt.tolist()
    padded = torch.tensor([tokens, [2] * 9 + tokens[:11]])
    mask = (padded != 2).long()
    check_steps(lm, knn, [tokens, tokens[:11]], inputs=padded, attention_mask=mask, prefill_chunk_size=4)


@pytest.mark.parametrize("size", [None, 3])
def test_the_whole_text_with_a_kept_cache(lm, knn, prompt, size) -> None:
    options = {"inputs": prompt, "prefill_chunk_size": size}
    check_steps(lm, knn, prompt.tolist(), past_key_values=cache_of(lm, prompt, 11), **options)


def test_a_cache_that_the_bare_model_made(lm, knn, prompt) -> None:
    cache = cache_of(lm, prompt, 11, model=lm.base)
    check_steps(lm, knn, prompt.tolist(), inputs=prompt, past_key_values=cache)


def test_a_cache_that_was_cut(lm, knn, prompt) -> None:
    cache = cache_of(lm, prompt, 15)
    cache.crop(-6)
    check_steps(lm, knn, prompt.tolist(), inputs=prompt, past_key_values=cache)


def test_a_chat_of_several_turns_with_one_cache(lm, knn, prompt) -> None:
    cache = DynamicCache(config=lm.config)
    turn = lm.generate(
        prompt[:, :9], past_key_values=cache, knn=knn, max_new_tokens=4, do_sample=False, pad_token_id=2
    )
    text = torch.cat([turn, prompt[:, 9:14]], 1)
    check_steps(lm, knn, text.tolist(), inputs=text, past_key_values=cache)


def test_beams_with_a_kept_cache(lm, knn, prompt) -> None:
    options = {"knn": knn, "num_beams": 2, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 2}
    cache = cache_of(lm, prompt.repeat(2, 1), 11)
    assert torch.equal(lm.generate(prompt, past_key_values=cache, **options), lm.generate(prompt, **options))


def test_texts_that_have_ended_are_not_looked_up(single, prompt, monkeypatch) -> None:
    """An end token in a prompt ends nothing."""
    end, *_ = single.generate(prompt, knn=KEYS, max_new_tokens=1)[0, prompt.shape[1] :].tolist()
    other = prompt.flip(1)
    other[0, 3] = end
    options = {"knn": KEYS, "max_new_tokens": 6, "eos_token_id": end, "pad_token_id": 2}
    expected = single.generate(other, **options)[0].tolist()
    assert end not in expected[prompt.shape[1] :]
    asked, search = [], single.store.search
    monkeypatch.setattr(
        single.store, "search", lambda keys, *rest: asked.append(len(keys)) or search(keys, *rest)
    )
    found = single.generate(torch.cat([prompt, other]), **options)
    assert found[1].tolist() == expected
    assert found[0, prompt.shape[1] :].tolist() == [end, 2, 2, 2, 2, 2]
    assert asked == [2, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("size", [None, 3])
def test_new_tokens_alone(lm, knn, prompt, size) -> None:
    given = {
        "inputs": prompt[:, 11:], "attention_mask": torch.ones_like(prompt), "prefill_chunk_size": size,
        "past_key_values": cache_of(lm, prompt, 11),
    }  # fmt: skip
    check_steps(lm, knn, prompt.tolist(), **given)


@pytest.mark.parametrize("size", [None, 3])
def test_new_tokens_alone_with_a_cache_of_the_bare_model(lm, knn, prompt, size) -> None:
    """Keys of one state need no other token; everything else is told how to call."""
    given = {
        "inputs": prompt[:, 11:], "attention_mask": torch.ones_like(prompt), "prefill_chunk_size": size,
        "past_key_values": cache_of(lm, prompt, 11, model=lm.base),
    }  # fmt: skip
    if not lm.needs_text(knn):
        check_steps(lm, knn, prompt.tolist(), **given)
        return
    with pytest.raises(ConfigError, match=r"contains 11 tokens .* give the whole text as input_ids"):
        check_steps(lm, knn, prompt.tolist(), **given)


def test_a_cache_that_leaves_nothing_to_read_is_refused(lm, knn, prompt) -> None:
    cache = cache_of(lm, prompt, prompt.shape[1])
    with pytest.raises(ConfigError, match=r"crop\(-1\)"):
        lm.generate(prompt, past_key_values=cache, knn=knn, max_new_tokens=2, pad_token_id=2)
    cache.crop(-1)
    check_steps(lm, knn, prompt.tolist(), inputs=prompt, past_key_values=cache)


@pytest.mark.parametrize(
    "options",
    [{"use_cache": False}, {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 3}],
    ids=str,
)
def test_other_caches(lm, knn, prompt, options) -> None:
    check_steps(lm, knn, prompt.tolist(), inputs=prompt, **options)


def test_embeddings_with_their_tokens(lm, knn, prompt) -> None:
    embeds = lm.get_input_embeddings()(prompt).detach()
    check_steps(lm, knn, prompt.tolist(), inputs=prompt, inputs_embeds=embeds)


def test_embeddings_alone_are_right_or_refused(lm, knn, prompt) -> None:
    given = {"inputs_embeds": lm.get_input_embeddings()(prompt).detach()}
    if not knn.needs_text:
        check_steps(lm, knn, prompt.tolist(), **given)
        return
    with pytest.raises(ConfigError, match="input_ids"):
        check_steps(lm, knn, prompt.tolist(), **given)


def test_forward_in_pieces(lm, knn, prompt) -> None:
    with torch.no_grad():
        whole = lm(prompt, knn=knn, use_cache=False).logits
        cache = DynamicCache(config=lm.config)
        given = {"past_key_values": cache, "use_cache": True, "knn": knn}
        parts = [lm(part, **given).logits for part in (prompt[:, :7], prompt[:, 7:8], prompt[:, 8:])]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-4, rtol=1e-3)


def test_a_cache_of_other_rows_is_refused(joined, prompt) -> None:
    cache = cache_of(joined, prompt, 7)
    with torch.no_grad(), pytest.raises(ConfigError, match="1 texts but this pass has 2"):
        joined(prompt[:, 7:].repeat(2, 1), past_key_values=cache)


def test_several_texts_in_one_row_are_right_or_refused(lm, knn, prompt) -> None:
    """As trainers pack them: by positions that begin again, or by a mask of four dimensions."""
    positions = torch.cat([torch.arange(9), torch.arange(11)])[None]
    text = (torch.arange(20) >= 9).long()
    causal = torch.ones(20, 20).tril().bool() & (text[:, None] == text)
    packed = {"positions": {"use_cache": False}, "mask": {"attention_mask": causal[None, None]}}
    with torch.no_grad():
        parts = [lm(part, knn=knn, use_cache=False).logits for part in (prompt[:, :9], prompt[:, 9:])]
        for options in packed.values():
            given = {"position_ids": positions, "knn": knn, **options}
            if knn is KEYS and not lm.key_encoder.joining.discounts:
                found = lm(prompt, **given).logits
                torch.testing.assert_close(found, torch.cat(parts, 1), atol=2e-4, rtol=1e-3)
            else:
                with pytest.raises(ConfigError, match="continuous cache"):
                    lm(prompt, **given)


def test_continuous_batching_is_refused_by_name(single, prompt) -> None:
    for call in (
        lambda: single.generate_batch(prompt.tolist()),
        lambda: single.generate(prompt, cache_implementation="paged"),
    ):
        with pytest.raises(ConfigError, match="continuous batching"):
            call()


# -- a second model, a second text, other modes


def greedy(lm, knn, prompt, **options):
    return lm.generate(
        prompt, knn=knn, do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=2, **options
    )


@pytest.mark.slow
def test_an_assistant_model_changes_nothing(lm, knn, prompt, make_model) -> None:
    expected = greedy(lm, knn, prompt)
    for assistant in (make_model("llama"), lm.base, lm):
        assert torch.equal(greedy(lm, knn, prompt, assistant_model=assistant), expected)


def guided(lm, knn, prompt, negative, scale):
    """Guidance by its definition, each token from two passes over whole texts."""
    (text,) = prompt.tolist()
    for _ in range(NEW):
        pair = (text, [*negative, *text[prompt.shape[1] :]])
        with torch.no_grad():
            wanted, other = (lm(torch.tensor([one]), knn=knn, use_cache=False).logits[0, -1] for one in pair)
        scores = other + scale * (wanted - other)
        scores[1] = -torch.inf  # the end, which min_new_tokens rules out
        text = [*text, int(scores.argmax())]
    return torch.tensor([text])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_cache": False},
        {"assistant_model": "llama"},
        {"prefill_chunk_size": 5},
        {"draft": True},
    ],
    ids=str,
)
def test_guidance_is_that_of_two_mixtures(lm, knn, prompt, make_model, options) -> None:
    if "assistant_model" in options:
        options = {"assistant_model": make_model(options["assistant_model"])}
    (tokens,) = prompt.tolist()
    negative = [0, *lm.reader.tokenize(STORED[5].text)[:7].tolist()]
    expected = guided(lm, knn, prompt, tokens[-1:], 1.7)
    assert torch.equal(greedy(lm, knn, prompt, guidance_scale=1.7, **options), expected)
    expected = guided(lm, knn, prompt, negative, 1.7)
    for ids in (negative, [2, 2, *negative]):
        given = torch.tensor([ids])
        found = greedy(
            lm, knn, prompt, guidance_scale=1.7, negative_prompt_ids=given,
            negative_prompt_attention_mask=(given != 2).long(), **options,
        )  # fmt: skip
        assert torch.equal(found, expected)


def test_guidance_of_beams_does_not_mix_rows_up(lm, knn, prompt) -> None:
    """Beams change places: what is kept of one must not be taken for another's."""
    options = {"guidance_scale": 1.7, "num_beams": 3, "output_scores": True, "return_dict_in_generate": True}
    found = greedy(lm, knn, prompt, **options)
    (text,), length = found.sequences.tolist(), prompt.shape[1]
    total = 0.0
    for at in range(length, len(text)):
        with torch.no_grad():
            wanted, other = (
                lm(torch.tensor([one]), knn=knn, use_cache=False).logits[0, -1]
                for one in (text[:at], text[length - 1 : at])
            )
        scores = other + 1.7 * (wanted - other)
        total += float(scores[text[at]])
    assert float(found.sequences_scores[0]) * NEW == pytest.approx(total, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dola_layers", {"dola_layers": "low"}),
        ("penalty_alpha", {"penalty_alpha": 0.6, "top_k": 4}),
        ("num_beam_groups", {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}),
        ("force_words_ids", {"num_beams": 2, "force_words_ids": [[5]]}),
        ("custom_generate='a/b'", {"custom_generate": "a/b"}),
        ("trust_remote_code", {"trust_remote_code": True}),
        ("assistant_early_exit", {"assistant_early_exit": 1}),
        ("use_mtp", {"use_mtp": True}),
    ],
)
def test_other_modes_are_refused_by_name_before_anything_runs(single, prompt, name, options) -> None:
    passes = []
    handle = single.base.register_forward_pre_hook(lambda *_: passes.append(1))
    with pytest.raises(ConfigError, match=name):
        single.generate(prompt, knn=KEYS, max_new_tokens=2, pad_token_id=2, **options)
    handle.remove()
    assert not passes


def test_watermarks_and_own_criteria_reach_the_mixture(single, prompt) -> None:
    expected = greedy(single, KEYS, prompt)
    heard = []

    def listen(ids, scores, **_):
        heard.append(ids.shape[1])
        return torch.zeros(len(ids), dtype=torch.bool)

    options = {"watermarking_config": {"bias": 0.0}, "stopping_criteria": [listen]}
    assert torch.equal(greedy(single, KEYS, prompt, **options), expected)
    assert heard == list(range(prompt.shape[1] + 1, prompt.shape[1] + NEW + 1))
    watermarked = greedy(single, KEYS, prompt, watermarking_config={"bias": 30.0})
    assert not torch.equal(watermarked, expected)
