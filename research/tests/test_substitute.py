"""The trainable substitute: its arithmetic, its training, and that it goes when its documents go."""

import json
import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from knnstore_research.one_weight import mix_log_probs
from knnstore_research.substitute import (
    Records,
    Substitute,
    SubstituteHead,
    TrainedSubstitute,
    add_substitute,
    evaluate_substitute,
    fit_alone,
    fit_beside,
    fit_rows,
    load_head,
    make_first_rows,
    train_substitute,
)

import knnstore
from knnstore.datastore import positions_from_ids
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
    find_trained_settings,
    settings_for,
    settings_from_dict,
    settings_to_dict,
)
from knnstore.lm.calibration import score_once
from knnstore.lm.calibration.candidates import _find_unscored_components
from knnstore.lm.calibration.evidence import gather_evidence
from knnstore.lm.calibration.fits import fit_fixed
from knnstore.lm.components import registry
from knnstore.lm.keys import Joining, locate
from knnstore.lm.reading import Encoder
from knnstore.lm.settings import saved as saved_module
from knnstore.progress import Progress
from knnstore.store import SavedSettings, Selection
from tests.lm.phrases import documents, phrases

RNG = np.random.default_rng(3)
PHRASES = phrases(RNG, 30)
HELD_OUT = documents(RNG, PHRASES, "h", 8)
PHRASES_ONLY = Selection(domains=("phrases",))


def as_saved(trained: TrainedSubstitute) -> dict[str, object]:
    """Settings of a substitute as JSON has them."""
    return json.loads(json.dumps(trained.substitute))


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the component be known, also where the package's entry points are of another version."""
    monkeypatch.setitem(registry._registered, "substitute", Substitute())


@pytest.fixture(scope="module")
def trained(make_lm):
    """A home with the domains phrases and noise, and what training on phrases returned."""
    stored = {"phrases": documents(RNG, PHRASES, "s", 20), "noise": ["w90 w91 w92"]}
    lm = make_lm(stored, max_length=32, stride=16)
    with lm.store as store:
        return store.home.path, train_substitute(lm, domains=["phrases"], rows=2, epochs=6)


@pytest.fixture(scope="module")
def filled(trained):
    return trained[0]


@pytest.fixture
def substitute(trained) -> dict[str, object]:
    return {**trained[1].substitute, "lam": 0.6}


def using(substitute, **values) -> KNNSettings:
    """Settings with a substitute in use."""
    return KNNSettings(**values, others={"substitute": substitute})


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
    torch.testing.assert_close(head.target_log_probs(keys, gold), head.log_probs(keys)[range(7), gold])
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
        return float(-head.target_log_probs(block.keys.float(), block.tokens).mean())

    best, epochs = fit_rows(
        first,
        [block],
        loss,
        records=4_000,
        epochs=12,
        learning_rate=0.1,
        generator=torch.Generator().manual_seed(0),
        progress=Progress(),
    )
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
        first,
        [block],
        lambda head: float(-head.target_log_probs(torch.ones(3, 1), other).mean()),
        records=300,
        epochs=3,
        learning_rate=0.1,
        generator=torch.Generator(),
        progress=Progress(),
    )
    assert (best, epochs) == (first, 0)


def test_training_gains_on_documents_held_out_and_is_the_same_each_time(lm, trained) -> None:
    found = trained[1]
    assert found.held_out_ppl < found.held_out_base_ppl
    assert 0 < found.substitute["lam"] <= 1
    assert found.rows == 2
    assert found.tokens == len(set(" ".join(PHRASES).split()))
    assert find_trained_settings(lm.store, PHRASES_ONLY, "substitute") == as_saved(found)
    assert find_trained_settings(lm.store, Selection(), "substitute") is None
    again = train_substitute(lm, domains=["phrases"], rows=2, epochs=6)
    assert again.substitute == found.substitute
    other = train_substitute(lm, domains=["phrases"], rows=1, epochs=1, seed=1)
    assert other.substitute["weights"] != found.substitute["weights"]
    files = [file.name for file in (lm.store.home.path / "weights").iterdir()]
    assert files == [other.substitute["weights"]]


def test_what_it_is_judged_by_is_no_part_of_what_it_is_trained_on(lm, monkeypatch) -> None:
    store, judged, trained = lm.store, set[int](), []
    text, records = type(store).tokens_by_number, type(store).records
    monkeypatch.setattr(
        type(store), "tokens_by_number", lambda self, number: judged.add(number) or text(self, number)
    )

    def read(self, *args, **options):
        for batch in records(self, *args, **options):
            trained.append(positions_from_ids(batch.ids))
            yield batch

    monkeypatch.setattr(type(store), "records", read)
    train_substitute(lm, domains=["phrases"], rows=1, epochs=1)
    snapshot = store.view().snapshot
    of_position = snapshot.rows[np.searchsorted(snapshot.starts, np.concatenate(trained), side="right") - 1]
    assert judged
    assert judged.isdisjoint(of_position.tolist())
    assert judged | set(of_position.tolist()) == set(store.lengths(Selection(domains=("phrases",))))


def test_what_cannot_be_trained_on_is_refused(lm) -> None:
    with pytest.raises(InputError, match="1 documents are too few to train on: at least 2"):
        train_substitute(lm, domains=["noise"])
    with pytest.raises(ConfigError, match="rows and epochs"):
        train_substitute(lm, rows=0)
    home = lm.store.home.path
    with knnstore.load(home) as reading, pytest.raises(ReadOnlyError):
        train_substitute(reading)


def test_another_model_or_a_damaged_file_is_refused(lm, substitute) -> None:
    held = lm.store.load_weights(substitute["weights"])
    for name, value in (("model_fingerprint", "0" * 64), ("key", "elsewhere"), ("dim", 7)):
        other = lm.store.save_weights(held.tensors, {**held.metadata, name: value})
        with pytest.raises(FingerprintMismatchError, match=f"trained for {name}"):
            load_head(lm.store, {**substitute, "weights": other})
    file = lm.store.home.path / "weights" / substitute["weights"]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptWeightsError):
        load_head(lm.store, substitute)


@pytest.mark.parametrize("change", ["remove", "replace"])
def test_it_goes_when_one_of_its_documents_goes(lm, substitute, change) -> None:
    phrases = Selection(domains=("phrases",))
    store, settings = lm.store, using(substitute, lam=0.25)
    saved = replace(store.settings(["phrases"]), query=settings_to_dict(settings))
    store.save_settings(saved, ["phrases"])
    text = torch.tensor([[5, 6, 7]])
    with knnstore.load(store.home.path).store as elsewhere:
        reader = knnstore.KNNLMForCausalLM.from_base(lm.base, elsewhere, tokenizer=lm.tokenizer)
        assert settings_for(elsewhere, phrases).others == {"substitute": substitute}
        assert settings_for(elsewhere).others == {}  # saved for other domains
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
        assert (left.others, left.mixer) == ({}, FixedLambda(0.25))
        assert elsewhere.info()["trained"] == [
            "substitute of phrases: outdated, because documents were removed"
        ]
    assert not list((store.home.path / "weights").iterdir())
    assert store.verify() == []


@pytest.mark.parametrize("lam", [0.0, 0.35])
@torch.no_grad()
def test_forward_evaluation_and_explanation_give_the_mixture_by_hand(lm, substitute, lam) -> None:
    settings = using(substitute, k=16, temperature=3.0, lam=lam)
    without = settings.without_components("substitute")
    ids = torch.tensor([[0, 9, 17, 33, 41, 9], [0, 12, 5, 58, 20, 7]])
    keys = lm.key_encoder.compute_keys(ids, np.arange(ids.numel()))
    p_sub = torch.from_numpy(by_hand(load_head(lm.store, substitute), keys.numpy()))
    store = lm(ids, knn=without).logits.flatten(0, 1).softmax(-1).double()
    expected = 0.6 * p_sub + 0.4 * store
    found = lm(ids, knn=settings).logits.flatten(0, 1).exp().double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(found.sum(1), torch.ones(len(found), dtype=torch.float64))
    text = " ".join(f"w{token}" for token in ids[0, 1:].tolist())
    gold, sub = (p[range(5), ids[0, 1:]] for p in (expected, p_sub))
    explained = lm.explain(text, settings)
    np.testing.assert_allclose([token.p for token in explained], gold, rtol=1e-4)
    parts = [{part.name: part for part in token.parts}["substitute"] for token in explained]
    np.testing.assert_allclose([part.p for part in parts], sub, rtol=1e-4)
    assert [part.weight for part in parts] == pytest.approx([0.6] * 5)
    assert "substitute" not in lm.explain(text, without)[0].shares
    evaluated = lm.evaluate([{"id": "x", "text": text}], settings)
    assert evaluated.knn_ppl == pytest.approx(float(gold.log().mean().neg().exp()), rel=1e-4)


def test_padding_is_not_predicted_from(lm, substitute) -> None:
    settings = using(substitute, lam=0.0)
    padded, mask = torch.tensor([[2, 2, 0, 12]]), torch.tensor([[0, 0, 1, 1]])
    with torch.no_grad():
        found = lm(padded, attention_mask=mask, position_ids=torch.tensor([[1, 1, 0, 1]]), knn=settings)
        alone = lm(padded[:, 2:], knn=settings).logits[0]
        at_padding = lm.base(padded, attention_mask=mask, position_ids=torch.tensor([[1, 1, 0, 1]]))
    torch.testing.assert_close(found.logits[0, 2:], alone, rtol=1e-4, atol=1e-4)
    expected = at_padding.logits[0, :2].log_softmax(-1)
    torch.testing.assert_close(found.logits[0, :2].log_softmax(-1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lam", [0.0, 0.35])
@torch.no_grad()
def test_generation_with_beams_in_a_padded_batch_is_the_best_of_forward(lm, substitute, lam) -> None:
    settings = using(substitute, k=16, temperature=3.0, lam=lam)
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
@pytest.mark.parametrize("networks", [False, True])
def test_calibration_tries_it_alone_and_on_top(lm, trained, networks) -> None:
    held_out = documents(RNG, PHRASES, "d", 12)
    found = lm.calibrate(held_out, domains=["phrases"], max_k=16, networks=networks)
    names = [candidate.name for candidate in found.comparison.candidates]
    at = names.index("substitute")
    assert names[at + 1].endswith(" + substitute")
    alone, both = found.comparison.candidates[at : at + 2]
    assert alone.settings.others["substitute"]["weights"] == trained[1].substitute["weights"]
    assert alone.held_out.ppl < found.comparison.base.ppl
    assert 0 <= both.settings.others["substitute"]["lam"] < 1
    if networks:
        gated = found.comparison.candidates[-1].settings
        assert "substitute" in gated.gate.factors
        assert lm.evaluate(HELD_OUT, replace(gated, selection=PHRASES_ONLY)).knn_ppl > 1
    # What was trained is kept beside what was calibrated.
    assert find_trained_settings(lm.store, PHRASES_ONLY, "substitute") == as_saved(trained[1])
    lm.store.remove_document("s1")
    again = lm.calibrate(documents(RNG, PHRASES, "e", 12), domains=["phrases"], max_k=16, networks=False)
    assert "substitute" not in [candidate.name for candidate in again.comparison.candidates]


@pytest.mark.slow
def test_calibration_leaves_it_out_where_documents_are_left_out(lm) -> None:
    stored = lm.calibrate(HELD_OUT, domains=["phrases"], stored_tokens=200, max_k=16, networks=False)
    assert "substitute" not in [candidate.name for candidate in stored.comparison.candidates]


def test_documents_that_it_was_trained_on_cannot_be_left_out(lm, substitute) -> None:
    stored = [{"id": "again", "text": lm.tokenizer.decode(lm.store.tokens("s1"))}]
    assert lm.evaluate(stored, KNNSettings(k=4), leave_out=True).stored == ("again",)
    with pytest.raises(ConfigError, match="the component 'substitute' was trained on stored documents"):
        lm.evaluate(stored, using(substitute, k=4, lam=0.2), leave_out=True)


def test_a_text_scored_before_is_as_one_scored_after_training(lm, trained) -> None:
    scored = score_once(lm.store, lm.reader, HELD_OUT, k=8, selection=PHRASES_ONLY)
    assert set(scored.others) >= {"substitute"}
    left_out = {HELD_OUT[0].content_hash: ("stored",)}
    apart = score_once(lm.store, lm.reader, HELD_OUT, k=8, selection=PHRASES_ONLY, left_out=left_out)
    assert "substitute" not in apart.others, "it cannot leave out a document"
    before = replace(scored, others={}, evidence=replace(scored.evidence, found={"n-grams": scored.ngrams}))
    added = add_substitute(before, lm.store, PHRASES_ONLY, "cpu")
    one, other = (of.evidence.found["substitute"] for of in (scored, added))
    torch.testing.assert_close(one.probs, other.probs)
    torch.testing.assert_close(one.largest, other.largest)
    assert add_substitute(before, lm.store, Selection(), "cpu") is before, "trained for other domains"
    for settings, of, missing in (
        (trained[1].substitute, scored, []),
        (trained[1].substitute, before, ["substitute"]),
        ({**trained[1].substitute, "weights": "others"}, scored, ["substitute"]),
    ):
        assert _find_unscored_components(using(settings), of) == missing


def test_it_is_fitted_alone_and_beside_the_store(lm, trained) -> None:
    scored = score_once(lm.store, lm.reader, HELD_OUT, k=8, selection=PHRASES_ONLY)
    evidence = gather_evidence(scored, [8])[0]
    alone, store = fit_alone(evidence.tokens, scored), fit_fixed(evidence)
    both = fit_beside(evidence, scored, fit_fixed)
    ppl = {
        name: float(scored.log_probs(one).log_probs.double().mean().neg().exp())
        for name, one in {"alone": alone, "store": store, "both": both}.items()
    }
    assert ppl["alone"] < float(scored.lm_log_probs.double().mean().neg().exp())
    assert ppl["both"] <= min(ppl["alone"], ppl["store"]) + 1e-3
    # No λ near that of the fit is likelier.
    lam = alone.others["substitute"]["lam"]
    for near in (lam - 0.1, lam - 0.02):
        other = alone.with_part("substitute", {**alone.others["substitute"], "lam": near})
        assert float(scored.log_probs(other).log_probs.double().mean().neg().exp()) >= ppl["alone"]


def test_its_share_of_the_gain_is_in_log_perplexity(lm, trained) -> None:
    keys = KNNSettings(k=8, temperature=3.0, lam=0.3, selection=PHRASES_ONLY)
    found = evaluate_substitute(lm, HELD_OUT, keys)
    assert found.store_ppl == pytest.approx(lm.evaluate(HELD_OUT, keys).knn_ppl)
    settings = using(trained[1].substitute, lam=0.0, selection=PHRASES_ONLY)
    assert found.substitute_ppl == pytest.approx(lm.evaluate(HELD_OUT, settings).knn_ppl)
    expected = math.log(found.base_ppl / found.substitute_ppl) / math.log(found.base_ppl / found.store_ppl)
    assert found.share == pytest.approx(expected)
    nothing = evaluate_substitute(lm, HELD_OUT, KNNSettings(lam=0.0, selection=PHRASES_ONLY))
    assert nothing.share is None, "the store gains nothing"
    with pytest.raises(
        ConfigError, match="no substitute was trained on exactly these domains: run knnstore research"
    ):
        evaluate_substitute(lm, HELD_OUT, KNNSettings(lam=0.3))


def test_its_settings_are_checked_and_survive_json(substitute) -> None:
    settings = using(substitute, k=8, temperature=2.0, lam=0.25)
    assert settings_from_dict(json.loads(json.dumps(settings_to_dict(settings)))) == settings
    assert settings.trained_components == ("substitute",)
    for wrong, message in (
        ({"lam": 0.5}, "name its weights and the documents"),
        ({**substitute, "traces": None}, "name its weights and the documents"),
        ({**substitute, "traces": {"domains": []}}, "the list of documents that a component"),
        ({**substitute, "lam": 1.5}, "between 0 and 1"),
        ({**substitute, "rows": 3}, "no setting 'rows'"),
    ):
        with pytest.raises(ConfigError, match=message):
            using(wrong)
    for selection in (Selection(domains=("noise",)), Selection(tags=("a",)), Selection(documents=("s1",))):
        with pytest.raises(ConfigError, match="leaves out documents that the component 'substitute'"):
            using(substitute, selection=selection)


def test_one_of_an_earlier_version_is_used_with_one_warning(lm, substitute, caplog, monkeypatch) -> None:
    saved_module._warn_of_former_components.cache_clear()
    record = {"substitute": substitute, "rows": 2}
    query = {"k": 8, "temperature": 3.0, "mixer": {"name": "fixed", "lam": 0.0}, "substitute": substitute}
    former = {**query, "trained_substitute": record}  # as it is in the catalog
    lm.store.save_settings(SavedSettings.from_payload(former), ["phrases"])
    assert lm.store.settings(["phrases"]).to_payload() == json.loads(json.dumps(former))
    with caplog.at_level(logging.WARNING, "knnstore"):
        found = settings_for(lm.store, PHRASES_ONLY), settings_for(lm.store, PHRASES_ONLY)
    assert found[0].others == found[1].others == {"substitute": substitute}
    (line,) = caplog.messages
    assert "substitute" in line
    assert "run knnstore calibrate again" in line
    assert lm.store.info()["trained"] == ["substitute of phrases: ready"]
    assert lm.store.verify() == []
    assert find_trained_settings(lm.store, PHRASES_ONLY, "substitute")["weights"] == substitute["weights"]
    trained = train_substitute(lm, domains=["phrases"], rows=1, epochs=1)
    saved = lm.store.settings(["phrases"])
    assert "substitute" not in saved.query
    assert saved.query["others"]["substitute"] == {**as_saved(trained), "lam": 0.6}, "λ stays"
    # Without the package the store opens, and the settings are refused by name.
    lm.store.save_settings(SavedSettings.from_payload(former), ["phrases"])
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_load_installed_components", dict)
    with pytest.raises(ConfigError, match="no component 'substitute' is installed"):
        settings_for(lm.store, PHRASES_ONLY)
    lm.store.save_settings(SavedSettings.from_payload({**query, "substitute": None}), ["phrases"])
    assert settings_for(lm.store, PHRASES_ONLY).is_model_alone


def test_the_rows_of_the_output_begin_no_substitute_of_joined_keys(make_model) -> None:
    base = make_model("gpt2")
    head, tokens = base.get_output_embeddings().weight, torch.arange(101)
    one = make_first_rows(Encoder(base, locate(base)), 32, tokens, 1, torch.Generator())
    assert torch.equal(one[0], head)
    joined = make_first_rows(
        Encoder(base, locate(base), Joining.from_state_count(3)), 32, tokens, 1, torch.Generator()
    )
    assert joined.abs().max() < 0.2
