"""Model folders whose files were damaged or made to harm: each is refused in one line, and nothing is run."""

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import knnstore
from knnstore.errors import (
    ConfigError,
    FingerprintMismatchError,
    InputError,
    KnnstoreError,
    ModelOutputError,
)
from tests.lm.test_creating import write_gguf


class Harm:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._code = f"open({str(mark)!r}, 'w').close()"

    def __reduce__(self):
        return exec, (self._code,)


@pytest.fixture
def folder(model_path, tmp_path) -> Path:
    """A copy of the model's folder."""
    return Path(shutil.copytree(model_path, tmp_path / "model"))


def change(file: Path, **fields: object) -> None:
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | fields))


def assert_refused(folder: Path, match: str = "", error: type[KnnstoreError] = ConfigError) -> None:
    """No store is made for the folder, or GGUF file, and the error is one line."""
    with pytest.raises(error, match=match) as refused:
        knnstore.create(folder.parent / "home", str(folder))
    assert len(str(refused.value).splitlines()) == 1
    assert not (folder.parent / "home").exists()


def index_of(folder: Path, shard: object) -> dict:
    return {"metadata": {"total_size": 1}, "weight_map": {"transformer.wte.weight": shard}}


@pytest.mark.parametrize("shard", ["pytorch_model.bin", "../outside.safetensors", "/etc/passwd", 3, None])
def test_an_index_names_safetensors_of_its_folder_alone(folder, shard) -> None:
    mark = folder.parent / "ran"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Harm(mark)))
    shutil.move(folder / "model.safetensors", folder.parent / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_of(folder, shard)))
    assert_refused(folder, r"index.json names .*: only safetensors files of its own folder are loaded")
    assert not mark.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "shard", ["pytorch_model.bin", pytest.param("../outside.safetensors", marks=pytest.mark.exhaustive)]
)
def test_an_index_of_the_hub_is_checked_too(folder, shard) -> None:
    """A model in the hub's cache, read by a process of its own that reaches no hub."""
    mark, cached = folder.parent / "ran", folder.parent / "hub" / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Harm(mark)))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_of(folder, shard)))
    shutil.move(folder, cached / "snapshots" / ("0" * 40))
    done = subprocess.run(
        [sys.executable, "-c", "import knnstore; knnstore.create('home', 'some/model')"],
        capture_output=True,
        text=True,
        cwd=folder.parent,
        env={**os.environ, "HF_HOME": str(folder.parent), "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert f"names '{shard}': only safetensors files of its own folder are loaded" in done.stderr
    assert not mark.exists()


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {}}', "3", "{", "[" * 200_000]
)
def test_an_index_that_is_none_is_named(folder, content) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    assert_refused(folder, "index.json (is not an index of weights|cannot be read)")


def test_pickled_weights_are_never_loaded(folder) -> None:
    mark = folder.parent / "ran"
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Harm(mark)))
    assert_refused(folder, "no file named model.safetensors")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        ("config.json", {"vocab_size": "abc"}),
        ("config.json", {"n_embd": 0}),
        ("config.json", {"n_head": 0}),
        ("config.json", {"n_positions": 2**70}),
        ("config.json", {"n_layer": 0}),
        ("config.json", {"n_layer": -1}),
        ("config.json", {"model_type": ["gpt2"]}),
        ("config.json", {"auto_map": 3}),
        ("config.json", {"dtype": "float7"}),
        ("config.json", {"activation_function": "os.system"}),
        ("config.json", {"quantization_config": 3}),
        ("config.json", {"text_config": 3}),
        ("config.json", {"__class__": "x"}),
        ("tokenizer_config.json", {"auto_map": 3}),
        ("tokenizer_config.json", {"tokenizer_class": 3}),
        ("tokenizer_config.json", {"bos_token": 3}),
        ("tokenizer_config.json", {"model_max_length": "x"}),
        ("tokenizer.json", {"model": None}),
        ("tokenizer.json", {"added_tokens": 3}),
        ("tokenizer.json", {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}),
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_one_line(folder, file, fields) -> None:
    change(folder / file, **fields)
    assert_refused(folder, "the configuration of the model .* layers|the model .* cannot be loaded")


@pytest.mark.slow
def test_a_billion_layers_are_not_built(folder) -> None:
    """In a process of its own, with a limit: without the check, its memory and time have no end."""
    change(folder / "config.json", n_layer=10**9)
    code = "import sys, knnstore; knnstore.create(sys.argv[1] + '/home', sys.argv[2])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder.parent), str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "ConfigError: the configuration of the model" in done.stderr


def test_weights_that_are_nan_are_refused_at_once(folder) -> None:
    data = (folder / "model.safetensors").read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    (folder / "model.safetensors").write_bytes(data[:start] + b"\xff" * (len(data) - start))
    assert_refused(folder, "logits are NaN or infinite", ModelOutputError)


def test_a_shape_unlike_the_configuration_is_named(folder) -> None:
    change(folder / "config.json", n_positions=65)
    assert_refused(folder, "its weights have other shapes than its configuration asks for$")


def test_tokens_that_the_model_has_not_are_warned_of(folder, caplog) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words |= {f"far-{at}": len(words) + at for at in range(3)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with knnstore.create(folder.parent / "home", str(folder)) as lm:
        (warning,) = [line for line in caplog.messages if "tokenizer has" in line]
        assert "3 tokens that are not among the model's 101, such as 'far-0' (token 101)" in warning
        with pytest.raises(InputError, match="far-1"):
            lm.add(["far-1"], domain="a")


def test_a_store_says_that_the_configuration_has_changed(folder) -> None:
    knnstore.create(folder.parent / "home", str(folder)).store.close()
    change(folder / "config.json", layer_norm_epsilon=0.1)
    with pytest.raises(FingerprintMismatchError, match=r"the configuration of the model .* is not the one"):
        knnstore.load(folder.parent / "home")


GGUF_TENSORS, GGUF_VALUES = 8, 16  # where the header holds their counts


def at_offset(content: bytes, offset: int, form: str, value: int) -> bytes:
    data = struct.pack(form, value)
    return content[:offset] + data + content[offset + len(data) :]


def after_name(content: bytes, name: bytes, value: int) -> bytes:
    """Set the number that follows a name, and its type, in the header of a GGUF file."""
    return at_offset(content, content.index(name) + len(name) + 4, "<I", value)


GGUF_DAMAGES = {
    "empty": (lambda content: b"", "."),
    "cut in its header": (lambda content: content[:3000], "its file ends too early"),
    "cut in its weights": (lambda content: content[: len(content) // 2], "."),
    "other format": (lambda content: b"\x80\x04" + content[2:], "not a valid JSON|magic"),
    "2**60 tensors": (lambda content: at_offset(content, GGUF_TENSORS, "<Q", 2**60), "."),
    "2**60 values": (lambda content: at_offset(content, GGUF_VALUES, "<Q", 2**60), "."),
    "no layers": (lambda content: after_name(content, b"llama.block_count", 0), "asks for 0 layers"),
    "many layers": (lambda content: after_name(content, b"llama.block_count", 2**31), "layers"),
    "large heads": (lambda content: after_name(content, b"llama.rope.dimension_count", 10**6), "head_dim"),
    "other width": (lambda content: after_name(content, b"llama.embedding_length", 48), "."),
    "no heads": (lambda content: after_name(content, b"llama.attention.head_count", 0), "."),
    "NaN": (lambda content: content[: -len(content) // 2] + b"\xff" * (len(content) // 2), "NaN or infinite"),
}  # fmt: skip


@pytest.mark.parametrize("damage", GGUF_DAMAGES)
def test_damaged_gguf_files_are_one_line(tmp_path, damage) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    change, reason = GGUF_DAMAGES[damage]
    file.write_bytes(change(file.read_bytes()))
    assert_refused(file, reason, ModelOutputError if damage == "NaN" else ConfigError)


@pytest.mark.parametrize("content", ["[1]", "3", "null", '"x"'])
@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_json_that_is_no_object_is_one_line(folder, file, content) -> None:
    (folder / file).write_text(content)
    assert_refused(folder, f"cannot be loaded.*, because of {file}: ")


def test_a_text_that_makes_the_tokenizer_panic_is_an_error_of_the_input(folder) -> None:
    """A regular expression that backtracks too often; a panic of tokenizers is no `Exception`."""
    file = folder / "tokenizer.json"
    slow = {"type": "Split", "pattern": {"Regex": "(x+)+$"}, "behavior": "Isolated", "invert": False}
    content = json.loads(file.read_text())
    before = content["pre_tokenizer"]
    change(file, pre_tokenizer={"type": "Sequence", "pretokenizers": [slow, before]})
    with knnstore.create(folder.parent / "home", str(folder)) as lm:
        lm.add(["w5 w6 w7"], domain="news")
        with pytest.raises(InputError, match=r"tokenizer fails on this text .*retry-limit"):
            lm.add(["x" * 40 + "!"], domain="news")
        assert len(list(lm.store.documents())) == 1
