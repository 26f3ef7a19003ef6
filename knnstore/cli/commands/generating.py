"""Commands that run the model with its store: `generate`, `explain` and `search`."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnstore.checks import printable
from knnstore.cli.inputs import read_text
from knnstore.cli.models import StoreRuntime
from knnstore.cli.options import JsonOption, seed_option
from knnstore.cli.output import Verbatim, echo, note, plain, print_result, row_of, table
from knnstore.cli.retrieval_options import Query, ScoringQuery, SelectionOptions, why_nothing
from knnstore.errors import ConfigError, InputError

if TYPE_CHECKING:
    from torch import Tensor

    from knnstore.lm import Detokenizer, Passage, Source, TextReader, TokenExplanation

_NEIGHBORS_CREDITED = 32  # neighbors of each token that get credit; further ones hardly weigh
_SOURCES_SHOWN = 5
_LEAST_SAMPLED = 1e-6  # smallest temperature; smaller ones would overflow the logits


def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The text to continue; - reads it from standard input.")
    ],
    *,
    selected: SelectionOptions,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens to write at most.")] = 64,
    sampling_temperature: Annotated[
        float,
        typer.Option(
            "--temperature",
            min=0,
            metavar="X",
            help="Of sampling; 0 takes the most probable token each time.",
        ),
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            min=0, max=1, metavar="P", help="Sample from the most probable tokens that make up this much."
        ),
    ] = 1.0,
    seed: Annotated[int | None, seed_option("Makes sampling repeatable.")] = None,
    beams: Annotated[int, typer.Option(min=1, metavar="N", help="Beams to search with.")] = 1,
    draft: Annotated[
        bool | None,
        typer.Option(
            "--draft/--no-draft",
            help="Check several tokens in one pass, which stood after the same words in the store or the "
            "text. The text stays the same; all that is stored is sorted first, as n-grams need it too: by "
            "default where these are in use and one beam searches. One line says so where drafts are "
            "impossible, as with a model that has a recurrent state.",
            show_default=False,
        ),
    ] = None,
    query: Query,
    explain: Annotated[
        bool, typer.Option("--explain", help="Name the documents that the text came from.")
    ] = False,
    runtime: StoreRuntime,
    as_json: JsonOption = False,
) -> None:
    """Continue a text.

    Examples:
      knnstore generate "The harbour was" --max-new-tokens 20
      knnstore generate "The harbour was" --domain letters --temperature 0.8 --seed 1 --explain
    """
    if 0 < sampling_temperature < _LEAST_SAMPLED:
        raise ConfigError(f"--temperature must be 0 or at least {_LEAST_SAMPLED}, got {sampling_temperature}")
    with runtime.open_model("r", domains=selected.domains) as lm:
        from knnstore.lm import Purpose, resolve

        settings = query.settings(lm.store, selected.selection())
        generating = resolve(lm.store, settings, Purpose.GENERATION)
        prompt = read_text(prompt)
        if settings.writes_alone:
            weight = "--ngram-lambda" if lm.store.is_keyless else "--lambda"
            note(
                "warning: the model writes alone, because with the store text repeats itself more "
                f"(knnstore calibrate --show); {weight} 0.5 lets the store count"
            )
        shown = PromptAndContinuation(lm.reader, prompt)
        continuation = lm.generate_text(
            prompt,
            max_new_tokens=max_new_tokens,
            do_sample=sampling_temperature > 0,
            temperature=sampling_temperature or 1.0,
            top_p=top_p,
            seed=seed,
            num_beams=beams,
            draft=generating.ngrams is not None and beams == 1 if draft is None else draft,
            knn=settings,
            streamer=shown if beams == 1 and not as_json else None,
        )
        result: dict[str, Any] = {"prompt": prompt, "continuation": continuation}
        if not as_json:
            shown.finish(continuation)
        if explain:
            explained = lm.explain(continuation, generating, neighbors=_NEIGHBORS_CREDITED, after=prompt)
            result["sources"] = credits_of(explained)
            if not as_json:
                echo("\n", table_of_sources(result["sources"]))
    if as_json:
        print_result(result, "", as_json=True)


class PromptAndContinuation:
    """Streamer for `generate` of transformers that prints the prompt, then the generated text.

    A token is printed as soon as its characters are complete. Together the pieces are the text that
    `generate_text` returns.
    """

    def __init__(self, reader: "TextReader", prompt: str) -> None:
        self._reader = reader
        self._prompt = prompt
        self._detokenizer: Detokenizer | None = None
        self._printed = ""

    def put(self, tokens: "Tensor") -> None:
        """Print new text. The first call gets the tokens of the prompt, later calls the generated tokens."""
        from knnstore.lm import Detokenizer, TokenTexts

        ids = tokens.flatten().tolist()
        if self._detokenizer is None:
            self._detokenizer = Detokenizer(TokenTexts(self._reader.tokenizer), ids)
            echo(Verbatim(self._prompt), end="")
            return
        text = "".join(piece.text for token in ids for piece in self._detokenizer.take(token))
        echo(Verbatim(text), end="")
        self._printed += text

    def end(self) -> None:
        """Do nothing; `finish` prints the rest of the text."""

    def finish(self, continuation: str) -> None:
        """Print the part of the continuation that is not printed yet, and a line break."""
        if self._detokenizer is None:
            echo(Verbatim(self._prompt), end="")
        echo(Verbatim(continuation.removeprefix(self._printed)))


def explain(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text; - reads it from standard input.")],
    *,
    neighbors: Annotated[int, typer.Option(min=0, metavar="N", help="Neighbors to name for each token.")] = 3,
    selected: SelectionOptions,
    query: ScoringQuery,
    runtime: StoreRuntime,
    as_json: JsonOption = False,
) -> None:
    """Show the probability of each token of a text, and its sources in the store.

    Below each token are its nearest neighbors: their share of the retrieved probability, their distance
    (squared for l2, the negated inner product for ip), their document and position, and the text around
    them with the retrieved token in brackets. --ngrams also lists places where this token follows the same
    tokens, with the number of these tokens.

    Examples:
      knnstore explain "The harbour was quiet" --neighbors 2
      knnstore explain "The harbour was quiet" --domain letters --json
    """
    with runtime.open_model("r", domains=selected.domains) as lm:
        settings = query.settings(lm.store, selected.selection())
        text = read_text(text)
        if not text:
            raise InputError("the text is empty")
        explained = lm.explain(text, settings, neighbors=neighbors)
    shown = "\n".join(line for token in explained for line in _lines(token))
    print_result([plain(token) for token in explained], shown, as_json=as_json)


def search(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text; - reads it from standard input.")],
    *,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Passages to show.")] = 5,
    selected: SelectionOptions,
    runtime: StoreRuntime,
    as_json: JsonOption = False,
) -> None:
    """Show the stored passages that are nearest to a text in the model's key space.

    The model's predictions for this text come from these passages. The store is searched at each token of the
    text and at its end. The share of a passage is its part of all neighbors found.

    Examples:
      knnstore search "The harbour was quiet"
      knnstore search "The harbour was quiet" --domain letters --limit 1 --json
    """
    with runtime.open_model("r", domains=selected.domains) as lm:
        from knnstore import KNNSettings

        selection = selected.selection()
        passages = lm.search(read_text(text), KNNSettings(selection=selection), limit=limit)
        if not passages:
            note(f"nothing is found: {why_nothing(lm.store, selection)}")
    shown = "\n".join(line for passage in passages for line in _lines_of(passage))
    print_result([row_of(passage) for passage in passages], shown, as_json=as_json)


def _lines_of(passage: "Passage") -> Iterator[str]:
    """Yield the output lines of a passage: its share and place, then its wrapped text."""
    yield f"{passage.share:6.1%}  {printable(f'{passage.domain}/{passage.document}:{passage.position}')}"
    text = printable(" ".join(passage.text.split()))
    yield from textwrap.wrap(text, 79, initial_indent=" " * 8, subsequent_indent=" " * 8)


def _lines(token: "TokenExplanation") -> Iterator[str]:
    """Yield the output lines of a token: its probabilities, then one line for each neighbor."""
    apart = [f"{name} {share:.2f}" for name, share in token.shares.items() if name != "model"]
    shares = f" ({', '.join(apart)})" if len(apart) > 1 else ""
    yield (
        f"{printable(token.text)!r:<20} p_LM {_probability(token.p_lm)}  p_kNN {_probability(token.p_knn)}  "
        f"λ {token.lam:.2f}{shares}  p {_probability(token.p)}"
    )
    for source in token.neighbors:
        place = printable(f"{source.domain}/{source.document}" if source.domain else source.document)
        how = f"{source.matched} tokens" if source.distance is None else f"{source.distance:.1f}"
        yield f"    {source.share:6.2%}  {how:>8}  {place}:{source.position}  {_passage(source)}"


def _probability(p: float) -> str:
    """Format a probability with four decimals; one below 0.001 in scientific notation."""
    return f"{p:.4f}" if p >= 0.001 or p == 0 else f"{p:.1e}"


def table_of_sources(sources: Sequence[Mapping[str, Any]]) -> str:
    """Format the first sources of `credits_of`, which have the largest shares, as a table."""
    most = [{**source, "share": f"{source['share']:6.1%}"} for source in sources[:_SOURCES_SHOWN]]
    return table(most, ["share", "domain", "document", "passage"])


def credits_of(tokens: Sequence["TokenExplanation"]) -> list[dict[str, Any]]:
    """Sum up for each document its part of the probability of a text's tokens.

    Returns:
        Objects with share (averaged over all tokens), domain, document and passage (the text around the
        record with the largest part), sorted by share, largest first.
    """
    credits: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for token in tokens:
        for source in token.neighbors:
            if source.token == token.token and token.p > 0:
                given = token.lam * source.share / token.p
                credits.setdefault((source.domain, source.document), []).append((given, _passage(source)))
    found: list[dict[str, Any]] = [
        {
            "share": sum(share for share, _ in given) / len(tokens),
            "domain": domain,
            "document": document,
            "passage": max(given)[1],
        }
        for (domain, document), given in credits.items()
    ]
    return sorted(found, key=lambda credit: -credit["share"])


def _passage(source: "Source") -> str:
    return printable(f"{source.context}[{source.text}]{source.continuation}".strip())
