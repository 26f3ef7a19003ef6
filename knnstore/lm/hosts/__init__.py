"""Hosts: programs other than knnstore that run the model, into whose predictions a store is mixed.

`vllm` is a plugin of vLLM, with its entry point in `vllm_entry`. `step_mixer` mixes a store into the
predictions of any program that batches requests, and `request_options` has the options of a request in such a
program. `processors` has n-grams for transformers' `generate` of any class of models, and for
llama-cpp-python.
"""

from typing import TYPE_CHECKING

from knnstore.lazy_imports import attach_lazy_imports

if TYPE_CHECKING:
    from knnstore.lm.hosts.processors import NGramLogitsProcessor
    from knnstore.lm.hosts.request_options import FELL_BACK, RequestOptions
    from knnstore.lm.hosts.step_mixer import Step, StepMixer
else:
    __getattr__, __dir__ = attach_lazy_imports(__name__)

__all__ = ["FELL_BACK", "NGramLogitsProcessor", "RequestOptions", "Step", "StepMixer"]
