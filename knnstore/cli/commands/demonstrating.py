"""The command `demo`: n-grams of two domains, then keys; removes a domain again, and generates a text.

Its documents are in every installation: Python's language reference and the docstrings of numpy.
"""

import inspect
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

import knnstore
from knnstore.cli.commands.generating import credit_documents, format_sources_table
from knnstore.cli.models import Runtime, silence_transformers
from knnstore.cli.options import JsonOption
from knnstore.cli.output import Bar, format_table, print_message, print_result
from knnstore.errors import ConfigError, KnnstoreError

if TYPE_CHECKING:
    from knnstore import TextDocument
    from knnstore.lm import KNNLM, Evaluation

REFERENCE = "python-reference"
LIBRARY = "library-docs"
_MODULES = ("numpy", "numpy.linalg", "numpy.fft", "numpy.random")
_LIBRARY_DOCUMENTS = 66
_MIN_CHARACTERS, _MAX_CHARACTERS = 500, 4_000
"""Length of a document in characters. A shorter document is left out, and a longer document is cut, to save
time."""
_HELD_OUT_EVERY = 14
"""Every 14th document is held out."""
_PROMPT = "Returns the sum of the array elements along"
_NEW_TOKENS = 20
_LAMBDA_OF_TEXT = 0.8
"""Weight of retrieval for generation. It is high, because the small model has hardly seen text of this
kind."""


class Corpus(NamedTuple):
    """The documents of one domain of the demonstration: documents to store, and held-out documents."""

    domain: str
    """Name of the domain."""
    stored: "list[TextDocument]"
    """Documents that are added to the store."""
    held_out: "list[TextDocument]"
    """Documents for evaluation, which are not stored."""


def demo(
    *,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_HUB_ID", show_default="examples/tiny-lm", help="A causal language model."
        ),
    ] = None,
    runtime: Runtime,
    as_json: JsonOption = False,
) -> None:
    """Demonstrate the library on documentation that is installed with Python and numpy.

    Measures perplexity on held-out documents with n-grams of two domains, then with keys and n-grams, removes
    one domain again, and continues a text with its sources. The stores are temporary.

    Examples:
      knnstore demo
    """
    started = time.perf_counter()
    name = model or _find_default_model()
    silence_transformers()
    with TemporaryDirectory(prefix="knnstore-demo-") as folder, Bar() as bar:
        options: dict[str, Any] = {"device": runtime.device, "dtype": runtime.dtype, "kind": "causal"}
        ngrams_lm = knnstore.create(Path(folder) / "ngrams.knn", name, key=None, **options)
        lm = knnstore.create(Path(folder) / "keys.knn", name, **options)
        with ngrams_lm.store, lm.store:
            result = demonstrate(ngrams_lm, lm, [build_reference_corpus(), build_library_corpus()], bar)
    print_result(result, _format_demo(result), as_json=as_json)
    if not as_json:
        print_message(f"\nmeasured just now, in {time.perf_counter() - started:.0f} s, with {name}")
    if not result["restored"]:
        raise KnnstoreError(f"removing {LIBRARY} did not restore the perplexities to the last digit")


def demonstrate(ngrams_lm: "KNNLM", lm: "KNNLM", corpora: list[Corpus], bar: Bar) -> dict[str, Any]:
    """Add two domains to two empty stores, evaluate and generate, then remove the second domain again.

    Args:
        ngrams_lm: the model with an empty store without keys. It keeps both domains.
        lm: the model with an empty store. It keeps the first domain.
        corpora: the two domains.
        bar: the progress bar.

    Returns:
        A dict for `_format_demo`: the perplexities in each state of the store, by domain; ``restored``, True
        if removing the second domain restored the perplexities exactly; speeds; and a generated continuation
        with its sources.
    """
    first, second = corpora
    states: list[dict[str, Any]] = []
    evaluations: list[Evaluation] = []

    def measure(state: str, lm: "KNNLM" = lm) -> dict[str, float]:
        """Evaluate both domains and record the state. Returns the perplexities with the store by domain."""
        results = {corpus.domain: lm.evaluate(corpus.held_out, progress=bar) for corpus in corpora}
        if not states:
            base = {domain: evaluation.base_ppl for domain, evaluation in results.items()}
            states.append({"state": "the model alone"} | base)
        perplexities = {domain: evaluation.knn_ppl for domain, evaluation in results.items()}
        states.append({"state": state} | perplexities)
        evaluations.extend(results.values())
        return perplexities

    # 1) Store both domains as n-grams, which takes no pass of the model.
    counted = [ngrams_lm.add(corpus.stored, domain=corpus.domain, progress=bar) for corpus in corpora]
    measure("with n-grams of both domains", ngrams_lm)
    # 2) Store keys too, of one domain after the other.
    added = [lm.add(first.stored, domain=first.domain, progress=bar)]
    before = measure(f"with keys of {first.domain}")
    added.append(lm.add(second.stored, domain=second.domain, progress=bar))
    measure(f"with keys of {second.domain} too")
    # 3) Continue a text without and with the store.
    model_settings, store_settings = replace(lm.knn, lam=0.0), replace(lm.knn, lam=_LAMBDA_OF_TEXT)
    model_continuation = lm.generate_text(_PROMPT, max_new_tokens=_NEW_TOKENS, knn=model_settings)
    continuation = lm.generate_text(_PROMPT, max_new_tokens=_NEW_TOKENS, knn=store_settings)
    sources = credit_documents(lm.explain(continuation, store_settings, after=_PROMPT, neighbors=32))
    # 4) Remove the second domain: the perplexities must be the same as before it.
    lm.store.remove_domain(second.domain)
    after = measure(f"after removing {second.domain}")
    stored_tokens = sum(addition.tokens for addition in added)
    scored_tokens = sum(evaluation.tokens for evaluation in evaluations)
    scoring_seconds = sum(evaluation.tokens / evaluation.tokens_per_s for evaluation in evaluations)
    return {
        "perplexity": states,
        "restored": after == before,
        "probes": lm.knn.probes,
        "temperature": lm.knn.temperature,
        "ngram_seconds": sum(addition.seconds for addition in counted),
        "stored_tokens": stored_tokens,
        "stored_tokens_per_s": stored_tokens / sum(addition.seconds for addition in added),
        "scored_tokens_per_s": scored_tokens / scoring_seconds,
        "prompt": _PROMPT,
        "continuation_of_the_model_alone": model_continuation,
        "continuation": continuation,
        "sources": sources,
    }


def _format_demo(result: dict[str, Any]) -> str:
    """Format the result of `demonstrate` as text for people."""
    perplexities = [{"": state["state"], **state} for state in result["perplexity"]]
    return f"""\
Perplexity on documents that were held out (lower is better):

{format_table(perplexities, ["", REFERENCE, LIBRARY])}

equal to before the second domain was added, to the last digit: {"yes" if result["restored"] else "NO"}
stored {result["stored_tokens"]:,} tokens as n-grams in {result["ngram_seconds"]:.1f} s, \
as keys at {result["stored_tokens_per_s"]:,.0f} tokens/s; \
scored at {result["scored_tokens_per_s"]:,.0f} tokens/s ({result["probes"]} probes)

A continuation of {result["prompt"]!r}:

the model alone  {result["continuation_of_the_model_alone"]!r}
with the store   {result["continuation"]!r}, from:

{format_sources_table(result["sources"])}"""


def _find_default_model() -> str:
    """Return the folder ``examples/tiny-lm`` of a checkout of the repository.

    Raises:
        ConfigError: the folder does not exist, as in an installed package.
    """
    folder = Path(knnstore.__file__).parent.parent / "examples" / "tiny-lm"
    if not (folder / "config.json").is_file():
        raise ConfigError("examples/tiny-lm is only in a checkout of the repository; give --model")
    return str(folder)


def build_reference_corpus() -> Corpus:
    """Return Python's language reference as a corpus; each topic of `help()` is a document."""
    from pydoc_data.topics import topics

    return _split_corpus(REFERENCE, sorted(topics.items()))


def build_library_corpus() -> Corpus:
    """Return docstrings of numpy's functions and classes as a corpus; every n-th one in order of name."""
    documented: dict[str, str] = {}
    for name in _MODULES:
        module = import_module(name)
        for attribute in sorted(dir(module)):
            text = getattr(getattr(module, attribute), "__doc__", None)
            if not attribute.startswith("_") and isinstance(text, str) and len(text) >= _MIN_CHARACTERS:
                documented.setdefault(f"{name}.{attribute}", inspect.cleandoc(text))
    every = max(1, len(documented) // _LIBRARY_DOCUMENTS)
    return _split_corpus(LIBRARY, list(documented.items())[::every])


def _split_corpus(domain: str, texts: Iterable[tuple[str, str]]) -> Corpus:
    """Create documents from pairs of id and text, and hold out every 14th document.

    Args:
        domain: name of the corpus's domain.
        texts: the pairs. Repeated paragraphs are removed, and long texts are cut.
    """
    from knnstore import TextDocument

    documents = [TextDocument(id, text[:_MAX_CHARACTERS]) for id, text in _remove_repeated_paragraphs(texts)]
    held_out = documents[::_HELD_OUT_EVERY]
    return Corpus(domain, [document for document in documents if document not in held_out], held_out)


def _remove_repeated_paragraphs(texts: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of id and text, without paragraphs that an earlier text contains.

    The demo stores some of the texts and holds out the others, and no paragraph may be in both. Each
    paragraph becomes one line without indentation. Rules, such as ``---``, are removed. A text that has fewer
    than `_MIN_CHARACTERS` characters afterwards is left out.
    """
    seen: set[str] = set()
    for id, text in texts:
        lines = []
        for paragraph in text.split("\n\n"):
            words = (word for word in paragraph.split() if word.strip("-=*~^."))
            line = " ".join(words)
            if line and line not in seen:
                seen.add(line)
                lines.append(line)
        if sum(map(len, lines)) >= _MIN_CHARACTERS:
            yield id, "\n".join(lines)
