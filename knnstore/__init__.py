"""knnstore: a memory that you can edit, for any Hugging Face language model.

    import knnstore

    lm = knnstore.create("news.knn", model="path/or/hub-id")    # an empty store for this model
    lm.add([{"id": "1", "text": "..."}], domain="news")         # one forward pass, no training
    lm.evaluate(held_out)                                       # perplexity without and with it
    lm.store.remove_domain("news")                              # and it is gone

Importing this package loads neither torch nor a vector engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from knnstore.documents import TextDocument, read_documents
    from knnstore.lm import KNNLMForCausalLM, KNNSettings, create, load
    from knnstore.progress import Progress
    from knnstore.store import KNNStore, Selection

    open = KNNStore.open

__version__ = "0.1.0"

_HOMES = {
    "KNNLMForCausalLM": "knnstore.lm",
    "KNNSettings": "knnstore.lm",
    "KNNStore": "knnstore.store",
    "Progress": "knnstore.progress",
    "Selection": "knnstore.store",
    "TextDocument": "knnstore.documents",
    "create": "knnstore.lm",
    "load": "knnstore.lm",
    "read_documents": "knnstore.documents",
}

__all__ = [
    "KNNLMForCausalLM", "KNNSettings", "KNNStore", "Progress", "Selection", "TextDocument", "create", "load",
    "open", "read_documents",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})


def __getattr__(name: str) -> Any:
    if name == "open":
        return import_module("knnstore.store").KNNStore.open
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'knnstore' has no attribute {name!r}")
