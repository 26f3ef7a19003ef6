"""Telling one model from another, in whichever precision each is opened."""

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import knnstore
from knnstore.errors import ConfigError, FingerprintMismatchError, StoreExistsError
from knnstore.lm import KNNSettings, load_model
from knnstore.lm.keys import describe_same_checkpoint, model_fingerprint

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
    assert all(describe_same_checkpoint(opened[one], opened[other]) for one, other in PAIRS)


def test_another_initialisation_is_another_model_in_every_precision(opened, make_model) -> None:
    model = make_model("llama")
    torch.manual_seed(1)
    spread(model)
    for dtype in DTYPES:
        other = model_fingerprint(model.to(getattr(torch, dtype)))
        assert not any(describe_same_checkpoint(fingerprint, other) for fingerprint in opened.values())


@pytest.mark.parametrize(("before", "after"), [pair for pair in PAIRS if "bfloat16" not in pair])
def test_one_step_of_training_makes_another_model(make_model, before: str, after: str) -> None:
    model = make_model("llama").to(torch.float32)
    known = model_fingerprint(make_model("llama").to(getattr(torch, before)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0)
    tokens = torch.arange(4, 36)[None]
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    assert not describe_same_checkpoint(known, model_fingerprint(model.to(getattr(torch, after))))


def test_a_step_in_bfloat16_makes_another_model(make_model) -> None:
    model = make_model("llama").to(torch.bfloat16)
    known = model_fingerprint(model)
    with torch.no_grad():
        for weight in model.parameters():  # by the least that there is
            weight.copy_(torch.nextafter(weight, torch.full_like(weight, torch.inf)))
    assert not describe_same_checkpoint(known, model_fingerprint(model))


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


# -- models that were loaded


@pytest.mark.slow
def test_a_model_object_is_used_as_it_is(make_model, tokenizer, model_path, tmp_path) -> None:
    base, text = make_model("gpt2"), "w5 w6 w7 w8"
    with knnstore.create(tmp_path / "given", base.train(), tokenizer=tokenizer) as given:
        assert given.base is base
        assert not base.training
        given.add([text], domain="a")
        with pytest.raises(ConfigError, match="tokenizer"):
            knnstore.load(tmp_path / "given", model=base)
    with knnstore.create(tmp_path / "named", model_path) as named:
        named.add([text], domain="a")
        assert (given.keys(text) == named.keys(text)).all()
    with knnstore.load(tmp_path / "named", model=load_model(model_path).model) as again:
        assert again.tokenizer.get_vocab() == tokenizer.get_vocab()
        assert again.store.record_count() == 4
    for home, wrong in (("named", make_model("llama")), ("given", make_model("opt"))):
        with pytest.raises(FingerprintMismatchError):
            knnstore.load(tmp_path / home, model=wrong, tokenizer=tokenizer)
    for options in ({"dtype": "float16"}, {"device": "cpu"}, {"device_map": "auto"}):
        with pytest.raises(
            ConfigError, match=f"{next(iter(options))} has no effect on a model that is already loaded"
        ):
            knnstore.load(tmp_path / "named", model=base, **options)
    with pytest.raises(ConfigError, match="not int"):
        knnstore.create(tmp_path / "new", 7)


def test_a_model_that_was_moved_is_found_by_its_name(model_path, tmp_path) -> None:
    moved = shutil.copytree(model_path, tmp_path / "moved")
    with knnstore.create(tmp_path / "home", str(moved), attn_implementation="eager") as made:
        assert made.base.config._attn_implementation == "eager"
    moved.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError):
        knnstore.load(tmp_path / "home")
    with pytest.raises(StoreExistsError):  # said before the model is looked for
        knnstore.create(tmp_path / "home", str(moved))
    with knnstore.load(tmp_path / "home", model=tmp_path / "elsewhere", dtype="bfloat16") as lm:
        assert lm.base.dtype == torch.bfloat16
        assert repr(lm.store) == f"KNNStore({str(tmp_path / 'home')!r}, mode='r')"


@pytest.mark.parametrize("mode", ["a", "r"])
def test_a_store_that_was_empty_when_loaded_gets_the_settings_of_its_first_documents(
    model_path, tmp_path, mode: str
) -> None:
    document = {"id": "first", "text": "the blue cat sat on the mat"}
    writer = knnstore.create(tmp_path / "home", model=str(model_path))
    reader = knnstore.load(tmp_path / "home", mode="r")
    if mode == "a":
        writer.store.close()
        writer = reader = knnstore.load(tmp_path / "home", mode="a")
    writer.add([document], domain="cats")
    used = reader.resolve_settings()
    reader.store.close()
    writer.store.close()
    with knnstore.load(tmp_path / "home") as later:
        assert used == later.knn
        assert used.temperature != 1.0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_of_peft_are_part_of_the_model(make_model, tokenizer, tmp_path) -> None:
    peft = pytest.importorskip("peft")
    text, plain = "w5 w6 w7 w8", make_model("llama")
    with knnstore.create(tmp_path / "plain", plain, tokenizer=tokenizer) as lm:
        keys = lm.keys(text)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(3)
    adapted = peft.get_peft_model(plain, config)
    with knnstore.create(tmp_path / "adapted", adapted, tokenizer=tokenizer) as lm:
        lm.add([text], domain="a")
        assert abs(lm.keys(text) - keys).max() > 1e-3
        ids = torch.tensor([[0, *tokenizer(text, add_special_tokens=False)["input_ids"]]])
        base = adapted(ids).logits.log_softmax(-1)
        assert torch.allclose(lm(ids, knn=KNNSettings(lam=0)).logits.log_softmax(-1), base, atol=1e-5)
    with pytest.raises(FingerprintMismatchError):
        knnstore.load(tmp_path / "plain", model=adapted, tokenizer=tokenizer)
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    learned = peft.get_peft_model(make_model("llama"), prompts)
    with pytest.raises(ConfigError, match="cannot use learned prompts"):
        knnstore.create(tmp_path / "learned", learned, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("rms_norm_eps", 1e-3),
        ("rope_parameters", {"rope_theta": 5e4}),
        ("head_dim", 16),
    ],
)
def test_another_configuration_with_the_same_weights_is_another_model(make_model, field, value) -> None:
    model = make_model("llama")
    known = model_fingerprint(model)
    setattr(model.config, field, value)
    assert not describe_same_checkpoint(known, model_fingerprint(model))
    assert describe_same_checkpoint(known.rpartition(":")[0], model_fingerprint(model)), (
        "of before there were configurations"
    )


def test_what_a_configuration_says_of_names_training_and_running_is_no_matter(make_model) -> None:
    model = make_model("gpt2")
    known = model_fingerprint(model)
    for field, value in (
        ("_name_or_path", "elsewhere"), ("attn_pdrop", 0.9), ("use_cache", False), ("dtype", "float16"),
        ("transformers_version", "9.9"), ("a_field_of_tomorrow", 1), ("initializer_range", 3.0),
    ):  # fmt: skip
        setattr(model.config, field, value)
    assert describe_same_checkpoint(known, model_fingerprint(model))


def test_files_that_are_not_of_one_model_are_refused(model_path, tmp_path) -> None:
    """Transformers would make what is missing, at random or knowing no word."""

    def copied(name: str):
        return Path(shutil.copytree(model_path, tmp_path / name))

    def refused(folder, match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            knnstore.create(tmp_path / "home", str(folder))
        assert not (tmp_path / "home").exists()

    deeper = copied("deeper") / "config.json"
    config = json.loads(deeper.read_text())
    deeper.write_text(json.dumps({**config, "n_layer": config["n_layer"] + 1}))
    refused(deeper.parent, r"lack \d+ of the weights that its config.json describes, such as 'transformer.h.")
    broken = copied("broken") / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:100])
    refused(
        broken.parent,
        "because of model.safetensors: Error while deserializing header",
    )
    wordless = copied("wordless")
    for file in wordless.glob("*token*"):
        file.unlink()
    refused(wordless, "has no tokenizer: save the tokenizer in the model's folder")


def test_a_store_is_made_where_there_can_be_one(model_path, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match="is the address of a server, but this engine keeps its keys in a folder"
    ):
        knnstore.create("home", model_path, location="http://localhost:6333")
    if os.geteuid() == 0:  # others are told that they may not
        with pytest.raises(ConfigError, match="no folder can be created in /proc: choose another --home"):
            knnstore.create("/proc/home", model_path)
    assert not list(tmp_path.iterdir())
