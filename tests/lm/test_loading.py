"""Telling one model from another, in whichever precision each is opened."""

import itertools

import pytest
import torch

import knnstore
from knnstore.errors import FingerprintMismatchError
from knnstore.lm import load_model
from knnstore.lm.keys import model_fingerprint, same_model

DTYPES = ("float32", "float16", "bfloat16")
PAIRS = list(itertools.product(DTYPES, DTYPES))


def spread(model) -> None:
    """Give the weights magnitudes from where float16 vanishes up to 10."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(10 ** torch.empty_like(weight).uniform_(-9, 1))


@pytest.fixture(params=DTYPES, scope="module")
def opened(request, make_model, tokenizer, tmp_path_factory):
    """The fingerprints of a checkpoint saved in some precision and opened in each."""
    path = tmp_path_factory.mktemp("model")
    model = make_model("llama")
    spread(model)
    model.to(getattr(torch, request.param)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return {dtype: model_fingerprint(load_model(str(path), dtype=dtype).model) for dtype in DTYPES}


def test_a_checkpoint_is_known_in_every_precision(opened) -> None:
    assert all(same_model(opened[one], opened[other]) for one, other in PAIRS)


def test_another_initialisation_is_another_model_in_every_precision(opened, make_model) -> None:
    model = make_model("llama")
    torch.manual_seed(1)
    spread(model)
    for dtype in DTYPES:
        other = model_fingerprint(model.to(getattr(torch, dtype)))
        assert not any(same_model(fingerprint, other) for fingerprint in opened.values())


@pytest.mark.parametrize(("before", "after"), [pair for pair in PAIRS if "bfloat16" not in pair])
def test_one_step_of_training_makes_another_model(make_model, before: str, after: str) -> None:
    model = make_model("llama").to(torch.float32)
    known = model_fingerprint(make_model("llama").to(getattr(torch, before)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0)
    tokens = torch.arange(4, 36)[None]
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    assert not same_model(known, model_fingerprint(model.to(getattr(torch, after))))


def test_a_step_in_bfloat16_makes_another_model(make_model) -> None:
    model = make_model("llama").to(torch.bfloat16)
    known = model_fingerprint(model)
    with torch.no_grad():
        for weight in model.parameters():  # by the least that there is
            weight.copy_(torch.nextafter(weight, torch.full_like(weight, torch.inf)))
    assert not same_model(known, model_fingerprint(model))


@pytest.mark.parametrize(("made", "used"), [("float32", "float16"), ("float16", "bfloat16")])
def test_a_store_is_used_in_another_precision(make_model, tokenizer, tmp_path, made: str, used: str) -> None:
    make_model("gpt2").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    home = tmp_path / "home"
    knnstore.create(home, model=str(tmp_path / "model"), dtype=made).store.close()
    with knnstore.load(home, dtype=used).store as store:
        assert len(store.info()["model_fingerprint"]) == 64
    other = make_model("gpt2")
    spread(other)
    other.save_pretrained(tmp_path / "model")
    with pytest.raises(FingerprintMismatchError):
        knnstore.load(home, dtype=used)
