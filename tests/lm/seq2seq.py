"""Tiny random encoder-decoder models, pairs for them, and their predictions with a store by definition."""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    M2M100Config,
    MarianConfig,
    MBartConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
)

VOCABULARY = 61
BOS, EOS, PAD, UNKNOWN, LANGUAGE = range(5)
_SPECIAL = {"vocab_size": VOCABULARY, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
_SIZES = {
    **_SPECIAL,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
_T5 = {**_SPECIAL, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}


@dataclass(frozen=True)
class Family:
    """A family of models: its shape, the module whose input is the key, and how its decoder begins."""

    config: PreTrainedConfig
    ffn: str
    start: int
    forced: int | None = None
    generation: dict[str, Any] = field(default_factory=dict)

    @property
    def prefix(self) -> list[int]:
        return [self.start] if self.forced is None else [self.start, self.forced]


_FC1 = "model.decoder.layers.1.fc1"
FAMILIES = {
    "marian": Family(
        MarianConfig(**_SIZES, decoder_vocab_size=VOCABULARY), _FC1, PAD, None, {"forced_eos_token_id": EOS}
    ),
    "m2m_100": Family(M2M100Config(**_SIZES), _FC1, EOS, LANGUAGE),  # NLLB has the same class
    "t5": Family(T5Config(**_T5), "decoder.block.1.layer.2.DenseReluDense", PAD),
    "bart": Family(BartConfig(**_SIZES), _FC1, EOS, BOS, {"forced_eos_token_id": EOS}),
    "mbart": Family(MBartConfig(**_SIZES), _FC1, LANGUAGE, None, {"forced_eos_token_id": EOS}),
}


def make_model(name: str, **changes: Any) -> PreTrainedModel:
    """Build a model; the same weights each time, large enough that predictions depend on the context."""
    family = FAMILIES[name]
    config = deepcopy(family.config)
    config.update(changes)
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.2)
        if name == "marian":
            model.final_logits_bias.normal_()
    options = {"decoder_start_token_id": family.start, "forced_bos_token_id": family.forced}
    for option, value in {**options, **family.generation}.items():
        setattr(model.generation_config, option, value)
    return model


def make_tokenizer(padding_side: str = "right") -> PreTrainedTokenizerFast:
    """Words w5, w6, ... are the tokens 5, 6, ..., after special ones; a source ends with EOS."""
    names = ["<s>", "</s>", "<pad>", "<unk>", "<de>", *(f"w{i}" for i in range(5, VOCABULARY))]
    words = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=["<de>"],
        padding_side=padding_side,
        model_input_names=["input_ids", "attention_mask"],
    )


def make_pairs(count: int, seed: int = 0, *, domain: str = "p") -> list[dict[str, str]]:
    """Return pairs of random words: sources of 2 to 8 words, and texts of 1 to 8."""
    rng = np.random.default_rng(seed)

    def words(low: int) -> str:
        return " ".join(f"w{i}" for i in rng.integers(5, VOCABULARY, rng.integers(low, 9)))

    return [{"id": f"{domain}{i}", "source": words(2), "text": words(1)} for i in range(count)]


class Definition:
    """A model with the records of some pairs, by definition: one text at a time, no cache, no engine.

    Args:
        model: the model.
        family: its family.
        tokenizer: its tokenizer.
        pairs: the stored pairs.
        k: number of neighbors.
        lam: weight of the store.
        temperature: T of the distances.
        discounts: weights of the earlier states in a key.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        family: Family,
        tokenizer: PreTrainedTokenizerFast,
        pairs: list[dict[str, str]],
        *,
        k: int,
        lam: float,
        temperature: float,
        discounts: tuple[float, ...] = (0.5, 0.35),
    ) -> None:
        self._model, self._prefix, self._tokenizer = model, family.prefix, tokenizer
        self._module = model.get_submodule(family.ffn)
        self._k, self._lam, self._temperature, self._discounts = k, lam, temperature, discounts
        self.padding = 0
        """Number of padding tokens before the sources that are read from now on."""
        keys, values = [], []
        for pair in pairs:
            text = [*(int(word[1:]) for word in pair["text"].split()), EOS]
            found, _ = self._read(pair["source"], [*self._prefix, *text])
            keys.append(found[len(self._prefix) - 1 : -1])
            values += text
        # Engines keep keys in half precision.
        self._keys, self._values = np.concatenate(keys).astype(np.float16).astype(float), np.array(values)

    def _read(self, source: str, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the key and log p_LM at each token of a text."""
        states = []
        hook = self._module.register_forward_pre_hook(lambda _, args: states.append(args[0]))
        words = [*(int(word[1:]) for word in source.split()), EOS]
        ids = torch.tensor([[PAD] * self.padding + words])
        inputs = {"attention_mask": torch.tensor([[0] * self.padding + [1] * len(words)])}
        inputs |= {"decoder_input_ids": torch.tensor([tokens]), "use_cache": False}
        with torch.no_grad():
            logits = self._model(ids, **inputs).logits[0]
        hook.remove()
        single = states[0].reshape(len(tokens), -1).double().numpy()
        joined = single.copy()
        for back, discount in enumerate(self._discounts, 1):
            joined[back:] += discount * np.roll(single[: len(tokens) - back], back, axis=1)
        return joined, logits.double().log_softmax(-1).numpy()

    def log_probs(self, source: str, tokens: list[int]) -> np.ndarray:
        """Return log p of every token after each token of a text, which includes the first tokens."""
        keys, p_lm = self._read(source, tokens)
        rows = []
        for key, log_p in zip(keys, p_lm, strict=True):
            distances = ((self._keys - key) ** 2).sum(1)
            nearest = np.argsort(distances)[: self._k]
            weights = np.exp((distances[nearest[0]] - distances[nearest]) / self._temperature)
            p_knn = np.bincount(self._values[nearest], weights / weights.sum(), VOCABULARY)
            rows.append(np.log(self._lam * p_knn + (1 - self._lam) * np.exp(log_p) + 1e-300))
        return np.array(rows)

    def _next(self, source: str, tokens: list[int], left: int) -> np.ndarray:
        """Return log p of the next token; forced tokens are certain."""
        forced = None
        if len(tokens) < len(self._prefix):
            forced = self._prefix[len(tokens)]
        elif left == 1 and self._model.generation_config.forced_eos_token_id is not None:
            forced = EOS
        if forced is not None:
            return np.where(np.arange(VOCABULARY) == forced, 0.0, -np.inf)
        return self.log_probs(source, tokens)[-1]

    def greedy(self, source: str, new: int) -> list[int]:
        """Return the first tokens and up to `new` tokens after the first one."""
        tokens = self._prefix[:1]
        for left in range(new, 0, -1):
            tokens.append(int(self._next(source, tokens, left).argmax()))
            if tokens[-1] == EOS:
                break
        return tokens

    def beams(self, source: str, new: int, count: int) -> list[int]:
        """Return the best text of a beam search that stops as soon as `count` texts have ended.

        The score of a text is its mean log p.
        """
        running, ended = [(0.0, self._prefix[:1])], []
        for left in range(new, 0, -1):
            candidates = sorted(
                (
                    (score + log_p, [*tokens, token])
                    for score, tokens in running
                    for token, log_p in enumerate(self._next(source, tokens, left).tolist())
                    if np.isfinite(log_p)
                ),
                key=lambda candidate: -candidate[0],
            )[: 2 * count]
            running = []
            for rank, (score, tokens) in enumerate(candidates):
                if tokens[-1] != EOS and left > 1:
                    running.append((score, tokens))
                elif rank < count:
                    ended.append((score / (len(tokens) - 1), tokens))
            running = running[:count]
            ended = sorted(ended, key=lambda one: -one[0])[:count]
            if len(ended) == count:
                break
        return ended[0][1]
