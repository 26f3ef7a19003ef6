"""Runs in the environment of vLLM: tries configurations that a store refuses, and prints what each says.

Arguments: the model, and the name of a change to vLLM that is made before the plugin is attached: `version`,
`name` or `none`. Standard input: a JSON list of configurations, each the arguments of vLLM's engine and
environment variables. Output: a JSON list of messages, null for a configuration that was accepted.
"""

import json
import os
import sys


def main() -> None:
    output = os.dup(1)
    os.dup2(2, 1)  # vLLM prints to standard output
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if sys.argv[2] == "version":
        vllm.__version__ = "0.33.1"
    if sys.argv[2] == "name":
        del GPUModelRunner._model_forward
    messages = []
    usual = dict(os.environ)
    for options, variables in json.load(sys.stdin):
        os.environ.clear()
        os.environ.update(usual | variables)
        try:
            args = EngineArgs(**{"model": sys.argv[1], "dtype": "float32", "enforce_eager": True, **options})
            args.create_engine_config()
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
        else:
            messages.append(None)
    os.write(output, json.dumps(messages).encode())


if __name__ == "__main__":
    main()
