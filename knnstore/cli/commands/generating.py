"""Commands that run the model with its store: `generate`, `translate`, `explain` and `search`."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnstore.checks import escape_unprintable
from knnstore.cli.inputs import read_lines, read_text
from knnstore.cli.models import StoreRuntime
from knnstore.cli.options import JsonOption, declare_seed_option
from knnstore.cli.output import (
    Bar,
    Verbatim,
    convert_to_dict,
    echo,
    format_table,
    get_fields,
    print_message,
    print_result,
)
from knnstore.cli.retrieval_options import Query, ScoringQuery, SelectionOptions, explain_empty_selection
from knnstore.errors import ConfigError, InputError

if TYPE_CHECKING:
    from torch import Tensor

    from knnstore.lm import Detokenizer, Kind, Passage, Source, TextReader, TokenExplanation

_NEIGHBORS_CREDITED = 32  # neighbors of each token that get credit; further ones hardly weigh
_SOURCES_SHOWN = 5
_MIN_TEMPERATURE = 1e-6  # smallest temperature; smaller ones would overflow the logits

BeamsOption = Annotated[
    int, typer.Option(min=1, metavar="N", help="Number of beams of beam search; 1 is no beam search.")
]
TextArgument = Annotated[
    str, typer.Argument(metavar="TEXT", help="The text; - reads it from standard input.")
]


def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The text to continue; - reads it from standard input.")
    ],
    *,
    selected: SelectionOptions,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Largest number of tokens to generate.")
    ] = 64,
    sampling_temperature: Annotated[
        float,
        typer.Option(
            "--temperature",
            min=0,
            metavar="X",
            help="Temperature of sampling; 0 takes the most probable token each time.",
        ),
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            metavar="P",
            help="Sample from the most probable tokens whose probabilities add up to P.",
        ),
    ] = 1.0,
    seed: Annotated[
        int | None, declare_seed_option("Seed of the random numbers, so that sampling can be repeated.")
    ] = None,
    beams: BeamsOption = 1,
    draft: Annotated[
        bool | None,
        typer.Option(
            "--draft/--no-draft",
            help="Speculative decoding: check several draft tokens in one pass. Drafts are tokens that "
            "follow the same words in the store or the text. The generated text stays the same. By default "
            "drafts are used if the settings have n-grams and there is one beam: the index of the n-grams "
            "also finds drafts. A message says if the model "
            "cannot use drafts, for example because it has a recurrent state.",
            show_default=False,
        ),
    ] = None,
    query: Query,
    explain: Annotated[
        bool, typer.Option("--explain", help="List the documents that the generated text comes from.")
    ] = False,
    runtime: StoreRuntime,
    as_json: JsonOption = False,
) -> None:
    """Continue a text.

    Examples:
      knnstore generate "The harbour was" --max-new-tokens 20
      knnstore generate "The harbour was" --domain letters --temperature 0.8 --seed 1 --explain
    """
    if 0 < sampling_temperature < _MIN_TEMPERATURE:
        raise ConfigError(
            f"--temperature must be 0 or at least {_MIN_TEMPERATURE}, got {sampling_temperature}"
        )
    with runtime.open_model("r", domains=selected.domains, kind="causal") as lm:
        from knnstore.lm import Purpose, resolve

        # 1) Resolve the settings, and warn if the store would not be used.
        settings = query.resolve_settings(lm.store, selected.make_selection())
        generating = resolve(lm.store, settings, Purpose.GENERATION)
        prompt = read_text(prompt)
        if settings.model_generates_alone:
            weight = "--ngram-lambda" if lm.store.is_keyless else "--lambda"
            print_message(
                "warning: the model generates alone, because text repeats itself more with the store "
                f"(knnstore calibrate --show); {weight} 0.5 uses the store"
            )
        # 2) Generate; the text is printed while it grows, unless with beams or --json.
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
            shown.print_rest(continuation)
        # 3) Explain which documents the text comes from.
        if explain:
            explained = lm.explain(continuation, generating, neighbors=_NEIGHBORS_CREDITED, after=prompt)
            result["sources"] = credit_documents(explained)
            if not as_json:
                echo("\n", format_sources_table(result["sources"]))
    if as_json:
        print_result(result, "", as_json=True)


class PromptAndContinuation:
    """Streamer for `generate` of transformers that prints the prompt, then the generated text.

    A token is printed as soon as its characters are complete. Together the printed pieces are the prompt and
    the text that `generate_text` returns.

    Args:
        reader: the text reader of the model; its tokenizer is used.
        prompt: the text to continue.
    """

    def __init__(self, reader: "TextReader", prompt: str) -> None:
        self._reader = reader
        self._prompt = prompt
        self._detokenizer: Detokenizer | None = None
        self._printed_text = ""

    def put(self, tokens: "Tensor") -> None:
        """Print the text of new tokens.

        Args:
            tokens: at the first call the tokens of the prompt, at later calls generated tokens.
        """
        from knnstore.lm import Detokenizer, TokenTexts

        ids = tokens.flatten().tolist()
        if self._detokenizer is None:
            self._detokenizer = Detokenizer(TokenTexts(self._reader.tokenizer), ids)
            echo(Verbatim(self._prompt), end="")
            return
        text = "".join(piece.text for token in ids for piece in self._detokenizer.append_token(token))
        echo(Verbatim(text), end="")
        self._printed_text += text

    def end(self) -> None:
        """Do nothing, because `print_rest` prints the rest of the text."""

    def print_rest(self, continuation: str) -> None:
        """Print the part of the continuation that is not printed yet, and a line break.

        Also prints the prompt if `put` was never called.
        """
        if self._detokenizer is None:
            echo(Verbatim(self._prompt), end="")
        echo(Verbatim(continuation.removeprefix(self._printed_text)))


def translate(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="Text in UTF-8 with one sentence on each line; - is standard input."
        ),
    ],
    *,
    selected: SelectionOptions,
    beams: BeamsOption = 1,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            show_default="twice those of the sentence, and 20 more",
            help="Largest number of tokens of a translation.",
        ),
    ] = None,
    query: Query,
    runtime: StoreRuntime,
    as_json: JsonOption = False,
) -> None:
    """Translate a file line by line, with an encoder-decoder model and its store.

    Prints one line for each line of the file, in the same order; an empty line stays empty. Lines of similar
    length are translated together.

    Examples:
      knnstore translate sentences.txt --domain client --beams 5 > translated.txt
      echo "A small house." | knnstore translate - --json
    """
    lines = read_lines(file)
    with Bar() as bar, runtime.open_model("r", domains=selected.domains, kind="seq2seq") as lm:
        settings = query.resolve_settings(lm.store, selected.make_selection())
        translations = lm.translate(
            lines, settings, num_beams=beams, max_new_tokens=max_new_tokens, progress=bar
        )
    if as_json:
        rows = [{"source": line, "text": text} for line, text in zip(lines, translations, strict=True)]
        print_result(rows, "", as_json=True)
    else:
        echo(Verbatim("\n".join(" ".join(text.splitlines()) for text in translations)))


def explain(
    text: TextArgument,
    *,
    neighbors: Annotated[
        int, typer.Option(min=0, metavar="N", help="Number of neighbors to list for each token.")
    ] = 3,
    source: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="For an encoder-decoder model: the source of the text, such as the sentence that it "
            "translates.",
        ),
    ] = None,
    selected: SelectionOptions,
    query: ScoringQuery,
    runtime: StoreRuntime,
    as_json: JsonOption = False,
) -> None:
    """Show the probability of each token of a text, and its sources in the store.

    Below each token are its nearest neighbors. Each line shows the neighbor's share of the retrieved
    probability, its distance (squared for l2, the negated inner product for ip), its document and position,
    and the text around it with the retrieved token in brackets. With --ngrams, the command also lists places
    in the stored text where this token follows the same previous tokens, and the number of these tokens.

    Examples:
      knnstore explain "The harbour was quiet" --neighbors 2
      knnstore explain "The harbour was quiet" --domain letters --json
    """
    kind: Kind | None = None if source is None else "seq2seq"
    with runtime.open_model("r", domains=selected.domains, kind=kind) as lm:
        settings = query.resolve_settings(lm.store, selected.make_selection())
        text = read_text(text)
        if not text:
            raise InputError("the text is empty")
        explained = lm.explain(text, settings, neighbors=neighbors, source=source)
    shown = "\n".join(line for token in explained for line in _format_token_lines(token))
    print_result([convert_to_dict(token) for token in explained], shown, as_json=as_json)


def search(
    text: TextArgument,
    *,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Largest number of passages to show.")] = 5,
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
    with runtime.open_model("r", domains=selected.domains, kind="causal") as lm:
        from knnstore import KNNSettings

        selection = selected.make_selection()
        passages = lm.search(read_text(text), KNNSettings(selection=selection), limit=limit)
        if not passages:
            print_message(f"nothing was found: {explain_empty_selection(lm.store, selection)}")
    shown = "\n".join(line for passage in passages for line in _format_passage_lines(passage))
    print_result([get_fields(passage) for passage in passages], shown, as_json=as_json)


def _format_passage_lines(passage: "Passage") -> Iterator[str]:
    """Yield the output lines of a passage: one line with its share and place, then its text, wrapped."""
    place = f"{passage.domain}/{passage.document}:{passage.position}"
    yield f"{passage.share:6.1%}  {escape_unprintable(place)}"
    text = escape_unprintable(" ".join(passage.text.split()))
    yield from textwrap.wrap(text, 79, initial_indent=" " * 8, subsequent_indent=" " * 8)


def _format_token_lines(token: "TokenExplanation") -> Iterator[str]:
    """Yield the output lines of a token: its probabilities, then one line for each neighbor."""
    component_shares = [f"{name} {share:.2f}" for name, share in token.shares.items() if name != "model"]
    shares = f" ({', '.join(component_shares)})" if len(component_shares) > 1 else ""
    yield (
        f"{escape_unprintable(token.text)!r:<20} p_LM {_format_probability(token.p_lm)}  "
        f"p_kNN {_format_probability(token.p_knn)}  λ {token.lam:.2f}{shares}  "
        f"p {_format_probability(token.p)}"
    )
    for source in token.neighbors:
        place = escape_unprintable(f"{source.domain}/{source.document}" if source.domain else source.document)
        how = f"{source.matched} tokens" if source.distance is None else f"{source.distance:.1f}"
        pair = "" if source.source_text is None else f"  <- {escape_unprintable(source.source_text)}"
        yield f"    {source.share:6.2%}  {how:>8}  {place}:{source.position}  {_format_context(source)}{pair}"


def _format_probability(p: float) -> str:
    """Format a probability with four decimals; below 0.001 (except 0) in scientific notation."""
    return f"{p:.4f}" if p >= 0.001 or p == 0 else f"{p:.1e}"


def format_sources_table(sources: Sequence[Mapping[str, Any]]) -> str:
    """Format a table of the documents that contributed most to the probability of the generated tokens.

    Args:
        sources: the result of `credit_documents`; at most `_SOURCES_SHOWN` documents are shown.
    """
    rows = [{**source, "share": f"{source['share']:6.1%}"} for source in sources[:_SOURCES_SHOWN]]
    return format_table(rows, ["share", "domain", "document", "passage"])


def credit_documents(tokens: Sequence["TokenExplanation"]) -> list[dict[str, Any]]:
    """Compute for each document the share of the text's probability that comes from its records.

    Returns:
        One dict for each document, with ``share`` (averaged over all tokens), ``domain``, ``document`` and
        ``passage`` (the text around the record with the largest part), the largest share first.
    """
    credits: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for token in tokens:
        for source in token.neighbors:
            if source.token == token.token and token.p > 0:
                given = token.lam * source.share / token.p
                credits.setdefault((source.domain, source.document), []).append(
                    (given, _format_context(source))
                )
    document_credits: list[dict[str, Any]] = [
        {
            "share": sum(share for share, _ in given) / len(tokens),
            "domain": domain,
            "document": document,
            "passage": max(given)[1],
        }
        for (domain, document), given in credits.items()
    ]
    return sorted(document_credits, key=lambda credit: -credit["share"])


def _format_context(source: "Source") -> str:
    """Return the text around a retrieved token, with the token in brackets."""
    return escape_unprintable(f"{source.context}[{source.text}]{source.continuation}".strip())
