"""Runs in the environment of vLLM: reads a job from standard input, and writes what vLLM generated.

The job is JSON: `engine` (arguments of `LLM`), `rounds` (a list of lists of requests), `triton` (True to run
Triton's kernels in its interpreter). A request has `prompt` (token ids), `options` and `tokens` (how many to
generate). The result is a list of rounds with an answer for each request.
"""

import json
import os
import sys


def main() -> None:
    job = json.load(sys.stdin)
    output = os.dup(1)
    os.dup2(2, 1)  # vLLM prints to standard output
    if job.get("triton"):
        interpret_triton()
    from vllm import LLM, SamplingParams

    llm = LLM(dtype="float32", enforce_eager=True, disable_log_stats=False, **job["engine"])
    rounds = []
    for requests in job["rounds"]:
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=request["tokens"],
                ignore_eos=True,
                logprobs=0,
                prompt_logprobs=0 if request.get("scores") else None,
                extra_args=request.get("options"),
            )
            for request in requests
        ]
        prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
        rounds.append([describe(answer) for answer in llm.generate(prompts, params, use_tqdm=False)])
    metrics = {one.name: one.value for one in llm.get_metrics() if hasattr(one, "value")}
    os.write(output, json.dumps({"rounds": rounds, "metrics": metrics}).encode())


def interpret_triton() -> None:
    """Make vLLM use Triton, whose kernels its interpreter runs (TRITON_INTERPRET=1), without a driver."""
    from types import SimpleNamespace

    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)


def describe(answer) -> dict:
    """Return what a test compares."""
    generated = answer.outputs[0]
    scores = answer.prompt_logprobs
    return {
        "tokens": list(generated.token_ids),
        "log_probs": [
            one[token].logprob for one, token in zip(generated.logprobs, generated.token_ids, strict=True)
        ],
        "scores": scores
        and [one[token].logprob for one, token in zip(scores[1:], answer.prompt_token_ids[1:], strict=True)],
        "finish": [generated.finish_reason, generated.stop_reason],
        "cached": answer.num_cached_tokens,
    }


if __name__ == "__main__":
    main()
