"""Rendering a model's chat template, which is a program that came with the model, apart from the server.

What clients send cannot forge the control tokens of a conversation, such as ``<|im_start|>``: they are marked
in the messages before the template sees these, and marked ones are encoded as ordinary text.
"""

import json
import re
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

_MARK = "\U000f0000"
"""Character, of those for private use, that transformers writes before a control token of a message."""


class ChatTemplate:
    """The chat template of a model, rendered in a process of its own with limits of CPU time and memory.

    Transformers renders templates in jinja's sandbox, where they reach no file and no Python object. But a
    template may still loop forever, or ask for any amount of memory. One operation, as ``10**10**9``, holds
    Python's global lock until it ends, so that no thread of the server could stop it.

    Args:
        tokenizer: of the model. Only its template and its added tokens are used, and only here.
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
        self._control_tokens = _control_tokens_of(tokenizer, self.text)
        self._one_at_a_time = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        if self.text:
            self._process = self._start()  # now, so that the first request need not wait for it

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Return the text of some messages, up to where the assistant is to speak.

        Control tokens in the messages are marked in it: `encode` makes its tokens. Waits for other calls to
        end. If the template exceeds its limits, its process ends and the next call
        starts another one.

        Args:
            messages: of plain JSON values.

        Raises:
            ApiError: 400 if the template refuses the messages or makes too long a text of them, 500 if it
                took too much time or ended its process.
        """
        try:
            line = json.dumps(self._marked(messages))
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

    def encode(self, tokenizer: Any, text: str) -> list[int]:
        """Return the tokens of a text that `render` has made.

        Control tokens that the template wrote are what they are; those of the messages are ordinary text.

        Args:
            tokenizer: of the model, for this call alone.
            text: from `render`.

        Raises:
            ApiError: 400 if the tokenizer makes a control token of ordinary text, so that it could be forged.
        """
        if self._control_tokens is None or _MARK not in text:
            return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        try:
            return list(_marking().encode_marked_chat(tokenizer, text))
        except ValueError as error:
            raise refused(f"messages: {error}", "messages") from error

    def close(self) -> None:
        """End the process. Waits for a call that is running."""
        with self._one_at_a_time:
            self._stop()

    def _marked(self, value: Any) -> Any:
        """Return a JSON value in which the control tokens of all strings, names of fields too, are marked."""
        if self._control_tokens is None:
            return value
        if isinstance(value, str):
            return _marking().mark_control_tokens(value, self._control_tokens)
        if isinstance(value, dict):
            return {self._marked(name): self._marked(one) for name, one in value.items()}
        if isinstance(value, list):
            return [self._marked(one) for one in value]
        return value

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


def _marking() -> Any:
    """Return transformers' module that marks and encodes control tokens."""
    from transformers.utils import chat_template_utils

    return chat_template_utils


def _control_tokens_of(tokenizer: Any, template: str) -> re.Pattern[str] | None:
    """Compile a pattern of the tokens that only the template may write, the longest first.

    These are the special tokens, and of the other added tokens those that the tokenizer lists as
    `chat_control_tokens` or, if it has no list, those that the template contains.

    Returns:
        None where transformers is too old to encode them as ordinary text.
    """
    if not hasattr(_marking(), "encode_marked_chat"):
        return None
    listed = getattr(tokenizer, "chat_control_tokens", None)
    found = [
        token.content
        for token in getattr(tokenizer, "added_tokens_decoder", {}).values()
        if token.special
        or (token.content in (template if listed is None else listed) and not token.content.isspace())
    ]
    longest_first = sorted(found, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")  # which matches nothing


def _template_of(tokenizer: Any) -> str:
    """Return a tokenizer's default chat template; empty if it has none, or only named ones."""
    try:
        return str(tokenizer.get_chat_template() or "")
    except (ValueError, TypeError, AttributeError):
        return ""
