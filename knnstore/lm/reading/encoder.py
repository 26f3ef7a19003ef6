"""One forward pass of the base model over packed windows: keys, and log-probabilities where wanted."""

from collections.abc import Generator
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from knnstore.errors import ModelOutputError
from knnstore.lm.keys import (
    Joining,
    KeyCapture,
    KeyLocation,
    Projection,
    hidden_forward,
    keys_forward,
    locate,
    model_precision,
)
from knnstore.lm.reading.model_cache import as_cache_argument
from knnstore.store import Reader

_CHUNK_VALUES = 1 << 24
"""How many logits are in memory at once: 64 MiB of float32."""
_CHUNK_VALUES_CPU = 1 << 21
"""On a CPU: what stays in its cache."""
_LEAST_ROWS = 64  # of a chunk: for each the whole head is read

_SINGLE = Joining()

_CHECKED_TOKENS = 32
"""From so many tokens the model predicts, before the first text is stored."""

_LOWEST = -1e30  # a token that the model rules out at -inf adds nothing to the entropy


class Encoded(NamedTuple):
    """What a forward pass gave at the n positions asked for."""

    keys: Tensor
    """float32, shape (n, d)."""

    states: Tensor
    """Opaque, shape (n, ...): what `Encoder.log_probs` makes probabilities from."""


class LogProbs(NamedTuple):
    """What the base model predicts at n positions."""

    gold: Tensor
    """log p_LM of one token each, float32, shape (n,), <= 0."""

    best: Tensor
    """log p_LM of the likeliest token, float32, shape (n,), <= 0: the model's confidence."""

    entropy: Tensor
    """Of p_LM, in nats, float32, shape (n,), >= 0."""


class Encoder:
    """A causal language model as a source of keys and of gold-token probabilities.

    The output head, most of the cost of a small model, runs only on the positions asked for and
    only by `log_probs`. Some models do more than their head between hidden state and logits (cap or
    scale them); this is found by one trial, and for them the logits of the full model are used.

    Args:
        model: a causal language model in evaluation mode.
        location: where the states are that keys are made of.
        joining: which of them make a key; default is one alone.
        projection: how keys are brought to fewer dimensions; None leaves them as they are.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        location: KeyLocation,
        joining: Joining = _SINGLE,
        projection: Projection | None = None,
    ) -> None:
        self.model = model
        self.location = location
        self.joining = joining
        self.projection = projection
        self.head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._is_checked = False

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model reads and predicts; see `vocabulary_size`."""
        return vocabulary_size(self.model)

    @classmethod
    def of(cls, model: PreTrainedModel, store: Reader) -> Self:
        """The source of a store's keys."""
        place, joining = Joining.parse(store.identity.key)
        return cls(model, locate(model, place), joining, Projection.of(store))

    def check_once(self, input_ids: NDArray[np.int64]) -> None:
        """Predict from the beginning of some text, the first time that this is called.

        Storing stops at the keys, so that a model whose output is damaged would be noticed only later.

        Args:
            input_ids: shape (b, t), of a text that is to be stored.

        Raises:
            ModelOutputError: a prediction is NaN or infinite.
        """
        if self._is_checked or not input_ids.size:
            return
        ids = torch.as_tensor(input_ids[:1, :_CHECKED_TOKENS], device=self.model.device)
        with torch.inference_mode():
            output: Any = self.model(ids, use_cache=False)
        check_logits(self.model, output.logits)
        self._is_checked = True

    def keys(self, input_ids: NDArray[np.int64] | Tensor, at: NDArray[np.int64] | Tensor) -> Tensor:
        """Run the model over rows of tokens, no further than to the keys.

        Args:
            input_ids: shape (b, t); rows may be padded on the right.
            at: shape (n,): indices into the b * t flattened positions.

        Returns:
            The keys at these positions, float32, shape (n, d), on the model's device.
        """
        wanted = torch.as_tensor(at, device=self.model.device)
        return self.projected(self.joining(self.key_states(input_ids)).flatten(0, 1)[wanted])

    def key_states(self, input_ids: NDArray[np.int64] | Tensor) -> Tensor:
        """What keys are made of, shape (b, t, d), in the model's dtype; `input_ids` as of `keys`."""
        ids = torch.as_tensor(input_ids, device=self.model.device)
        if self._stops_at_keys:
            return keys_forward(self.model, self.location, ids)
        return hidden_forward(self.model, self.location, ids)[0]

    def encode(self, input_ids: NDArray[np.int64] | Tensor, at: NDArray[np.int64] | Tensor) -> Encoded:
        """Run the model over rows of tokens; the arguments are those of `keys`.

        Returns:
            Keys and states at these positions, on the model's device.
        """
        ids = torch.as_tensor(input_ids, device=self.model.device)
        wanted = torch.as_tensor(at, device=self.model.device)
        if self._head_suffices:
            keys, states = hidden_forward(self.model, self.location, ids)
        else:
            with torch.inference_mode(), KeyCapture(self.model, self.location) as capture:
                states = self.model(ids, use_cache=False).logits
            keys = capture.keys(*ids.shape)
        return Encoded(self.projected(self.joining(keys).flatten(0, 1)[wanted]), states.flatten(0, 1)[wanted])

    def encode_in_parts(
        self, input_ids: NDArray[np.int64] | Tensor, at: NDArray[np.int64] | Tensor, most: int
    ) -> Generator[None, None, Encoded]:
        """Do what `encode` does for one row, a few tokens in each forward pass, with a cache of attention.

        Args:
            input_ids: shape (1, t).
            at: as of `keys`.
            most: tokens of a pass, >= 1. A row of no more tokens is read as `encode` reads it, to the bit;
                others differ from that by rounding.

        Yields:
            None after each pass but the last.

        Returns:
            As `encode`.
        """
        ids = torch.as_tensor(input_ids, device=self.model.device)
        if ids.shape[1] <= most:
            return self.encode(ids, at)
        cache, keys, states = DynamicCache(), list[Tensor](), list[Tensor]()
        for start in range(0, ids.shape[1], most):
            if start:
                yield
            part = ids[:, start : start + most]
            with torch.inference_mode(), KeyCapture(self.model, self.location) as capture:
                read = self.model.base_model if self._head_suffices else self.model
                output: Any = read(
                    input_ids=part,
                    attention_mask=torch.ones_like(ids[:, : start + most]),
                    use_cache=True,
                    **as_cache_argument(read, cache),
                )
            keys.append(capture.keys(*part.shape))
            states.append(output[0] if self._head_suffices else output.logits)
        wanted = torch.as_tensor(at, device=self.model.device)
        joined = self.projected(self.joining(torch.cat(keys, 1)).flatten(0, 1)[wanted])
        return Encoded(joined, torch.cat(states, 1).flatten(0, 1)[wanted])

    def gold_log_probs(self, states: Tensor, gold: NDArray[np.int64] | Tensor) -> Tensor:
        """Return the first part of `log_probs` alone."""
        return self.log_probs(states, gold).gold

    def log_probs(self, states: Tensor, gold: NDArray[np.int64] | Tensor) -> LogProbs:
        """Return the base model's log-probability of one token and of its best guess, and its entropy.

        Memory stays bounded: the vocabulary is touched for a few positions at a time.

        Args:
            states: from `encode`, n positions.
            gold: token ids, shape (n,).
        """
        tokens = torch.as_tensor(gold, device=states.device)[:, None]
        found = LogProbs(*(torch.empty(len(states), device=states.device) for _ in LogProbs._fields))
        values = _CHUNK_VALUES_CPU if states.device.type == "cpu" else _CHUNK_VALUES
        rows = max(_LEAST_ROWS, values // self.model.config.get_text_config().vocab_size)
        with torch.inference_mode():
            for start in range(0, len(states), rows):
                part = slice(start, start + rows)
                logits = self._logits(states[part]).float()
                probs = logits.softmax(1)
                best = probs.amax(1).log()
                total = logits.amax(1) - best
                found.gold[part] = logits.gather(1, tokens[part])[:, 0] - total
                found.best[part] = best
                expected = probs.mul_(logits).sum(1)
                if expected.isnan().any():  # 0 times -inf
                    expected = (logits.softmax(1) * logits.clamp(min=_LOWEST)).sum(1)
                found.entropy[part] = total - expected
        if not found.best.isfinite().all():
            raise not_finite(self.model)
        return found

    def _logits(self, states: Tensor) -> Tensor:
        """Return the logits of some states from `encode`, in the model's precision."""
        if not self._head_suffices:
            return states
        with model_precision():
            logits: Tensor = self.head(states)
        return logits

    def projected(self, keys: Tensor) -> Tensor:
        """The keys as the store has them, float32, from joined states, shape (..., d)."""
        return keys.float() if self.projection is None else self.projection(keys)

    @cached_property
    def _stops_at_keys(self) -> bool:
        ids = torch.arange(8, device=self.model.device)[None]
        # Parts that are moved to the device for their turn would not be moved back.
        return not hasattr(self.model, "hf_device_map") and torch.equal(
            keys_forward(self.model, self.location, ids),
            hidden_forward(self.model, self.location, ids)[0],
        )

    @cached_property
    def _head_suffices(self) -> bool:
        """Whether logits are the head's output for the base model's states, tried on a few tokens."""
        if self.head is None or self.model.base_model is self.model:
            return False
        ids = torch.arange(8, device=self.model.device)[None]
        with torch.inference_mode():
            whole: Any = self.model(ids, use_cache=False).logits
            hidden = self.model.base_model(ids, use_cache=False)[0]
            try:
                logits = self.head(hidden)
            except RuntimeError:  # another layer lies between them, and gives the states another width
                return False
            # The same operations on the same shapes: equal to the bit, or something else is done.
            return torch.equal(whole.float(), logits.float())


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of tokens that a model reads and predicts: rows of its embeddings and of its head."""
    counts = [int(model.config.get_text_config().vocab_size)]
    inputs, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    for module, name in ((inputs, "num_embeddings"), (head, "out_features")):
        count = getattr(module, name, None)
        if isinstance(count, int):
            counts.append(count)
    return min(counts)


def check_logits(model: PreTrainedModel, logits: Tensor, mask: Tensor | None = None) -> None:
    """Refuse logits from which no token can be predicted. A token that is ruled out at -inf is allowed.

    Args:
        model: the model that made them, named in the message.
        logits: shape (b, kept, v), of the last positions.
        mask: attention mask, shape (b, n), 0 for padding. Predictions at padding are not looked at.

    Raises:
        ModelOutputError: at some position the largest logit is NaN or infinite.
    """
    if logits.sum(dtype=torch.float32).isfinite():  # a sum takes a tenth of the time of a maximum
        return
    finite = logits.amax(-1).isfinite()
    if finite.all():
        return
    if mask is not None and mask.ndim == 2 and finite.ndim == 2 and mask.shape[1] >= finite.shape[1]:
        finite = finite | (mask[:, -finite.shape[1] :] == 0).to(finite.device)
        if finite.all():
            return
    raise not_finite(model)


def not_finite(model: PreTrainedModel, what: str = "logits") -> ModelOutputError:
    """Build the error for NaN or infinite output; names the dtype, which is the likely cause at float16."""
    dtype = str(model.dtype).removeprefix("torch.")
    if model.dtype == torch.float16:
        cause = "float16 overflows above 65,504 in this model: load it in bfloat16 or float32 (--dtype)"
    else:
        cause = "the checkpoint is damaged, or its training had diverged: load the model's files again"
    return ModelOutputError(f"the model's {what} are NaN or infinite ({dtype}); probably {cause}")
