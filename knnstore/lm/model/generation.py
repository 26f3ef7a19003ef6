"""`generate` of transformers for a model with a store.

`generate` keeps the settings of a call (``knn``) among the arguments for the model. But it passes the same
arguments to an assistant model and to the encoder, which do not accept them, and the classifier-free guidance
of transformers ignores them. This module corrects all three. The texts so far are in the cache, see
`knnstore.lm.model.text_layer`. Modes of `generate` that do not work with a store raise an error before
generation begins.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessorList, UnbatchedClassifierFreeGuidanceLogitsProcessor

from knnstore.errors import ConfigError
from knnstore.lm.model.drafting import enable_drafts, find_reason_against_drafts, warn_no_drafts
from knnstore.lm.model.guidance import Guidance
from knnstore.lm.model.text_layer import (
    attach_texts,
    check_rows_not_reordered,
    get_cached_length,
    get_cached_texts,
)
from knnstore.lm.reading import (
    CACHE_NAMES,
    DelayedCheck,
    check_tensors,
    check_tokens,
    get_cache_argument_name,
)
from knnstore.lm.settings import KNNSettings, Purpose
from knnstore.lm.text_state import TextState

_OWN_ARGUMENTS = ("knn", "ends", "delayed_check")
"""Arguments of the model with a store that an assistant model does not accept."""
_MODEL_ALONE = KNNSettings(lam=0.0)
_NO_FOREIGN_CODE = "needs code from another repository, which knnstore never runs"


class Ends(NamedTuple):
    """The tokens that end the texts of a call of `generate`."""

    prompt_length: int
    """Number of tokens in each prompt, padding included. End tokens in a prompt do not end the text."""
    tokens: Tensor
    """End tokens, int64, shape (n,)."""

    def find_ended(self, input_ids: Tensor) -> list[bool]:
        """Return, for each text, True if its generated tokens contain an end token.

        Args:
            input_ids: prompts and generated tokens, int64, shape (b, n).
        """
        ended: list[bool] = torch.isin(input_ids[:, self.prompt_length :], self.tokens).any(1).tolist()
        return ended


class StoreGeneration(GenerationMixin):
    """The `generate` of transformers (`GenerationMixin`) for a model with a store."""

    text_argument = "input_ids"
    """Name of the model's argument that has the token ids of the generated text."""
    text_mask_argument = "attention_mask"
    """Name of the model's argument that has the padding mask of the generated text."""

    def generate(
        self: Any, *args: Any, knn: KNNSettings | None = None, draft: bool = False, **kwargs: Any
    ) -> Any:
        """Generate text as `GenerationMixin.generate` does, with predictions of the store mixed in.

        Args:
            *args: arguments of `GenerationMixin.generate`.
            knn: settings of this call; default ``self.knn``. Unset fields get their values for generation.
            draft: True to check several drafted tokens in one forward pass (speculative decoding). A draft is
                copied from a place in the store or earlier in the text where the same tokens precede it.
                Greedy text stays the same, and sampled text keeps its distribution. Works for causal models
                without beams, if the model's cache can remove tokens; several texts also need a model whose
                attention does not count the columns of the cache. Otherwise a warning with the reason is
                logged, and text is generated without drafts.
            **kwargs: arguments of `GenerationMixin.generate`.

        Returns:
            The result of `GenerationMixin.generate`.

        Raises:
            ConfigError: a mode of `generate` does not work with a store.
            InputError: the prompt has a token that the model does not have; or tokens or a mask are not
                tensors.
        """
        _refuse_unsupported_modes(self, kwargs)
        kwargs = _rename_cache_option(kwargs)
        prompt = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        names = (self.text_argument, "attention_mask", self.text_mask_argument)
        check_tensors(**{name: kwargs.get(name) for name in names}, inputs=prompt)
        if prompt is not None and not prompt.is_floating_point():
            check_tokens(prompt.flatten().cpu().numpy(), self.key_encoder.vocabulary, self.tokenizer)
        knn = self.resolve_settings(knn, Purpose.GENERATION)
        if draft:
            reason = find_reason_against_drafts(self, args, kwargs)
            if reason is None:
                kwargs = enable_drafts(self.store, knn, self.tokenizer, kwargs)
            else:
                warn_no_drafts(reason)
        delayed_check = DelayedCheck(self.base)
        generated = super().generate(*args, knn=knn, delayed_check=delayed_check, **kwargs)
        delayed_check.finish()
        return generated

    def generate_batch(self: Any, *_: Any, **__: Any) -> Any:
        """Raise ConfigError, always: continuous batching of transformers packs several texts into one row."""
        raise ConfigError(
            "continuous batching of transformers (generate_batch, cache_implementation='paged') does not "
            "work with a store: use generate, or knnstore serve, which batches continuously"
        )

    init_continuous_batching = continuous_batching_context_manager = generate_batch

    def prepare_inputs_for_generation(
        self: Any,
        input_ids: Tensor,
        *args: Any,
        inputs_embeds: Tensor | None = None,
        knn: KNNSettings | None = None,
        ends: Ends | None = None,
        delayed_check: DelayedCheck | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Prepare the arguments of the next forward pass, with the settings and the padding mask.

        For texts that have ended the store is not searched any more (λ is 0), because transformers replaces
        their next tokens by padding.

        Args:
            input_ids: the texts so far, or the next chunk of the prompts, int64, shape (b, n).
            *args: arguments of `GenerationMixin.prepare_inputs_for_generation`.
            inputs_embeds: embeddings of the prompts, in place of token ids; None for token ids.
            knn: settings of the call.
            ends: the tokens that end a text; None if texts end by their length only.
            delayed_check: check of the last step's logits. This call reads its result, and passes the object
                on to the next step. None if each step checks its logits at once.
            **kwargs: arguments of `GenerationMixin.prepare_inputs_for_generation`.

        Returns:
            The base model's arguments, and three more: ``knn``, the settings for all texts or a list with the
            settings of each; ``text_mask``, shape (b, new), 0 at padding, None if there is no mask; and
            ``delayed_check`` if it is not None.

        Raises:
            ModelOutputError: logits of the last step are NaN or infinite.
            ConfigError: beam search has reordered the rows, and the cache is not a `Cache` of transformers,
                so the texts in it cannot be reordered.
        """
        if inputs_embeds is not None:
            kwargs["inputs_embeds"] = inputs_embeds
        text_name, mask_name = self.text_argument, self.text_mask_argument
        mask = kwargs.get(mask_name)  # the base model may replace the mask
        inputs: dict[str, Any] = self.base.prepare_inputs_for_generation(input_ids, *args, **kwargs)
        # An encoder-decoder model has embeddings of the source only, and these are in the encoder's output.
        embeds = inputs.get("inputs_embeds") if text_name == "input_ids" else None
        new = (inputs[text_name] if embeds is None else embeds).shape[1]
        if embeds is not None and input_ids.shape[1] >= new:
            inputs[text_name] = input_ids[:, -new:]
        text_mask = None
        if isinstance(mask, Tensor) and mask.ndim == 2:
            stop = (get_cached_length(inputs) or mask.shape[1] - new) + new
            text_mask = mask[:, stop - new : stop]
        elif mask is None and inputs.get(mask_name) is not None:
            text_mask = torch.ones((len(input_ids), new), dtype=torch.long)
        if get_cache_argument_name(self.base.forward) is None:  # `generate` makes a cache for every model
            inputs = {name: value for name, value in inputs.items() if name not in CACHE_NAMES}
        check_rows_not_reordered(inputs, input_ids, new)
        each: KNNSettings | list[KNNSettings] | None = knn
        if knn is not None and ends is not None and len(input_ids) > 1:
            ended = ends.find_ended(input_ids)
            each = [_MODEL_ALONE if is_ended else knn for is_ended in ended] if any(ended) else knn
        if delayed_check is not None:
            delayed_check.finish()
            inputs["delayed_check"] = delayed_check
        return {**inputs, "knn": each, "text_mask": text_mask}

    def _prefill(  # type: ignore[override]
        self: Any, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], **options: Any
    ) -> Any:
        """Run the model over the prompts, as `GenerationMixin._prefill` does.

        Also adds the end tokens (`Ends`) to `model_kwargs`. If another model has filled the cache, and the
        settings need the earlier text, a causal base model first processes the cached tokens again, to add
        their `TextState` (tokens and keys) to the cache.

        Args:
            input_ids: the prompts, int64, shape (b, n).
            generation_config: the options of `generate`.
            model_kwargs: arguments of the model, with the KV cache.
            **options: further arguments of `GenerationMixin._prefill`.

        Raises:
            ConfigError: the cache already contains all of the input tokens.
        """
        mask, read = model_kwargs.get(self.text_mask_argument), get_cached_length(model_kwargs)
        covered = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1]
        if read and covered == input_ids.shape[1]:
            if read >= covered and model_kwargs.get("inputs_embeds") is None:
                raise ConfigError(
                    f"the cache contains {read} tokens, but input_ids and attention_mask cover {covered}: "
                    "give both for the whole text, and leave at least its last token out of the cache "
                    "(cache.crop(-1) removes it)"
                )
            if get_cached_texts(model_kwargs) is None and not self.key_encoder.reads_source:
                knn = self.resolve_settings(model_kwargs.get("knn"))
                if self.needs_text(knn):
                    texts = self._compute_text_states(
                        input_ids[:, :read], None if mask is None else mask[:, :read]
                    )
                    attach_texts(model_kwargs, texts)
        end_tokens = getattr(generation_config, "_eos_token_tensor", None)
        if end_tokens is not None:  # the passes after this one get it
            model_kwargs["ends"] = Ends(input_ids.shape[1], end_tokens)
        return super()._prefill(input_ids, generation_config, model_kwargs, **options)  # type: ignore[misc, arg-type]

    def _prepare_text_encoder_decoder_kwargs_for_generation(
        self: Any, inputs_tensor: Tensor, model_kwargs: dict[str, Any], *args: Any, **options: Any
    ) -> dict[str, Any]:
        """Run the encoder over the sources, as `GenerationMixin` does.

        The encoder does not receive the arguments in `_OWN_ARGUMENTS`, which only a model with a store
        accepts.

        Returns:
            A copy of `model_kwargs` with the encoder's output.
        """
        others = {name: value for name, value in model_kwargs.items() if name not in _OWN_ARGUMENTS}
        prepared = super()._prepare_text_encoder_decoder_kwargs_for_generation(  # type: ignore[misc]
            inputs_tensor, others, *args, **options
        )
        return {**model_kwargs, **prepared}

    def _compute_text_states(self: Any, input_ids: Tensor, mask: Tensor | None) -> list[TextState]:
        """Compute the `TextState` (tokens and keys) of each row of a cache that another model has filled.

        Runs the base model over the tokens of each row. A row that is only padding gives an empty state.

        Args:
            input_ids: tokens of the texts, shape (b, n).
            mask: shape (b, n), 0 at padding; None means no padding.
        """
        texts = []
        for row, tokens in enumerate(input_ids):
            text = TextState()
            if mask is not None:
                tokens = tokens[mask[row].to(tokens.device) != 0]  # noqa: PLW2901
            if len(tokens):
                self.extend_texts(
                    [text], tokens[None], self.key_encoder.compute_key_states(tokens[None]), None
                )
            texts.append(text)
        return texts

    def _get_candidate_generator(  # type: ignore[override]
        self: Any, *, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> Any:
        """Create the object that guesses tokens in assisted decoding, as `GenerationMixin` does.

        The assistant model, which makes the guesses, does not receive the arguments in `_OWN_ARGUMENTS`.
        """
        others = {name: value for name, value in model_kwargs.items() if name not in _OWN_ARGUMENTS}
        return super()._get_candidate_generator(model_kwargs=others, **kwargs)  # type: ignore[misc]

    def _get_logits_processor(
        self: Any, *args: Any, model_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> LogitsProcessorList:
        """Return transformers' logits processors; `Guidance` replaces the one for classifier-free guidance.

        `Guidance` runs the model on the second prompt with the store and the settings ``knn`` of the call.
        """
        processors: LogitsProcessorList = super()._get_logits_processor(  # type: ignore[misc]
            *args, model_kwargs=model_kwargs, **kwargs
        )
        for index, processor in enumerate(processors):
            if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                given: dict[str, Any] = processor.unconditional_context
                processors[index] = Guidance(
                    self,
                    (model_kwargs or {})["knn"],
                    processor.guidance_scale,
                    given["input_ids"],
                    given["attention_mask"],
                )
        return processors

    def _get_deprecated_gen_repo(self: Any, generation_mode: Any, *_: Any, **__: Any) -> None:
        """Raise ConfigError for a mode whose code transformers would download; return None for other modes.

        transformers calls this method to find the repository with the mode's code.
        """
        if generation_mode.value in _FOREIGN_MODES:
            raise ConfigError(f"{_FOREIGN_MODES[generation_mode.value]} {_NO_FOREIGN_CODE}: leave it out")


_FOREIGN_MODES = {
    "dola_generation": "dola_layers",
    "contrastive_search": "penalty_alpha",
    "group_beam_search": "num_beam_groups",
    "constrained_beam_search": "constraints or force_words_ids",
}
"""Modes of `generate` whose code is not in transformers, each with the option that selects the mode."""


_CAUSAL_OPTIONS = ("guidance_scale", "prompt_lookup_num_tokens", "prefill_chunk_size")
"""Options of `generate` that work with the store of a causal model only."""


def _rename_cache_option(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the options of `generate`, with the KV cache under the name that transformers expects.

    The installed version of transformers expects either ``cache`` or ``past_key_values``. If the caller used
    the other name, the option is renamed. If the caller used both, the expected name wins.

    Args:
        options: keyword arguments of `generate`.
    """
    name = get_cache_argument_name(GenerationMixin.prepare_inputs_for_generation)
    others = {"cache", "past_key_values"} - {name}
    renamed = {key: value for key, value in options.items() if key not in others}
    cache = next((options[key] for key in others if options.get(key) is not None), None)
    if cache is not None and name is not None:
        renamed.setdefault(name, cache)
    return renamed


def _get_option(model: Any, options: Mapping[str, Any], name: str) -> Any:
    """Return the value of an option of `generate`: from `options` or, if missing there, the configuration.

    Returns None if neither has the option.
    """
    return options.get(name, getattr(options.get("generation_config") or model.generation_config, name, None))


def _refuse_unsupported_modes(model: Any, options: Mapping[str, Any]) -> None:
    """Check that no option of `generate` selects a mode that does not work with a store.

    Raises:
        ConfigError: an option runs code from the hub (`custom_generate` as a string, `trust_remote_code`),
            sets `assistant_early_exit`, `use_mtp` or `speculation_type`, or selects a paged cache. With an
            encoder-decoder model, an assistant model, a KV cache and `_CAUSAL_OPTIONS` raise the error too.
    """
    if isinstance(options.get("custom_generate"), str):
        raise ConfigError(
            f"custom_generate={options['custom_generate']!r} {_NO_FOREIGN_CODE}: give a function"
        )
    if options.get("trust_remote_code"):
        raise ConfigError(f"trust_remote_code {_NO_FOREIGN_CODE}: leave it out")
    for name in ("assistant_early_exit", "use_mtp", "speculation_type"):
        if _get_option(model, options, name):
            raise ConfigError(f"{name} does not work with a store: leave it out")
    if _get_option(model, options, "cache_implementation") == "paged":
        model.generate_batch()
    if model.key_encoder.reads_source:
        given = [name for name in ("assistant_model", *CACHE_NAMES) if options.get(name) is not None]
        given += [name for name in _CAUSAL_OPTIONS if _get_option(model, options, name) not in (None, 1, 1.0)]
        if given:
            raise ConfigError(f"{given[0]} works with a store only for causal models: leave it out")
