"""Running the base model on windows of text to compute keys and log-probabilities; checks of its logits."""

import math
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
    KeyDescription,
    KeyLocation,
    Projection,
    Source,
    locate,
    make_forward_kwargs,
    reads_source,
    restore_autocast,
    run_until_keys,
    run_without_head,
)
from knnstore.lm.reading.model_cache import as_cache_argument
from knnstore.lm.reading.windows import SourceBatch

_CHUNK_VALUES = 1 << 24
"""Number of logits that are in memory at once on a GPU: 64 MiB of float32."""
_CHUNK_VALUES_CPU = 1 << 21
"""Number of logits that are in memory at once on a CPU: 8 MiB, which fits its cache."""
_LEAST_ROWS = 64  # least rows of a chunk: each chunk reads all weights of the output head

_SINGLE = Joining()

_CHECKED_TOKENS = 32
"""Number of tokens of the first text for which the logits are checked before the text is stored."""

_LOWEST = -1e30  # replaces a logit of -inf, so that the token adds 0 to the entropy


class Encoded(NamedTuple):
    """Result of a forward pass at n selected positions."""

    keys: Tensor
    """Keys, float32, shape (n, d)."""

    states: Tensor
    """Input of `Encoder.log_probs`, shape (n, ...): final hidden states or logits, depending on the model."""


class LogProbs(NamedTuple):
    """Predictions of the base model at n positions."""

    gold: Tensor
    """log p_LM of the target token, float32, shape (n,), <= 0."""

    best: Tensor
    """log p_LM of the most probable token, float32, shape (n,), <= 0."""

    entropy: Tensor
    """Entropy of p_LM in nats, float32, shape (n,), >= 0."""


class Encoder:
    """Computes keys and target-token probabilities with a language model.

    For an encoder-decoder model, each text comes with its source.

    The output head is most of the cost of a small model, so it runs only in `log_probs` and only on the
    selected positions. Some models cap or scale the output of the head. The encoder detects such a model with
    one trial, and then takes the logits from full forward passes.

    Args:
        model: a language model in evaluation mode.
        location: the place of the hidden states that make keys.
        joining: how a key is computed from the states of several tokens; default is a single state.
        projection: linear map of keys to fewer dimensions; None leaves keys unchanged.
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
    def reads_source(self) -> bool:
        """True for an encoder-decoder model, which predicts a text together with its source."""
        return reads_source(self.model)

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model both accepts as input and predicts."""
        return vocabulary_size(self.model)

    @classmethod
    def for_store(cls, model: PreTrainedModel, store: KeyDescription) -> Self:
        """Create the encoder that computes keys like a store's: same place, joining and projection.

        Args:
            model: the language model.
            store: the store, or another object that describes its keys.

        Raises:
            ConfigError: the model does not have the place of the keys.
            CorruptWeightsError: the file of the projection is missing or damaged.
            FingerprintMismatchError: the projection was fitted for the keys of another store.
        """
        place, joining = Joining.parse(store.identity.key)
        return cls(model, locate(model, place), joining, Projection.load(store))

    def check_once(self, input_ids: NDArray[np.int64], source: SourceBatch | None = None) -> None:
        """Check that the model's logits for the first tokens of a text are finite.

        After one success, later calls do nothing. Adding documents computes only keys, so without this check
        nobody would notice that the model's logits are damaged.

        Args:
            input_ids: tokens of the text that will be stored, shape (b, t). Empty input is not checked.
            source: the source of each row for an encoder-decoder model, else None.

        Raises:
            ModelOutputError: at some position the largest logit is NaN or infinite.
        """
        if self._is_checked or not input_ids.size:
            return
        ids = torch.as_tensor(input_ids[:1, :_CHECKED_TOKENS], device=self.model.device)
        first = None if source is None else SourceBatch(source.input_ids[:1], source.attention_mask[:1])
        with torch.inference_mode():
            output: Any = self.model(**self._make_forward_kwargs(ids, first), use_cache=False)
        check_logits(self.model, output.logits)
        self._is_checked = True

    def compute_keys(
        self,
        input_ids: NDArray[np.int64] | Tensor,
        at: NDArray[np.int64] | Tensor,
        source: SourceBatch | None = None,
    ) -> Tensor:
        """Compute the keys at selected positions of rows of tokens.

        Layers after the place of the keys do not run, if the model allows it.

        Args:
            input_ids: token ids, shape (b, t); rows may be padded on the right.
            at: indices into the b * t flattened positions, int64, shape (n,).
            source: the source of each row for an encoder-decoder model, else None.

        Returns:
            The keys, float32, shape (n, d), on the model's device.
        """
        wanted = torch.as_tensor(at, device=self.model.device)
        return self.project(self.joining(self.compute_key_states(input_ids, source)).flatten(0, 1)[wanted])

    def compute_key_states(
        self, input_ids: NDArray[np.int64] | Tensor, source: SourceBatch | None = None
    ) -> Tensor:
        """Compute the hidden states of rows of tokens at the place in the model where keys are captured.

        `joining` and `project` turn the states into keys. Layers after this place do not run, if the model
        allows it.

        Args:
            input_ids: token ids, shape (b, t); rows may be padded on the right.
            source: the source of each row for an encoder-decoder model, else None.

        Returns:
            The states, h components each, shape (b, t, h), in the model's dtype, on its device; padding has
            states too.
        """
        ids = torch.as_tensor(input_ids, device=self.model.device)
        given = self._move_source(source)
        if self._stops_at_keys:
            return run_until_keys(self.model, self.location, ids, given)
        return run_without_head(self.model, self.location, ids, given)[0]

    def encode(
        self,
        input_ids: NDArray[np.int64] | Tensor,
        at: NDArray[np.int64] | Tensor,
        source: SourceBatch | None = None,
    ) -> Encoded:
        """Run the model, and return its keys and hidden states at selected positions.

        `log_probs` computes log-probabilities from the states.

        Args:
            input_ids: token ids, shape (b, t); rows may be padded on the right.
            at: indices into the b * t flattened positions, int64, shape (n,).
            source: the source of each row for an encoder-decoder model, else None.

        Returns:
            Keys and states at the n positions, on the model's device.
        """
        ids = torch.as_tensor(input_ids, device=self.model.device)
        wanted = torch.as_tensor(at, device=self.model.device)
        if self._head_suffices:
            keys, states = run_without_head(self.model, self.location, ids, self._move_source(source))
        else:
            with torch.inference_mode(), KeyCapture(self.model, self.location) as capture:
                states = self.model(**self._make_forward_kwargs(ids, source), use_cache=False).logits
            keys = capture.take_keys(*ids.shape)
        return Encoded(self.project(self.joining(keys).flatten(0, 1)[wanted]), states.flatten(0, 1)[wanted])

    def encode_in_parts(
        self,
        input_ids: NDArray[np.int64] | Tensor,
        at: NDArray[np.int64] | Tensor,
        most: int,
        source: SourceBatch | None = None,
    ) -> Generator[None, None, Encoded]:
        """Compute the result of `encode` for one row, in several forward passes with a KV cache.

        A row with a source is processed in one pass.

        Args:
            input_ids: token ids, shape (1, t).
            at: indices of the n selected positions, int64, shape (n,).
            most: largest number of tokens in a pass, >= 1. A row that fits in one pass has exactly the same
                result as with `encode`. The result for a longer row differs by rounding.
            source: the source of the row for an encoder-decoder model, else None.

        Yields:
            None after each pass except the last.

        Returns:
            The result of `encode`.
        """
        ids = torch.as_tensor(input_ids, device=self.model.device)
        if ids.shape[1] <= most or source is not None:
            return self.encode(ids, at, source)
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
            keys.append(capture.take_keys(*part.shape))
            states.append(output[0] if self._head_suffices else output.logits)
        wanted = torch.as_tensor(at, device=self.model.device)
        joined = self.project(self.joining(torch.cat(keys, 1)).flatten(0, 1)[wanted])
        return Encoded(joined, torch.cat(states, 1).flatten(0, 1)[wanted])

    def target_log_probs(self, states: Tensor, gold: NDArray[np.int64] | Tensor) -> Tensor:
        """Return the model's log-probability of the target token at n positions, float32, shape (n,).

        Args:
            states: ``Encoded.states`` of the positions.
            gold: target tokens, int64, shape (n,).
        """
        return self.log_probs(states, gold).gold

    def log_probs(self, states: Tensor, gold: NDArray[np.int64] | Tensor) -> LogProbs:
        """Compute log p_LM of the target tokens and of the most probable tokens, and the entropy of p_LM.

        The logits are computed for a few positions at a time, so that memory is bounded.

        Args:
            states: ``Encoded.states`` of n positions.
            gold: target tokens, int64, shape (n,).

        Returns:
            Three float32 tensors of shape (n,), on the device of `states`.

        Raises:
            ModelOutputError: the logits of a position are NaN or infinite.
        """
        tokens = torch.as_tensor(gold, device=states.device)[:, None]
        found = LogProbs(*(torch.empty(len(states), device=states.device) for _ in LogProbs._fields))
        values = _CHUNK_VALUES_CPU if states.device.type == "cpu" else _CHUNK_VALUES
        rows = max(_LEAST_ROWS, values // self.model.config.get_text_config().vocab_size)
        with torch.inference_mode():
            for start in range(0, len(states), rows):
                part = slice(start, start + rows)
                logits = self._compute_logits(states[part]).float()
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
            raise create_not_finite_error(self.model)
        return found

    def _compute_logits(self, states: Tensor) -> Tensor:
        """Compute the logits of n positions, shape (n, v), in model precision.

        Args:
            states: ``Encoded.states`` of the positions. If they are logits already, they are returned
                unchanged.
        """
        if not self._head_suffices:
            return states
        with restore_autocast():
            logits: Tensor = self.head(states)
        return logits

    def project(self, states: Tensor) -> Tensor:
        """Convert joined hidden states to keys: apply the projection to fewer dimensions, if there is one.

        Args:
            states: results of `joining`, shape (..., h).

        Returns:
            float32, shape (..., d).
        """
        return states.float() if self.projection is None else self.projection(states)

    def _make_forward_kwargs(self, ids: Tensor, source: SourceBatch | None) -> dict[str, Tensor]:
        """Return the keyword arguments of a forward pass of the model over texts (and their sources, if any).

        Args:
            ids: token ids of the texts, on the model's device, shape (b, t).
            source: the source of each row for an encoder-decoder model, else None.
        """
        return make_forward_kwargs(self.model, ids, self._move_source(source))

    def _move_source(self, source: SourceBatch | None) -> Source | None:
        """Return sources as tensors on the model's device; None stays None."""
        if source is None:
            return None
        return Source(*(torch.as_tensor(part, device=self.model.device) for part in source))

    @cached_property
    def _stops_at_keys(self) -> bool:
        """True if a forward pass that stops at the keys computes the same keys as a full pass.

        The first use runs both passes on 8 tokens and compares their keys. The value is always False for a
        model that the library Accelerate has placed on devices (`hf_device_map`). Accelerate moves layers to
        the device during a pass, and after a stopped pass they would stay there.
        """
        ids = torch.arange(8, device=self.model.device)[None]
        source = Source.make_probe(self.model, 1)
        # Layers that accelerate moves to the device for their turn would stay on the device.
        return not hasattr(self.model, "hf_device_map") and torch.equal(
            run_until_keys(self.model, self.location, ids, source),
            run_without_head(self.model, self.location, ids, source)[0],
        )

    @cached_property
    def _head_suffices(self) -> bool:
        """True if the output head alone computes the logits from the final hidden states.

        False if the model has no separate head, or changes the head's output, for example by a cap. The test
        runs once, on 8 tokens.
        """
        if self.head is None or self.model.base_model is self.model:
            return False
        ids = torch.arange(8, device=self.model.device)[None]
        inputs = make_forward_kwargs(self.model, ids, Source.make_probe(self.model, 1))
        with torch.inference_mode():
            whole: Any = self.model(**inputs, use_cache=False).logits
            hidden = self.model.base_model(**inputs, use_cache=False)[0]
            try:
                logits = self.head(hidden)
            except RuntimeError:  # a layer before the head changes the width
                return False
            # The operations and shapes are the same, so the logits are equal to the bit if nothing is added.
            return torch.equal(whole.float(), logits.float())


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of tokens that a model both accepts as input and predicts.

    Returns the minimum of the configured size, the number of embeddings and the number of outputs of the
    head.
    """
    counts = [int(model.config.get_text_config().vocab_size)]
    inputs, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    for module, name in ((inputs, "num_embeddings"), (head, "out_features")):
        count = getattr(module, name, None)
        if isinstance(count, int):
            counts.append(count)
    return min(counts)


def check_logits(model: PreTrainedModel, logits: Tensor, mask: Tensor | None = None) -> None:
    """Check that the largest logit of each position is finite, so that a token can be predicted.

    Other logits may be -inf.

    Args:
        model: the model that computed the logits; its dtype is in the message.
        logits: logits of the last positions, shape (b, kept, v).
        mask: attention mask, shape (b, n), 0 at padding. Logits at padding are not checked.

    Raises:
        ModelOutputError: at some position the largest logit is NaN or infinite.
    """
    if math.isfinite(logits.sum(dtype=torch.float32).item()):  # a sum is ten times faster than a maximum
        return
    finite = logits.amax(-1).isfinite()
    if finite.all():
        return
    if mask is not None and mask.ndim == 2 and finite.ndim == 2 and mask.shape[1] >= finite.shape[1]:
        finite = finite | (mask[:, -finite.shape[1] :] == 0).to(finite.device)
        if finite.all():
            return
    raise create_not_finite_error(model)


class DelayedCheck:
    """Checks the logits of decoding steps on a GPU like `check_logits`, but reports an error one step later.

    `check_logits` makes the program wait for the GPU once more in each step. `DelayedCheck` only starts the
    check in a step, and reads its result when the next step begins or the text ends: the program has then
    already waited for the step's token.

    Args:
        model: the model that computes the logits.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._begun: tuple[Tensor, Tensor] | None = None

    def begin(self, logits: Tensor) -> Tensor:
        """Begin to check the logits of a step.

        Args:
            logits: logits of a step without padding, shape (b, 1, v).

        Returns:
            A tensor on the device of the logits, bool, shape (): False if a logit is NaN or +inf, or all
            logits of a text are -inf.
        """
        is_finite = logits.amax(-1).isfinite().all()  # NaN is the largest value
        self._begun = logits, is_finite
        return is_finite

    def finish(self) -> None:
        """Read the result of the check that was begun last, if any.

        Raises:
            ModelOutputError: the largest logit of a text is NaN or infinite.
        """
        begun, self._begun = self._begun, None
        if begun is not None and not begun[1]:
            check_logits(self._model, begun[0])


def create_not_finite_error(model: PreTrainedModel, what: str = "logits") -> ModelOutputError:
    """Return the error for NaN or infinite output, with the dtype and the probable cause.

    Args:
        model: the model.
        what: the output that is not finite, ``logits`` or ``states``, for the message.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    if model.dtype == torch.float16:
        cause = "float16 overflows above 65,504 in this model: load it in bfloat16 or float32 (--dtype)"
    else:
        cause = "the checkpoint is damaged, or its training had diverged: load the model's files again"
    return ModelOutputError(f"the model's {what} are NaN or infinite ({dtype}); probably {cause}")
