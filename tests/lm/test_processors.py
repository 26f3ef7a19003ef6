"""N-grams of a store as a logits processor, next to the n-gram component in `generate`."""

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    CLIPConfig,
    LogitsProcessorList,
    T5Config,
    Wav2Vec2BertConfig,
    WhisperConfig,
)

import knnstore
from knnstore.errors import ConfigError
from knnstore.lm import KeylessText, KNNSettings, NGramSettings, save_settings
from knnstore.lm.hosts import NGramLogitsProcessor
from knnstore.store import KNNStore, Selection
from tests.lm.conftest import SPECIAL
from tests.lm.phrases import documents, phrases

RNG = np.random.default_rng(5)
FIRST, SECOND = (phrases(RNG, 12) for _ in range(2))
NGRAMS = NGramSettings(5, 0.4, (0.05, 0.2, 0.5, 0.7))
LENGTH = 14


@pytest.fixture(scope="module")
def lm(make_lm):
    texts = {"first": documents(RNG, FIRST, "f", 8), "second": documents(RNG, SECOND, "s", 8)}
    lm = make_lm(texts, max_length=64)
    save_settings(lm.store, KNNSettings(16, 6.0, lam=0.5, ngrams=NGRAMS))
    return lm


@pytest.fixture(scope="module")
def reader(lm):
    with KNNStore.open(lm.store.home.path) as store:
        yield store


@pytest.mark.parametrize(
    "mode",
    [
        {"do_sample": False},
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ({"do_sample": True, "top_k": 0}, {"num_beams": 3})
        ),
    ],
)
@pytest.mark.parametrize("domains", [None, ["second"]])
@pytest.mark.parametrize(("weight", "order"), [(None, None), (0.6, 3)])
def test_a_causal_model_generates_what_the_component_generates(
    lm, reader, mode, domains, weight, order
) -> None:
    prefix, pad = lm.reader.prefix, 2
    texts = [
        [*prefix, *lm.reader.tokenize(text)[:length].tolist()]
        for text, length in ((FIRST[0], 7), (SECOND[1], 3))
    ]
    ids = torch.tensor([[pad] * (8 - len(text)) + text for text in texts])
    options = {
        "attention_mask": (ids != pad).long(),
        "max_new_tokens": LENGTH,
        "min_new_tokens": LENGTH,
        **mode,
    }
    ngrams = NGRAMS if weight is None else NGramSettings(order, weight)
    selection = Selection(domains=domains and tuple(domains))
    torch.manual_seed(1)
    expected = lm.generate(ids, knn=KNNSettings(lam=0.0, ngrams=ngrams, selection=selection), **options)
    processor = NGramLogitsProcessor(reader, domains=domains, weight=weight, order=order, skip=[*prefix, pad])
    torch.manual_seed(1)
    found = lm.base.generate(ids, logits_processor=LogitsProcessorList([processor]), **options)
    assert found.tolist() == expected.tolist()


def test_arrays_of_one_text_are_mixed_as_tensors_are(lm, reader) -> None:
    """As llama-cpp-python calls it."""
    processor = NGramLogitsProcessor(lm.store.home.path, skip=[0])
    ids = np.array([0, *lm.reader.tokenize(FIRST[2])[:5]], np.intc)
    scores = np.random.default_rng(0).normal(size=101).astype(np.single)
    scores[[5, 60]] = -np.inf
    mixed = processor(ids, scores)
    assert (mixed.dtype, mixed.shape) == (np.single, (101,))
    assert np.isneginf(mixed[[5, 60]]).all()
    whole = processor(torch.from_numpy(ids.astype(np.int64))[None], torch.from_numpy(scores)[None])
    np.testing.assert_array_equal(mixed, whole[0].numpy())
    assert int(lm.reader.tokenize(FIRST[2])[5]) == int(mixed.argmax())


def test_removed_text_and_missing_domains_count_at_once(make_lm) -> None:
    lm = make_lm({"kept": documents(RNG, FIRST, "f", 4)}, max_length=64)
    lm.add(documents(RNG, SECOND, "s", 8), domain="secret")
    tokens = lm.reader.tokenize(SECOND[0]).tolist()
    ids, answer, scores = torch.tensor([tokens[:4]]), tokens[4], torch.zeros(1, 101)
    processor = NGramLogitsProcessor(lm.store.home.path, domains=["secret", "never"], weight=0.9)
    assert int(processor(ids, scores).argmax()) == answer
    assert len(lm.store.remove_selected(Selection(domains=("secret",)))) == 8
    assert processor(ids, scores) is scores  # the domain went with its last document


T5 = T5Config(**SPECIAL, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=2)
WHISPER = WhisperConfig(
    **SPECIAL,
    d_model=32,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    num_mel_bins=8,
    max_source_positions=20,
    max_target_positions=64,
    decoder_start_token_id=2,
    begin_suppress_tokens=[],
)


@pytest.mark.parametrize(
    ("config", "auto_class", "reason"),
    [
        (T5, AutoModelForSeq2SeqLM, "a store without keys works only with NGramLogitsProcessor"),
        (WHISPER, AutoModelForSpeechSeq2Seq, "is an encoder-decoder model, so knnstore cannot run it"),
    ],
    ids=["t5", "whisper"],
)
def test_other_kinds_of_models_follow_the_text_of_a_store_of_their_own(
    config, auto_class, reason, tokenizer, tmp_path, caplog
) -> None:
    torch.manual_seed(0)
    model = auto_class.from_config(config).eval()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    with KeylessText.create(tmp_path / "home", str(tmp_path / "model")).store as store:
        KeylessText(store, tokenizer).add(documents(RNG, FIRST, "f", 8), domain="first")
        text = tokenizer(FIRST[5])["input_ids"]
        start = torch.tensor([[2, *text[:4]]])
        source = {
            "input_ids": torch.tensor([tokenizer(SECOND[3])["input_ids"][:6]]),
            "input_features": torch.randn(1, 8, 40),
        }[model.main_input_name]
        options = {"decoder_input_ids": start, "max_new_tokens": 6, "do_sample": False}
        processor = NGramLogitsProcessor(store, domains=["first"], weight=0.99, skip=[2])
        found = model.generate(source, logits_processor=LogitsProcessorList([processor]), **options)
        assert found.tolist()[0][-6:] == text[4:10]
        assert model.generate(source, **options).tolist()[0][-6:] != text[4:10]
    assert "generates no text" not in caplog.text
    with pytest.raises(ConfigError, match=reason):
        knnstore.load(tmp_path / "home")


def test_a_store_of_ngrams_for_a_model_without_text_is_made_with_a_warning(
    tokenizer, tmp_path, caplog
) -> None:
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(text_config={**small, "vocab_size": 101}, vision_config=small)
    for part in (config, tokenizer):
        part.save_pretrained(tmp_path / "clip")
    model = str(tmp_path / "clip")
    with caplog.at_level("WARNING", "knnstore"):
        KeylessText.create(tmp_path / "home", model).store.close()
    assert [line for line in caplog.messages if "generates no text" in line] == [
        f"the model {model!r} (clip) generates no text, so only its tokenizer is used: no n-grams can be "
        "added to its predictions"
    ]
    with pytest.raises(ConfigError, match="cannot run it: choose a model that generates text"):
        knnstore.load(tmp_path / "home")


def test_a_store_for_a_model_that_does_not_fit_is_refused(tokenizer, tmp_path, caplog) -> None:
    AutoModelForSeq2SeqLM.from_config(T5).save_pretrained(tmp_path / "model")
    model = str(tmp_path / "model")
    with pytest.raises(ConfigError, match="has no tokenizer"):
        KeylessText.create(tmp_path / "refused", model)
    text = KeylessText.create(tmp_path / "home", model, tokenizer=tokenizer)
    with text.store:
        assert text.sync(documents(RNG, FIRST, "f", 2), domain="first").added.added == 2
    T5Config(**{**T5.to_dict(), "vocab_size": 50}).save_pretrained(tmp_path / "small")
    with caplog.at_level("WARNING"):
        KeylessText.create(tmp_path / "other", str(tmp_path / "small"), tokenizer=tokenizer).store.close()
    assert "the tokenizer has 51 tokens that are not among the model's 50" in caplog.text
    Wav2Vec2BertConfig().save_pretrained(tmp_path / "none")
    with pytest.raises(ConfigError, match="does not give the size of its vocabulary"):
        KeylessText.create(tmp_path / "refused", str(tmp_path / "none"), tokenizer=tokenizer)
    assert not (tmp_path / "refused").exists()


def test_wrong_values_and_another_vocabulary_are_refused(reader) -> None:
    for options in ({"weight": 1.5}, {"order": 1}, {"order": 99}):
        with pytest.raises(ConfigError):
            NGramLogitsProcessor(reader, **options)
    with pytest.raises(ConfigError, match="vocabulary of 101 tokens, but the scores have 50"):
        NGramLogitsProcessor(reader)(torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 50))
