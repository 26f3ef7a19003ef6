"""The trainable substitute of a store: what part of its gain needs no retrieval (Xu et al. 2023).

    p_sub(y|x) ∝ Σ_{rows w of y} exp(w · f(x))        p'(y) = λ p_sub(y) + (1 - λ) p_LM(y)

f(x) is the key with which a store would be searched. Every token that the documents hold has n rows,
trained on the keys and tokens of these documents while the language model stays as it is
(https://arxiv.org/abs/2301.02828). Where a store is used beside it, that is mixed with p' in place of
p_LM; mixers still choose by the model's own confidence.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from knnstore.errors import FingerprintMismatchError, OutdatedWeightsError
from knnstore.lm.mixing import mix_log_probs
from knnstore.lm.settings import Substitute
from knnstore.store import Identity, KNNStore, Reader

_CHUNK_VALUES = 1 << 24
"""How many probabilities are in memory at once: 64 MiB of float32."""

_KEPT = 2  # heads in memory

_MADE_FOR = ("model_fingerprint", "key", "projection", "dim", "vocab_size")


class SubstituteHead:
    """The rows of a substitute in memory.

    Args:
        rows: float32, shape (n, s, d): n rows of each of s tokens.
        tokens: which these are, int64, shape (s,), each once.
        vocab_size: tokens of the vocabulary, v; those without rows have p_sub = 0.
    """

    def __init__(self, rows: Tensor, tokens: Tensor, vocab_size: int) -> None:
        self.rows = rows
        self.tokens = tokens
        self.vocab_size = vocab_size
        self._columns = torch.full((vocab_size,), -1, device=tokens.device)
        self._columns[tokens] = torch.arange(len(tokens), device=tokens.device)

    def columns(self, tokens: Tensor) -> Tensor:
        """Which of its tokens these are, -1 for those without rows; int64, shape of `tokens`."""
        return self._columns[tokens.to(self._columns.device)]

    def log_probs(self, keys: Tensor) -> Tensor:
        """Give log p_sub for keys on any device, float32, shape (m, d).

        Returns:
            float32, shape (m, v), -inf where p_sub is 0; on the device of the rows.
        """
        keys = keys.to(self.rows.device)
        log_probs = torch.full((len(keys), self.vocab_size), -torch.inf, device=keys.device)
        for at in self._chunks(len(keys)):
            log_probs[at, self.tokens] = token_scores(keys[at], self.rows).log_softmax(1)
        return log_probs

    def gold_log_probs(self, keys: Tensor, gold: Tensor) -> Tensor:
        """Give log p_sub of one token for each key; `keys` as of `log_probs`, `gold` of shape (m,).

        Returns:
            float32, shape (m,), -inf where p_sub is 0; on the keys' device.
        """
        columns = self.columns(gold)
        found = torch.empty(len(keys))
        for at in self._chunks(len(keys)):
            scores = token_scores(keys[at].to(self.rows.device), self.rows)
            chosen = scores.gather(1, columns[at, None].clamp(min=0))[:, 0] - scores.logsumexp(1)
            found[at] = torch.where(columns[at] >= 0, chosen, -torch.inf).cpu()
        return found.to(keys.device)

    def save(self, store: KNNStore) -> str:
        """Save the rows for a store; return the name of what was saved."""
        tensors = {"rows": self.rows.cpu().numpy(), "tokens": self.tokens.cpu().numpy()}
        return store.save_weights(tensors, _made_for(store.identity))

    def _chunks(self, count: int) -> Iterator[slice]:
        step = max(1, _CHUNK_VALUES // max(1, len(self.tokens)))
        return (slice(start, start + step) for start in range(0, count, step))


def token_scores(keys: Tensor, rows: Tensor) -> Tensor:
    """The log of what each token weighs before the softmax, (m, s), from keys (m, d) and rows (n, s, d)."""
    return torch.stack([keys @ row.T for row in rows]).logsumexp(0) if len(rows) > 1 else keys @ rows[0].T


def load_head(store: Reader, substitute: Substitute, device: torch.device | str = "cpu") -> SubstituteHead:
    """Read the rows of a substitute.

    Raises:
        OutdatedWeightsError: a document that it was trained on is gone.
        FingerprintMismatchError: it was trained for another model or other keys.
        CorruptWeightsError: its file is missing or damaged.
    """
    if substitute.is_outdated(store):
        of = ", ".join(substitute.traces.domains) or "the whole store"
        raise OutdatedWeightsError(
            f"the substitute of {of} was trained on documents that were removed or replaced since: train it "
            "again (knnstore substitute), or use settings without it"
        )
    weights = store.load_weights(substitute.weights)
    for name, needed in _made_for(store.identity).items():
        if weights.metadata.get(name) != needed:
            raise FingerprintMismatchError(
                f"the substitute {substitute.weights[:12]} was trained for {name} "
                f"{weights.metadata.get(name)!r}, the store has {needed!r}: train one for this store "
                "(knnstore substitute)"
            )
    rows, tokens = (torch.from_numpy(weights.tensors[name]).to(device) for name in ("rows", "tokens"))
    return SubstituteHead(rows, tokens, store.identity.vocab_size)


class Heads:
    """The heads of the substitutes that settings name, read when they are first used.

    Args:
        store: in whose home they are.
        device: where they compute.
    """

    def __init__(self, store: Reader, device: torch.device | str) -> None:
        self._store = store
        self._device = device
        self._read: dict[str, SubstituteHead] = {}

    def __call__(self, substitute: Substitute) -> SubstituteHead:
        """The head of a substitute.

        Raises:
            OutdatedWeightsError, FingerprintMismatchError, CorruptWeightsError: as `load_head`.
        """
        if substitute.is_outdated(self._store):
            self._read.clear()  # and `load_head` refuses it
        if substitute.weights not in self._read:
            if len(self._read) == _KEPT:
                self._read.clear()
            self._read[substitute.weights] = load_head(self._store, substitute, self._device)
        return self._read[substitute.weights]

    def mix(self, substitute: Substitute | None, lm_log_probs: Tensor, keys: Tensor) -> Tensor:
        """Mix the model's distributions with those of a substitute, if there is one.

        Args:
            substitute: that of the settings.
            lm_log_probs: log p_LM, float32, shape (m, v).
            keys: float32, shape (m, d).
        """
        if substitute is None:
            return lm_log_probs
        predicted = self(substitute).log_probs(keys).to(lm_log_probs.device)
        return mix_log_probs(lm_log_probs, predicted, substitute.lam)

    def mix_gold(
        self, substitute: Substitute | None, lm_log_probs: Tensor, keys: Tensor, gold: Tensor
    ) -> Tensor:
        """Mix the probabilities of one token for each key, if there is a substitute.

        Args:
            substitute: that of the settings.
            lm_log_probs: log p_LM of the token, float32, shape (m,).
            keys: float32, shape (m, d).
            gold: the token, int64, shape (m,).
        """
        if substitute is None:
            return lm_log_probs
        return mix_log_probs(lm_log_probs, self(substitute).gold_log_probs(keys, gold), substitute.lam)


def _made_for(identity: Identity) -> dict[str, Any]:
    return {name: getattr(identity, name) for name in _MADE_FOR}
