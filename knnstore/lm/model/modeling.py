"""A causal language model with a store, as an ordinary transformers model."""

import inspect
import json
import os
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from knnstore.errors import ConfigError, StoreNotFoundError
from knnstore.lm.keys import KeyCapture, Projection, keep_positions, locate
from knnstore.lm.model.logits import Positions, mix_logits
from knnstore.lm.model.store_mixin import StoreMixin
from knnstore.lm.reading import Tokens, check_matches, load_model
from knnstore.lm.retrieval import STATES_KEPT, PointerStates, TextKeys, TextPass, sequence_ids_of, whole_texts
from knnstore.lm.settings import KNNSettings, weights_for
from knnstore.lm.substitute import Heads
from knnstore.store import KNNStore, save_weights

CONFIG_NAME = "knn_config.json"
_FORMAT = 1


class KNNLMForCausalLM(StoreMixin, PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """Any causal language model of transformers, with retrieval from a store mixed into its output.

    `forward` returns log-probabilities of the mixture as ``logits``, so that `generate` in all its modes,
    pipelines, `Trainer.evaluate` and evaluation harnesses work as they do with the base model. It
    shares the base model's weights, configuration and generation configuration.

    Args:
        base: the causal language model.
        store: where to retrieve from; keys are taken at the place that its identity names.
        knn: the settings of calls that give none; default `KNNSettings()`.
        tokenizer: the model's tokenizer, which only `add`, `evaluate`, `explain` and
            `generate_text` need.

    Raises:
        FingerprintMismatchError: model or tokenizer are not those that the store was made with.

    Example:
        >>> model = KNNLMForCausalLM.from_base(base, store)  # doctest: +SKIP
        >>> model.generate(ids, knn=KNNSettings(k=64, lam=0.5))  # doctest: +SKIP
    """

    base_model_prefix = "base"
    # The base model has made sure of its own attention; here nothing is to be refused.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    # A search runs on the CPU in the middle of `forward`.
    _can_compile_fullgraph = False

    def __init__(
        self,
        base: PreTrainedModel,
        store: KNNStore,
        knn: KNNSettings | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        check_matches(base, tokenizer, store.identity)
        super().__init__(base.config)
        self.base: Any = base
        self.store = store
        self.tokenizer = tokenizer
        self.knn = knn or KNNSettings()
        self.location = locate(base, store.identity.key)
        self.projection = Projection.of(store)
        self._heads = Heads(store, base.device)
        self.generation_config = base.generation_config
        self._text_keys = TextKeys(self._keys_of, store.identity.metric)
        self._base_accepts = frozenset(inspect.signature(base.forward).parameters)
        if hasattr(base, "hf_device_map"):
            self.hf_device_map = base.hf_device_map
        self.train(base.training)

    # -- making, saving and loading

    @classmethod
    def from_base(
        cls,
        base: PreTrainedModel,
        store: KNNStore,
        knn: KNNSettings | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> Self:
        """Give a store to a model; the arguments are those of the class."""
        return cls(base, store, knn, tokenizer)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        directory: str | os.PathLike[str],
        *,
        store: KNNStore | None = None,
        knn: KNNSettings | None = None,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        **options: Any,
    ) -> Self:
        """Load what `save_pretrained` wrote.

        Args:
            directory: where ``knn_config.json`` is.
            store: an open store in place of the one named there.
            knn: settings in place of those written there.
            device: where the base model runs; see `load_model`.
            dtype: of its weights.
            **options: passed on to ``AutoModelForCausalLM.from_pretrained``.

        Raises:
            ConfigError: there is no ``knn_config.json``, or it is of a newer format.
            StoreNotFoundError: the store is not where it was.
        """
        path = Path(directory) / CONFIG_NAME
        if not path.is_file():
            raise ConfigError(f"{path} does not exist; save_pretrained writes it")
        config = json.loads(path.read_text(encoding="utf-8"))
        if config["format"] > _FORMAT:
            raise ConfigError(
                f"{path} has format {config['format']}, this version knows {_FORMAT}; upgrade knnstore"
            )
        if store is None:
            if config["store"] is None:
                raise StoreNotFoundError(f"{path} names no store; give one: from_pretrained(..., store=...)")
            store = KNNStore.open(config["store"])
        options = {"revision": config["revision"], **options}
        base, tokenizer = load_model(config["base"], device=device, dtype=dtype, **options)
        if knn is None:
            knn = KNNSettings.from_dict(config["knn"], weights_for(store, Path(directory)))
        return cls(base, store, knn, tokenizer)

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | os.PathLike[str], **_: Any
    ) -> None:
        """Write where the base model and the store are, and the settings; never any weights but a gate's.

        Args:
            save_directory: folder for ``knn_config.json``; made when it does not exist.
            **_: options for weight files, which there are none of.

        Raises:
            ConfigError: the base model was never saved, so nothing could load it again.
        """
        base = self.base.name_or_path
        if not base:
            raise ConfigError("the base model has no path or hub id; save it and load it from there first")
        home = self.store.home.path if isinstance(self.store, KNNStore) else None
        config = {
            "format": _FORMAT,
            "base": str(Path(base).resolve()) if Path(base).is_dir() else base,
            "revision": getattr(self.config, "_commit_hash", None) or "main",
            "store": None if home is None else str(Path(home).resolve()),
            "knn": self.knn.to_dict(),
        }
        directory = Path(save_directory)
        directory.mkdir(parents=True, exist_ok=True)
        for weights in self.knn.weights:
            save_weights(directory, weights)
        (directory / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    # -- what transformers asks of a model

    def get_input_embeddings(self) -> nn.Module:
        """Return the base model's."""
        embeddings: nn.Module = self.base.get_input_embeddings()
        return embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Set the base model's."""
        self.base.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the base model's."""
        embeddings: nn.Module | None = self.base.get_output_embeddings()
        return embeddings

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Set the base model's."""
        self.base.set_output_embeddings(new_embeddings)

    def generate(self, *args: Any, knn: KNNSettings | None = None, **kwargs: Any) -> Any:
        """Write text as `GenerationMixin.generate` does; pointers begin at the end of each prompt.

        Args:
            *args: as there.
            knn: settings of this call; default ``self.knn``.
            **kwargs: as there.
        """
        if (knn or self.knn).pointers is not None:
            kwargs.setdefault("pointer_states", PointerStates(STATES_KEPT))
        return super().generate(*args, knn=knn, **kwargs)  # type: ignore[misc]

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        *args: Any,
        inputs_embeds: Tensor | None = None,
        knn: KNNSettings | None = None,
        pointer_states: PointerStates | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Let the base model prepare its inputs, and pass by it the settings and the texts so far."""
        mask = kwargs.get("attention_mask")
        sequence_ids = None
        # The mask is longer where a prompt was given as embeddings, or was read in an earlier call.
        if inputs_embeds is None if mask is None else mask.shape == input_ids.shape:
            sequence_ids = sequence_ids_of(input_ids, mask)
        if inputs_embeds is not None:
            kwargs["inputs_embeds"] = inputs_embeds
        inputs: dict[str, Any] = self.base.prepare_inputs_for_generation(input_ids, *args, **kwargs)
        return {**inputs, "knn": knn, "sequence_ids": sequence_ids, "pointer_states": pointer_states}

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        knn: KNNSettings | None = None,
        sequence_ids: Tensor | None = None,
        pointer_states: PointerStates | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Run the base model and mix what its keys retrieve into its predictions.

        Positions whose attention mask is 0 are not searched. Where λ is 0 or nothing is found at
        any position, the base model's logits are returned as they are.

        Args:
            input_ids: int64, shape (b, t).
            attention_mask: shape (b, past + t), 0 for padding; other shapes reach the base model only.
            position_ids: shape (b, t).
            past_key_values: the cache.
            inputs_embeds: in place of input_ids, shape (b, t, h).
            labels: shape (b, t), -100 is ignored; gives the loss of the mixture.
            use_cache: whether to return a cache.
            logits_to_keep: how many of the last positions to predict from (0 is all), or which ones.
            knn: settings of this call; default ``self.knn``.
            sequence_ids: with a cache, the whole texts: int64, shape (b, past + t), -1 for padding;
                see `knnstore.lm.retrieval.prefix_states`. `generate` gives them.
            pointer_states: what lets pointers go on from the pass before; `generate` gives it.
            return_dict: False returns a tuple.
            **kwargs: whatever else the base model takes, and ``num_items_in_batch`` for the loss.

        Returns:
            The base model's output with ``logits`` float32 log-probabilities of the mixture,
            shape (b, kept, vocabulary), and ``loss``.
        """
        settings = knn or self.knn
        loss_options = {
            name: kwargs.pop(name) for name in ("num_items_in_batch", "shift_labels") if name in kwargs
        }
        inputs: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "inputs_embeds": inputs_embeds,
            "use_cache": use_cache,
            "logits_to_keep": logits_to_keep,
        }
        inputs = {name: value for name, value in inputs.items() if name in self._base_accepts}
        if settings.cache is not None and sequence_ids is None:
            sequence_ids = whole_texts(input_ids, attention_mask, past_key_values)
        with KeyCapture(self.base, self.location) as capture:
            output = self.base(**inputs, **kwargs, return_dict=True)
        logits = output.logits
        if settings.retrieves or settings.cache is not None or settings.substitute is not None:
            tokens = input_ids if input_ids is not None else inputs_embeds
            assert tokens is not None
            keys = capture.keys(*tokens.shape[:2])
            if self.projection is not None:
                keys = self.projection(keys)
            batch, length = keys.shape[:2]
            at = torch.arange(batch * length, device=keys.device).reshape(batch, length, 1)
            kept = keep_positions(at, logits_to_keep)[..., 0]
            mask = attention_mask if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2 else None
            if mask is not None:
                mask = mask[:, -length:].to(keys.device)
            recent = text_pass = None
            if settings.cache is not None:
                assert sequence_ids is not None
                recent = self._text_keys.look_back(
                    sequence_ids,
                    keys.float(),
                    kept.flatten(),
                    settings.cache.size,
                    goes_on=use_cache is not False,
                )
            if settings.pointers is not None:
                if sequence_ids is not None:
                    text_pass = TextPass.of(sequence_ids, batch, length, kept.cpu(), pointer_states)
                else:  # what was read before this pass is not known: pointers begin in it
                    read = None if input_ids is None else sequence_ids_of(input_ids, mask)
                    text_pass = TextPass.of(read, batch, length, kept.cpu(), None)
            attended = torch.ones_like(kept, dtype=torch.bool)
            if mask is not None:
                attended = mask.flatten()[kept] != 0
            positions = Positions(keys.flatten(0, 1)[kept], attended, recent, text_pass)
            logits = mix_logits(self.store, self._heads, logits, positions, settings)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1], **loss_options)
        mixed: CausalLMOutputWithPast = type(output)(**{**output, "loss": loss, "logits": logits})
        return mixed.to_tuple() if return_dict is False else mixed

    def _keys_of(self, tokens: Tokens) -> Tensor:
        """The keys of a text, float32, shape (n, d)."""
        return self.encoder.keys(tokens[None], np.arange(len(tokens)))
