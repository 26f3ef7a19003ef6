"""Rendering a model's chat template, which is a program that came with the model, apart from the server."""

import json
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from knnstore.server.errors import ApiError, refused

_PROGRAM = Path(__file__).with_name("template_process.py")

_CPU_SECONDS = 5.0
"""CPU time that the template may take for one request. Templates of real models take milliseconds."""

_MEMORY_BYTES = 512 << 20
"""Memory that it may take beside what the process needs for itself."""


class ChatTemplate:
    """The chat template of a model, rendered in a process of its own with limits of CPU time and memory.

    Transformers renders templates in jinja's sandbox, where they reach no file and no Python object. But a
    template may still loop forever, or ask for any amount of memory. One operation, as ``10**10**9``, holds
    Python's global lock until it ends, so that no thread of the server could stop it.

    Args:
        tokenizer: of the model. Only its template and its special tokens are used, and only here.
        most_characters: longest text that is accepted.
    """

    def __init__(self, tokenizer: Any, most_characters: int) -> None:
        self.text = _template_of(tokenizer)
        self._first = {
            "template": self.text,
            "values": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            "most_characters": most_characters,
            "cpu_seconds": _CPU_SECONDS,
            "memory_bytes": _MEMORY_BYTES,
        }
        self._one_at_a_time = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        if self.text:
            self._process = self._start()  # now, so that the first request need not wait for it

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Return the text of some messages, up to where the assistant is to speak.

        Waits for other calls to end. If the template exceeds its limits, its process ends and the next call
        starts another one.

        Args:
            messages: of plain JSON values.

        Raises:
            ApiError: 400 if the template refuses the messages or makes too long a text of them, 500 if it
                took too much time or ended its process.
        """
        try:
            line = json.dumps(messages)
        except RecursionError as error:
            raise refused("messages: a value is nested too deeply", "messages") from error
        with self._one_at_a_time:
            answer = self._ask(line)
        if answer is None:
            raise ApiError(
                500,
                f"the model's chat template took more than {_CPU_SECONDS:g} seconds for these messages, or "
                "ended its process: use /v1/completions, or a model with a sound template",
                code="chat_template_failed",
            )
        if "error" in answer:
            raise refused(f"the model's template refuses these messages: {answer['error']}", "messages")
        if "characters" in answer:
            raise refused(
                f"messages: the model's template makes {answer['characters']:,} characters of them, more "
                "than the model reads",
                "messages",
                "context_length_exceeded",
            )
        return str(answer["text"])

    def close(self) -> None:
        """End the process. Waits for a call that is running."""
        with self._one_at_a_time:
            self._stop()

    def _ask(self, line: str) -> dict[str, Any] | None:
        """Have the process render one line of messages; None if it ends instead."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(line, file=process.stdin, flush=True)
            answer = process.stdout.readline()
        except OSError:  # the process has ended
            answer = ""
        if not answer:
            self._stop()
            return None
        found: dict[str, Any] = json.loads(answer)
        return found

    def _start(self) -> "subprocess.Popen[str]":
        """Start the process, and send it the template."""
        process = subprocess.Popen(  # noqa: S603  this package's own file
            # -P: its folder holds modules whose names other packages may use.
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="ascii",
            start_new_session=True,  # Ctrl-C is for the server, which ends it
        )
        assert process.stdin is not None
        with suppress(OSError):  # it has ended: the next call says so
            print(json.dumps(self._first), file=process.stdin, flush=True)
        return process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _template_of(tokenizer: Any) -> str:
    """Return a tokenizer's default chat template; empty if it has none, or only named ones."""
    try:
        return str(tokenizer.get_chat_template() or "")
    except (ValueError, TypeError, AttributeError):
        return ""
