"""Keys in fewer dimensions: the arithmetic against numpy, and a store whose keys are projected."""

import shutil

import numpy as np
import pytest
import torch

import knnstore
from knnstore.documents import TextDocument
from knnstore.errors import ConfigError, CorruptWeightsError, FingerprintMismatchError
from knnstore.lm import KNNSettings, settings_to_dict
from knnstore.lm.keys import fit_projection, run_without_head
from knnstore.lm.reading import Encoder
from knnstore.lm.reading.sample import sample_documents
from knnstore.store import KNNStore, SavedSettings
from tests.lm.phrases import words

RNG = np.random.default_rng(3)
KEYS = (RNG.standard_normal((500, 12)) @ RNG.standard_normal((12, 12)) + 5).astype(np.float32)
TEXTS = [words(RNG, 60, 4, 60) for _ in range(12)]


def squares(keys):
    return ((keys[:, None] - keys[None]) ** 2).sum(-1)


def test_the_components_are_those_of_the_singular_value_decomposition() -> None:
    projection, kept = fit_projection(KEYS, 4)
    centred = KEYS.astype(np.float64) - KEYS.astype(np.float64).mean(0)
    _, values, directions = np.linalg.svd(centred, full_matrices=False)
    signs = np.sign((directions[:4] * projection.matrix.numpy().T).sum(1))
    expected = centred @ directions[:4].T * signs
    np.testing.assert_allclose(projection(torch.from_numpy(KEYS)), expected, atol=1e-3)
    assert kept == pytest.approx((values[:4] ** 2).sum() / (values**2).sum())
    np.testing.assert_allclose(projection.matrix.T @ projection.matrix, np.eye(4), atol=1e-5)


def test_all_components_leave_every_distance_as_it_was() -> None:
    keys = torch.from_numpy(KEYS)
    whole, kept = fit_projection(KEYS, 12)
    assert kept == pytest.approx(1)
    np.testing.assert_allclose(squares(whole(keys)[:50]), squares(keys[:50]), rtol=1e-4, atol=1e-3)
    products, _ = fit_projection(KEYS, 12, "ip")
    np.testing.assert_allclose(products(keys) @ products(keys).T, keys @ keys.T, rtol=1e-4, atol=1e-2)
    assert not products.mean.any()


def test_keys_of_a_half_precision_model_are_projected_in_float32() -> None:
    projection, _ = fit_projection(KEYS, 3)
    half = torch.from_numpy(KEYS).bfloat16()
    assert torch.equal(projection(half), projection(half.float()))
    assert projection(half).dtype == torch.float32


@pytest.mark.parametrize(("keys", "dim"), [(KEYS, 13), (KEYS, 0), (KEYS[:119], 4)])
def test_impossible_sizes_are_refused(keys, dim) -> None:
    with pytest.raises(ConfigError, match=r"at least 120 tokens, but it has 119|between 1 and 12"):
        fit_projection(keys, dim)
    fit_projection(KEYS[:120], 4)


def test_a_sample_is_random_the_same_each_time_and_takes_a_text_once() -> None:
    documents = [TextDocument(str(at), f"text {at % 40} " + "x" * 93) for at in range(80)]
    chosen = sample_documents(documents, 1000)
    assert 10 <= len(chosen) <= 11
    assert len({document.text for document in chosen}) == len(chosen)
    again = sample_documents(reversed(documents), 1000)
    assert [document.text for document in again] == [document.text for document in chosen]
    assert len(sample_documents(documents, 10**6)) == 40


@pytest.fixture(scope="module")
def filled(make_lm):
    """A home whose keys are projected to 8 of 32 components."""
    with make_lm({"phrases": TEXTS[:8]}, states=1, dim=8, sample=TEXTS, max_length=32).store as store:
        store.save_settings(SavedSettings(settings_to_dict(KNNSettings(k=20, temperature=2.0, lam=0.5))))
        return store.home.path


def test_what_is_stored_and_searched_is_projected(filled) -> None:
    lm = knnstore.load(filled)
    with lm.store as store:
        assert (store.identity.dim, store.datastore.dim, store.verify()) == (8, 8, [])
        _, stored, _ = next(store.datastore.iterate())
        whole = Encoder(lm.base, lm.key_encoder.location)
        ids = lm.tokenizer("<s> " + TEXTS[0], return_tensors="pt", add_special_tokens=False)["input_ids"]
        keys = whole.encode(ids[:, :31], np.arange(31)).keys
        np.testing.assert_allclose(stored[:31], lm.key_encoder.projection(keys), atol=0.01)
        # `forward` searches for the same keys that evaluation does.
        text = {"id": "t", "text": " ".join(TEXTS[9].split()[:30])}
        inputs = lm.tokenizer("<s> " + text["text"], return_tensors="pt", add_special_tokens=False)[
            "input_ids"
        ]
        with torch.no_grad():
            logits = lm(inputs, knn=lm.knn).logits[0, :-1]
        assert lm.knn.k == 20
        loss = -logits.gather(1, inputs[0, 1:, None]).mean().item()
        assert np.exp(loss) == pytest.approx(lm.evaluate([text], lm.knn).knn_ppl, rel=1e-4)
        assert torch.equal(run_without_head(lm.base, lm.key_encoder.location, ids[:, :31])[0][0], keys)


def test_a_projection_that_is_lost_or_for_another_store_is_refused(filled, make_lm, tmp_path) -> None:
    home = tmp_path / "home"
    shutil.copytree(filled, home)
    with KNNStore.open(home, "a") as store:
        name = store.identity.projection
        store.save_settings(SavedSettings({"k": 5}))  # which removes weights that nothing names
    file = home / "weights" / name
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"x")
    with pytest.raises(CorruptWeightsError, match="is damaged"):
        knnstore.load(home)
    with KNNStore.open(home) as store:
        assert [problem for problem in store.verify() if "is damaged" in problem]
    file.unlink()
    with pytest.raises(CorruptWeightsError, match="cannot be read"):
        knnstore.load(home)
    with make_lm(dim=8, sample=TEXTS, key="final_hidden").store as other:
        foreign = other.load_weights(other.identity.projection)
    with KNNStore.create(tmp_path / "mixed", store.identity, projection=foreign) as mixed:
        assert mixed.identity.projection == foreign.name
    with pytest.raises(FingerprintMismatchError, match="transformer:output"):
        knnstore.load(tmp_path / "mixed")


def test_the_size_and_the_sample_belong_together(model_path, tmp_path) -> None:
    with pytest.raises(ConfigError, match="belong together"):
        knnstore.create(tmp_path / "home", model_path, dim=8)
    with pytest.raises(ConfigError, match="between 1 and 32, got 33"):
        knnstore.create(tmp_path / "home", model_path, dim=33, sample=TEXTS)
    assert not (tmp_path / "home").exists()
