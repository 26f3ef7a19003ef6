"""Request bodies of OpenAI's protocol and of this server's own endpoints, as pydantic models.

The tables `UNSUPPORTED_…` list the fields of OpenAI's protocol, and of other servers' extensions, that this
server does not support. A value of such a field is accepted if it changes nothing: null, an empty value, or
the protocol's default. Any other value is refused with an error that names the field.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from knnstore.checks import MAX_NAME
from knnstore.server.engine import Sampling

MOST_COPIES = 16
"""Largest `n`: number of texts that are generated for each prompt."""
MOST_PROMPTS = 64
"""Largest number of prompts of a request."""
MOST_TEXTS = 128
"""Largest number of texts that a request generates: prompts × n."""
MOST_TOP = 20
"""Largest number of most probable tokens that are listed for each token."""
MOST_STOPS = 16
"""Largest number of stop strings of a request."""
MOST_STOP = 1024
"""Largest length of a stop string in characters."""
MOST_MESSAGES = 4096
"""Largest number of messages of a conversation."""
MOST_FIELDS = 64
"""Largest number of fields of one JSON object in a body."""
MOST_NEIGHBORS = 64
"""Largest number of neighbors (retrieved records) that are listed for each token."""
MOST_NAMES = 64
"""Largest number of domains, and of tags, in a list."""
MOST_EXPLAINED = 4096
"""Largest number of tokens of a text that is explained in one request."""
MOST_SOURCES = 32_768
"""Largest number of explained tokens × listed neighbors of one request. An answer of this size has about 25
MB."""

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
Names = Annotated[list[Name], Field(min_length=1, max_length=MOST_NAMES)]
Stop = Annotated[str, Field(max_length=MOST_STOP)]
StopText = Annotated[str, Field(min_length=1, max_length=MOST_STOP)]
TokenId = Annotated[StrictInt, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]


def field_error(field: str, message: str) -> PydanticCustomError:
    """Return an error that names a field of the body, for a validator of a whole body to raise.

    Args:
        field: the name of the field.
        message: the text for the client.
    """
    return PydanticCustomError("field", "{message}", {"field": field, "message": message})


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A field of the protocol that this server does not support, and the neutral values that it accepts.

    A neutral value is a value that changes nothing. Null is always neutral. An empty string, list or object
    is neutral too, unless `is_empty_refused` is True. An object is empty if all its values are empty.
    """

    reason: str
    """Reason why all other values are refused; a clause for the error message."""
    defaults: tuple[Any, ...] = ()
    """Further neutral values, for example the protocol's default. Empty means none."""
    is_neutral: Callable[[Any], bool] | None = None
    """Further test: a function that takes any JSON value and returns True if the value is neutral. None means
    no further test."""
    is_empty_refused: bool = False
    """True if an empty string, list or object is refused."""

    def accepts(self, value: Any) -> bool:
        """Check whether a JSON value is one of the neutral values, which change nothing.

        See the class for the values that are neutral. False and True do not count as equal to 0 and 1.
        """
        if value is None or (_is_empty(value) and not self.is_empty_refused):
            return True
        if any(
            value == default and isinstance(value, bool) == isinstance(default, bool)
            for default in self.defaults
        ):
            return True
        return self.is_neutral is not None and self.is_neutral(value)


def _is_empty(value: Any) -> bool:
    """Check whether a JSON value is null, an empty string or list, or an object with only empty values."""
    if isinstance(value, dict):
        return all(map(_is_empty, value.values()))
    return value is None or value in ("", [])


def _is_zero_for_all_tokens(bias: Any) -> bool:
    """Check whether a JSON value is an object whose values are all 0, so that it biases no token."""
    return isinstance(bias, dict) and all(value == 0 and value is not False for value in bias.values())


def _make_defaults_test(**defaults: str) -> Callable[[Any], bool]:
    """Return a function that checks whether a JSON value is an object whose fields all have default values.

    Fields may be missing in the object. Other fields make the result False. For example, with the default
    ``type="text"`` the objects ``{}`` and ``{"type": "text"}`` give True.
    """
    return lambda value: isinstance(value, dict) and value.items() <= defaults.items()


_NO_TOOLS = "this server cannot call tools or functions"
_NO_PENALTIES = "this server cannot penalize repetition"
_NO_SAMPLER = "this server samples with temperature, top_p and seed only"
_NO_CACHE_CONTROL = "this server keeps no prompts between requests"
_NO_AUDIO = "this server reads and writes text only"

# These fields are part of OpenAI's protocol, or of the extensions of other servers.
UNSUPPORTED_STREAM_OPTIONS = {
    "include_obfuscation": Unsupported("this server adds no random characters to events", (False,)),
    "continuous_usage_stats": Unsupported("only the last event of a stream has the usage", (False,)),
}
_UNSUPPORTED_SAMPLING = {
    "presence_penalty": Unsupported(_NO_PENALTIES, (0,)),
    "frequency_penalty": Unsupported(_NO_PENALTIES, (0,)),
    "repetition_penalty": Unsupported(_NO_PENALTIES, (1,)),
    "logit_bias": Unsupported(
        "this server cannot change the probability of single tokens", is_neutral=_is_zero_for_all_tokens
    ),
    "top_k": Unsupported(_NO_SAMPLER, (0, -1)),
    "min_p": Unsupported(_NO_SAMPLER, (0,)),
    "typical_p": Unsupported(_NO_SAMPLER, (1,)),
    "length_penalty": Unsupported("this server has no beam search", (1,)),
    "use_beam_search": Unsupported("this server has no beam search", (False,)),
    "num_beams": Unsupported("this server has no beam search", (1,)),
    "min_tokens": Unsupported("this server cannot forbid a text to end", (0,)),
    "ignore_eos": Unsupported("this server cannot forbid a text to end", (False,)),
}
IGNORED_IN_INFILL = (
    "input_extra",
    "id_slot",
    "cache_prompt",
    "n_cache_reuse",
    "n_indent",
    "n_keep",
    "n_probs",
    "response_fields",
    "samplers",
    "t_max_predict_ms",
    "t_max_prompt_ms",
    "timings_per_token",
    "top_k",
    "min_p",
)
"""Names of fields of ``/infill`` that are ignored, because editors send them with each request. Most of them
are hints for the sampler and the prompt cache of llama.cpp. `input_extra` has further files of the project;
here such files are documents of the store."""
_MAX_INFILLED = 128
"""Largest number of tokens that ``/infill`` generates if the request has no limit."""
UNSUPPORTED_CHAT = {
    **_UNSUPPORTED_SAMPLING,
    "tools": Unsupported(_NO_TOOLS),
    "tool_choice": Unsupported(_NO_TOOLS, ("none", "auto")),
    "parallel_tool_calls": Unsupported(_NO_TOOLS, (True, False)),
    "functions": Unsupported(_NO_TOOLS),
    "function_call": Unsupported(_NO_TOOLS, ("none", "auto")),
    "web_search_options": Unsupported("this server cannot search the web", is_empty_refused=True),
    "modalities": Unsupported(_NO_AUDIO, (["text"],)),
    "audio": Unsupported(_NO_AUDIO),
    "reasoning_effort": Unsupported("this server does not support a reasoning effort", ("none",)),
    "verbosity": Unsupported("this server does not support verbosity: ask for it in a message", ("medium",)),
    "prediction": Unsupported("this server takes its drafts from its store and accepts no predicted text"),
    "moderation": Unsupported("this server cannot moderate texts"),
    "service_tier": Unsupported("this server has only one service tier", ("auto", "default")),
    "store": Unsupported("this server does not store answers", (False,)),
    "metadata": Unsupported("this server stores neither answers nor their metadata"),
    "prompt_cache_retention": Unsupported(_NO_CACHE_CONTROL, ("in_memory", "in-memory", "24h")),
    "prompt_cache_options": Unsupported(
        _NO_CACHE_CONTROL, is_neutral=_make_defaults_test(mode="implicit", ttl="30m")
    ),
    "echo": Unsupported("a conversation is not repeated in its answer", (False,)),
    "add_generation_prompt": Unsupported("an answer is always a new message", (True,)),
    "continue_final_message": Unsupported("an answer is always a new message", (False,)),
}
UNSUPPORTED_MESSAGE = {
    "function_call": Unsupported("it was replaced by tool_calls: use that field"),
    "refusal": Unsupported("write a refusal as the content of its message"),
    "audio": Unsupported(_NO_AUDIO),
}
IGNORED_IN_MESSAGE = (
    "annotations",
    "provider_specific_fields",
    "reasoning_details",
    "thinking_blocks",
)
"""Names of fields of an assistant's message that are dropped. Another server has added them to an earlier
answer, and clients send them back with the conversation. They describe that answer and ask for nothing."""
UNSUPPORTED_PART = {
    "annotations": Unsupported("this server reads only the text of a message"),
    "prompt_cache_breakpoint": Unsupported(_NO_CACHE_CONTROL),
    "cache_control": Unsupported(_NO_CACHE_CONTROL),
}


class Body(BaseModel):
    """Base of all request bodies, and of the JSON objects inside the bodies.

    A field with the value null counts as missing, even if the server does not know the field. A field that is
    listed in `unsupported` is refused unless its value is neutral (changes nothing). Any other unknown field
    is refused. The error names the field.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    unsupported: ClassVar[Mapping[str, Unsupported]] = {}
    """Fields that this server does not support, by name."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_fields(cls, given: Any) -> Any:
        """Return a copy of a JSON object without the fields that change nothing.

        These are null fields, and unsupported fields with a neutral value (see `Unsupported`).
        A value that is not an object is returned unchanged; pydantic refuses it later.

        Raises:
            PydanticCustomError: if a field of `unsupported` has a value that is not neutral.
            ValueError: if the object has too many fields or is nested too deeply, or contains NaN, Infinity
                or a lone surrogate. JSON can escape a lone surrogate (half of a character), but it cannot be
                encoded as UTF-8.
        """
        if not isinstance(given, dict):  # pydantic refuses its type later
            return given
        if len(given) > MOST_FIELDS:
            raise ValueError(f"an object has {len(given):,} fields, but at most {MOST_FIELDS} are allowed")
        try:
            json.dumps(given, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("half of a character (a lone surrogate) is not valid text") from error
        except ValueError as error:
            raise ValueError(
                "NaN and Infinity are not valid JSON: leave the field out, or send null"
            ) from error
        except RecursionError as error:
            raise ValueError("the body is nested too deeply") from error
        fields = {}
        for name, value in given.items():
            rule = cls.unsupported.get(name)
            if rule is not None and not rule.accepts(value):
                raise field_error(name, rule.reason)
            if rule is None and value is not None:
                fields[name] = value
        return fields


class Retrieval(Body):
    """Field ``knn`` of a request: the documents to retrieve from, and the settings of retrieval.

    A missing field means the setting that is saved in the store.
    """

    domains: Names | None = Field(
        default=None, description="Retrieve only from these domains, which the model's name must include."
    )
    tags: Names | None = Field(
        default=None, description="Retrieve only from documents that have at least one of these tags."
    )
    where: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        default=None, description="Retrieve only from documents whose metadata meet this condition."
    )
    k: Annotated[StrictInt, Field(ge=1, le=65_536)] | None = None
    probes: Annotated[StrictInt, Field(ge=0, le=65_536)] | None = None
    temperature: Annotated[float, Field(gt=0)] | None = None
    lam: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, validation_alias=AliasChoices("lam", "lambda")
    )
    sources: Annotated[StrictInt, Field(ge=0, le=MOST_NEIGHBORS)] = Field(
        default=0,
        description="Number of neighbors that the answer lists for each generated token; 0 lists none.",
    )


class StreamOptions(Body):
    """Field ``stream_options``: options of a stream of events."""

    unsupported = UNSUPPORTED_STREAM_OPTIONS

    include_usage: StrictBool = False


class JsonSchemaFormat(Body):
    """Field ``json_schema`` of a response format: the JSON schema that the answer must match.

    The schema is always enforced strictly, even if `strict` is False.
    """

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] = Field(default={}, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Body):
    """Field ``response_format``: the answer is free text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        """Check that there is a schema if the type is "json_schema", and none otherwise. Returns this object.

        Raises:
            PydanticCustomError: if a schema is missing or superfluous.
        """
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise field_error(
                "json_schema", "is required for the type 'json_schema', and not allowed for other types"
            )
        return self


class GenerationRequest(Body):
    """Fields that `CompletionRequest` and `ChatRequest` have in common."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MOST_COPIES)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=MOST_STOPS)] | None = None
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(
        default=None,
        description="Label that changes nothing, like `safety_identifier` and `prompt_cache_key`.",
    )
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    knn: Retrieval | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Check the stop strings and the stream options, and return the request unchanged.

        Raises:
            PydanticCustomError: if a stop string in a list is empty, or the usage is requested without a
                stream.
        """
        if "" in self.stops:
            raise field_error("stop", "a stop string cannot be empty")
        if self.wants_usage and not self.stream:
            raise field_error("stream_options", "only with stream")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple; empty if `stop` is missing or an empty string."""
        if isinstance(self.stop, str):
            return (self.stop,) if self.stop else ()
        return tuple(self.stop or ())

    @property
    def sampling(self) -> Sampling:
        """Sampling settings of the request; a missing setting has the default of OpenAI's protocol.

        A temperature below 1e-6 counts as 0, so that always the most probable token is chosen.
        """
        temperature = 1.0 if self.temperature is None else self.temperature
        if 0 < temperature < 1e-6:
            temperature = 0.0  # dividing log-probabilities by it would overflow
        return Sampling(temperature, 1.0 if self.top_p is None else self.top_p, self.seed)

    @property
    def wants_usage(self) -> bool:
        """True if the client wants an event with the numbers of tokens (usage) at the end of a stream."""
        return self.stream_options is not None and self.stream_options.include_usage


_PROMPT_FORMS = "a text, a list of texts, a list of token ids, or a list of such lists"
_JSON_TYPE_NAMES = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "an object",
}


def _describe_json_type(value: Any) -> str:
    """Return the name of a value's JSON type with its article, for example "a string". None gives "null"."""
    return _JSON_TYPE_NAMES.get(type(value), "null")


class CompletionRequest(GenerationRequest):
    """The body of ``/v1/completions``: prompts to continue or to score.

    If the prompt is missing or empty, the text of a new document is generated.
    """

    unsupported = _UNSUPPORTED_SAMPLING

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
    ) = ""
    suffix: str | None = Field(
        default=None,
        description="Text after the one to generate. Needs a model that was trained to fill in the middle, "
        "and one prompt that is text. An empty suffix counts as none.",
    )
    max_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    echo: StrictBool | None = False
    logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_TOP)] | None = None
    best_of: StrictInt | None = None
    return_tokens_as_token_ids: StrictBool | None = Field(
        default=False,
        description="Show tokens of log-probabilities as token_id:N, because two tokens can have one text.",
    )

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, given: Any) -> Any:
        """Return the prompt unchanged if it is text, a list of texts, token ids, or lists of token ids.

        Without this check pydantic would report one error for each form that a prompt can have.

        Raises:
            ValueError: if the prompt has another form. The message says what is wrong.
        """
        if isinstance(given, str):
            return given
        if not isinstance(given, list):
            raise ValueError(f"prompt: {_PROMPT_FORMS}, not {_describe_json_type(given)}")
        if not given:
            raise ValueError(f"prompt: the list is empty: give {_PROMPT_FORMS}")
        if all(isinstance(item, str) for item in given):
            return given
        lists = [("", given)]
        if isinstance(given[0], list):
            lists = [(f"list {position}: ", token_list) for position, token_list in enumerate(given)]
        for name, token_list in lists:
            if not isinstance(token_list, list):
                raise ValueError(
                    f"prompt: {name.rstrip(': ')} is {_describe_json_type(token_list)}, but the first item "
                    "is a list of token ids"
                )
            if not token_list:
                raise ValueError(f"prompt: {name}the list of token ids is empty")
            for position, token in enumerate(token_list):
                if isinstance(token, bool) or not isinstance(token, int):
                    raise ValueError(
                        f"prompt: {name}item {position} is {_describe_json_type(token)}, not a token id: "
                        f"give {_PROMPT_FORMS}"
                    )
                if token < 0:
                    raise ValueError(f"prompt: {name}token id {token} at position {position} is negative")
        return given

    @model_validator(mode="after")
    def _check_number_of_texts(self) -> Self:
        """Check the number of texts, prompts × n, and return the request unchanged.

        Raises:
            PydanticCustomError: if `best_of` differs from `n`, or prompts × n are more than `MOST_TEXTS`.
        """
        copies = self.n or 1
        if self.best_of not in (None, copies):
            raise field_error("best_of", "must equal n, because all texts are returned")
        if len(self.prompts) * copies > MOST_TEXTS:
            count = len(self.prompts) * copies
            raise field_error("prompt", f"prompts × n are {count}, at most {MOST_TEXTS}")
        return self

    @model_validator(mode="after")
    def _check_suffix(self) -> Self:
        """Check that the suffix fits the other fields, and return the request unchanged.

        Raises:
            PydanticCustomError: if a request with a suffix has several prompts, has token ids as the prompt,
                or wants the prompt repeated (`echo`).
        """
        if self.suffix and self.echo:
            raise field_error("echo", "a prompt with a suffix cannot be repeated")
        if self.suffix and not (len(self.prompts) == 1 and isinstance(self.prompts[0], str)):
            raise field_error("suffix", "needs one prompt, which is text and not token ids")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """All prompts, each as text or as a list of token ids; a single prompt gives a list with one item."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]


class InfillRequest(Body):
    """The body of ``/infill``, an endpoint of llama.cpp's server for editors: the text around the cursor."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **{name: rule for name, rule in _UNSUPPORTED_SAMPLING.items() if name not in IGNORED_IN_INFILL},
        "stream": Unsupported("this endpoint does not stream its answers", (False,)),
        "grammar": Unsupported("this server does not support grammars"),
        "json_schema": Unsupported("this server cannot fill in JSON between two texts"),
    }

    input_prefix: str = Field(default="", description="Text before the cursor.")
    input_suffix: str = Field(default="", description="Text after the cursor.")
    prompt: str = Field(default="", description="Beginning of the text at the cursor.")
    n_predict: Annotated[StrictInt, Field(ge=-1)] = Field(
        default=-1, description="Largest number of tokens to generate; -1 stands for 128."
    )
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[StrictInt, Field(ge=-1, lt=2**63)] = -1
    stop: Annotated[list[StopText], Field(fail_fast=True, max_length=MOST_STOPS)] | None = None
    model: str | None = None
    knn: Retrieval | None = None

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        """Check that no sources are requested, and return the request unchanged.

        Raises:
            PydanticCustomError: if the request asks for sources (stored records that support a token).
        """
        if self.knn is not None and self.knn.sources:
            raise field_error(
                "knn.sources", "answers of this endpoint have no field for sources: use /v1/completions"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored_fields(cls, given: Any) -> Any:
        """Return a copy of a JSON object without the fields of `IGNORED_IN_INFILL`."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if name not in IGNORED_IN_INFILL}

    def to_completion(self, model: str, window: int) -> CompletionRequest:
        """Convert this request to the body of ``/v1/completions``, without the text after the cursor.

        Args:
            model: default name of the model, with domains; used if this request names no model.
            window: number of tokens of the model's window. If this request has no limit of tokens, the limit
                is half of the window, at most `_MAX_INFILLED`.
        """
        fields = {
            "model": self.model or model,
            "prompt": self.input_prefix,
            "max_tokens": min(_MAX_INFILLED, window // 2) if self.n_predict < 0 else self.n_predict,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": None if self.seed < 0 else self.seed,
            "stop": self.stop,
            "knn": self.knn and self.knn.model_dump(exclude_none=True),
        }
        return CompletionRequest.model_validate(fields)


class TextPart(Body):
    """A part of the content of a message. Only parts of the type "text" are supported."""

    unsupported = UNSUPPORTED_PART

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, given: Any) -> Any:
        """Refuse a part of another type than "text", for example an image; return other values unchanged.

        This check runs before pydantic checks the other fields, because those errors would be less clear. A
        missing type, or a type that is not a string, is left to pydantic.

        Raises:
            PydanticCustomError: if the type is a string other than "text".
        """
        if isinstance(given, dict) and isinstance(given.get("type"), str) and given["type"] != "text":
            raise field_error("type", f"a part of type {given['type']!r} cannot be read, only 'text'")
        return given


def _convert_content_to_parts(content: Any) -> Any:
    """Return the content of a message as a list of parts. A string becomes one part of the type "text".

    A list is returned unchanged. Any other value raises PydanticCustomError.
    """
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        return content
    raise PydanticCustomError("content", "must be a string or a list of parts of type 'text'")


Content = Annotated[
    list[TextPart], BeforeValidator(_convert_content_to_parts, json_schema_input_type=str | list[TextPart])
]


class FunctionCall(Body):
    """The function that an earlier answer called: its name, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Body):
    """A tool call in an earlier answer of the conversation.

    Another server has made it; this one calls no tools.
    """

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One message of a conversation: its role, its content, and further parts of an assistant's answer."""

    unsupported = UNSUPPORTED_MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(
        default=None,
        description="Reasoning of the assistant before its answer, for chat templates that use it.",
    )
    reasoning: str | None = Field(default=None, description="Another name of `reasoning_content`.")

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored_fields(cls, given: Any) -> Any:
        """Return a copy of an assistant's message without the fields of `IGNORED_IN_MESSAGE`.

        Messages of other roles, and values that are not objects, are returned unchanged.
        """
        if not isinstance(given, dict) or given.get("role") != "assistant":
            return given
        return {name: value for name, value in given.items() if name not in IGNORED_IN_MESSAGE}

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        """Check that content, tool calls and reasoning fit the role, and return the message unchanged.

        Only the role "assistant" may have tool calls and reasoning; every other role needs content.

        Raises:
            PydanticCustomError: if a field does not fit the role.
        """
        if self.content is None and self.role != "assistant":
            raise field_error("content", f"is required for a message of the role {self.role!r}")
        if self.tool_calls and self.role != "assistant":
            raise field_error("tool_calls", "is allowed only in messages of the role 'assistant'")
        for name in ("reasoning_content", "reasoning"):
            if getattr(self, name) and self.role != "assistant":
                raise field_error(name, "is allowed only in messages of the role 'assistant'")
        return self

    @property
    def thoughts(self) -> str:
        """Text of the assistant's reasoning before its answer; empty if the message has none."""
        return self.reasoning_content or self.reasoning or ""

    @property
    def text(self) -> str:
        """Texts of all parts of the content, joined; empty if the message has no content."""
        return "".join(part.text for part in self.content or ())


class ChatRequest(GenerationRequest):
    """The body of ``/v1/chat/completions``: a conversation whose next answer is to be generated."""

    unsupported = UNSUPPORTED_CHAT

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: StrictBool | None = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_TOP)] | None = None

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> Self:
        """Check that `top_logprobs` is set only together with `logprobs`, and return the request unchanged.

        Raises:
            PydanticCustomError: if `top_logprobs` is set without `logprobs`.
        """
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "only with logprobs")
        return self


class TokenizeRequest(Body):
    """The body of ``/tokenize``: a text whose tokens are wanted."""

    model: str | None = None
    prompt: str
    add_special_tokens: StrictBool = True


class DetokenizeRequest(Body):
    """The body of ``/detokenize``: token ids whose text is wanted."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class ExplainRequest(Body):
    """The body of ``/v1/explain``: a text whose tokens are explained by the records that were retrieved."""

    model: str
    text: str
    after: str = Field(
        default="",
        description="Text before `text`: the model reads it first, and its tokens are not explained.",
    )
    source: str | None = Field(
        default=None,
        description="For an encoder-decoder model: the source of the text, such as the sentence that it "
        "translates.",
    )
    neighbors: Annotated[StrictInt, Field(ge=0, le=MOST_NEIGHBORS)] = 8
    knn: Retrieval | None = None


class NewDocuments(Body):
    """The body of ``POST /v1/documents``: documents to add to a domain (a named set of documents)."""

    domain: Name
    documents: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=1024)] = Field(
        description="Objects with `id` and `text`; all other fields are metadata. An encoder-decoder model "
        "also needs `source`."
    )
    tags: Annotated[list[Name], Field(max_length=MOST_NAMES)] = []
