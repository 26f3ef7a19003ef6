"""Program that renders a model's chat template. The module `chat_templates` runs it in a separate process.

It imports nothing of knnstore, so that it starts within a second. It reads JSON lines from standard input.
The first line is the object ``{"template", "values", "most_characters", "cpu_seconds", "memory_bytes"}``.
Each later line is a list of messages. For each list the program writes one line: ``{"text"}`` with the
rendered text, ``{"characters"}`` with the text's length if the text is too long, or ``{"error"}``.
"""

import contextlib
import json
import signal
import sys
from typing import Any

with contextlib.suppress(ImportError):  # Windows has none: memory is not limited there
    import resource

from transformers.utils.chat_template_utils import render_jinja_template

_MOST_ERROR_CHARACTERS = 300


def _limit_memory(extra_bytes: int) -> None:
    """Limit the memory of this process to its current size plus `extra_bytes`. Does nothing outside Linux."""
    with contextlib.suppress(OSError, ValueError, NameError):
        with open("/proc/self/statm", encoding="ascii") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + extra_bytes, taken + extra_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time(cpu_seconds: float) -> None:
    """Make the kernel end this process after `cpu_seconds` more seconds of CPU time; 0 removes the limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)


def _render(first: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Render messages with the template, and return the answer: an object with one field.

    Args:
        first: the object of the first line, with the template and the limits.
        messages: the messages.

    Returns:
        ``{"text": …}`` with the rendered text, ``{"characters": …}`` with its length if the text is too long,
        or ``{"error": …}`` with the first line of the error.
    """
    try:
        rendered: Any = render_jinja_template(
            conversations=[messages],
            chat_template=first["template"],
            add_generation_prompt=True,
            **first["values"],
        )
        text = str(rendered[0][0])
    except MemoryError:
        return {"error": "it uses too much memory"}
    except RecursionError:
        return {"error": "it recurses too deeply"}
    except Exception as error:  # a template is a program and can raise any exception
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return {"error": lines[0][:_MOST_ERROR_CHARACTERS]}
    if len(text) > first["most_characters"]:
        return {"characters": len(text)}
    return {"text": text}


def main() -> None:
    """Render the messages of each line of standard input, and write the answers to standard output."""
    first = json.loads(sys.stdin.readline())
    _limit_memory(first["memory_bytes"])
    for line in sys.stdin:
        messages = json.loads(line)
        _limit_time(first["cpu_seconds"])
        answer = json.dumps(_render(first, messages))
        _limit_time(0)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
