"""What clients send, as OpenAI's protocol has it, and what is allowed of it."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    field_validator,
    model_validator,
)

from knnstore.checks import MAX_NAME
from knnstore.server.engine import Sampling

MOST_COPIES = 16
MOST_PROMPTS = 64
MOST_TEXTS = 128
"""Prompts × n."""
MOST_TOP = 20
MOST_STOPS = 16
MOST_NEIGHBORS = 64
MOST_NAMES = 64
MOST_EXPLAINED = 4096
"""Tokens."""
MOST_SOURCES = 32_768
"""Tokens × neighbors of one explanation: an answer of some 25 MB."""

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
Names = Annotated[list[Name], Field(min_length=1, max_length=MOST_NAMES)]
TokenId = Annotated[StrictInt, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


class Body(BaseModel):
    """The body of a request: what it does not know it refuses, rather than do something else."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_text(cls, given: Any) -> Any:
        """Refuse what JSON can escape and no text can hold, wherever it stands, also in names of fields."""
        if not isinstance(given, dict):  # which is refused for what it is
            return given
        try:
            json.dumps(given, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("half of a character (a lone surrogate) is no text") from error
        except ValueError as error:
            raise ValueError("NaN and Infinity are no JSON: leave the field out, or send null") from error
        except RecursionError as error:
            raise ValueError("the body is nested too deeply") from error
        return given


class Retrieval(Body):
    """How to retrieve, where a request leaves the saved settings."""

    domains: Names | None = Field(default=None, description="Only from these of the model's domains.")
    tags: Names | None = Field(default=None, description="Only from documents with one of these tags.")
    where: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        default=None, description="Only from documents whose metadata meet this condition."
    )
    k: Annotated[StrictInt, Field(ge=1, le=65_536)] | None = None
    probes: Annotated[StrictInt, Field(ge=0, le=65_536)] | None = None
    temperature: Annotated[float, Field(gt=0)] | None = None
    lam: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, validation_alias=AliasChoices("lam", "lambda")
    )
    sources: Annotated[StrictInt, Field(ge=0, le=MOST_NEIGHBORS)] = Field(
        default=0, description="Name so many places for each token that was written."
    )


class StreamOptions(Body):
    """What a stream has beside its text."""

    include_usage: StrictBool = False


class Writing(Body):
    """What completions of both kinds have in common."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MOST_COPIES)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    knn: Retrieval | None = None
    # Known, but only as if they had not been given.
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "" in self.stops:
            raise ValueError("stop: a string that ends a text cannot be empty")
        if self.stream_options and not self.stream:
            raise ValueError("stream_options: only with stream")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end a text."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        temperature = 1.0 if self.temperature is None else self.temperature
        if 0 < temperature < 1e-6:
            temperature = 0.0  # the most probable token, where its log-probability would have no number
        return Sampling(temperature, 1.0 if self.top_p is None else self.top_p, self.seed)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with what it used."""
        return self.stream_options is not None and self.stream_options.include_usage


_FORMS = "a text, a list of texts, a list of token ids, or a list of such lists"
_KINDS = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "an object",
}


def _kind(value: Any) -> str:
    """Return what JSON calls the type of a value."""
    return _KINDS.get(type(value), "null")


class CompletionRequest(Writing):
    """The body of ``/v1/completions``."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    max_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    echo: StrictBool | None = False
    logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_TOP)] | None = None
    best_of: StrictInt | None = None
    suffix: Literal[""] | None = None
    return_tokens_as_token_ids: StrictBool | None = Field(
        default=False, description="Write tokens of log-probabilities as token_id:N: no two print alike."
    )

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, given: Any) -> Any:
        """Say what is wrong with a prompt. Without this, each of the four forms would report an error."""
        if isinstance(given, str):
            return given
        if not isinstance(given, list):
            raise ValueError(f"prompt: {_FORMS}, not {_kind(given)}")
        if not given:
            raise ValueError(f"prompt: the list is empty: give {_FORMS}")
        if all(isinstance(one, str) for one in given):
            return given
        lists = [("", given)]
        if isinstance(given[0], list):
            lists = [(f"list {at}: ", one) for at, one in enumerate(given)]
        for name, one in lists:
            if not isinstance(one, list):
                raise ValueError(f"prompt: {name.rstrip(': ')} is {_kind(one)} beside lists of token ids")
            if not one:
                raise ValueError(f"prompt: {name}there is no token id")
            for at, token in enumerate(one):
                if isinstance(token, bool) or not isinstance(token, int):
                    raise ValueError(
                        f"prompt: {name}item {at} is {_kind(token)}, not a token id: give {_FORMS}"
                    )
                if token < 0:
                    raise ValueError(f"prompt: {name}token id {token} at position {at} is negative")
        return given

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        copies = self.n or 1
        if self.best_of not in (None, copies):
            raise ValueError("best_of: must equal n, all texts are returned")
        if len(self.prompts) * copies > MOST_TEXTS:
            raise ValueError(f"prompt: prompts × n are {len(self.prompts) * copies}, at most {MOST_TEXTS}")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        """Its parts, one after another."""
        return self.content if isinstance(self.content, str) else "".join(one.text for one in self.content)


class ChatRequest(Writing):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: StrictBool | None = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_TOP)] | None = None

    @model_validator(mode="after")
    def _check_top(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs")
        return self


class TokenizeRequest(Body):
    """The body of ``/tokenize``."""

    model: str | None = None
    prompt: str
    add_special_tokens: StrictBool = True


class DetokenizeRequest(Body):
    """The body of ``/detokenize``."""

    model: str | None = None
    tokens: list[TokenId]


class ExplainRequest(Body):
    """The body of ``/v1/explain``."""

    model: str
    text: str
    after: str = Field(default="", description="A text that comes before and is not explained.")
    neighbors: Annotated[StrictInt, Field(ge=0, le=MOST_NEIGHBORS)] = 8
    knn: Retrieval | None = None


class NewDocuments(Body):
    """The body of ``POST /v1/documents``."""

    domain: Name
    documents: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=1024)] = Field(
        description="Objects with `id` and `text`; whatever else they have is metadata."
    )
    tags: Annotated[list[Name], Field(max_length=MOST_NAMES)] = []
