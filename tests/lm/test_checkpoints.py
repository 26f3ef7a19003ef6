"""A model's files are compared with a store without loading the model."""

import shutil
from copy import deepcopy

import pytest
import torch
from transformers import AutoModelForCausalLM

from knnstore.errors import ConfigError, FingerprintMismatchError
from knnstore.lm.keys import model_fingerprint
from knnstore.lm.reading import check_checkpoint, checkpoints
from tests.lm.conftest import FAMILIES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", ["1GB", "40KB"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox"])
def test_the_fingerprint_of_files_is_that_of_the_loaded_model(family, shards, dtype, tmp_path) -> None:
    """Tied weights (GPT-2) are in the files once. Weights with other names (GPT-NeoX) have to be loaded."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(deepcopy(FAMILIES[family].config)).to(dtype).save_pretrained(
        tmp_path, max_shard_size=shards
    )
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards == "40KB")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    expected = None if family == "gpt_neox" else model_fingerprint(loaded)
    assert checkpoints._compute_file_fingerprint(str(tmp_path), "main") == expected


def test_files_without_the_prefix_of_the_causal_model_are_read(tmp_path) -> None:
    model = AutoModelForCausalLM.from_config(deepcopy(FAMILIES["gpt2"].config))
    model.transformer.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert checkpoints._compute_file_fingerprint(str(tmp_path), "main") == model_fingerprint(loaded)


def test_another_model_is_refused(make_lm, model_path, tmp_path) -> None:
    identity = make_lm().store.identity
    check_checkpoint(identity, str(model_path))
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(deepcopy(FAMILIES["gpt2"].config)).save_pretrained(tmp_path)
    with pytest.raises(FingerprintMismatchError, match=str(tmp_path)):
        check_checkpoint(identity, str(tmp_path))


def test_files_that_cannot_be_read_are_named(make_lm, model_path, tmp_path) -> None:
    shutil.copytree(model_path, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        check_checkpoint(make_lm().store.identity, str(tmp_path))
