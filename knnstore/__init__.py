"""knnstore: a memory that you can edit, for any Hugging Face language model.

    import knnstore

    lm = knnstore.create("news.knn", model="path/or/hub-id")    # an empty store for this model
    lm.add([{"id": "1", "text": "..."}], domain="news")         # one forward pass, no training
    lm.evaluate(held_out)                                       # perplexity without and with it
    lm.store.remove_domain("news")                              # and it is gone

Importing this package loads neither torch nor a vector engine.
"""

from typing import TYPE_CHECKING, Any

from knnstore.lazy_imports import attach_lazy_imports

if TYPE_CHECKING:
    from knnstore.documents import TextDocument, read_documents
    from knnstore.lm import KNNLMForCausalLM, KNNLMForSeq2SeqLM, KNNSettings, create, load
    from knnstore.progress import Progress
    from knnstore.store import KNNStore, Selection

    open = KNNStore.open
else:
    _import_name, _ = attach_lazy_imports(__name__)

    def __getattr__(name: str) -> Any:
        return _import_name("KNNStore").open if name == "open" else _import_name(name)


__version__ = "0.1.0"

__all__ = [
    "KNNLMForCausalLM",
    "KNNLMForSeq2SeqLM",
    "KNNSettings",
    "KNNStore",
    "Progress",
    "Selection",
    "TextDocument",
    "create",
    "load",
    "open",
    "read_documents",
]


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})
