"""A small domain of text that comes with every installation of Python."""

from pathlib import Path
from pydoc_data.topics import topics

from texts import Limits

from knnstore.documents import TextDocument

TINY_LM = Path(__file__).parent.parent.parent / "examples" / "tiny-lm"
SMOKE_LIMITS = Limits(
    documents=24, k=32, fractions=3, train_tokens=1_000, generated=8, prompts=4, codes="pq8"
)


def smoke_texts() -> dict[str, dict[str, list[TextDocument]]]:
    """Topics of Python's help, cut short, as one domain."""
    long = [(name, " ".join(text.split())) for name, text in sorted(topics.items()) if len(text) > 900]
    rows = [TextDocument(name, text[:390]) for name, text in long]
    return {"python": {"store": rows[16:40], "dev": rows[:8], "test": rows[8:16]}}
