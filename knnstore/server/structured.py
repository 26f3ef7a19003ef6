"""Answers that are held to JSON or to a JSON schema, with llguidance (the extra `structured`).

A constraint forbids the tokens after which the text could no longer become JSON of the schema. It follows one
text token by token; the engine asks it before it chooses each token.
"""

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from knnstore.errors import InputError
from knnstore.server.errors import refused
from knnstore.server.protocol import ResponseFormat

_MAX_SCHEMA_LENGTH = 65_536
"""Characters of a schema as JSON. Compiling 65,000 characters of patterns takes seconds."""
_MAX_LEXER_STATES = 50_000
"""Of one text, 1 to 2 kB each."""
_MAX_STEPS = 12
"""Of the path to the wrong part of a schema that a message names, about."""
_MAX_PROBES = 100
"""Parts of a wrong schema that are compiled alone to find the wrong one."""

# A space may follow a comma and a colon, other whitespace could go on without an end.
_LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}

_PARAM = "response_format"
_SCHEMA_PARAM = "response_format.json_schema.schema"


class JsonConstraint:
    """What a text may go on with to be JSON of one schema.

    Args:
        matcher: llguidance's state of the text, which this object owns.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fork(self) -> "JsonConstraint":
        """Return a constraint at the same place for another text."""
        return JsonConstraint(self._matcher.deep_copy())

    def restrict(self, log_probs: Tensor) -> Tensor:
        """Return log-probabilities of shape (v,) with -inf for each token that is not allowed next.

        The others keep theirs and are not normalized. If all of these are -inf, all become 0.

        Raises:
            InputError: the schema needs more states than a text may have.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        allowed = np.unpackbits(bits, bitorder="little", count=len(log_probs)).astype(bool)
        is_allowed = torch.from_numpy(allowed).to(log_probs.device)
        restricted = log_probs.where(is_allowed, -torch.inf)
        if restricted.max() == -torch.inf:
            return torch.zeros_like(log_probs).where(is_allowed, -torch.inf)
        return restricted

    def advance(self, token: int) -> bool:
        """Take in the chosen token; return whether the text is complete, so that nothing can follow."""
        self._matcher.consume_token(token)
        self._check()
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InputError(f"{_PARAM}: the schema is too complex to be followed")


class JsonConstraints:
    """Makes constraints for the tokens of one model.

    Args:
        use_tokenizer: calls a function with the model's tokenizer while nobody else uses it.
        vocab_size: tokens that the model predicts.
        ends: tokens that end a text.
    """

    def __init__(
        self, use_tokenizer: Callable[[Callable[[Any], Any]], Any], vocab_size: int, ends: Iterable[int]
    ) -> None:
        self._use_tokenizer = use_tokenizer
        self._vocab_size = vocab_size
        self._ends = sorted(ends)
        self._lock = threading.Lock()
        self._made: Any = None

    def constraint_for(self, response_format: ResponseFormat | None) -> JsonConstraint | None:
        """Return the constraint of a request, None if its text is free. Takes a second at the first call.

        Raises:
            ApiError: 400, because llguidance is not installed, the tokenizer is not supported, or the schema
                is wrong; then it says which part of the schema is.
        """
        if response_format is None or response_format.type == "text":
            return None
        schema: dict[str, Any] = {"type": "object"}
        if response_format.json_schema is not None:
            schema = response_format.json_schema.json_schema
        tokenizer = self._tokenizer()
        matcher, fault = _compile(tokenizer, schema)
        if fault:
            path, reason = _find_fault(tokenizer, schema, fault)
            param = ".".join([_SCHEMA_PARAM, *path])
            raise refused(f"{param}: {reason}", param)
        if not _adds_properties(schema):
            closed, fault = _compile(tokenizer, _without_other_properties(schema))
            matcher = matcher if fault else closed
        matcher.compute_bitmask()  # the first is slow for a large schema, and would hold up all texts
        return JsonConstraint(matcher)

    def _tokenizer(self) -> Any:
        """Return the vocabulary as llguidance needs it, made at the first call."""
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            message = f"{_PARAM}: this server lacks llguidance: pip install 'knnstore[structured]'"
            raise refused(message, _PARAM) from error
        with self._lock:
            if self._made is None:
                try:
                    self._made = self._use_tokenizer(
                        lambda one: LLTokenizer(
                            _serialize_tokenizer(one),
                            n_vocab=max(len(one), self._vocab_size),
                            eos_token=self._ends or one.eos_token_id,
                        )
                    )
                except Exception as error:  # whatever Rust makes of a tokenizer that it does not know
                    message = f"{_PARAM}: llguidance does not support this model's tokenizer"
                    raise refused(message, _PARAM) from error
            return self._made


def _serialize_tokenizer(tokenizer: Any) -> str:
    """Return a fast tokenizer as JSON, in which no text is a token that was added to the vocabulary.

    llguidance tokenizes text that a schema forces. If the text holds a name such as ``</s>`` or ``<tool>``,
    it offers the token of this name, and then refuses it. So added tokens get names that no text has; their
    text can be written with the other tokens.

    Raises:
        ValueError: the tokenizer is not a fast one.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError("only fast tokenizers are supported")
    values = json.loads(tokenizer.backend_tokenizer.to_str())
    values |= {"padding": None, "truncation": None, "post_processor": None}
    model, names = values["model"], dict[str, str]()
    for token in values.get("added_tokens") or ():
        names[token["content"]] = f"\ue000added {token['id']}\ue000"
        token |= {"content": names[token["content"]], "special": True}
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {names.get(token, token): id for token, id in model["vocab"].items()}
    elif model.get("vocab"):  # of unigrams, with their scores
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return json.dumps(values)


def _compile(tokenizer: Any, schema: dict[str, Any]) -> tuple[Any, str]:
    """Return llguidance's matcher of a schema, and what is wrong with the schema; empty if nothing is."""
    from llguidance import LLMatcher, LLParserLimits

    length = len(json.dumps(schema))
    if length > _MAX_SCHEMA_LENGTH:
        return None, f"a schema of {length:,} characters, at most {_MAX_SCHEMA_LENGTH:,} are read"
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_LAYOUT)
    except ValueError as error:
        return None, str(error)
    limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    return matcher, matcher.get_error()


def _find_fault(tokenizer: Any, schema: dict[str, Any], reason: str) -> tuple[list[str], str]:
    """Return the path of the innermost part of a schema that is wrong alone, and what is wrong with it."""
    shared: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    path: list[str] = []
    part, probes = schema, 0
    while True:
        for step, inner in _inner_schemas(part):
            if probes == _MAX_PROBES or len(path) >= _MAX_STEPS:
                return path, _first_line(reason)
            probes += 1
            found = _compile(tokenizer, {**shared, **inner} if path or step[0] not in shared else inner)[1]
            if found:
                path, part, reason = [*path, *step], inner, found
                break
        else:
            return path, _first_line(reason)


_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")


def _without_other_properties(schema: Any) -> Any:
    """Return a schema whose objects have no properties but those that it names, where it leaves that open.

    JSON of the result is JSON of the schema. A small model would add properties until its tokens are used up.
    The schema is one for which `_adds_properties` is False.
    """
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, dict):
            found[name] = {key: _without_other_properties(one) for key, one in value.items()}
        elif name in _LISTS and isinstance(value, list):
            found[name] = [_without_other_properties(one) for one in value]
        elif name in _SINGLE:
            found[name] = _without_other_properties(value)
    if "properties" in schema and "patternProperties" not in schema:
        found.setdefault("additionalProperties", False)
    return found


def _adds_properties(schema: dict[str, Any]) -> bool:
    """Return whether some object of a schema may have properties that another part of the schema names."""
    combines = "allOf" in schema or (
        any(name in schema for name in ("$ref", "anyOf", "oneOf"))
        and any(name in schema for name in ("properties", "required"))
    )
    return combines or any(_adds_properties(inner) for _, inner in _inner_schemas(schema))


def _inner_schemas(schema: dict[str, Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield each schema that is directly inside a schema, with the steps that lead to it."""
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, dict):
            inner = [([name, key], one) for key, one in value.items()]
        elif name in _LISTS and isinstance(value, list):
            inner = [([name, str(at)], one) for at, one in enumerate(value)]
        elif name in _SINGLE:
            inner = [([name], value)]
        else:
            continue
        yield from ((step, one) for step, one in inner if isinstance(one, dict))


def _first_line(reason: str) -> str:
    """Return the reason in one line; an error of a pattern draws the place below it."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return lines[0] if len(lines) < 2 else f"{lines[0]} {lines[-1]}"
