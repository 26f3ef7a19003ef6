"""The entry point of the plugin for vLLM; imports the plugin only if a store is configured."""

import os


def register_vllm_plugin() -> None:
    """Load the plugin that mixes the store named by ``KNNSTORE_HOME`` into vLLM's predictions.

    Does nothing if this environment variable is unset or empty. vLLM calls this function in each of its
    processes (entry point group ``vllm.general_plugins``).
    """
    if os.environ.get("KNNSTORE_HOME"):
        from knnstore.lm.hosts import vllm

        vllm.attach()
