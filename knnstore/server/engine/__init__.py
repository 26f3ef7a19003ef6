"""The engine of the server: one thread decodes all requests with one model, in continuous batches.

`Engine` runs the thread. `Task`, `Prompt` and `Sampling` describe a request, `Ticket` submits it, and `Piece`
and `TokenScore` are its results. `Row` turns chosen tokens into pieces. `Turns` is long work that the engine
runs between decoding steps. `Observed` has the counts of one turn of the engine, for the metrics.
"""

from knnstore.server.engine.engine import Engine, SettingsOf
from knnstore.server.engine.jobs import Turns
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
    make_token_score,
)
from knnstore.server.engine.tickets import (
    MOST_BEHIND,
    MOST_UNREAD,
    EngineBusyError,
    EngineStoppedError,
    Observed,
    Ticket,
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
    "make_token_score",
]
