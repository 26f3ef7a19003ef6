"""Tiny random models of the families that knnstore is tried on, and an exact store in a few lines."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from sqlalchemy import make_url
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

import knnstore
from knnstore.datastore import Neighbors, record_ids
from knnstore.lm import KNNLMForCausalLM
from knnstore.lm.calibration import scoring_only
from knnstore.lm.keys import Joining, key_dim, locate, model_fingerprint, tokenizer_fingerprint
from knnstore.lm.reading import Encoder
from knnstore.store import EVERYTHING, Identity, Reader
from knnstore.store.home import Home
from knnstore.store.reader_protocol import Records

scoring_only.PROMPTS = 16  # enough for texts as short as these, and quick

VOCABULARY = 101
SPECIAL = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
LLAMA = {
    **SPECIAL,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Family:
    """A model family: its shape, and by name the modules on which the keys are known to be."""

    config: PreTrainedConfig
    ffn: str
    decoder: str


FAMILIES = {
    "gpt2": Family(
        GPT2Config(**SPECIAL, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        "transformer.h.1.mlp",
        "transformer",
    ),
    "llama": Family(LlamaConfig(**LLAMA), "model.layers.1.mlp", "model"),
    "qwen2": Family(Qwen2Config(**LLAMA), "model.layers.1.mlp", "model"),
    "qwen3": Family(Qwen3Config(**LLAMA), "model.layers.1.mlp", "model"),
    "mistral": Family(MistralConfig(**LLAMA), "model.layers.1.mlp", "model"),
    "gpt_neox": Family(
        GPTNeoXConfig(
            **SPECIAL,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
        ),
        "gpt_neox.layers.1.mlp",
        "gpt_neox",
    ),
    "opt": Family(
        OPTConfig(
            **SPECIAL,
            hidden_size=32,
            word_embed_proj_dim=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
        ),
        "model.decoder.layers.1.fc1",
        "model.decoder",
    ),
}
"""The families that every behavior is tried on."""

ODD_FAMILIES = {
    "gemma2": Gemma2Config(**LLAMA, final_logit_softcapping=2.0),
    "cohere2": Cohere2Config(**LLAMA, logit_scale=0.25),
    "mamba": MambaConfig(**SPECIAL, hidden_size=32, num_hidden_layers=2, state_size=4),
}
"""Models that differ after the head (a cap, a scale) or have no attention."""


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Models this small lose time on every further thread."""
    torch.set_num_threads(1)


@pytest.fixture(
    params=[
        name if name in ("gpt2", "llama", "gpt_neox") else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
    ]
)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def make_model() -> Callable[[str], PreTrainedModel]:
    """Build a random model of a family; the same weights each time."""

    def make(name: str) -> PreTrainedModel:
        config = FAMILIES[name].config if name in FAMILIES else ODD_FAMILIES[name]
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(deepcopy(config)).eval()  # saving writes its dtype there
        # Larger weights than the default's: predictions and keys must depend on the context.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(std=0.2)
        return model

    return make


@pytest.fixture(scope="session")
def model_path(make_model, tokenizer, tmp_path_factory) -> str:
    """A folder with a GPT-2 and its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    make_model("gpt2").save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def model(family: str, make_model: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    return make_model(family)


@pytest.fixture
def ffn_path(family: str) -> str:
    return FAMILIES[family].ffn


@pytest.fixture
def decoder_path(family: str) -> str:
    return FAMILIES[family].decoder


class ExactStore(Reader):
    """The records of some token sequences, searched one distance at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        sequences: Sequence[Sequence[int]],
        key: str,
        joining: Joining,
    ) -> None:
        location = locate(model, key)
        self.identity = Identity(
            model="tiny",
            model_fingerprint=model_fingerprint(model),
            tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
            key=f"{location}{joining}",
            dim=key_dim(model, location),
            metric="l2",
            vocab_size=VOCABULARY,
            max_length=64,
            stride=32,
        )
        self.home = Home(Path("exact"), make_url("sqlite://"))
        self.searched = 0
        """Queries so far."""
        self.keys = np.zeros((0, self.identity.dim), np.float32)
        self.ids = np.zeros(0, np.int64)
        for sequence in sequences:
            rows = np.array([sequence[:-1]], np.int64)
            keys = Encoder(model, location, joining).encode(rows, np.arange(rows.size)).keys
            positions = len(self.ids) + np.arange(rows.size)
            self.keys = np.concatenate([self.keys, keys.numpy()])
            self.ids = np.append(self.ids, record_ids(positions, np.array(sequence[1:])))

    def search(self, queries, k, selection=EVERYTHING) -> Neighbors:
        assert queries.dtype == np.float32
        assert queries.shape[1:] == (self.identity.dim,)
        self.searched += len(queries)
        ids = np.full((len(queries), k), -1)
        distances = np.full((len(queries), k), np.inf, np.float32)
        if selection == EVERYTHING:
            for row, query in enumerate(queries):
                squares = ((self.keys.astype(np.float64) - query) ** 2).sum(1)
                order = np.argsort(squares, kind="stable")[:k]
                ids[row, : len(order)] = self.ids[order]
                distances[row, : len(order)] = squares[order]
        return Neighbors(ids, distances)

    def records(self, selection=EVERYTHING, *, without=(), batch_size=8192) -> Iterator[Records]:
        yield Records(self.ids, self.keys)

    def record_count(self, selection=EVERYTHING) -> int:
        return len(self.ids) if selection == EVERYTHING else 0

    def provenance(self, ids, *, before=16, after=8) -> list[None]:
        return [None] * len(ids)


@pytest.fixture(scope="session")
def make_store(tokenizer: PreTrainedTokenizerFast) -> Callable[..., ExactStore]:
    """Build a store of token sequences; any selection but everything finds nothing in it."""

    def make(
        model: PreTrainedModel,
        sequences: Sequence[Sequence[int]],
        key: str = "ffn_input",
        joining: Joining | None = None,
    ) -> ExactStore:
        return ExactStore(model, tokenizer, sequences, key, joining or Joining())

    return make


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Words w4, w5, ... are the tokens 4, 5, ..., after four special ones; padding on the left."""
    names = ["<s>", "</s>", "<pad>", "<unk>", *(f"w{i}" for i in range(4, VOCABULARY))]
    words = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=64,
        model_input_names=["input_ids", "attention_mask"],
    )


@pytest.fixture(scope="module")
def make_lm(model_path, tmp_path_factory) -> Iterator[Callable[..., KNNLMForCausalLM]]:
    """Make a store for the GPT-2 of some documents by domain; it is open for writing until the module ends.

    Further arguments are those of `knnstore.create`.
    """
    with ExitStack() as stores:

        def make(documents: Mapping[str, Iterable[object]] = MappingProxyType({}), **options: Any):
            made = knnstore.create(tmp_path_factory.mktemp("made") / "home", model_path, **options)
            stores.enter_context(made.store)
            for domain, of_domain in documents.items():
                made.add(of_domain, domain=domain)
            return made

        yield make


@pytest.fixture
def lm(filled, tmp_path) -> Iterator[KNNLMForCausalLM]:
    """A copy, open for writing, of the home that the module's own fixture `filled` makes."""
    shutil.copytree(filled, tmp_path / "home")
    opened = knnstore.load(tmp_path / "home", "a")
    yield opened
    opened.store.close()
