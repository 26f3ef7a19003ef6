"""The engine of the server: one thread, one model, one batch of texts that new ones join between steps."""

from knnstore.server.engine.engine import Engine, SettingsOf
from knnstore.server.engine.jobs import Turns
from knnstore.server.engine.rows import Finish, Piece, Prompt, Sampling, Task, TokenScore, TopToken
from knnstore.server.engine.tickets import (
    MOST_BEHIND,
    MOST_UNREAD,
    EngineBusyError,
    EngineStoppedError,
    Observed,
    Ticket,
)

__all__ = [
    "MOST_BEHIND", "MOST_UNREAD", "Engine", "EngineBusyError", "EngineStoppedError", "Finish", "Observed",
    "Piece", "Prompt", "Sampling", "SettingsOf", "Task", "Ticket", "TokenScore", "TopToken", "Turns",
]  # fmt: skip
