"""Programs other than knnstore that run the model, and mix a store into its predictions.

`vllm` is a plugin of vLLM. `step_mixer` does the same for any engine that batches requests, without knowing
the engine. `request_options` are the options that a request of such a program can set.
"""

import os

HOME = "KNNSTORE_HOME"
"""Environment variable that names the store's home. Without it the plugin does nothing."""


def register_vllm_plugin() -> None:
    """Attach the store named by ``KNNSTORE_HOME`` to vLLM; do nothing if the variable is unset or empty.

    vLLM calls this in each of its processes (entry point group ``vllm.general_plugins``).
    """
    if os.environ.get(HOME):
        from knnstore.lm.hosts import vllm

        vllm.attach()
