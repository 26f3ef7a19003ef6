"""How `generate` of transformers works with a store: what of it concerns the model with its store.

`generate` keeps the arguments of each call (``knn``, ``pointer_states``) among those for the model, and hands
all of these to whatever else takes part: an assistant model, the second text of classifier-free guidance.
Here each receives its own. What `generate` cannot do with a store is refused by name before anything runs.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import GenerationMixin, LogitsProcessorList, UnbatchedClassifierFreeGuidanceLogitsProcessor

from knnstore.errors import ConfigError
from knnstore.lm.model.drafting import warn_undrafted, why_no_drafts, with_drafts
from knnstore.lm.model.guidance import Guidance
from knnstore.lm.model.pointing import with_pointers
from knnstore.lm.reading import cache_argument, check_tokens
from knnstore.lm.retrieval import PointerStates, past_length, sequence_ids_of
from knnstore.lm.settings import KNNSettings

_OURS = ("knn", "pointer_states", "whole_ids")
"""Arguments of `generate` and `prepare_inputs_for_generation` that no other model takes."""
_NO_OTHER_CODE = "needs code from another repository, and knnstore runs no code but its own"


class StoreGeneration(GenerationMixin):
    """`GenerationMixin` for a model with a store."""

    def generate(
        self: Any, *args: Any, knn: KNNSettings | None = None, draft: bool = False, **kwargs: Any
    ) -> Any:
        """Generate text as `GenerationMixin.generate` does; pointers begin at the end of each prompt.

        Args:
            *args: as there.
            knn: settings of this call, but for what counts in scoring only; default ``self.knn``.
            draft: check several tokens in one pass, which stood after the same words in the store or the
                text; the text stays the same. Done for a single text without beams, if the model's cache can
                take tokens back; otherwise one line is logged that says why not.
            **kwargs: as there.

        Raises:
            ConfigError: a mode of `generate` does not work with a store.
        """
        _refuse_modes(self, kwargs)
        kwargs = _with_named_cache(kwargs)
        prompt = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        if isinstance(prompt, Tensor) and not prompt.is_floating_point():
            check_tokens(prompt.flatten().cpu().numpy(), self.encoder.vocabulary, self.tokenizer)
        knn = self._completed(knn or self.knn).for_writing
        if knn.pointers is not None:
            if _option(self, kwargs, "guidance_scale") not in (None, 1):
                raise ConfigError("guidance_scale does not go with pointers: leave one of them out")
            kwargs = with_pointers(self, kwargs)
        if draft:
            reason = why_no_drafts(self, args, kwargs)
            if reason is None:
                kwargs = with_drafts(self.store, knn, self.tokenizer, kwargs)
            else:
                warn_undrafted(reason)
        return super().generate(*args, knn=knn, **kwargs)  # type: ignore[misc]

    def generate_batch(self: Any, *_: Any, **__: Any) -> Any:
        """Always raises: continuous batching of transformers mixes the texts of a batch in one row."""
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
        pointer_states: PointerStates | None = None,
        whole_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Let the base model prepare its inputs, and add the settings and the texts so far.

        Args:
            input_ids: as in transformers: the texts so far, or the next part of the prompts.
            *args: as in transformers.
            inputs_embeds: as in transformers.
            knn: the settings in use.
            pointer_states: of the call of `generate`.
            whole_ids: the whole prompts, where `input_ids` may be a part of them.
            **kwargs: as in transformers.

        Raises:
            ConfigError: the cache holds tokens that are not given, and keys, n-grams or pointers depend on
                them.
        """
        if inputs_embeds is not None:
            kwargs["inputs_embeds"] = inputs_embeds
        mask = kwargs.get("attention_mask")  # the base model may make another of it
        inputs: dict[str, Any] = self.base.prepare_inputs_for_generation(input_ids, *args, **kwargs)
        tokens = inputs.get("input_ids")
        new = inputs["inputs_embeds"].shape[1] if tokens is None else tokens.shape[1]
        read = past_length(inputs)
        texts = input_ids if whole_ids is None else whole_ids
        # How many tokens the texts have at the end of this pass. A recurrent state does not say what it has
        # read, but a pass that is not the first has all of the text.
        length = None if read is None else read + new
        if read is None and not kwargs.get("is_first_iteration"):
            length = texts.shape[1]
        sequence_ids = None
        is_known = length is not None and (texts.shape[1] == length or whole_ids is not None)
        if is_known and (mask is None or mask.shape[1] >= length):
            sequence_ids = sequence_ids_of(texts[:, :length], None if mask is None else mask[:, :length])
        elif read != 0 and self.looks_back(self._completed(knn or self.knn)):
            raise ConfigError(
                f"the cache holds {'a text' if read is None else f'{read} tokens'} not in input_ids: "
                "keys of several states, n-grams, a cache of the text and pointers depend on all; give "
                "the ids of the whole text as input_ids, and its attention_mask, with the cache"
            )
        return {**inputs, "knn": knn, "sequence_ids": sequence_ids, "pointer_states": pointer_states}

    def looks_back(self: Any, knn: KNNSettings) -> bool:
        """Check whether more than the model's own state of a text counts with these settings."""
        if knn.is_model_alone:
            return False
        return bool(self.encoder.joining.discounts) or knn.needs_text or knn.pointers is not None

    def _prefill(  # type: ignore[override]
        self: Any, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], **options: Any
    ) -> Any:
        """Read the prompts, perhaps in parts; each part is given with the tokens before it."""
        mask, read = model_kwargs.get("attention_mask"), past_length(model_kwargs)
        covered = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1]
        length = input_ids.shape[1]
        is_whole = read == 0 or covered == length
        if read and is_whole and read >= length and model_kwargs.get("inputs_embeds") is None:
            raise ConfigError(
                f"the cache holds {read} tokens, and input_ids with attention_mask {length}: give both "
                "for the whole text; at least its last token must not be in the cache yet "
                "(cache.crop(-1) takes it out)"
            )
        if is_whole and length and generation_config.prefill_chunk_size is not None:
            model_kwargs["whole_ids"] = input_ids
        try:
            return super()._prefill(input_ids, generation_config, model_kwargs, **options)  # type: ignore[misc, arg-type]
        finally:
            model_kwargs.pop("whole_ids", None)

    def _get_candidate_generator(  # type: ignore[override]
        self: Any, *, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> Any:
        """Give the assistant model none of our arguments."""
        others = {name: value for name, value in model_kwargs.items() if name not in _OURS}
        return super()._get_candidate_generator(model_kwargs=others, **kwargs)  # type: ignore[misc]

    def _get_logits_processor(
        self: Any, *args: Any, model_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> LogitsProcessorList:
        """Let guidance predict its second text with the same settings."""
        found: LogitsProcessorList = super()._get_logits_processor(  # type: ignore[misc]
            *args, model_kwargs=model_kwargs, **kwargs
        )
        for at, processor in enumerate(found):
            if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                given: dict[str, Any] = processor.unconditional_context
                found[at] = Guidance(
                    self, (model_kwargs or {})["knn"], processor.guidance_scale,
                    given["input_ids"], given["attention_mask"],
                )  # fmt: skip
        return found

    def _get_deprecated_gen_repo(self: Any, generation_mode: Any, *_: Any, **__: Any) -> None:
        """Raise for a mode that transformers would load from another repository."""
        if generation_mode.value in _ELSEWHERE:
            raise ConfigError(f"{_ELSEWHERE[generation_mode.value]} {_NO_OTHER_CODE}: leave it out")


_ELSEWHERE = {
    "dola_generation": "dola_layers",
    "contrastive_search": "penalty_alpha",
    "group_beam_search": "num_beam_groups",
    "constrained_beam_search": "constraints or force_words_ids",
}
"""The option that chooses each mode of `generate` whose code is not in transformers."""


def _with_named_cache(options: Mapping[str, Any]) -> dict[str, Any]:
    """Give the cache among the options of `generate` the name that it has in the installed transformers."""
    name = cache_argument(GenerationMixin.prepare_inputs_for_generation)
    others = {"cache", "past_key_values"} - {name}
    found = {key: value for key, value in options.items() if key not in others}
    cache = next((options[key] for key in others if options.get(key) is not None), None)
    if cache is not None and name is not None:
        found.setdefault(name, cache)
    return found


def _option(model: Any, options: Mapping[str, Any], name: str) -> Any:
    """Return an option of `generate` that is in force, from its arguments or the configuration."""
    return options.get(name, getattr(options.get("generation_config") or model.generation_config, name, None))


def _refuse_modes(model: Any, options: Mapping[str, Any]) -> None:
    """Refuse by name what `generate` cannot do with a store."""
    if isinstance(options.get("custom_generate"), str):
        raise ConfigError(f"custom_generate={options['custom_generate']!r} {_NO_OTHER_CODE}: give a function")
    if options.get("trust_remote_code"):
        raise ConfigError(f"trust_remote_code {_NO_OTHER_CODE}: leave it out")
    for name in ("assistant_early_exit", "use_mtp", "speculation_type"):
        if _option(model, options, name):
            raise ConfigError(f"{name} does not work with a store: leave it out")
    if _option(model, options, "cache_implementation") == "paged":
        model.generate_batch()
