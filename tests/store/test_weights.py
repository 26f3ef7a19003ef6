"""Fitted weights in files: named by their content, checked when read, kept while settings name them."""

import hashlib

import numpy as np
import pytest

from knnstore.errors import ConfigError, CorruptWeightsError, ReadOnlyError
from knnstore.store import KNNStore, SavedSettings, Weights

TENSORS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.float16([0.5])}
METADATA = {"model": "Ä", "widths": [2, 3]}


def test_weights_come_back_as_they_were_saved_under_the_hash_of_their_file(store, home) -> None:
    name = store.save_weights(TENSORS, METADATA)
    file = home / "weights" / name
    assert (
        name
        == f"{hashlib.sha256(file.read_bytes()).hexdigest()}.safetensors"
        == Weights(TENSORS, METADATA).name
    )
    assert store.save_weights(dict(reversed(TENSORS.items())), METADATA) == name
    with KNNStore.open(home) as reader:
        found = reader.load_weights(name)
        with pytest.raises(ReadOnlyError):
            reader.save_weights(TENSORS, {})
    assert found.metadata == METADATA
    assert found.tensors.keys() == TENSORS.keys()
    for key, tensor in TENSORS.items():
        assert found.tensors[key].dtype == tensor.dtype
        np.testing.assert_array_equal(found.tensors[key], tensor)


def test_what_no_settings_name_any_more_is_removed_when_settings_are_saved(store, writer, home) -> None:
    writer.add("law", "1")
    names = [store.save_weights({"w": np.float32([n])}, {}) for n in range(3)]
    half = home / "weights" / f"{names[0]}.tmp"
    half.write_bytes(b"left by a crash")
    store.save_settings(SavedSettings({"mixer": {"weights": names[0]}}))
    assert {file.name for file in half.parent.iterdir()} == set(names)  # the others may be named next
    store.save_settings(SavedSettings({"gate": {"weights": names[1]}}), ["law"])
    store.close()
    with KNNStore.open(home, "a") as again:
        again.save_settings(SavedSettings({"k": 1}))
        assert {file.name for file in half.parent.iterdir()} == {names[1]}


def test_a_damaged_or_missing_file_is_named_and_never_used(store, home) -> None:
    name = store.save_weights(TENSORS, {})
    store.save_settings(SavedSettings({"mixer": {"weights": name}}))
    assert store.verify() == []
    file = home / "weights" / name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for what in ("is damaged", "cannot be read"):
        (problem,) = store.verify()
        assert name in problem
        assert what in problem
        with pytest.raises(CorruptWeightsError, match=what):
            store.load_weights(name)
        file.unlink(missing_ok=True)
    store.save_weights(TENSORS, {})
    assert store.verify() == []
    with pytest.raises(ConfigError, match="not the name"):
        store.load_weights("../catalog.db")
