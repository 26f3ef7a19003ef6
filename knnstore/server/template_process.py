"""The program that renders a model's chat template, run by `chat_templates` in a process of its own.

It imports nothing of knnstore, so that it starts in a second. It reads lines of JSON from standard input:
first ``{"template", "values", "most_characters", "cpu_seconds", "memory_bytes"}``, then a list of messages a
line. For each list it writes one line: ``{"text"}``, or ``{"characters"}`` if the text is too long, or
``{"error"}``.
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
    """Limit this process's memory to what it has now and `extra_bytes`. Does nothing where Linux is not."""
    with contextlib.suppress(OSError, ValueError, NameError):
        with open("/proc/self/statm", encoding="ascii") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + extra_bytes, taken + extra_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time(cpu_seconds: float) -> None:
    """Have the kernel end this process after so much CPU time; 0 takes the limit away."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)


def _render(first: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the text of some messages, or its length if that is too large, or the template's error."""
    try:
        rendered: Any = render_jinja_template(
            conversations=[messages],
            chat_template=first["template"],
            add_generation_prompt=True,
            **first["values"],
        )
        text = str(rendered[0][0])
    except MemoryError:
        return {"error": "it takes too much memory"}
    except RecursionError:
        return {"error": "it calls itself too often"}
    except Exception as error:  # of any kind: a template is a program
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return {"error": lines[0][:_MOST_ERROR_CHARACTERS]}
    if len(text) > first["most_characters"]:
        return {"characters": len(text)}
    return {"text": text}


def main() -> None:
    """Render messages until standard input ends."""
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
