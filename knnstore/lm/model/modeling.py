"""A causal language model with a store, as an ordinary transformers model."""

import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from knnstore.errors import ConfigError
from knnstore.lm import scoring
from knnstore.lm.calibration import calibrate
from knnstore.lm.components import KEYS, RecentText
from knnstore.lm.explanation import explain
from knnstore.lm.keys import KeyCapture, in_full_precision, keep_positions
from knnstore.lm.model.delegating import delegate_to_base, is_answered_by_base, is_trainer_calling
from knnstore.lm.model.generation import StoreGeneration
from knnstore.lm.model.logits import LogitMixer
from knnstore.lm.model.passes import ForwardPass
from knnstore.lm.model.registering import KNNLMConfig, of_base_model, write_type
from knnstore.lm.model.saving import read_config, write_config
from knnstore.lm.model.text_generation import generate_text, with_cache
from knnstore.lm.model.text_layer import attach_texts, texts_of_pass
from knnstore.lm.reading import (
    Encoder,
    TextReader,
    add,
    as_cache_argument,
    check_logits,
    check_matches,
    check_tokens,
    find_cache,
    load_model,
    sync,
)
from knnstore.lm.settings import KNNSettings, Purpose, Resolver, resolve, save_default_settings
from knnstore.lm.text_state import TextBatch, TextState, append_pass
from knnstore.store import KNNStore

_OTHER_WEIGHTS = (
    "a model with a store keeps its weights, for the store's keys are of these: give the base model {} "
    "first, and make a store for that with knnstore.create"
)


@delegate_to_base
class KNNLMForCausalLM(PreTrainedModel, StoreGeneration, GenerationMixin):  # type: ignore[no-untyped-call]
    """Any causal language model of transformers, with retrieval from a store mixed into its output.

    `forward` returns log-probabilities of the mixture as ``logits``, so that `generate` in all its modes,
    pipelines, `Trainer.evaluate` and evaluation harnesses work as they do with the base model. It
    shares the base model's weights, configuration and generation configuration.

    Args:
        base: the causal language model.
        store: where to retrieve from; keys are taken at the place that its identity names.
        knn: the settings of calls that give none; default are those that the store has.
        tokenizer: the model's tokenizer, which only methods that take texts, and n-grams, need.

    Raises:
        FingerprintMismatchError: model or tokenizer are not those that the store was made with.

    Example:
        >>> model = KNNLMForCausalLM.from_base(base, store)  # doctest: +SKIP
        >>> model.generate(ids, knn=KNNSettings(k=64, lam=0.5))  # doctest: +SKIP
    """

    config_class = KNNLMConfig
    base_model_prefix = "base"
    # The loss is computed here, whatever the base model's own is.
    loss_type = "ForCausalLM"
    accepts_loss_kwargs = True
    # A search runs on the CPU in the middle of `forward`.
    _can_compile_fullgraph = False

    # Each is documented, and tested, as the function that it is.
    add = in_full_precision(add)
    audit = in_full_precision(scoring.audit)
    calibrate = in_full_precision(calibrate)
    evaluate = in_full_precision(scoring.evaluate)
    explain = in_full_precision(explain)
    export = scoring.export
    keys = in_full_precision(scoring.keys)
    neighbors = in_full_precision(scoring.neighbors)
    p_knn = in_full_precision(scoring.p_knn)
    generate_text = generate_text
    search = in_full_precision(scoring.search)
    sync = in_full_precision(sync)

    def __init__(
        self,
        base: PreTrainedModel,
        store: KNNStore,
        knn: KNNSettings | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        check_matches(base, tokenizer, store.identity)
        # `PreTrainedModel.__init__` prepares a model of one's own: it checks which attention and experts its
        # layers can run. The base model has done all that, and answers for it.
        nn.Module.__init__(self)
        self.base: Any = base
        self.config = base.config
        self.name_or_path = base.config.name_or_path
        self.store = store
        self.tokenizer = tokenizer
        self.knn = knn or KNNSettings()
        self.encoder = Encoder.of(base, store)
        of_base: GenerationConfig | None = getattr(base, "generation_config", None)
        self.generation_config = with_cache(of_base or GenerationConfig())  # type: ignore[no-untyped-call]
        self._resolver = Resolver(store)
        self._mixer = LogitMixer(store)
        self._base_accepts = frozenset(inspect.signature(base.forward).parameters)
        self.training = base.training

    def __getattr__(self, name: str) -> Any:
        """Return what the base model has of this name, if the model with a store has nothing."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            base = self.__dict__.get("_modules", {}).get("base")
            if base is None or not is_answered_by_base(base, name):
                raise
            return getattr(base, name)

    @property
    def reader(self) -> TextReader:
        """The base model as it reads text, in the store's windows; a `ConfigError` without a tokenizer."""
        if self.tokenizer is None:
            raise ConfigError("the model has no tokenizer: give one to from_base, or use knnstore.load")
        identity = self.store.identity
        return TextReader(self.encoder, self.tokenizer, identity.max_length, identity.stride)

    def resolve_settings(
        self, knn: KNNSettings | None = None, purpose: Purpose = Purpose.SCORING
    ) -> KNNSettings:
        """Return the settings in force for a call with `knn`; see `knnstore.lm.resolve`.

        The default is ``self.knn``. The result is cached: it is the same object until the store changes.
        """
        return self._resolver(knn or self.knn, purpose)

    def after_adding(self) -> None:
        """Keep the default settings of these documents, so that later ones do not change them."""
        is_unchosen = self.knn == KNNSettings(selection=self.knn.selection)
        if save_default_settings(self.store) and is_unchosen:
            self.knn = resolve(self.store, KNNSettings(selection=self.knn.selection))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.store.close()

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
            dtype: data type of its weights.
            **options: passed on to ``AutoModelForCausalLM.from_pretrained``.

        Raises:
            ConfigError: there is no ``knn_config.json``, or it is of a newer format.
            StoreNotFoundError: the store is not where it was.
        """
        name, revision, store, knn = read_config(Path(directory), store, knn)
        given = {"revision": revision, "dtype": dtype, **of_base_model(options)}
        base, tokenizer = load_model(name, device=device, **given)
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
            FingerprintMismatchError: its weights have changed since the store was opened, and would be lost.
        """
        check_matches(self.base, None, self.store.identity)
        write_config(Path(save_directory), self.base, self.store, self.knn)
        write_type(save_directory, self.base.config, self.tokenizer)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the base model's forward pass, see `torch.compile`; the search runs as it is."""
        self.base.compile(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Set training mode, or evaluation mode, of the base model.

        Raises:
            ConfigError: a `Trainer` is about to train the model.
        """
        if mode and is_trainer_calling():
            raise ConfigError(
                "a model with a store cannot be trained: its keys are of the weights as they are now. Train "
                "the base model (Trainer(model=lm.base)), save it, and make a store for that with "
                "knnstore.create"
            )
        super().train(mode)
        return self

    def load_adapter(self, *_: Any, **__: Any) -> Any:
        """Raise a `ConfigError`: an adapter changes the states that the store's keys are."""
        raise ConfigError(_OTHER_WEIGHTS.format("an adapter"))

    def add_adapter(self, *_: Any, **__: Any) -> None:
        """Raise a `ConfigError`: an adapter changes the states that the store's keys are."""
        raise ConfigError(_OTHER_WEIGHTS.format("an adapter"))

    def push_to_hub(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        """Raise a `ConfigError`: what `save_pretrained` writes names a store on this machine."""
        raise ConfigError(
            "a model with a store cannot be pushed to the hub, which would get the path of the store alone: "
            "push the base model (lm.base.push_to_hub), and copy the store's folder"
        )

    def needs_text(self, knn: KNNSettings) -> bool:
        """Check whether predictions with these settings need more of the text than the model's own cache."""
        return not knn.is_model_alone and (knn.needs_text or bool(self.encoder.joining.discounts))

    def prefix_for(self, each: Sequence[KNNSettings]) -> int | None:
        """Return the token before every document, which n-grams and other components leave out of a text.

        None where there is no such token, or where no settings look at a text's tokens: only then a model
        without a tokenizer will do.
        """
        reads_tokens = any(one.parts.keys() - {KEYS, RecentText.name} for one in each)
        return self.reader.prefix if reads_tokens else None

    def extend_texts(
        self,
        texts: Sequence[TextState],
        tokens: Tensor | None,
        states: Tensor,
        is_text: NDArray[np.bool_] | None,
    ) -> tuple[Tensor, TextBatch]:
        """Extend texts by a forward pass, and make its keys; see `append_pass`."""
        joining, project = self.encoder.joining, self.encoder.projected
        extended: tuple[Tensor, TextBatch] = append_pass(texts, tokens, states, is_text, joining, project)
        return extended

    @in_full_precision
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
        knn: KNNSettings | Sequence[KNNSettings] | None = None,
        text_mask: Tensor | None = None,
        return_dict: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Run the base model and mix what its keys retrieve into its predictions.

        Positions whose attention mask is 0 are not searched. Where λ is 0 or nothing is found at
        any position, the base model's logits are returned as they are. NaN or infinite logits raise
        `ModelOutputError`, and tokens that the model does not have `InputError`.

        Args:
            input_ids: int64, shape (b, t).
            attention_mask: shape (b, past + t), 0 for padding; other shapes reach the base model only.
            position_ids: shape (b, t).
            past_key_values: the same as `cache`, under its name before transformers 5.24.
            inputs_embeds: input of the base model in place of input_ids, shape (b, t, h). With both,
                input_ids are the tokens that these embeddings stand for.
            labels: shape (b, t), -100 is ignored; gives the loss of the mixture.
            use_cache: True to return a cache.
            logits_to_keep: number of last positions to predict from (0 is all), or their indices.
            knn: settings of this call, or of each row; default ``self.knn``. Rows that share an object are
                searched for together.
            text_mask: 0 where a new position is padding, shape (b, t), if attention_mask has not two
                dimensions; `generate` gives it.
            return_dict: False returns a tuple.
            cache: the cache of earlier tokens; the base model gets it under its own name. This model adds a
                layer with the texts so far, which keys of several states, n-grams and the recent text need. A
                cache that another model has filled works only for settings without these.
            **kwargs: further arguments of the base model, and ``num_items_in_batch`` for the loss.

        Returns:
            The base model's output with ``logits`` float32 log-probabilities of the mixture,
            shape (b, kept, vocabulary), and ``loss``.
        """
        given = [knn or self.knn] if isinstance(knn, KNNSettings | None) else knn
        each = [self.resolve_settings(one) for one in given]
        of_loss = {key: kwargs.pop(key) for key in ("num_items_in_batch", "shift_labels") if key in kwargs}
        inputs: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "use_cache": use_cache,
            "logits_to_keep": logits_to_keep,
        }
        inputs = {name: value for name, value in inputs.items() if name in self._base_accepts}
        inputs |= as_cache_argument(self.base, past_key_values if cache is None else cache)
        if inputs_embeds is not None:
            inputs.pop("input_ids", None)
        read_tokens = input_ids if inputs_embeds is None else inputs_embeds
        assert read_tokens is not None
        batch, length = read_tokens.shape[:2]
        # 1) Find the texts that the pass continues, before the model reads on in its cache.
        known = {**inputs, **kwargs, "attention_mask": attention_mask, "position_ids": position_ids}
        texts, is_text, why_not = texts_of_pass(known, batch, length, text_mask)
        if texts is None and any(self.needs_text(one) for one in each):
            raise ConfigError(why_not)
        # 2) Run the base model.
        try:
            with KeyCapture(self.base, self.encoder.location) as capture:
                output = self.base(**inputs, **kwargs, return_dict=True)
        except IndexError:
            if input_ids is not None:  # the likely cause; whatever else it is stays as it was raised
                check_tokens(input_ids.flatten().cpu().numpy(), self.encoder.vocabulary, self.tokenizer)
            raise
        logits = output.logits
        if "logits_to_keep" not in self._base_accepts:
            logits = keep_positions(logits, logits_to_keep)
        if not self.training:  # in training a step that overflows is left to the loss scaler
            check_logits(self.base, logits, attention_mask)
        # 3) Extend the texts, and let them ride in the cache that the model returns.
        is_mixed = not all(one.is_model_alone for one in each)
        states = capture.keys(batch, length)
        if texts is None:
            keys, batch_of_texts = self.encoder.projected(states), None
        else:
            keys, batch_of_texts = self.extend_texts(texts, input_ids, states, is_text)
        # Some models change the cache that they are given, and return none.
        attach_texts(output if find_cache(output) is not None else known, texts)
        # 4) Mix.
        if is_mixed:
            prefix = self.prefix_for(each)
            read = ForwardPass(logits, keys, is_text, batch_of_texts, logits_to_keep, prefix)
            logits = self._mixer.mix(read, each)
        mixed: CausalLMOutputWithPast = output
        mixed.logits = logits
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1], **of_loss)
            mixed = type(output)(**{**output, "loss": loss})
        return mixed.to_tuple() if return_dict is False else mixed
