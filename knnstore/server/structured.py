"""Structured output: answers that are JSON, or JSON of a schema, with llguidance (the extra `structured`).

A `JsonConstraint` forbids the tokens after which a text could no longer become JSON of the schema. It follows
one text; the engine applies it before each token is chosen. `JsonConstraints` makes the constraints of
requests.
"""

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from knnstore.errors import InputError
from knnstore.server.errors import bad_request_error
from knnstore.server.protocol import ResponseFormat

_MAX_SCHEMA_LENGTH = 65_536
"""Largest length of a schema as JSON, in characters. Patterns of 65,000 characters compile in seconds."""
_MAX_LEXER_STATES = 50_000
"""Largest number of lexer states for one text. A state takes 1 to 2 kB."""
_MAX_STEPS = 12
"""Approximate largest number of steps (names and indices) in the path to the wrong part of a schema, for the
error message."""
_MAX_PROBES = 100
"""Largest number of parts of a wrong schema that are compiled alone to find the wrong part."""

# Only one space may follow a comma or a colon. With free whitespace a model could write spaces forever.
_LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}

_PARAM = "response_format"
_SCHEMA_PARAM = "response_format.json_schema.schema"


class JsonConstraint:
    """Constraint for one text: forbids the tokens after which the text could not become JSON of the schema.

    Args:
        matcher: llguidance's state of the text. This object takes it over and changes it.
        schema: the JSON schema that the matcher was made from.
    """

    def __init__(self, matcher: Any, schema: Mapping[str, Any]) -> None:
        self._matcher = matcher
        self.schema = schema

    def fork(self) -> "JsonConstraint":
        """Return an independent copy in the current state, for another text with the same tokens."""
        return JsonConstraint(self._matcher.deep_copy(), self.schema)

    def mask_log_probs(self, log_probs: Tensor) -> Tensor:
        """Return a copy of the log-probabilities of the next token, with -inf for each forbidden token.

        Input and result have the shape (v,). Allowed tokens keep their log-probabilities, which are not
        normalized again. If the log-probabilities of all allowed tokens are -inf, they become 0.

        Raises:
            InputError: if the schema is too complex to be followed (it needs more than `_MAX_LEXER_STATES`
                states).
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check_state()
        allowed = np.unpackbits(bits, bitorder="little", count=len(log_probs)).astype(bool)
        is_allowed = torch.from_numpy(allowed).to(log_probs.device)
        restricted = log_probs.where(is_allowed, -torch.inf)
        if restricted.max() == -torch.inf:
            return torch.zeros_like(log_probs).where(is_allowed, -torch.inf)
        return restricted

    def advance(self, token: int) -> bool:
        """Append the chosen token to the state. Returns True if the text is complete and must end.

        Raises:
            InputError: if the schema is too complex to be followed (it needs more than `_MAX_LEXER_STATES`
                states).
        """
        self._matcher.consume_token(token)
        self._check_state()
        return bool(self._matcher.is_stopped())

    def _check_state(self) -> None:
        """Check that llguidance can still follow the text.

        Raises:
            InputError: if llguidance has given up, because the schema needs more than `_MAX_LEXER_STATES`
                states.
        """
        if self._matcher.is_error():
            raise InputError(f"{_PARAM}: the schema is too complex")


class JsonConstraints:
    """Makes the constraints of requests for one model. Threads may share the object.

    Args:
        use_tokenizer: function that gives access to the model's tokenizer, which threads share:
            ``use_tokenizer(f)`` returns ``f(tokenizer)``, and no other thread uses the tokenizer meanwhile.
        vocab_size: number of tokens that the model predicts.
        ends: ids of the end tokens: a text ends after one of these tokens.
    """

    def __init__(
        self, use_tokenizer: Callable[[Callable[[Any], Any]], Any], vocab_size: int, ends: Iterable[int]
    ) -> None:
        self._use_tokenizer = use_tokenizer
        self._vocab_size = vocab_size
        self._ends = sorted(ends)
        self._lock = threading.Lock()
        self._cached_tokenizer: Any = None

    def make_constraint(self, response_format: ResponseFormat | None) -> JsonConstraint | None:
        """Make the constraint for the answer of a request; None if the answer is free text.

        The first call takes about a second. If possible, the constraint allows only the properties that the
        schema names: see `_forbid_other_properties`.

        Args:
            response_format: the field of the request; None if the field is missing.

        Raises:
            ApiError: 400 if llguidance is not installed, the tokenizer is not supported, or the schema is
                wrong. The message names the wrong part of the schema.
        """
        if response_format is None or response_format.type == "text":
            return None
        schema: dict[str, Any] = {"type": "object"}
        if response_format.json_schema is not None:
            schema = response_format.json_schema.json_schema
        tokenizer = self._get_tokenizer()
        matcher, fault = _compile_schema(tokenizer, schema)
        if fault:
            path, reason = _find_wrong_schema_part(tokenizer, schema, fault)
            param = ".".join([_SCHEMA_PARAM, *path])
            raise bad_request_error(f"{param}: {reason}", param)
        if not _may_split_properties(schema):
            closed_schema = _forbid_other_properties(schema)
            closed, fault = _compile_schema(tokenizer, closed_schema)
            if not fault:
                matcher, schema = closed, closed_schema
        # Compute the first bitmask here: it is slow for a large schema and would delay all texts.
        matcher.compute_bitmask()
        return JsonConstraint(matcher, schema)

    def _get_tokenizer(self) -> Any:
        """Return the model's vocabulary as llguidance's tokenizer. The first call builds it.

        Raises:
            ApiError: 400 if llguidance is not installed or does not support the tokenizer.
        """
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            message = f"{_PARAM}: this server lacks llguidance: pip install 'knnstore[structured]'"
            raise bad_request_error(message, _PARAM) from error
        with self._lock:
            if self._cached_tokenizer is None:
                try:
                    self._cached_tokenizer = self._use_tokenizer(
                        lambda tokenizer: LLTokenizer(
                            _serialize_tokenizer(tokenizer),
                            n_vocab=max(len(tokenizer), self._vocab_size),
                            eos_token=self._ends or tokenizer.eos_token_id,
                        )
                    )
                except Exception as error:  # llguidance raises various exceptions for unknown tokenizers
                    message = f"{_PARAM}: llguidance does not support this model's tokenizer"
                    raise bad_request_error(message, _PARAM) from error
            return self._cached_tokenizer


def _serialize_tokenizer(tokenizer: Any) -> str:
    r"""Serialize a fast tokenizer as JSON for llguidance, with renamed added tokens.

    An added token such as ``</s>`` gets a name that no text contains, for example ``\ue000added 2\ue000``.
    Without this, llguidance would fail if a schema forces a text with the name of an added token: llguidance
    would offer this token and then refuse it. The characters ``</s>`` can still be generated with other
    tokens.

    All added tokens are marked as special. Padding, truncation and the post-processor are left out.

    Raises:
        ValueError: if the tokenizer is not a fast tokenizer.
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
    elif model.get("vocab"):  # a unigram model lists its tokens with their scores
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return json.dumps(values)


def _compile_schema(tokenizer: Any, schema: dict[str, Any]) -> tuple[Any, str]:
    """Compile a JSON schema to llguidance's matcher.

    Args:
        tokenizer: llguidance's tokenizer.
        schema: the schema.

    Returns:
        The matcher, and the error of the schema as text. The error is empty if the schema is right; otherwise
        the matcher may be None.
    """
    from llguidance import LLMatcher, LLParserLimits

    length = len(json.dumps(schema))
    if length > _MAX_SCHEMA_LENGTH:
        return None, f"the schema has {length:,} characters, but at most {_MAX_SCHEMA_LENGTH:,} are allowed"
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_LAYOUT)
    except ValueError as error:
        return None, str(error)
    limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    return matcher, matcher.get_error()


def _find_wrong_schema_part(tokenizer: Any, schema: dict[str, Any], reason: str) -> tuple[list[str], str]:
    """Find the innermost part of a wrong schema that is wrong when it is compiled alone.

    The search goes from the whole schema to the first wrong part in it, and then to the first wrong part in
    that part. It ends after `_MAX_PROBES` compilations, or when the path has `_MAX_STEPS` steps.

    Args:
        tokenizer: llguidance's tokenizer.
        schema: the wrong schema.
        reason: the error of the whole schema.

    Returns:
        The path to the wrong part (names and indices; empty for the whole schema), and its error in one line.
    """
    shared: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    path: list[str] = []
    subschema, compilations = schema, 0
    while True:
        for step, inner in _iterate_subschemas(subschema):
            if compilations == _MAX_PROBES or len(path) >= _MAX_STEPS:
                return path, _shorten_error(reason)
            compilations += 1
            fault = _compile_schema(
                tokenizer, {**shared, **inner} if path or step[0] not in shared else inner
            )[1]
            if fault:
                path, subschema, reason = [*path, *step], inner, fault
                break
        else:
            return path, _shorten_error(reason)


_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE_SCHEMAS = ("items", "additionalProperties")


def _forbid_other_properties(schema: Any) -> Any:
    """Return a copy of a schema in which objects may have only the properties that the schema names.

    Without this, a small model would add properties until its tokens are used up. An object of the schema
    keeps its own rule if it sets `additionalProperties` or `patternProperties`, or names no properties. All
    JSON that matches the result also matches the schema. The caller has checked that `_may_split_properties`
    is False.

    Args:
        schema: the schema; another value than an object is returned unchanged.
    """
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for name, value in schema.items():
        if name in _SCHEMA_MAPS and isinstance(value, dict):
            result[name] = {key: _forbid_other_properties(subschema) for key, subschema in value.items()}
        elif name in _SCHEMA_LISTS and isinstance(value, list):
            result[name] = [_forbid_other_properties(subschema) for subschema in value]
        elif name in _SINGLE_SCHEMAS:
            result[name] = _forbid_other_properties(value)
    if "properties" in schema and "patternProperties" not in schema:
        result.setdefault("additionalProperties", False)
    return result


def _may_split_properties(schema: dict[str, Any]) -> bool:
    """Check whether the properties of one object may be named in several parts of a schema.

    For example, `allOf` can name the property `a` in one part and `b` in another part. Then no single part
    may forbid other properties. Returns True if the schema, or a schema inside it, has `allOf`, or has
    `$ref`, `anyOf` or `oneOf` together with `properties` or `required`.
    """
    combines = "allOf" in schema or (
        any(name in schema for name in ("$ref", "anyOf", "oneOf"))
        and any(name in schema for name in ("properties", "required"))
    )
    return combines or any(_may_split_properties(inner) for _, inner in _iterate_subschemas(schema))


def _iterate_subschemas(schema: dict[str, Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield the path and the content of each direct subschema of a schema.

    A path has one or two steps, for example ``["items"]`` or ``["properties", "name"]``. Subschemas that are
    not objects are skipped.
    """
    for name, value in schema.items():
        if name in _SCHEMA_MAPS and isinstance(value, dict):
            subschemas = [([name, key], subschema) for key, subschema in value.items()]
        elif name in _SCHEMA_LISTS and isinstance(value, list):
            subschemas = [([name, str(position)], subschema) for position, subschema in enumerate(value)]
        elif name in _SINGLE_SCHEMAS:
            subschemas = [([name], value)]
        else:
            continue
        yield from ((step, subschema) for step, subschema in subschemas if isinstance(subschema, dict))


def _shorten_error(reason: str) -> str:
    """Return the first and the last line of an error, joined in one line.

    The lines between them show a wrong regular expression of the schema.
    """
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return lines[0] if len(lines) < 2 else f"{lines[0]} {lines[-1]}"
