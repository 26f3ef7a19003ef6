"""What the model cannot read, and output from which nothing can be predicted, is named and refused."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from tokenizers.normalizers import Replace

import knnstore
from knnstore.errors import ConfigError, InputError, ModelOutputError, UnusableDocumentError
from knnstore.lm import KNNSettings
from tests.lm.conftest import VOCABULARY

NAN_CAUSES = {
    "head": ("lm_head.weight", float("nan")),
    "middle": ("transformer.h.0.mlp.c_fc.bias", float("nan")),
    "norm": ("transformer.ln_f.weight", float("inf")),
}


@pytest.mark.parametrize("cause", NAN_CAUSES)
def test_a_model_that_gives_nan_is_named_as_the_cause(make_model, tokenizer, tmp_path, cause) -> None:
    text = " ".join(f"w{at}" for at in range(8))
    with knnstore.create(tmp_path / "home", make_model("gpt2"), tokenizer=tokenizer) as lm:
        lm.add([{"id": "before", "text": text}], domain="d")
        path, value = NAN_CAUSES[cause]
        base = lm.base
        base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone())  # tied until now
        with torch.no_grad():
            base.get_parameter(path)[0] = value
        held_out = [{"id": "other", "text": " ".join(f"w{4 + at % 7}" for at in range(2400))}]
        for use in (
            lambda: lm.evaluate(held_out),
            lambda: lm.explain("w5 w6 w7"),
            lambda: lm.generate_text("w5 w6", max_new_tokens=2),
            lambda: lm.generate_text("w5 w6", max_new_tokens=2, knn=KNNSettings(lam=0)),
            lambda: lm.calibrate(held_out),
            lambda: lm(torch.tensor([[5, 6]])),
        ):
            with pytest.raises(ModelOutputError, match=r"NaN or infinite .*damaged"):
                use()
    broken = make_model("gpt2").half()
    broken.lm_head.weight = torch.nn.Parameter(broken.lm_head.weight.detach().clone())
    with torch.no_grad():
        broken.get_parameter(path)[0] = value
    with knnstore.create(tmp_path / "broken", broken, tokenizer=tokenizer) as lm:
        with pytest.raises(ModelOutputError, match="float16 overflows"):
            lm.add([{"id": "a", "text": text}], domain="d")
        assert lm.store.documents() == []


def test_tokens_that_are_ruled_out_are_no_fault(make_model, tokenizer, tmp_path) -> None:
    model = make_model("gpt2")
    head = torch.nn.Linear(model.config.n_embd, model.config.vocab_size)
    head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        head.bias.fill_(0.0)
        head.bias[50:60] = -torch.inf
    model.lm_head = head
    with knnstore.create(tmp_path / "home", model, tokenizer=tokenizer) as lm:
        lm.add([{"id": "a", "text": "w5 w6 w7 w4"}], domain="d")
        lm.generate_text("w5 w6", max_new_tokens=4)
        assert np.isfinite(lm.evaluate([{"id": "b", "text": "w5 w6 w4"}]).base_ppl)


@pytest.fixture
def wide_tokenizer(tokenizer):
    """A tokenizer with a word that the models do not have."""
    wide = deepcopy(tokenizer)
    wide.add_tokens(["<new>"])
    assert len(wide) == VOCABULARY + 1
    return wide


@pytest.mark.parametrize("key", ["ffn_input", None])
def test_a_document_with_a_token_that_the_model_lacks_is_left_out(
    make_model, wide_tokenizer, tmp_path, key
) -> None:
    said = "document 'b' .document 2.: token 101 .'<new>'. at position 1 is not among the model's 101 tokens"
    rows = [{"id": id, "text": text} for id, text in (("a", "w5 w6"), ("b", "w5 <new> w6"), ("c", "w7"))]
    with knnstore.create(tmp_path / "home", make_model("gpt2"), tokenizer=wide_tokenizer, key=key) as lm:
        with pytest.raises(UnusableDocumentError, match=said) as raised:
            lm.add(rows, domain="strict")
        assert raised.value.id == "b"
        assert [one.id for one in lm.store.documents(domain="strict")] == ["a", "c"]
        found: list[InputError] = []
        added = lm.add(rows, domain="loose", on_bad=found.append)
        assert (added.added, len(found)) == (2, 1)
        lm.sync(rows[:2], domain="loose", on_bad=found.append)
        assert [one.id for one in lm.store.documents(domain="loose")] == ["a"]
        for use in (
            lambda: lm.evaluate(rows[1:]),
            lambda: lm.explain("w5 <new>"),
            lambda: lm.generate_text("w5 <new>"),
            lambda: lm.calibrate(rows[1:]),
            lambda: lm.search("w5 <new>"),
        ):
            with pytest.raises(InputError, match=r"token 101 .'<new>'. at position 1"):
                use()
        for ids in ([[1, -5]], [[1, VOCABULARY]]):
            with pytest.raises(InputError, match=f"token {ids[0][1]} .*at position 1"):
                lm.generate(torch.tensor(ids), max_new_tokens=1)


def test_a_text_without_tokens_is_named(make_model, tokenizer, tmp_path) -> None:
    silent = deepcopy(tokenizer)
    silent.backend_tokenizer.normalizer = Replace("~", "")
    rows = [{"id": "a", "text": "w5 w6"}, {"id": "b", "text": "~~"}, {"id": "c", "text": "w7"}]
    with knnstore.create(tmp_path / "home", make_model("gpt2"), tokenizer=silent) as lm:
        with pytest.raises(UnusableDocumentError, match=r"document 'b' .*makes no token of the text"):
            lm.add(rows, domain="d")
        assert [one.id for one in lm.store.documents()] == ["a", "c"]


def test_a_tokenizer_whose_first_token_the_model_lacks_is_refused(make_model, tokenizer, tmp_path) -> None:
    wide = deepcopy(tokenizer)
    wide.add_special_tokens({"bos_token": "<begin>"})
    with pytest.raises(ConfigError, match=r"begins texts with token 101 .'<begin>'."):
        knnstore.create(tmp_path / "home", make_model("gpt2"), tokenizer=wide)
