"""Pairs in a store: adding, changing and removing them, and everything that scores, fits and explains."""

import logging
import shutil
from dataclasses import replace

import numpy as np
import pytest
import sacrebleu
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    NllbTokenizer,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import knnstore
from knnstore.documents import TextDocument
from knnstore.errors import ConfigError, FingerprintMismatchError, InputError, UnusableDocumentError
from knnstore.lm import (
    CacheSettings,
    FixedLambda,
    KeylessText,
    KNNLMForCausalLM,
    KNNLMForSeq2SeqLM,
    KNNSettings,
    NGramSettings,
)
from knnstore.lm.keys import Projection
from knnstore.store import KNNStore, Selection
from tests.lm.seq2seq import EOS, LANGUAGE, make_model, make_pairs, make_tokenizer

KNN = KNNSettings(k=8, mixer=FixedLambda(0.9), temperature=2.0)
NGRAMS = KNNSettings(lam=0.0, ngrams=NGramSettings(order=4, lam=0.9))
FIRST, SECOND = make_pairs(30, 0, domain="a"), make_pairs(30, 1, domain="b")
HELD_OUT = make_pairs(4, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with an M2M100, whose decoder begins with two tokens, and its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    make_model("m2m_100").save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def empty(folder, tmp_path_factory):
    """The home of a store for that model, without pairs."""
    home = tmp_path_factory.mktemp("empty") / "home"
    knnstore.create(home, str(folder)).store.close()
    return home


@pytest.fixture
def lm(empty, tmp_path):
    with KNNStore.open(shutil.copytree(empty, tmp_path / "home"), "a") as store:
        yield KNNLMForSeq2SeqLM.from_base(make_model("m2m_100"), store, KNN, make_tokenizer())


def translate(lm, pairs, **options):
    return [lm.generate_text(pair["source"], 12, **options) for pair in pairs]


def texts_of(pairs):
    return [pair["text"] for pair in pairs]


# -- adding and removing


def test_a_store_knows_its_pairs_and_forgets_the_removed_ones(lm) -> None:
    """After a removal, the store predicts as if the removed pairs had never been there, to the bit."""
    lm.add(FIRST, domain="first")
    batch = make_tokenizer()([pair["source"] for pair in HELD_OUT], padding=True, return_tensors="pt")
    options = {"num_beams": 3, "max_new_tokens": 12, "return_dict_in_generate": True, "output_scores": True}
    before, scored = lm.generate(**batch, **options), lm.evaluate(HELD_OUT)
    lm.add(SECOND, domain="second")
    assert translate(lm, [FIRST[0], SECOND[0]]) == texts_of([FIRST[0], SECOND[0]])
    assert not torch.equal(lm.generate(**batch, **options).sequences_scores, before.sequences_scores)
    lm.store.remove_domain("second")
    after = lm.generate(**batch, **options)
    assert torch.equal(after.sequences, before.sequences)
    assert all(torch.equal(*scores) for scores in zip(after.scores, before.scores, strict=True))
    assert lm.evaluate(HELD_OUT).knn_ppl == scored.knn_ppl
    assert translate(lm, SECOND[:3]) != texts_of(SECOND[:3])


def test_one_pair_can_be_withdrawn(lm) -> None:
    lm.add(FIRST, domain="first")
    lm.store.remove_selected(Selection(("first",), documents=("a3",)))
    assert translate(lm, FIRST[2:4])[0] == FIRST[2]["text"]
    assert translate(lm, FIRST[2:4])[1] != FIRST[3]["text"]


def test_another_source_replaces_a_pair_and_other_metadata_do_not(lm) -> None:
    first, second = lm.add(FIRST, domain="first"), FIRST[:2]
    assert (first.added, first.tokens) == (30, sum(len(text.split()) + 1 for text in texts_of(FIRST)))
    changed = [{**second[0], "source": "w7 w7"}, {**second[1], "client": "x"}, *FIRST[2:]]
    found = lm.add(changed, domain="first")
    assert (found.replaced, found.described, found.unchanged) == (1, 1, 28)
    assert [document.metadata for document in lm.store.documents(domain="first")[:2]] == [
        {"client": "x", "source": second[1]["source"]},
        {"source": FIRST[2]["source"]},
    ]
    assert translate(lm, [changed[0]]) == [second[0]["text"]]


def test_a_domain_is_made_equal_to_pairs(lm) -> None:
    lm.add(FIRST, domain="first")
    found = lm.sync([*FIRST[5:], {**FIRST[0], "source": "w7"}], domain="first")
    assert (found.added.replaced, found.added.unchanged) == (1, 25)
    assert found.removed == ("a1", "a2", "a3", "a4")
    with pytest.raises(UnusableDocumentError, match="no 'source'"):
        lm.sync([*FIRST[5:], {"id": "a0", "text": "w5"}], domain="first")
    assert len(lm.store.documents(domain="first")) == 26


def test_pairs_have_the_ids_of_both_texts(lm) -> None:
    """The same translation of two sentences is two pairs; the same pair twice is one."""
    rows = [{"source": source, "text": "w9 w8"} for source in ("w5", "w6")]
    lm.add(rows, domain="a")
    assert lm.add(rows, domain="a").unchanged == 2
    given = TextDocument("1", "w9 w8", source="w5 w6")
    assert TextDocument("1", "w9 w8", {"source": "w5 w6"}).content_hash != given.content_hash
    assert lm.add([given], domain="b").added == 1
    assert lm.add([TextDocument("1", "w9 w8", {"source": "w5 w6"})], domain="b").unchanged == 1


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "w5"}, "no 'source': for this model a document is a pair"),
        ({"source": 3, "text": "w5"}, "'source' is int, not a string"),
        ({"source": " ", "text": "w5"}, "the source is empty"),
        ({"source": "w5", "text": " "}, "the text is empty"),
        ({"source": "w5 " * 64, "text": "w5"}, "the source has 65 tokens, but must have 1 to 64"),
    ],
)
def test_a_pair_that_cannot_be_used_is_named_and_left_out(lm, row, reason) -> None:
    problems = []
    pairs = [FIRST[0], {"id": "bad", **row}, FIRST[1]]
    assert lm.add(pairs, domain="a", on_bad=problems.append).added == 2
    assert reason in str(problems[0])
    with pytest.raises(UnusableDocumentError, match=r"bad|document 2") as refused:
        lm.evaluate(pairs)
    assert reason in str(refused.value)


def test_a_source_is_metadata_for_other_models() -> None:
    document = TextDocument.from_row({"id": 1, "text": "a", "source": "web"})
    assert (document.source, document.metadata) == (None, {"source": "web"})
    assert document.content_hash == TextDocument("1", "a").content_hash
    with pytest.raises(InputError, match="field 'source' is not the source of the pair"):
        TextDocument("1", "a", {"source": "web"}, source="b")


def test_a_long_text_is_cut_into_windows_that_all_see_the_source(folder, tmp_path) -> None:
    """Every token is stored and predicted once; windows after the first one begin inside the text."""
    (pair,) = make_pairs(1, 4)
    pair["text"] = " ".join(f"w{i}" for i in range(5, 45))
    with knnstore.create(tmp_path / "home", str(folder), max_length=16, stride=8).store as store:
        lm = KNNLMForSeq2SeqLM.from_base(make_model("m2m_100"), store, KNN, make_tokenizer())
        assert lm.add([pair], domain="a").tokens == lm.store.record_count() == 41
        found = lm.evaluate([pair, {**pair, "id": "other", "source": "w5"}])
        assert found.by_document[0].knn_ppl < 1.3
        assert found.tokens == 82
        assert found.by_document[1].base_ppl != found.by_document[0].base_ppl


def test_keys_of_pairs_are_projected_as_fits_a_sample_of_pairs(folder, tmp_path) -> None:
    """The directions are the principal components of the keys, which depend on the sources."""
    exact = {"store": "faiss", "max_length": 32}
    with knnstore.create(tmp_path / "whole", str(folder), **exact) as whole:
        whole.add(FIRST, domain="a")
        keys = np.concatenate([batch.keys for batch in whole.store.records()]).astype(float)
    with knnstore.create(tmp_path / "small", str(folder), **exact, dim=4, sample=FIRST) as lm:
        assert lm.store.identity.dim == 4
        projection = Projection.load(lm.store)
        assert projection is not None
        directions = np.linalg.svd(keys - keys.mean(0))[2][:4].T
        np.testing.assert_allclose(np.abs(directions.T @ projection.matrix.numpy()), np.eye(4), atol=0.02)
        lm.add(FIRST, domain="a")
        (stored,) = [batch.keys for batch in lm.store.records()]
        np.testing.assert_allclose(stored, projection(torch.tensor(keys)), atol=0.05)
        with pytest.raises(UnusableDocumentError, match="no 'source'"):
            knnstore.create(tmp_path / "bad", str(folder), dim=4, sample=["w5 w6"])


# -- everything that scores, fits and explains


def test_domains_tags_and_filters_choose_pairs(lm) -> None:
    lm.add(FIRST, domain="first", tags=["x"])
    lm.add([{**pair, "year": 2020 + at % 2} for at, pair in enumerate(SECOND)], domain="second")
    for selection in (Selection(("second",)), Selection(where="year > 2019")):
        knn = replace(KNN, selection=selection)
        assert translate(lm, [FIRST[0], SECOND[0]], knn=knn)[0] != FIRST[0]["text"]
        assert translate(lm, [FIRST[0], SECOND[0]], knn=knn)[1] == SECOND[0]["text"]
    assert translate(lm, FIRST[:1], knn=replace(KNN, selection=Selection(tags=("x",)))) == texts_of(FIRST[:1])


def test_n_grams_of_the_texts_follow_beams(lm) -> None:
    """They know where a text begins and ends, and the decoder's first tokens are no part of it."""
    texts = ("w10 w11 w12", "w20 w21 w22")
    lm.add([{"source": f"w{5 + at}", "text": texts[at % 2]} for at in range(40)], domain="a")
    batch = make_tokenizer()([pair["source"] for pair in HELD_OUT], padding=True, return_tensors="pt")
    found = []
    for use_cache in (True, False):
        rows = lm.generate(**batch, num_beams=3, max_new_tokens=8, use_cache=use_cache, knn=NGRAMS)
        found.append([[token for token in row if token > LANGUAGE] for row in rows.tolist()])
    assert found[0] == found[1]
    assert all(text in ([10, 11, 12], [20, 21, 22]) for text in found[0])
    assert lm.evaluate([{"source": "w9", "text": "w20 w21 w22"}], NGRAMS).knn_ppl < 2


def test_scoring_and_the_forward_pass_agree_with_every_component(lm) -> None:
    lm.add(FIRST, domain="first")
    knn = replace(KNN, ngrams=NGramSettings(order=3, lam=0.3), cache=CacheSettings(size=8, lam=0.2))
    pair = {"source": FIRST[0]["source"], "text": "w9 w8 w9 w8 w9 w8"}
    tokens = lm.reader.tokenize(pair["text"]).tolist()
    source = make_tokenizer()(pair["source"], return_tensors="pt")
    with torch.no_grad():
        ids = torch.tensor([[EOS, LANGUAGE, *tokens[:-1]]])
        rows = lm(**source, decoder_input_ids=ids, knn=knn).logits[0, 1:].log_softmax(-1)
    found = lm.evaluate([pair], knn)
    assert found.cache_ppl != found.base_ppl
    assert found.ngram_ppl != found.base_ppl
    expected = rows[torch.arange(len(tokens)), torch.tensor(tokens)].mean().exp()
    assert 1 / found.knn_ppl == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize("stored", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_settings_are_fitted_to_pairs(lm, stored) -> None:
    """A few sentences come again and again, with another word somewhere: the store knows the rest."""
    rng = np.random.default_rng(3)
    sentences = rng.integers(5, 61, (8, 2, 6))

    def variants(count):
        for at in range(count):
            source, text = sentences[at % 8].copy()
            source[rng.integers(6)], text[rng.integers(6)] = rng.integers(5, 61, 2)
            yield {"source": " ".join(f"w{i}" for i in source), "text": " ".join(f"w{i}" for i in text)}

    pairs = {pair["text"]: {"id": str(at), **pair} for at, pair in enumerate(variants(500))}
    listed = list(pairs.values())
    lm.add(listed[:250], domain="a")
    found = lm.calibrate(stored_tokens=1400) if stored else lm.calibrate(listed[250:], networks=False)
    assert found.record is not None
    assert found.record.knn_ppl < 0.5 * found.record.base_ppl
    assert found.in_store == (found.record.documents if stored else 0)
    assert lm.knn == found.settings
    with pytest.raises(ConfigError, match="causal"):
        lm.calibrate(listed[250:], repetition=True)


def test_an_explanation_names_the_pairs_and_shows_their_sources(lm) -> None:
    lm.add(FIRST, domain="first")
    pair = FIRST[4]
    found = lm.explain(pair["text"], source=pair["source"])
    assert [token.text for token in found][-1].strip() == "</s>"
    assert len(found) == len(pair["text"].split()) + 1
    for token in found:
        assert (token.neighbors[0].document, token.neighbors[0].source_text) == (pair["id"], pair["source"])
    assert found.documents[0].document == pair["id"]
    rest = lm.explain(" w9", source=pair["source"], after=pair["text"])
    assert [token.text.strip() for token in rest] == ["w9", "</s>"]
    with pytest.raises(ConfigError, match="needs the source of each text"):
        lm.explain(pair["text"])


# -- opening, saving, refusing


def test_a_saved_model_opens_its_store(lm, folder, tmp_path) -> None:
    lm.add(FIRST, domain="first")
    expected = translate(lm, HELD_OUT)
    lm.base.name_or_path = str(folder)
    lm.save_pretrained(tmp_path / "saved")
    lm.store.close()
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved")
    with loaded.store:
        assert isinstance(loaded, KNNLMForSeq2SeqLM)
        assert translate(loaded, HELD_OUT) == expected
    with knnstore.load(tmp_path / "home", knn=KNN).store as store:
        assert store.identity.model == str(folder)


@pytest.mark.parametrize("change", ["start", "language", "source"])
def test_another_language_is_refused(folder, tmp_path, change) -> None:
    """Keys of another language, or of other special tokens around the source, are no keys of the store."""
    knnstore.create(tmp_path / "home", str(folder)).store.close()
    model, tokenizer = make_model("m2m_100"), make_tokenizer()
    if change == "start":
        model.generation_config.decoder_start_token_id = 0
    elif change == "language":
        model.generation_config.forced_bos_token_id = 7
    else:
        tokenizer.backend_tokenizer.post_processor = None
    with pytest.raises(FingerprintMismatchError, match="other languages"):
        knnstore.load(tmp_path / "home", model=model, tokenizer=tokenizer)


def test_a_store_of_pairs_says_so(lm) -> None:
    assert lm.store.identity.is_paired
    assert len(lm.store.identity.tokenizer_fingerprint) == 64
    with pytest.raises(FingerprintMismatchError, match="the store was made for the encoder-decoder model"):
        KeylessText(lm.store, make_tokenizer())


def test_each_class_names_the_other_for_models_of_the_other_kind(lm, make_model, tokenizer) -> None:
    with pytest.raises(ConfigError, match="is an encoder-decoder model: use KNNLMForSeq2SeqLM"):
        KNNLMForCausalLM.from_base(lm.base, lm.store)
    with pytest.raises(ConfigError, match="is a causal language model: use KNNLMForCausalLM"):
        KNNLMForSeq2SeqLM.from_base(make_model("gpt2"), lm.store)


def test_what_is_not_built_for_pairs_is_refused_in_one_line(lm, folder, tmp_path, caplog) -> None:
    lm.add(FIRST, domain="first")
    for call in (lm.keys, lm.neighbors, lm.p_knn):
        with pytest.raises(ConfigError, match="needs the source of each text"):
            call("w5 w6")
    with pytest.raises(ConfigError, match="encoder-decoder"):
        lm.search("w5 w6")
    with pytest.raises(ConfigError, match="the texts are missing"):
        lm(torch.tensor([[5, 6, EOS]]))
    with pytest.raises(InputError, match="no 'source'"):
        lm.reader.tokenize_sources([TextDocument("1", "w5")])
    with pytest.raises(ConfigError, match="an audit needs a causal model"):
        lm.audit(HELD_OUT)
    ids = torch.tensor([[5, 6, EOS]])
    for option in ({"guidance_scale": 2.0}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": lm.base}):
        with pytest.raises(
            ConfigError, match=f"{next(iter(option))} works with a store only for causal models"
        ):
            lm.generate(ids, **option)
    with caplog.at_level(logging.WARNING):
        lm.generate(ids, draft=True, max_new_tokens=2)
    assert "generating without drafts: the model is an encoder-decoder model" in caplog.text
    with pytest.raises(ConfigError, match="encoder-decoder model"):
        knnstore.create(tmp_path / "other", str(folder), key=None)
    assert not (tmp_path / "other").exists()


def test_a_model_without_an_end_or_with_two_vocabularies_is_refused(tmp_path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no EOS token"):
        knnstore.create(tmp_path / "home", make_model("bart"), tokenizer=tokenizer)
    model = make_model("marian")
    model.config.vocab_size = 70
    with pytest.raises(ConfigError, match="has different vocabularies for sources and for texts"):
        knnstore.create(tmp_path / "home", model, tokenizer=make_tokenizer())


def test_a_model_that_reads_sound_is_refused(tmp_path) -> None:
    config = WhisperConfig(
        vocab_size=61,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        pad_token_id=2,
        bos_token_id=0,
        eos_token_id=EOS,
        decoder_start_token_id=0,
    )
    model = WhisperForConditionalGeneration(config)
    with pytest.raises(ConfigError, match="reads input_features: only sources that are text"):
        knnstore.create(tmp_path / "home", model, tokenizer=make_tokenizer())
    assert not (tmp_path / "home").exists()


def test_a_model_without_a_limit_has_long_windows(tmp_path) -> None:
    """T5's positions are relative."""
    with knnstore.create(tmp_path / "home", make_model("t5"), tokenizer=make_tokenizer()).store as store:
        assert (store.identity.max_length, store.identity.stride) == (2048, 1024)


def test_text_is_generated_with_stop_strings_and_several_rows(lm) -> None:
    lm.add(FIRST, domain="first")
    pair = next(pair for pair in FIRST if len(pair["text"].split()) > 3)
    words = pair["text"].split()
    assert lm.generate_text(pair["source"], 12, stop_strings=words[1]) == " ".join(words[:2])
    rows = lm.generate_text(pair["source"], 12, num_beams=3, num_return_sequences=2)
    assert (rows[0], len(rows)) == (pair["text"], 2)
    for source, new, reason in (
        ("w5 " * 64, 12, "the source has 65 tokens"),
        (" ", 12, "the source is empty"),
        ("w5", 64, "a text has at most 63 tokens, but 64 are requested"),
    ):
        with pytest.raises(InputError, match=reason):
            lm.generate_text(source, new)


def test_translations_keep_the_order_of_their_sources_whatever_is_read_together(lm) -> None:
    lm.add(FIRST, domain="first")
    sources = [pair["source"] for pair in FIRST[:5]] + [" "]
    for options in ({}, {"batch_tokens": 1}, {"batch_tokens": 24, "num_beams": 2}):
        assert lm.translate(sources, **options) == [*texts_of(FIRST[:5]), ""]
    assert lm.translate([]) == []
    with pytest.raises(InputError, match="source 2: the source has 65 tokens"):
        lm.translate(["w5", "w5 " * 64])
    with pytest.raises(ConfigError, match="one text for each source"):
        lm.translate(sources, num_beams=2, num_return_sequences=2)


def test_translations_that_have_ended_are_not_looked_up(lm, monkeypatch) -> None:
    """The decoder's first token is looked up too, and then each token of the text and the EOS token."""
    lm.add(FIRST, domain="first")
    pairs, search, asked = FIRST[:9], lm.store.search, []
    monkeypatch.setattr(
        lm.store, "search", lambda keys, *rest: asked.append(len(keys)) or search(keys, *rest)
    )
    assert lm.translate([pair["source"] for pair in pairs]) == texts_of(pairs)
    lengths = [len(text.split()) + 2 for text in texts_of(pairs)]
    assert len(set(lengths)) > 1
    assert (sum(asked), max(asked)) == (sum(lengths), 9)


def test_translations_are_scored_beside_those_of_the_model_alone(lm) -> None:
    """A stored source is translated as stored; the scores of other pairs are those of sacrebleu."""
    lm.add(FIRST, domain="first")
    found = lm.score_translations(FIRST[:12])
    assert (found.pairs, found.knn_bleu, found.knn_chrf) == (12, pytest.approx(100), pytest.approx(100))
    assert found.base_bleu < 20
    assert found.bleu_signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a")
    mixed = [*FIRST[:6], *HELD_OUT]
    found = lm.score_translations(mixed, num_beams=2)
    texts = lm.translate([pair["source"] for pair in mixed], num_beams=2)
    assert found.knn_bleu == sacrebleu.corpus_bleu(texts, [texts_of(mixed)]).score
    assert found.knn_chrf == sacrebleu.corpus_chrf(texts, [texts_of(mixed)]).score
    assert 0 < found.knn_bleu < 100
    with pytest.raises(InputError, match="there is no pair"):
        lm.score_translations([])


def test_a_model_of_many_languages_keeps_those_of_its_folder(tmp_path) -> None:
    """NLLB: its tokenizer puts a language before a source, and the decoder begins with the other one."""
    letters = {letter: 5 + at for at, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    names = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "▁": 4, **letters}
    languages = {"src_lang": "eng_Latn", "tgt_lang": "fra_Latn"}
    tokenizer = NllbTokenizer(vocab=names, merges=[], **languages)
    french = tokenizer.convert_tokens_to_ids("fra_Latn")
    model = make_model("m2m_100", vocab_size=len(tokenizer), pad_token_id=1, eos_token_id=2)
    options = {
        "decoder_start_token_id": 2,
        "forced_bos_token_id": french,
        "eos_token_id": 2,
        "pad_token_id": 1,
    }
    for name, value in options.items():
        setattr(model.generation_config, name, value)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    pairs = [{"source": "the cat", "text": "le chat"}, {"source": "a dog", "text": "un chien"}]
    with knnstore.create(tmp_path / "home", str(tmp_path / "model")).store as store:
        lm = KNNLMForSeq2SeqLM.from_base(model, store, KNNSettings(k=1, lam=1.0, temperature=1.0), tokenizer)
        lm.add(pairs, domain="a")
        assert lm.reader.prefix == (2, french)
        assert lm.translate([pair["source"] for pair in pairs], num_beams=2) == texts_of(pairs)
        assert "".join(token.text for token in lm.explain("le chat", source="the cat")) == "le chat</s>"
        assert store.token_counts()[french] == 0
    with knnstore.load(tmp_path / "home").store as store:
        assert store.record_count() == 19
    german = NllbTokenizer.from_pretrained(tmp_path / "model", src_lang="deu_Latn")
    with pytest.raises(FingerprintMismatchError, match="other languages"):
        knnstore.load(tmp_path / "home", tokenizer=german)
