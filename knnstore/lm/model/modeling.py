"""Language models with a store, as ordinary transformers models.

`KNNLM` has everything that the two classes share; each class adds the signature of its `forward`.
"""

import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast, Seq2SeqLMOutput

from knnstore.errors import ConfigError
from knnstore.lm import scoring
from knnstore.lm.calibration import calibrate
from knnstore.lm.components import KEYS, RecentText
from knnstore.lm.explanation import explain
from knnstore.lm.keys import KeyCapture, reads_source, run_without_autocast, select_positions_to_keep
from knnstore.lm.model.delegating import delegate_to_base, is_delegated, is_trainer_calling
from knnstore.lm.model.generation import StoreGeneration
from knnstore.lm.model.logits import LogitMixer
from knnstore.lm.model.passes import ForwardPass
from knnstore.lm.model.registering import (
    KNNLMConfig,
    KNNSeq2SeqConfig,
    select_base_model_options,
    write_transformers_config,
)
from knnstore.lm.model.saving import read_config, write_config
from knnstore.lm.model.text_generation import enable_cache, generate_text
from knnstore.lm.model.text_layer import attach_texts, get_texts_of_pass
from knnstore.lm.model.translation import score_translations, translate
from knnstore.lm.reading import (
    DelayedCheck,
    Encoder,
    TextReader,
    add,
    as_cache_argument,
    check_logits,
    check_matches,
    check_tensors,
    check_tokens,
    find_cache,
    find_decoder_prefix,
    load_model,
    sync,
)
from knnstore.lm.settings import KNNSettings, Purpose, Resolver, resolve, save_default_settings
from knnstore.lm.text_state import TextBatch, TextState, append_pass
from knnstore.store import KNNStore

_OTHER_WEIGHTS = (
    "a model with a store cannot change its weights, because the store's keys were computed with them: "
    "give the base model {} first, and make a store for that with knnstore.create"
)


class _Text(NamedTuple):
    """The arguments of a forward pass that describe its texts."""

    input_ids: Tensor | None
    """Token ids of the new positions, int64, shape (b, t); None if only embeddings are given."""
    embeddings: Tensor | None
    """Embeddings that replace the token ids as input of the model, shape (b, t, h); None for no
    embeddings."""
    attention_mask: Tensor | None
    """0 at padding, shape (b, past + t), or a mask of another shape; None for no padding."""
    position_ids: Tensor | None
    """Positions of the tokens, shape (b, t)."""
    text_mask: Tensor | None
    """0 where a new position is padding, shape (b, t); None if `attention_mask` shows the padding."""


@delegate_to_base
class KNNLM(PreTrainedModel, StoreGeneration, GenerationMixin):  # type: ignore[no-untyped-call]
    """A language model of transformers, with retrieval from a store mixed into its output.

    `forward` returns log-probabilities of the mixture as ``logits``, so that `generate` in all its modes,
    pipelines, `Trainer.evaluate` and evaluation harnesses work as with the base model. The model with a store
    shares the base model's weights and configuration. The object is a context manager that closes the store.

    Args:
        base: the language model.
        store: the store that is searched; its identity names the place in the model where keys are captured.
        knn: settings for calls without the argument ``knn``; default are the settings saved in the store.
        tokenizer: the model's tokenizer. Methods that take texts need it, and so do n-grams.

    Raises:
        FingerprintMismatchError: the store was made with another model or tokenizer.
        ConfigError: the base model is of the other kind, causal or encoder-decoder.
    """

    base_model_prefix = "base"
    accepts_loss_kwargs = True
    _reads_source: ClassVar[bool]
    """True for encoder-decoder models."""
    _config_type: ClassVar[type[KNNLMConfig]]
    """Class of the configuration in a saved folder."""
    # A search runs on the CPU in the middle of `forward`.
    _can_compile_fullgraph = False

    # These methods are functions of other modules; their docstrings are there.
    add = run_without_autocast(add)
    audit = run_without_autocast(scoring.audit)
    calibrate = run_without_autocast(calibrate)
    evaluate = run_without_autocast(scoring.evaluate)
    explain = run_without_autocast(explain)
    export = scoring.export
    keys = run_without_autocast(scoring.compute_keys)
    neighbors = run_without_autocast(scoring.find_neighbors)
    p_knn = run_without_autocast(scoring.compute_p_knn)
    generate_text = generate_text
    search = run_without_autocast(scoring.search)
    sync = run_without_autocast(sync)

    def __init__(
        self,
        base: PreTrainedModel,
        store: KNNStore,
        knn: KNNSettings | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        _check_model_class(type(self), base, store)
        check_matches(base, tokenizer, store.identity)
        # `PreTrainedModel.__init__` is skipped: it checks which attention implementations the layers can run.
        # The base model has done so, and these attributes are delegated to it.
        nn.Module.__init__(self)
        self.base: Any = base
        self.config = base.config
        self.name_or_path = base.config.name_or_path
        self.store = store
        self.tokenizer = tokenizer
        self.knn = knn or KNNSettings()
        self.key_encoder = Encoder.for_store(base, store)
        of_base: GenerationConfig | None = getattr(base, "generation_config", None)
        self.generation_config = enable_cache(of_base or GenerationConfig())  # type: ignore[no-untyped-call]
        self._resolver = Resolver(store)
        self._mixer = LogitMixer(store)
        self._prefix: tuple[Any, tuple[int, ...]] | None = None
        self._base_accepts = frozenset(inspect.signature(base.forward).parameters)
        self.training = base.training

    def __getattr__(self, name: str) -> Any:
        """Return the base model's attribute of this name, if the model with a store has none.

        Raises:
            AttributeError: neither model has the attribute, or it is a private attribute of the base model's
                object.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            base = self.__dict__.get("_modules", {}).get("base")
            if base is None or not is_delegated(base, name):
                raise
            return getattr(base, name)

    @property
    def reader(self) -> TextReader:
        """A `TextReader` that tokenizes text and runs the base model on windows of the store's length.

        Raises:
            ConfigError: the model has no tokenizer.
        """
        if self.tokenizer is None:
            raise ConfigError("the model has no tokenizer: give one to from_base, or use knnstore.load")
        identity = self.store.identity
        return TextReader(self.key_encoder, self.tokenizer, identity.max_length, identity.stride)

    def resolve_settings(
        self, knn: KNNSettings | None = None, purpose: Purpose = Purpose.SCORING
    ) -> KNNSettings:
        """Fill in the unset fields of a call's settings with saved or default values; return the result.

        The result is cached: it is the same object until the store changes.

        Args:
            knn: the settings of the call; default ``self.knn``.
            purpose: scoring or generation; some components are used in scoring only.
        """
        return self._resolver(knn or self.knn, purpose)

    def after_adding(self) -> None:
        """Save the default settings in the store, so that later documents do not change them.

        Called after documents were added. Does nothing if settings are saved for the whole store already. If
        it saves settings, and ``self.knn`` sets nothing but the selection, ``self.knn`` becomes the settings
        that are then in force.
        """
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
        """Create the model from a loaded base model and an open store.

        Args:
            base: the language model.
            store: the store that is searched.
            knn: settings for calls without the argument ``knn``; default are the settings saved in the store.
            tokenizer: the model's tokenizer; None if no method needs text.

        Raises:
            FingerprintMismatchError: the store was made with another model or tokenizer.
            ConfigError: the base model is of the other kind, causal or encoder-decoder.
        """
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
        """Load the base model and open the store whose names `save_pretrained` saved in a folder.

        Args:
            directory: the folder with ``knn_config.json``.
            store: an open store, used instead of the saved store; by default the saved store is opened for
                reading.
            knn: settings that replace the saved settings.
            device: device of the base model; default is the GPU if torch finds one, else the CPU.
            dtype: dtype of the weights; default is float32 on the CPU, and the saved dtype on a GPU.
            **options: passed on to ``from_pretrained`` of the `Auto` class.

        Raises:
            ConfigError: ``knn_config.json`` is missing, or a newer version of knnstore wrote it.
            StoreNotFoundError: the store is not at its saved path.
            FingerprintMismatchError: the store was made with another model or tokenizer.
        """
        name, revision, store, knn = read_config(Path(directory), store, knn)
        given = {"revision": revision, "dtype": dtype, **select_base_model_options(options)}
        base, tokenizer = load_model(name, device=device, **given)
        return cls(base, store, knn, tokenizer)

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | os.PathLike[str], **_: Any
    ) -> None:
        """Write the names of the base model and the store, the settings, and the tokenizer to a folder.

        The weights of the base model and the content of the store are not copied. The networks that the
        settings use are copied. Replaces existing files.

        Args:
            save_directory: the folder, created if needed.
            **_: options of transformers for weight files; ignored.

        Raises:
            ConfigError: the base model has no path or hub id, so it could not be loaded again.
            FingerprintMismatchError: the base model's weights have changed since the store was opened.
        """
        check_matches(self.base, None, self.store.identity)
        write_config(Path(save_directory), self.base, self.store, self.knn)
        config = self._config_type.from_base_config(self.base.config)
        write_transformers_config(save_directory, config, self.tokenizer)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the base model's forward pass in place with `torch.compile`; the search is not compiled."""
        self.base.compile(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Set training mode, or evaluation mode if `mode` is False, and return the model.

        Raises:
            ConfigError: a `Trainer` of transformers calls this to train the model.
        """
        if mode and is_trainer_calling():
            raise ConfigError(
                "a model with a store cannot be trained, because the store's keys would no longer match "
                "its weights. Train the base model (Trainer(model=lm.base)), save it, and make a store for "
                "it with knnstore.create"
            )
        super().train(mode)
        return self

    def load_adapter(self, *_: Any, **__: Any) -> Any:
        """Raise ConfigError, always: an adapter changes hidden states, so the stored keys would not match."""
        raise ConfigError(_OTHER_WEIGHTS.format("an adapter"))

    def add_adapter(self, *_: Any, **__: Any) -> None:
        """Raise ConfigError, always: an adapter changes hidden states, so the stored keys would not match."""
        raise ConfigError(_OTHER_WEIGHTS.format("an adapter"))

    def push_to_hub(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        """Raise ConfigError, always: a saved folder has only the local path of the store, not the store."""
        raise ConfigError(
            "a model with a store cannot be pushed to the hub, because only the path of the store would be "
            "uploaded: push the base model (lm.base.push_to_hub), and copy the store's folder"
        )

    def needs_text(self, knn: KNNSettings) -> bool:
        """Check whether predictions with these settings need more of a text's past than the model's KV cache.

        The KV cache has no tokens, keys or hidden states of earlier tokens, so the caller must keep them.

        Returns:
            True if the settings use the cache of recent text, n-grams or a component of another package, or
            if the settings use any component and a key joins the hidden states of several tokens. False for
            the model alone, and for retrieval by keys of one hidden state each.
        """
        return not knn.is_model_alone and (knn.needs_text or bool(self.key_encoder.joining.discounts))

    def prefix_for(self, each: Sequence[KNNSettings]) -> tuple[int, ...]:
        """Return the tokens that precede every document, e.g. BOS, for components that look at tokens.

        N-grams and other components skip these tokens at the beginning of a text.

        Args:
            each: the settings of the texts.

        Returns:
            The tokens; empty if documents have no prefix. Also empty if no component in `each` looks at
            tokens; then the model needs no tokenizer.

        Raises:
            ConfigError: a component looks at tokens, and the model has no tokenizer.
        """
        reads_tokens = any(settings.parts.keys() - {KEYS, RecentText.name} for settings in each)
        if not reads_tokens:
            return ()
        if self._prefix is None or self._prefix[0] is not self.tokenizer:
            self._prefix = self.tokenizer, self.reader.prefix
        return self._prefix[1]

    def extend_texts(
        self,
        texts: Sequence[TextState],
        tokens: Tensor | None,
        states: Tensor,
        is_text: NDArray[np.bool_] | None,
    ) -> tuple[Tensor, TextBatch]:
        """Compute the keys of a forward pass, and append its tokens and keys to texts.

        Args:
            texts: the text of each of b rows, changed in place.
            tokens: int64, shape (b, t); None if the pass has embeddings without tokens.
            states: hidden states at the place of the keys, shape (b, t, h).
            is_text: False at padding, shape (b, t); None means no padding.

        Returns:
            The keys of all positions, shape (b, t, d), and the extended texts.
        """
        joining, project = self.key_encoder.joining, self.key_encoder.project
        extended: tuple[Tensor, TextBatch] = append_pass(texts, tokens, states, is_text, joining, project)
        return extended

    def _run_and_mix(
        self,
        inputs: dict[str, Any],
        text: _Text,
        *,
        cache: Any,
        labels: Tensor | None,
        logits_to_keep: int | Tensor,
        knn: KNNSettings | Sequence[KNNSettings] | None,
        return_dict: bool | None,
        others: dict[str, Any],
    ) -> Any:
        """Run the base model, and mix the predictions of the store into its predictions.

        Args:
            inputs: arguments of the base model. Arguments that it does not accept are left out.
            text: the arguments that describe the texts: token ids or embeddings, mask and positions.
            cache: the KV cache of earlier tokens, None for no cache.
            labels: target tokens, in the form that the base model's loss function expects; None for no loss.
            logits_to_keep: number of last positions to predict from (0 means all), or indices of positions.
            knn: settings of this call, or a sequence with the settings of each row; None uses ``self.knn``.
            return_dict: False returns a tuple.
            others: further arguments of the base model, and of the loss.

        Returns:
            The base model's output, with log-probabilities of the mixture as ``logits``, and with ``loss`` if
            `labels` are given.
        """
        given = [knn or self.knn] if isinstance(knn, KNNSettings | None) else knn
        resolved = {id(settings): self.resolve_settings(settings) for settings in given}
        each = [resolved[id(settings)] for settings in given]
        delayed_check: DelayedCheck | None = others.pop("delayed_check", None)
        of_loss = {key: others.pop(key) for key in ("num_items_in_batch", "shift_labels") if key in others}
        inputs = {name: value for name, value in inputs.items() if name in self._base_accepts}
        inputs |= as_cache_argument(self.base, cache) | others
        read_tokens = text.input_ids if text.embeddings is None else text.embeddings
        assert read_tokens is not None
        batch, length = read_tokens.shape[:2]
        # 1) Find the texts that the pass continues, before the model extends its cache.
        known = {**inputs, "attention_mask": text.attention_mask, "position_ids": text.position_ids}
        texts, is_text, why_not = get_texts_of_pass(known, batch, length, text.text_mask)
        if texts is None and any(self.needs_text(settings) for settings in each):
            raise ConfigError(why_not)
        # 2) Copy the tokens to main memory. After the pass, the copy would wait for the whole pass.
        tokens = None if texts is None or text.input_ids is None else text.input_ids.cpu()
        # 3) Run the base model.
        try:
            with KeyCapture(self.base, self.key_encoder.location) as capture:
                output = self.base(**inputs, return_dict=True)
        except IndexError:
            # A token out of range is the likely cause; another error is raised again.
            if text.input_ids is not None:
                check_tokens(
                    text.input_ids.flatten().cpu().numpy(), self.key_encoder.vocabulary, self.tokenizer
                )
            raise
        logits = output.logits
        if "logits_to_keep" not in self._base_accepts:
            logits = select_positions_to_keep(logits, logits_to_keep)
        is_finite: Tensor | None = None
        if delayed_check is not None and length == 1 and logits.device.type != "cpu":
            is_finite = delayed_check.begin(logits)
        elif not self.training:  # in training a step that overflows is left to the loss scaler
            check_logits(self.base, logits, text.attention_mask)
        # 4) Extend the texts, and store them in the cache that the model returns.
        is_mixed = not all(settings.is_model_alone for settings in each)
        states = capture.take_keys(batch, length)
        if texts is None:
            keys, batch_of_texts = self.key_encoder.project(states), None
        else:
            keys, batch_of_texts = self.extend_texts(texts, tokens, states, is_text)
        # Some models change the cache in their arguments, and return no cache.
        attach_texts(output if find_cache(output) is not None else known, texts)
        # 5) Mix.
        if is_mixed:
            prefix = self.prefix_for(each)
            read = ForwardPass(logits, keys, is_text, batch_of_texts, logits_to_keep, prefix)
            logits = self._mixer.mix(read, each)
        if is_finite is not None:  # sampling from NaN would break the process
            logits = logits.where(is_finite, 0.0)
        mixed: Any = output
        mixed.logits = logits
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1], **of_loss)
            mixed = type(output)(**{**output, "loss": loss})
        return mixed.to_tuple() if return_dict is False else mixed


class KNNLMForCausalLM(KNNLM):  # type: ignore[no-untyped-call]
    """Any causal language model of transformers, with retrieval from a store mixed into its output.

    See `KNNLM` for arguments and errors.

    Example:
        >>> model = KNNLMForCausalLM.from_base(base, store)  # doctest: +SKIP
        >>> model.generate(ids, knn=KNNSettings(k=64, lam=0.5))  # doctest: +SKIP
    """

    config_class = _config_type = KNNLMConfig
    # The loss is computed from the mixture, also if the base model has another loss.
    loss_type = "ForCausalLM"
    _reads_source = False

    @run_without_autocast
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
        """Run the base model, and mix the predictions of the store into its predictions.

        The store is not searched for positions with attention mask 0. If the weight λ is 0, the base model's
        logits are returned unchanged, so they are not normalized. On a CPU this also happens if nothing is
        found at any position. On a GPU, all logits are then normalized to log-probabilities.

        Args:
            input_ids: int64, shape (b, t).
            attention_mask: shape (b, past + t), 0 for padding; a mask of another shape is only passed on to
                the base model.
            position_ids: shape (b, t).
            past_key_values: the same as `cache`, under its name before transformers 5.24.
            inputs_embeds: input of the base model in place of input_ids, shape (b, t, h). If both are given,
                input_ids are the tokens of these embeddings.
            labels: target tokens, shape (b, t), -100 is ignored; the output then has the loss of the mixture.
            use_cache: True to return a cache.
            logits_to_keep: number of last positions to predict from (0 means all), or indices of positions.
            knn: settings of this call, or a sequence with the settings of each row; default ``self.knn``.
                Rows with the same settings object are searched together.
            text_mask: 0 where a new position is padding, shape (b, t); needed only if attention_mask does not
                have two dimensions. `generate` passes it.
            return_dict: False returns a tuple.
            cache: the KV cache of earlier tokens. This model adds a layer with the texts so far. Three things
                need these texts: keys that are made of several hidden states, n-grams, and the continuous
                cache (keys of the same text). With any of the three, a cache that another model has filled
                raises an error.
            **kwargs: further arguments of the base model, and ``num_items_in_batch`` for the loss.

        Returns:
            The base model's output, with log-probabilities of the mixture as ``logits``, shape (b, kept,
            vocabulary), and with ``loss`` if `labels` are given.

        Raises:
            ModelOutputError: logits of the base model are NaN or infinite, and the model is not in training
                mode.
            InputError: a token is not in the vocabulary of the model; or tokens, embeddings or labels are not
                tensors.
            ConfigError: the settings need the earlier text, and it is not known; or the number of settings
                does not match the rows.
        """
        check_tensors(input_ids=input_ids, inputs_embeds=inputs_embeds, labels=labels)
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "use_cache": use_cache,
            "logits_to_keep": logits_to_keep,
        }
        if inputs_embeds is not None:
            inputs.pop("input_ids")
        mixed: CausalLMOutputWithPast | tuple[Any, ...] = self._run_and_mix(
            inputs,
            _Text(input_ids, inputs_embeds, attention_mask, position_ids, text_mask),
            cache=past_key_values if cache is None else cache,
            labels=labels,
            logits_to_keep=logits_to_keep,
            knn=knn,
            return_dict=return_dict,
            others=kwargs,
        )
        return mixed


class KNNLMForSeq2SeqLM(KNNLM):  # type: ignore[no-untyped-call]
    """Any encoder-decoder model of transformers, with retrieval from a store mixed into its output (kNN-MT).

    A document is a pair ``{"id", "source", "text", ...metadata}``, for example a sentence and its
    translation. Keys are hidden states of the decoder, which has read the source; values are tokens of the
    text, up to the EOS token. `generate` takes sources as the base model does. See `KNNLM` for arguments and
    errors. (Khandelwal et al. 2021, https://arxiv.org/abs/2010.00710.)

    Example:
        >>> model = KNNLMForSeq2SeqLM.from_base(base, store)  # doctest: +SKIP
        >>> model.generate(**tokenizer(sources, return_tensors="pt", padding=True))  # doctest: +SKIP
    """

    config_class = _config_type = KNNSeq2SeqConfig
    # Cross-entropy of labels that are not shifted: the target of a position is its label.
    loss_type = "ForMaskedLM"
    _reads_source = True
    # These methods are functions of another module; their docstrings are there.
    score_translations = score_translations
    translate = translate
    text_argument = "decoder_input_ids"
    text_mask_argument = "decoder_attention_mask"

    @run_without_autocast
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        knn: KNNSettings | Sequence[KNNSettings] | None = None,
        text_mask: Tensor | None = None,
        return_dict: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput | tuple[Any, ...]:
        """Run the base model, and mix the predictions of the store into its predictions.

        The store is not searched for positions of the decoder with attention mask 0. If the weight λ is 0,
        the base model's logits are returned unchanged, so they are not normalized. On a CPU this also happens
        if nothing is found at any position. On a GPU, all logits are then normalized to log-probabilities.

        Args:
            input_ids: the sources, int64, shape (b, s).
            attention_mask: 0 at padding of the sources, shape (b, s).
            decoder_input_ids: the texts, int64, shape (b, t).
            decoder_attention_mask: 0 at padding of the texts, shape (b, past + t).
            encoder_outputs: the sources after the encoder, in place of input_ids.
            past_key_values: the same as `cache`, under its name before transformers 5.24.
            inputs_embeds: input of the encoder in place of input_ids, shape (b, s, h).
            decoder_inputs_embeds: input of the decoder in place of decoder_input_ids, shape (b, t, h). If
                both are given, decoder_input_ids are the tokens of these embeddings.
            labels: target token of each position, shape (b, t), -100 is ignored; the output then has the loss
                of the mixture. Without decoder inputs, the shifted labels are the decoder's input.
            use_cache: True to return a cache.
            logits_to_keep: number of last positions to predict from (0 means all), or indices of positions.
            knn: settings of this call, or a sequence with the settings of each row; default ``self.knn``.
                Rows with the same settings object are searched together.
            text_mask: 0 where a new position of the decoder is padding, shape (b, t). `generate` passes it.
            return_dict: False returns a tuple.
            cache: the KV cache of earlier tokens, see `KNNLMForCausalLM.forward`.
            **kwargs: further arguments of the base model, and ``num_items_in_batch`` for the loss.

        Returns:
            The base model's output, with log-probabilities of the mixture as ``logits``, shape (b, kept,
            vocabulary), and with ``loss`` if `labels` are given.

        Raises:
            ModelOutputError: logits of the base model are NaN or infinite, and the model is not in training
                mode.
            InputError: a token is not in the vocabulary of the model; or tokens, embeddings or labels are not
                tensors.
            ConfigError: the settings need the earlier text, and it is not known; the number of settings does
                not match the rows; or there is no input of the decoder, and no labels.
        """
        check_tensors(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            decoder_input_ids=decoder_input_ids,
            decoder_inputs_embeds=decoder_inputs_embeds,
            labels=labels,
        )
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            if labels is None:
                raise ConfigError("the texts are missing: give decoder_input_ids, their embeddings or labels")
            decoder_input_ids = _shift_labels(self.base, labels)
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "decoder_input_ids": None if decoder_inputs_embeds is not None else decoder_input_ids,
            "decoder_attention_mask": decoder_attention_mask,
            "encoder_outputs": encoder_outputs,
            "inputs_embeds": inputs_embeds,
            "decoder_inputs_embeds": decoder_inputs_embeds,
            "use_cache": use_cache,
        }
        mixed: Seq2SeqLMOutput | tuple[Any, ...] = self._run_and_mix(
            inputs,
            _Text(decoder_input_ids, decoder_inputs_embeds, decoder_attention_mask, None, text_mask),
            cache=past_key_values if cache is None else cache,
            labels=labels,
            logits_to_keep=logits_to_keep,
            knn=knn,
            return_dict=return_dict,
            others=kwargs,
        )
        return mixed


def _shift_labels(base: Any, labels: Tensor) -> Tensor:
    """Return the decoder's input for labels: the token that starts the decoder, then all labels but the last.

    Args:
        base: the encoder-decoder model. If it has a method for this, the method is used, because in some
            models the first token depends on the labels.
        labels: int64, shape (b, t); -100 becomes the padding token.
    """
    if hasattr(base, "prepare_decoder_input_ids_from_labels"):
        shifted: Tensor = base.prepare_decoder_input_ids_from_labels(labels)
        return shifted
    start, *_ = find_decoder_prefix(base)
    before = torch.full_like(labels[:, :1], start)
    shifted = torch.cat([before, labels[:, :-1]], 1)
    return shifted.masked_fill(shifted == -100, base.config.pad_token_id)


def choose_model_class(base: PreTrainedModel) -> type[KNNLM]:
    """Return the subclass of `KNNLM` for a base model: for encoder-decoder models or for causal models."""
    return KNNLMForSeq2SeqLM if reads_source(base) else KNNLMForCausalLM


def _check_model_class(model_class: type[KNNLM], base: PreTrainedModel, store: KNNStore) -> None:
    """Check that a model class can be used with a base model and a store.

    Raises:
        ConfigError: the class is for causal models and the base model is an encoder-decoder model, or the
            reverse; or the base model is an encoder-decoder model and the store keeps no keys.
    """
    needed = choose_model_class(base)
    if model_class._reads_source != needed._reads_source:
        kind = "an encoder-decoder model" if needed._reads_source else "a causal language model"
        raise ConfigError(f"{type(base).__name__} is {kind}: use {needed.__name__}")
    if needed._reads_source and store.is_keyless:
        raise ConfigError(
            "for an encoder-decoder model, a store without keys works only with NGramLogitsProcessor: make "
            "a store with keys to translate with it"
        )
