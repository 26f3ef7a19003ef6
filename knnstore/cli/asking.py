"""Commands that ask the model with its store: perplexity, text, explanations."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnstore.cli.cache_options import CacheLambdaOption, CacheOption, CacheTemperatureOption, cache_of
from knnstore.cli.models import open_model
from knnstore.cli.options import (
    DEFAULT_HOME,
    DeviceOption,
    DomainsOption,
    DtypeOption,
    FilesArgument,
    HomeOption,
    JsonOption,
    LambdaOption,
    NeighborsOption,
    PointersOption,
    SkipBadOption,
    TagsOption,
    read_params,
)
from knnstore.cli.output import Bar, note, one_line, print_json, print_json_lines, print_table, printable
from knnstore.cli.substituting import trained_substitute, warn_of_outdated

if TYPE_CHECKING:
    from knnstore import KNNLMForCausalLM, KNNSettings
    from knnstore.errors import InputError
    from knnstore.lm.explain import Source, TokenExplanation

_NEIGHBORS_CREDITED = 32  # of each token; further ones hardly weigh and cost time to name
_SOURCES_SHOWN = 5

KNNTemperatureOption = Annotated[
    float | None,
    typer.Option(
        "--temperature", metavar="T", help="Divides the distances: larger gives far neighbours more weight."
    ),
]


def evaluate(
    files: FilesArgument,
    domains: DomainsOption = None,
    tags: TagsOption = None,
    k: NeighborsOption = None,
    temperature: KNNTemperatureOption = None,
    lam: LambdaOption = None,
    cache: CacheOption = None,
    cache_temperature: CacheTemperatureOption = None,
    cache_lambda: CacheLambdaOption = None,
    pointers: PointersOption = None,
    leave_out: Annotated[
        bool,
        typer.Option("--leave-out", help="A document that is in the store does not retrieve from itself."),
    ] = False,
    substitute: Annotated[
        bool,
        typer.Option(
            "--substitute",
            help="Measure beside it the substitute trained for these domains, without any retrieval.",
        ),
    ] = False,
    skip_bad: SkipBadOption = False,
    per_token: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a row for each token: JSON Lines where the name ends in .jsonl, else "
            "tab-separated values.",
        ),
    ] = None,
    params: Annotated[
        list[str] | None,
        typer.Option(
            "--param",
            metavar="NAME=VALUE",
            help="A parameter of the engine in place of the store's, this time; repeatable.",
        ),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """Measure perplexity with and without the store.

    The documents should not be in the store. Prints a JSON object (tokens, base_ppl, knn_ppl, the
    same for words and bytes, helped: the share of tokens to which retrieval gives more probability
    than the model, k, temperature, lambda, mixer, tokens_per_s and more), with --json on one line.
    by_frequency and by_distance divide the tokens by how often they are stored and by how near the
    nearest neighbour is. With a continuous cache store_ppl is that of the mixture without it, and
    cache_ppl that of the model with the cache alone.

    Examples:
      knnstore eval held-out.jsonl
      knnstore eval held-out.jsonl --per-token tokens.tsv
      knnstore eval held-out.jsonl --cache 400 --cache-lambda 0.1
      knnstore eval held-out.jsonl --pointers 64
      knnstore eval held-out.jsonl --domain news --k 64 --temperature 20 --lambda 0.5 --json
    """
    from knnstore.documents import read_documents
    from knnstore.lm.token_table import TokenTable

    bad: list[InputError] = []

    def skip(error: "InputError") -> None:
        bad.append(error)
        note(f"skipped {one_line(error)}")

    table = None if per_token is None else TokenTable()
    with Bar() as bar, ExitStack() as opened:
        # Opened first: that it cannot be written is to be known before the work.
        file = None if per_token is None else opened.enter_context(per_token.open("w", encoding="utf-8"))
        lm = open_model(home, "r", device=device, dtype=dtype, params=read_params(params))
        with lm.store:
            found = lm.evaluate(
                read_documents(files, on_bad=skip if skip_bad else None),
                knn=_settings(
                    lm, k, temperature, lam, domains, tags, (cache, cache_temperature, cache_lambda), pointers
                ),
                substitute=trained_substitute(lm.store, domains, tags) if substitute else None,
                leave_out=leave_out,
                table=table,
                progress=bar,
            )
        if file is not None and table is not None and per_token is not None and lm.tokenizer is not None:
            table.write(file, lm.tokenizer, as_json=per_token.suffix == ".jsonl")
    if found.stored and not leave_out:
        note(
            f"warning: {len(found.stored):,} of these documents are among those retrieved from, "
            f"{found.stored[0]!r} for one: what they should predict is looked up; --leave-out prevents it"
        )
    result = asdict(found)
    result = {"lambda" if name == "lam" else name: value for name, value in result.items()}
    result["skipped"] = len(bad)
    (print_json if as_json else print_json_lines)(result)


def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The text to continue; - reads it from standard input.")
    ],
    domains: DomainsOption = None,
    tags: TagsOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens to write at most.")] = 64,
    temperature: Annotated[
        float,
        typer.Option(min=0, metavar="X", help="Of sampling; 0 takes the most probable token each time."),
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            min=0, max=1, metavar="P", help="Sample from the most probable tokens that make up this much."
        ),
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Makes sampling repeatable.")] = None,
    beams: Annotated[int, typer.Option(min=1, metavar="N", help="Beams to search with.")] = 1,
    k: NeighborsOption = None,
    knn_temperature: Annotated[
        float | None,
        typer.Option(metavar="T", help="Divides the distances of neighbours, as --temperature of eval."),
    ] = None,
    lam: LambdaOption = None,
    cache: CacheOption = None,
    cache_temperature: CacheTemperatureOption = None,
    cache_lambda: CacheLambdaOption = None,
    pointers: PointersOption = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Name the documents that the text came from.")
    ] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """Continue a text.

    Examples:
      knnstore generate "The harbour was" --max-new-tokens 20
      knnstore generate "The harbour was" --domain letters --temperature 0.8 --seed 1 --explain
    """
    lm = open_model(home, "r", device=device, dtype=dtype)
    settings = _settings(
        lm, k, knn_temperature, lam, domains, tags, (cache, cache_temperature, cache_lambda), pointers
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    with lm.store:
        continuation = lm.generate_text(
            text,
            max_new_tokens=max_new_tokens,
            do_sample=temperature > 0,
            temperature=temperature or 1.0,
            top_p=top_p,
            seed=seed,
            num_beams=beams,
            knn=settings,
        )
        sources: list[dict[str, Any]] = []
        if explain:
            explained = lm.explain(continuation, settings, neighbors=_NEIGHBORS_CREDITED, after=text)
            sources = credits_of(explained)
    if as_json:
        print_json(
            {"prompt": text, "continuation": continuation, **({"sources": sources} if explain else {})}
        )
        return
    typer.echo(text + continuation)
    if explain:
        typer.echo()
        print_sources(sources)


def explain(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text; - reads it from standard input.")],
    neighbors: Annotated[
        int, typer.Option(min=0, metavar="N", help="Neighbours to name for each token.")
    ] = 3,
    domains: DomainsOption = None,
    tags: TagsOption = None,
    k: NeighborsOption = None,
    temperature: KNNTemperatureOption = None,
    lam: LambdaOption = None,
    cache: CacheOption = None,
    cache_temperature: CacheTemperatureOption = None,
    cache_lambda: CacheLambdaOption = None,
    pointers: PointersOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """Say how probable each token of a text is, and why.

    Under each token stand its nearest neighbours: their part of the retrieved probability, their
    distance (squared for l2, the negated inner product for ip), where they are, and the text around
    them with the retrieved token in brackets.

    Examples:
      knnstore explain "The harbour was quiet" --neighbors 2
      knnstore explain "The harbour was quiet" --domain letters --json
    """
    lm = open_model(home, "r", device=device, dtype=dtype)
    with lm.store:
        explained = lm.explain(
            sys.stdin.read() if text == "-" else text,
            knn=_settings(
                lm, k, temperature, lam, domains, tags, (cache, cache_temperature, cache_lambda), pointers
            ),
            neighbors=neighbors,
        )
    if as_json:
        print_json([_json(token) for token in explained])
        return
    for token in explained:
        typer.echo(
            f"{printable(token.text)!r:<20} p_LM {token.p_lm:.4f}  p_kNN {token.p_knn:.4f}  "
            f"λ {token.lam:.2f}  p {token.p:.4f}"
            + ("" if token.p_sub is None else f"  p_sub {token.p_sub:.4f}")
        )
        for source in token.neighbors:
            typer.echo(
                f"    {source.share:6.2%}  {source.distance:8.1f}  "
                f"{_place(source)}:{source.position}  "
                f"{_passage(source)}"
            )


def print_sources(sources: Sequence[Mapping[str, Any]]) -> None:
    """Print the documents that gave most to a text, from `credits_of`."""
    most = [{**source, "share": f"{source['share']:6.1%}"} for source in sources[:_SOURCES_SHOWN]]
    print_table(most, ["share", "domain", "document", "passage"])


def credits_of(tokens: Iterable["TokenExplanation"]) -> list[dict[str, Any]]:
    """Add up, by document, how much of the probability of a text's tokens was retrieved there.

    Returns:
        Objects with share (of all tokens' probability), domain, document and passage (around the
        record that gave most), the largest share first.
    """
    shares: dict[tuple[str, str], float] = {}
    best: dict[tuple[str, str], tuple[float, str]] = {}
    count = 0
    for token in tokens:
        count += 1
        for source in token.neighbors:
            if source.token == token.token and token.p > 0:
                place, given = (source.domain, source.document), token.lam * source.share / token.p
                shares[place] = shares.get(place, 0.0) + given
                best[place] = max(best.get(place, (0.0, "")), (given, _passage(source)))
    ranked = sorted(shares, key=lambda place: -shares[place])
    return [
        {
            "share": shares[place] / count,
            "domain": place[0],
            "document": place[1],
            "passage": best[place][1],
        }
        for place in ranked
    ]


def _place(source: "Source") -> str:
    return printable(f"{source.domain}/{source.document}" if source.domain else source.document)


def _passage(source: "Source") -> str:
    return printable(f"{source.context}[{source.text}]{source.continuation}".strip())


def _json(token: "TokenExplanation") -> dict[str, Any]:
    fields = asdict(token)
    return {"lambda" if name == "lam" else name: value for name, value in fields.items()}


def _settings(
    lm: "KNNLMForCausalLM",
    k: int | None,
    temperature: float | None,
    lam: float | None,
    domains: list[str] | None,
    tags: list[str] | None,
    cache: tuple[int | None, float | None, float | None],
    pointers: int | None,
) -> "KNNSettings":
    """The settings of this call: what was given, else what is saved for these domains.

    Says so where calibrated settings are used, and where they are stale.
    """
    from knnstore import Selection
    from knnstore.lm.calibrate import CalibrationRecord
    from knnstore.lm.defaults import settings_for
    from knnstore.lm.pointers import PointerSettings

    selection = Selection(domains=tuple(domains) if domains else None, tags=tuple(tags) if tags else None)
    given: dict[str, Any] = {"k": k, "temperature": temperature, "lam": lam}
    if lam is not None:  # everywhere, then
        given["skip"] = None
    settings = replace(
        settings_for(lm.store, selection),
        **{name: value for name, value in given.items() if value is not None or name == "skip"},
    )
    settings = replace(settings, cache=cache_of(settings, *cache, only_store=lam is not None))
    if pointers is not None:
        settings = replace(settings, pointers=PointerSettings(pointers) if pointers else None)
    warn_of_outdated(lm.store, selection)
    record = CalibrationRecord.of(lm.store, selection)
    if record is not None and lam is None:
        of = f" for {printable(', '.join(record.domains))}" if record.domains else ""
        note(
            f"settings calibrated{of} on {record.date[:10]} with {record.tokens:,} tokens: {record.mixer}, "
            f"k={settings.k:,}, T={settings.temperature:.4g}"
        )
        if record.is_stale(lm.store):
            note(
                f"warning: these settings are stale, the records they were found for are "
                f"{record.growth(lm.store):.2f} times as many now; run knnstore calibrate again"
            )
    return settings
