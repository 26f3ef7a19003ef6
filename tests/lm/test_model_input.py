"""What the model cannot read, and output from which nothing can be predicted, is named and refused."""

import json
from copy import deepcopy

import numpy as np
import pytest
import torch
from tokenizers.normalizers import Replace
from typer.testing import CliRunner

import knnstore
from knnstore.cli import app
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
    with pytest.raises(ModelOutputError, match="float16 overflows"):
        knnstore.create(tmp_path / "broken", broken, tokenizer=tokenizer)
    assert not (tmp_path / "broken").exists()


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


@pytest.mark.slow
def test_figures_leave_out_what_the_model_cannot_read_and_name_it(
    make_model, wide_tokenizer, tmp_path, monkeypatch
) -> None:
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{rng.integers(60)}" for _ in range(40)) for _ in range(60)]
    rows = [{"id": str(at), "text": text} for at, text in enumerate(texts)]
    held_out = [*rows[30:45], {"id": "bad", "text": "w5 <new> w6"}, {"id": "none"}, *rows[45:]]
    make_model("gpt2").save_pretrained(tmp_path / "model")
    wide_tokenizer.save_pretrained(tmp_path / "model")
    with knnstore.create(tmp_path / "home", str(tmp_path / "model")) as lm:
        lm.add(rows[:30], domain="d")
        expected = lm.evaluate(rows[30:])
        for measure in (lm.evaluate, lm.calibrate):
            found: list[UnusableDocumentError] = []
            result = measure(held_out, on_bad=found.append)
            assert {one.id for one in found} == {"bad", None}, measure
            if measure == lm.evaluate:
                assert (result.documents, result.tokens) == (30, expected.tokens)
                assert result.base_ppl == pytest.approx(expected.base_ppl)
    file = tmp_path / "held-out.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in held_out if "text" in row))
    monkeypatch.setenv("KNNSTORE_HOME", str(tmp_path / "home"))
    for command in (["eval"], ["eval", "--audit"], ["calibrate"]):
        refused = CliRunner().invoke(app, [*command, str(file)])
        assert refused.exit_code == 1
        assert "document 'bad'" in str(refused.exception) + refused.output
        done = CliRunner().invoke(app, [*command, str(file), "--skip-bad", "--json"])
        assert done.exit_code == 0, done.output
        assert "not among the model's 101 tokens" in done.stderr
        result = json.loads(done.stdout)
        assert (result["skipped"], result["documents"]) == (1, 30)
    # In a folder, what cannot be used is left out in any case, also of a sample for a projection.
    folder = tmp_path / "sample"
    folder.mkdir()
    for row in held_out[:20]:
        if "text" in row:
            (folder / f"{row['id']}.txt").write_text(row["text"])
    init = ["--home", str(tmp_path / "small"), "init", "--model", str(tmp_path / "model")]
    done = CliRunner().invoke(app, [*init, "--dim", "2", "--sample", str(folder), "-v"])
    assert done.exit_code == 0, done.output


def test_a_text_without_tokens_is_named(make_model, tokenizer, tmp_path) -> None:
    silent = deepcopy(tokenizer)
    silent.backend_tokenizer.normalizer = Replace("~", "")
    rows = [{"id": "a", "text": "w5 w6"}, {"id": "b", "text": "~~"}, {"id": "c", "text": "w7"}]
    with knnstore.create(tmp_path / "home", make_model("gpt2"), tokenizer=silent) as lm:
        with pytest.raises(UnusableDocumentError, match=r"document 'b' .*gives no tokens for the text"):
            lm.add(rows, domain="d")
        assert [one.id for one in lm.store.documents()] == ["a", "c"]


def test_a_tokenizer_whose_first_token_the_model_lacks_is_refused(make_model, tokenizer, tmp_path) -> None:
    wide = deepcopy(tokenizer)
    wide.add_special_tokens({"bos_token": "<begin>"})
    with pytest.raises(ConfigError, match=r"begins texts with token 101 .'<begin>'."):
        knnstore.create(tmp_path / "home", make_model("gpt2"), tokenizer=wide)


@pytest.mark.parametrize("tokens", [[[1, 2]], np.array([[1, 2]]), {"input_ids": [[1, 2]]}])
def test_tokens_that_are_no_tensor_are_refused_in_one_line(make_model, tokenizer, tmp_path, tokens) -> None:
    model, tensor = make_model("gpt2"), torch.tensor([[1, 2]])
    message = f"^(inputs|input_ids|labels|attention_mask) is {type(tokens).__name__}, not a tensor of torch"
    with knnstore.create(tmp_path / "home", model, tokenizer=tokenizer) as lm:
        for call in (
            lambda: lm.generate(tokens, max_new_tokens=2),
            lambda: lm.generate(input_ids=tokens, max_new_tokens=2),
            lambda: lm.generate(tensor, attention_mask=tokens, max_new_tokens=2, draft=True),
            lambda: lm(tokens),
            lambda: lm(tensor, labels=tokens),
        ):
            with pytest.raises(InputError, match=message):
                call()
