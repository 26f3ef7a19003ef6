"""Model folders whose files were damaged or made to harm: each is refused in one line, and nothing is run."""

import json
import pickle
import shutil
from pathlib import Path

import pytest

import knnstore
from knnstore.errors import ConfigError


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


def assert_refused(folder: Path, match: str = "") -> None:
    """No store is made for the folder, and the error is one line."""
    with pytest.raises(ConfigError, match=match) as refused:
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
        ("config.json", {"n_layer": 10**9}),
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
        ("tokenizer.json", {"model": None}),
        ("tokenizer.json", {"added_tokens": 3}),
        ("tokenizer.json", {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}),
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_one_line(folder, file, fields) -> None:
    change(folder / file, **fields)
    assert_refused(folder, "config.json of the model .* layers|the model .* cannot be loaded on")


@pytest.mark.parametrize("content", ["[1]", "3", "null", '"x"'])
@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_json_that_is_no_object_is_one_line(folder, file, content) -> None:
    (folder / file).write_text(content)
    assert_refused(folder, "cannot be loaded on")
