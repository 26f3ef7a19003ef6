"""Rendering of a model's chat template (a program that turns a conversation into text) in its own process.

Clients cannot forge the control tokens of a conversation, such as ``<|im_start|>``. Control tokens in the
messages are marked before the template is rendered. Then the marked text is encoded as ordinary text, and
only the template's own control tokens become control tokens.
"""

import json
import re
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from knnstore.errors import ConfigError
from knnstore.server.errors import ApiError, bad_request_error

_PROGRAM = Path(__file__).with_name("template_process.py")

_CPU_SECONDS = 5.0
"""Largest CPU time in seconds that a template may take for one request. Usual templates take milliseconds."""

_MEMORY_BYTES = 512 << 20
"""Bytes of memory that a template may take, in addition to the memory of its process."""

_MARK = "\U000f0000"
"""Private-use character that transformers puts before a control token in a message, to mark it as ordinary
text."""


class ChatTemplate:
    """The chat template of a model, rendered in a process of its own with limits of CPU time and memory.

    Transformers renders templates in jinja's sandbox, where they reach no file and no Python object. But a
    template can still loop forever or allocate any amount of memory. A single operation such as ``10**10**9``
    holds the global interpreter lock until it ends, so no thread of the server could stop it.

    If the model has a template, the constructor starts the process. `text` is the source of the template,
    empty if the model has none.

    Args:
        tokenizer: the model's tokenizer. Only the constructor uses it, for its template and its tokens.
        most_characters: largest length of a rendered text in characters.

    Raises:
        ConfigError: if transformers is too old to encode control tokens as ordinary text.
    """

    def __init__(self, tokenizer: Any, most_characters: int) -> None:
        self.text = _get_template(tokenizer)
        self._first_line = {
            "template": self.text,
            "values": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            "most_characters": most_characters,
            "cpu_seconds": _CPU_SECONDS,
            "memory_bytes": _MEMORY_BYTES,
        }
        self._control_tokens = _compile_control_tokens(tokenizer, self.text)
        self._one_at_a_time = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        if self.text:
            self._process = self._start_process()  # now, so that the first request does not wait for it

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Return a conversation as text, rendered by the template up to where the assistant's answer begins.

        Control tokens in the messages are marked in the text, so only `encode` can tokenize the text. Calls
        from several threads wait for each other. If the template exceeds its limits, its process ends, and
        the next call starts a new process.

        Args:
            messages: the messages, as plain JSON values.

        Raises:
            ApiError: 400 if the template refuses the messages or their text is too long; 500 if the template
                takes too much time or ends its process.
        """
        try:
            line = json.dumps(self._mark_strings(messages))
        except RecursionError as error:
            raise bad_request_error("messages: a value is nested too deeply", "messages") from error
        with self._one_at_a_time:
            answer = self._send_and_receive(line)
        if answer is None:
            raise ApiError(
                500,
                f"the model's chat template took more than {_CPU_SECONDS:g} seconds for these messages, or "
                "ended its process: use /v1/completions, or a model with a sound template",
                code="chat_template_failed",
            )
        if "error" in answer:
            raise bad_request_error(
                f"the model's template refuses these messages: {answer['error']}", "messages"
            )
        if "characters" in answer:
            raise bad_request_error(
                f"messages: the model's template turns them into {answer['characters']:,} characters, more "
                "than the model reads",
                "messages",
                "context_length_exceeded",
            )
        return str(answer["text"])

    def encode(self, tokenizer: Any, text: str) -> list[int]:
        """Return the token ids of a text that `render` returned.

        Control tokens from the template become control tokens. Control tokens from the messages become
        ordinary text.

        Args:
            tokenizer: the model's tokenizer. No other thread may use it during the call.
            text: the result of `render`.

        Raises:
            ApiError: 400 if the tokenizer encodes ordinary text as a control token, so that a client could
                forge one.
        """
        if _MARK not in text:
            return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        try:
            return list(_import_marking_module().encode_marked_chat(tokenizer, text))
        except ValueError as error:
            raise bad_request_error(f"messages: {error}", "messages") from error

    def close(self) -> None:
        """Stop the process, after the current call of `render` has ended."""
        with self._one_at_a_time:
            self._stop_process()

    def _mark_strings(self, value: Any) -> Any:
        """Return a copy of a JSON value with the control tokens marked in all strings and field names."""
        if isinstance(value, str):
            return _import_marking_module().mark_control_tokens(value, self._control_tokens)
        if isinstance(value, dict):
            return {self._mark_strings(name): self._mark_strings(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self._mark_strings(item) for item in value]
        return value

    def _send_and_receive(self, line: str) -> dict[str, Any] | None:
        """Send one line with messages to the template's process, and return its parsed answer.

        Starts the process if it does not run. Returns None if the process ends without an answer.
        """
        process = self._process = self._process or self._start_process()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(line, file=process.stdin, flush=True)
            answer = process.stdout.readline()
        except OSError:  # the process has ended
            answer = ""
        if not answer:
            self._stop_process()
            return None
        parsed_answer: dict[str, Any] = json.loads(answer)
        return parsed_answer

    def _start_process(self) -> "subprocess.Popen[str]":
        """Start the template's process, send it the template, and return the process."""
        process = subprocess.Popen(  # noqa: S603  this package's own file
            # -P keeps the program's folder out of sys.path: its modules could hide those of other packages.
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="ascii",
            start_new_session=True,  # Ctrl-C goes to the server only, which then stops this process
        )
        assert process.stdin is not None
        with suppress(OSError):  # the process has ended already: `_send_and_receive` notices it
            print(json.dumps(self._first_line), file=process.stdin, flush=True)
        return process

    def _stop_process(self) -> None:
        """Kill the template's process and wait until it has ended. Does nothing if no process runs."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _import_marking_module() -> Any:
    """Import and return the module of transformers that marks and encodes control tokens."""
    from transformers.utils import chat_template_utils

    return chat_template_utils


def _compile_control_tokens(tokenizer: Any, template: str) -> re.Pattern[str]:
    """Return a pattern that matches the control tokens: the tokens that only the template may write.

    All special tokens are control tokens. Other added tokens are control tokens if the tokenizer lists them
    in `chat_control_tokens`. If the tokenizer has no such list, they are control tokens if the template
    contains them.

    Args:
        tokenizer: the model's tokenizer.
        template: the source of the template.

    Returns:
        The pattern, which tries longer tokens first.

    Raises:
        ConfigError: if transformers is too old to encode control tokens as ordinary text.
    """
    if not hasattr(_import_marking_module(), "encode_marked_chat"):
        raise ConfigError(
            "serving needs transformers 5.24 or later, which keeps clients from forging control tokens: "
            "pip install 'knnstore[server]'"
        )
    listed_tokens = getattr(tokenizer, "chat_control_tokens", None)
    contents = [
        token.content
        for token in getattr(tokenizer, "added_tokens_decoder", {}).values()
        if token.special
        or (
            token.content in (template if listed_tokens is None else listed_tokens)
            and not token.content.isspace()
        )
    ]
    longest_first = sorted(contents, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")  # "(?!)" matches nothing


def _get_template(tokenizer: Any) -> str:
    """Return the source of a tokenizer's default chat template.

    Empty if the tokenizer has no template, or several templates with names and no default.
    """
    try:
        return str(tokenizer.get_chat_template() or "")
    except (ValueError, TypeError, AttributeError):
        return ""
