"""The trainable substitute: its arithmetic, its training, and that it goes when its documents go."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import knnstore
from knnstore.datastore import positions_of
from knnstore.errors import (
    ConfigError,
    CorruptWeightsError,
    FingerprintMismatchError,
    InputError,
    OutdatedWeightsError,
    ReadOnlyError,
)
from knnstore.lm import (
    FixedLambda,
    KNNSettings,
    Substitute,
    settings_for,
    settings_to_dict,
    trained_for,
)
from knnstore.lm.mixing import mix_log_probs
from knnstore.lm.substitute.head import SubstituteHead, load_head
from knnstore.lm.substitute.records import Records
from knnstore.lm.substitute.training import fit_rows
from knnstore.progress import Progress
from knnstore.store import Lineage, Selection
from tests.lm.phrases import documents, phrases

RNG = np.random.default_rng(3)
PHRASES = phrases(RNG, 30)
HELD_OUT = documents(RNG, PHRASES, "h", 8)
LINEAGE = Lineage((), 1, 1)


@pytest.fixture(scope="module")
def trained(make_lm):
    """A home with the domains phrases and noise, and what training on phrases returned."""
    stored = {"phrases": documents(RNG, PHRASES, "s", 20), "noise": ["w90 w91 w92"]}
    lm = make_lm(stored, max_length=32, stride=16)
    with lm.store as store:
        return store.home.path, lm.train_substitute(domains=["phrases"], rows=2, epochs=6)


@pytest.fixture(scope="module")
def filled(trained):
    return trained[0]


@pytest.fixture
def substitute(trained) -> Substitute:
    return replace(trained[1].substitute, lam=0.6)


def by_hand(head: SubstituteHead, keys: np.ndarray) -> np.ndarray:
    """p_sub, one exponential at a time, in float64."""
    found = np.zeros((len(keys), head.vocab_size))
    for rows in head.rows.double().numpy():
        for token, row in zip(head.tokens.tolist(), rows, strict=True):
            found[:, token] += np.exp(keys.astype(np.float64) @ row)
    return found / found.sum(1, keepdims=True)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("lam", [0.3, 1.0])
def test_the_mixture_is_that_of_the_definition(rows, lam) -> None:
    head = SubstituteHead(torch.randn(rows, 4, 5), torch.tensor([6, 0, 2, 3]), 8)
    keys, lm = torch.randn(7, 5), torch.randn(7, 8).log_softmax(1)
    expected = by_hand(head, keys.numpy())
    found = head.log_probs(keys).exp().double()
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=1e-5, atol=1e-7)
    gold = torch.tensor([6, 1, 2, 3, 0, 7, 6])
    torch.testing.assert_close(head.gold_log_probs(keys, gold), head.log_probs(keys)[range(7), gold])
    mixed = mix_log_probs(lm, head.log_probs(keys), lam).exp()
    expected = lam * expected + (1 - lam) * lm.double().exp().numpy()
    torch.testing.assert_close(mixed.double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-7)


def test_training_finds_the_best_distribution_where_it_is_known() -> None:
    # Each context has a component of its own, so the best p_sub is how often each token followed it.
    contexts, vocabulary = 4, 6
    truth = np.random.default_rng(0).dirichlet(np.ones(vocabulary - 1), contexts)
    drawn = np.random.default_rng(1)
    at = drawn.integers(0, contexts, 4_000)
    tokens = np.array([drawn.choice(vocabulary - 1, p=truth[context]) for context in at])
    block = Records(torch.eye(contexts)[at].half(), torch.from_numpy(tokens))
    first = SubstituteHead(torch.zeros(1, vocabulary - 1, contexts), torch.arange(5), vocabulary)

    def loss(head: SubstituteHead) -> float:
        return float(-head.gold_log_probs(block.keys.float(), block.tokens).mean())

    best, epochs = fit_rows(
        first, [block], loss,
        records=4_000, epochs=12, learning_rate=0.1, generator=torch.Generator().manual_seed(0),
        progress=Progress(),
    )  # fmt: skip
    assert epochs > 1
    counts = np.zeros((contexts, vocabulary))
    np.add.at(counts, (at, tokens), 1)
    empirical = counts / counts.sum(1, keepdims=True)
    np.testing.assert_allclose(best.log_probs(torch.eye(contexts)).exp(), empirical, atol=0.02)
    entropy = -np.log(empirical[at, tokens]).mean()
    assert entropy <= loss(best) + 1e-6 < entropy + 0.005 < loss(first) == pytest.approx(math.log(5))


def test_it_stops_where_held_out_records_find_no_gain() -> None:
    block = Records(torch.ones(300, 1).half(), torch.zeros(300, dtype=torch.int64))
    first = SubstituteHead(torch.zeros(1, 2, 1), torch.arange(2), 2)
    other = torch.ones(3, dtype=torch.int64)  # held out: always the token that never came
    best, epochs = fit_rows(
        first, [block], lambda head: float(-head.gold_log_probs(torch.ones(3, 1), other).mean()),
        records=300, epochs=3, learning_rate=0.1, generator=torch.Generator(), progress=Progress(),
    )  # fmt: skip
    assert (best, epochs) == (first, 0)


def test_training_gains_on_documents_held_out_and_is_the_same_each_time(lm, trained) -> None:
    found = trained[1]
    assert found.held_out_ppl < found.held_out_base_ppl
    assert 0 < found.substitute.lam <= 1
    assert found.rows == 2
    assert found.tokens == len(set(" ".join(PHRASES).split()))
    assert trained_for(lm.store, Selection(domains=("phrases",))) == found.substitute
    assert trained_for(lm.store, Selection()) is None
    again = lm.train_substitute(domains=["phrases"], rows=2, epochs=6)
    assert again.substitute == found.substitute
    other = lm.train_substitute(domains=["phrases"], rows=1, epochs=1, seed=1)
    assert other.substitute.weights != found.substitute.weights
    files = [file.name for file in (lm.store.home.path / "weights").iterdir()]
    assert files == [other.substitute.weights]


def test_what_it_is_judged_by_is_no_part_of_what_it_is_trained_on(lm, monkeypatch) -> None:
    store, judged, trained = lm.store, set[int](), []
    text, records = type(store).text, type(store).records
    monkeypatch.setattr(type(store), "text", lambda self, number: judged.add(number) or text(self, number))

    def read(self, *args, **options):
        for batch in records(self, *args, **options):
            trained.append(positions_of(batch.ids))
            yield batch

    monkeypatch.setattr(type(store), "records", read)
    lm.train_substitute(domains=["phrases"], rows=1, epochs=1)
    snapshot = store.view().snapshot
    of_position = snapshot.rows[np.searchsorted(snapshot.starts, np.concatenate(trained), side="right") - 1]
    assert judged
    assert judged.isdisjoint(of_position.tolist())
    assert judged | set(of_position.tolist()) == set(store.lengths(Selection(domains=("phrases",))))


def test_what_cannot_be_trained_on_is_refused(lm) -> None:
    with pytest.raises(InputError, match="1 documents are too few to train on: at least 2"):
        lm.train_substitute(domains=["noise"])
    with pytest.raises(ConfigError, match="rows and epochs"):
        lm.train_substitute(rows=0)
    home = lm.store.home.path
    with knnstore.load(home).store as reading, pytest.raises(ReadOnlyError):
        knnstore.KNNLMForCausalLM.from_base(lm.base, reading, tokenizer=lm.tokenizer).train_substitute()


def test_another_model_or_a_damaged_file_is_refused(lm, substitute) -> None:
    held = lm.store.load_weights(substitute.weights)
    for name, value in (("model_fingerprint", "0" * 64), ("key", "elsewhere"), ("dim", 7)):
        other = lm.store.save_weights(held.tensors, {**held.metadata, name: value})
        with pytest.raises(FingerprintMismatchError, match=f"trained for {name}"):
            load_head(lm.store, replace(substitute, weights=other))
    file = lm.store.home.path / "weights" / substitute.weights
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptWeightsError):
        load_head(lm.store, substitute)


@pytest.mark.parametrize("change", ["remove", "replace"])
def test_it_goes_when_one_of_its_documents_goes(lm, substitute, change) -> None:
    phrases = Selection(domains=("phrases",))
    store, settings = lm.store, KNNSettings(lam=0.25, substitute=substitute)
    saved = replace(store.settings(["phrases"]), query=settings_to_dict(settings))
    store.save_settings(saved, ["phrases"])
    text = torch.tensor([[5, 6, 7]])
    with knnstore.load(store.home.path).store as elsewhere:
        reader = knnstore.KNNLMForCausalLM.from_base(lm.base, elsewhere, tokenizer=lm.tokenizer)
        assert settings_for(elsewhere, phrases).substitute == substitute
        assert settings_for(elsewhere).substitute is None  # saved for other domains
        reader(text, knn=settings)
        lm.add([{"id": "more", "text": "w5 w6"}], domain="phrases")  # no harm
        reader(text, knn=settings)
        if change == "remove":
            store.remove_document("s3")
        else:
            lm.add([{"id": "s3", "text": "w5 w6"}], domain="phrases")
        for use in (
            lambda: reader(text, knn=settings),
            lambda: reader.generate(text, max_new_tokens=1, do_sample=False, knn=settings),
            lambda: reader.evaluate(HELD_OUT, settings),
            lambda: reader.explain("w5 w6", settings),
        ):
            with pytest.raises(OutdatedWeightsError, match="of phrases was trained on documents that were"):
                use()
        left = settings_for(elsewhere, phrases)
        assert (left.substitute, left.mixer) == (None, FixedLambda(0.25))
        assert elsewhere.info()["substitutes"] == ["of phrases: outdated, documents of it are gone"]
    assert not list((store.home.path / "weights").iterdir())
    assert store.verify() == []


@pytest.mark.parametrize("lam", [0.0, 0.35])
@torch.no_grad()
def test_forward_evaluation_and_explanation_give_the_mixture_by_hand(lm, substitute, lam) -> None:
    settings = KNNSettings(k=16, temperature=3.0, lam=lam, substitute=substitute)
    without = replace(settings, substitute=None)
    ids = torch.tensor([[0, 9, 17, 33, 41, 9], [0, 12, 5, 58, 20, 7]])
    keys = lm.encoder.keys(ids, np.arange(ids.numel()))
    base = lm(ids, knn=KNNSettings(lam=0.0)).logits.log_softmax(-1).flatten(0, 1).exp().double()
    p_sub = torch.from_numpy(by_hand(load_head(lm.store, substitute), keys.numpy()))
    dense = 0.6 * p_sub + 0.4 * base
    store = lm(ids, knn=without).logits.flatten(0, 1).softmax(-1).double() - (1 - lam) * base
    expected = store + (1 - lam) * dense
    found = lm(ids, knn=settings).logits.flatten(0, 1).exp().double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(found.sum(1), torch.ones(len(found), dtype=torch.float64))
    text = " ".join(f"w{token}" for token in ids[0, 1:].tolist())
    gold, sub = (p[range(5), ids[0, 1:]] for p in (expected, p_sub))
    explained = lm.explain(text, settings)
    np.testing.assert_allclose([token.p for token in explained], gold, rtol=1e-4)
    np.testing.assert_allclose([token.p_sub for token in explained], sub, rtol=1e-4)
    assert lm.explain(text, without)[0].p_sub is None
    evaluated = lm.evaluate([{"id": "x", "text": text}], settings, substitute=substitute)
    assert evaluated.knn_ppl == pytest.approx(float(gold.log().mean().neg().exp()), rel=1e-4)
    alone = dense[range(5), ids[0, 1:]]
    assert evaluated.substitute_ppl == pytest.approx(float(alone.log().mean().neg().exp()), rel=1e-4)


@pytest.mark.parametrize("lam", [0.0, 0.35])
@torch.no_grad()
def test_generation_with_beams_in_a_padded_batch_is_the_best_of_forward(lm, substitute, lam) -> None:
    settings = KNNSettings(k=16, temperature=3.0, lam=lam, substitute=substitute)
    prompts = [[0, 9, 17, 33], [0, 12]]
    padded = torch.tensor([prompts[0], [2, 2, *prompts[1]]])
    options = {
        "max_new_tokens": 5,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 2,
        "knn": settings,
    }
    written = lm.generate(padded, attention_mask=(padded != 2).long(), **options)
    beams = lm.generate(padded, attention_mask=(padded != 2).long(), num_beams=3, **options)
    for row, prompt in enumerate(prompts):
        greedy, kept = list(prompt), [(0.0, list(prompt))]
        for _ in range(5):
            greedy.append(int(lm(torch.tensor([greedy]), knn=settings).logits[0, -1].argmax()))
            grown = []
            for score, ids in kept:
                log_probs = lm(torch.tensor([ids]), knn=settings).logits[0, -1]
                best = log_probs.topk(3)
                grown += [
                    (score + float(value), [*ids, int(token)])
                    for value, token in zip(best.values, best.indices, strict=True)
                ]
            kept = sorted(grown, key=lambda beam: -beam[0])[:3]
        assert written[row, 4:].tolist() == greedy[len(prompt) :]
        assert beams[row, 4:].tolist() == kept[0][1][len(prompt) :]


@pytest.mark.slow
def test_calibration_tries_it_alone_and_beside_the_store(lm, trained) -> None:
    phrases = Selection(domains=("phrases",))
    found = lm.calibrate(documents(RNG, PHRASES, "d", 12), domains=["phrases"], max_k=16)
    names = [candidate.name for candidate in found.comparison.candidates]
    at = names.index("substitute")
    assert names[at + 1].endswith(" + substitute")
    alone, beside = found.comparison.candidates[at : at + 2]
    assert beside.held_out.ppl < alone.held_out.ppl
    assert alone.settings.substitute.weights == trained[1].substitute.weights
    assert alone.held_out.ppl < found.comparison.base.ppl
    evaluated = lm.evaluate(HELD_OUT, replace(beside.settings, selection=phrases))
    without = lm.evaluate(HELD_OUT, replace(beside.settings, selection=phrases, substitute=None))
    assert evaluated.knn_ppl < without.knn_ppl
    assert trained_for(lm.store, phrases) == trained[1].substitute  # kept beside what was calibrated
    lm.store.remove_document("s1")
    again = lm.calibrate(documents(RNG, PHRASES, "e", 12), domains=["phrases"], max_k=16)
    assert "substitute" not in [candidate.name for candidate in again.comparison.candidates]


def test_documents_that_it_was_trained_on_cannot_be_left_out(lm, substitute) -> None:
    stored = [{"id": "again", "text": lm.tokenizer.decode(lm.store.tokens("s1"))}]
    assert lm.evaluate(stored, KNNSettings(k=4), leave_out=True).stored == ("again",)
    with pytest.raises(ConfigError, match="the substitute was trained on them"):
        lm.evaluate(stored, KNNSettings(k=4), substitute=substitute, leave_out=True)
