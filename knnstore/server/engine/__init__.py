"""The engine of the server: one thread that runs the model and decodes the texts of all requests together.

Each step of the model adds a token, or several if they were drafted, to every running text. New texts join
between two steps (continuous batching).

`Engine` runs the thread. A request is described by a `Task` (prompts to continue or to score), with `Prompt`
and `Sampling`. A `Ticket` is a task together with the callback that gets its results. Results arrive as
`Piece` objects (new text of one continuation), with a `TokenScore` for each token. `Row` turns chosen tokens
into pieces. `Turns` is the type of long work that the engine runs in parts between decoding steps. `Observed`
has the counts of one turn of the engine, for the metrics.
"""

from knnstore.server.engine.engine import Engine, SettingsOf
from knnstore.server.engine.rows import (
    Finish,
    Piece,
    Prompt,
    Row,
    Sampling,
    Task,
    TokenScore,
    TopToken,
    add_prompt_texts,
    find_stop_strings,
    make_token_score,
)
from knnstore.server.engine.tickets import (
    MOST_BEHIND,
    MOST_UNREAD,
    EngineBusyError,
    EngineStoppedError,
    Observed,
    Ticket,
    Turns,
)

__all__ = [
    "MOST_BEHIND",
    "MOST_UNREAD",
    "Engine",
    "EngineBusyError",
    "EngineStoppedError",
    "Finish",
    "Observed",
    "Piece",
    "Prompt",
    "Row",
    "Sampling",
    "SettingsOf",
    "Task",
    "Ticket",
    "TokenScore",
    "TopToken",
    "Turns",
    "add_prompt_texts",
    "find_stop_strings",
    "make_token_score",
]
