"""Pointers in a call of `generate`."""

import logging
from typing import Any

from transformers import GenerationMixin

from knnstore.lm.retrieval import STATES_KEPT, PointerStates

_logger = logging.getLogger(__name__)


def with_pointers(model: GenerationMixin, options: dict[str, Any]) -> dict[str, Any]:
    """The options of `generate` with what lets pointers go on from one token to the next.

    Without a cache each token is read with all before it and is the only one that is predicted: no pointer
    leads to it, which is said once.
    """
    config = options.get("generation_config") or model.generation_config
    if options.get("use_cache", config.use_cache) is False:
        _logger.warning("with use_cache=False no pointer is followed: every token is searched for")
    return {"pointer_states": PointerStates(STATES_KEPT), **options}
