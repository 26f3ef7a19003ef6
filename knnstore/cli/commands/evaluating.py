"""The command `eval`, which measures perplexity, and the text forms of its result."""

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnstore.cli.inputs import Documents, read_params
from knnstore.cli.models import StoreRuntime
from knnstore.cli.options import JsonOption, LeaveOutOption
from knnstore.cli.output import Bar, convert_to_dict, format_pairs, format_table, print_message, print_result
from knnstore.cli.retrieval_options import ScoringQuery, SelectionOptions
from knnstore.documents import TextDocument, is_file_in_paths
from knnstore.errors import ConfigError, KnnstoreError

if TYPE_CHECKING:
    from knnstore.lm import Evaluation, Kind


def evaluate(
    *,
    selected: SelectionOptions,
    query: ScoringQuery,
    leave_out: LeaveOutOption = False,
    documents: Documents,
    per_token: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a row for each token: JSON Lines where the name ends in .jsonl, else "
            "tab-separated values.",
        ),
    ] = None,
    audited: Annotated[
        bool,
        typer.Option(
            "--audit",
            help="Also check the figures on a sample: the mixture sums to 1 and equals the scored "
            "probabilities, no token is predicted from itself or later tokens, no text is in the store, and "
            "the model and the mixture are scored on the same tokens. Exit status 1 if a check fails.",
        ),
    ] = False,
    params: Annotated[
        list[str] | None,
        typer.Option(
            "--param",
            metavar="NAME=VALUE",
            help="Parameter of the vector engine for this run, in place of the store's; repeatable.",
        ),
    ] = None,
    translates: Annotated[
        bool,
        typer.Option(
            "--translate",
            help="With an encoder-decoder model: also translate the sources, and compare with the texts. "
            "Prints BLEU and chrF of sacrebleu, and with --details how these were computed.",
        ),
    ] = False,
    beams: Annotated[
        int, typer.Option(min=1, metavar="N", help="With --translate: number of beams; 1 is no beam search.")
    ] = 1,
    details: Annotated[
        bool,
        typer.Option(
            "--details",
            help="Also print all other figures, and perplexity by how often a token is stored and by the "
            "distance of its nearest neighbor.",
        ),
    ] = False,
    runtime: StoreRuntime,
    as_json: JsonOption = False,
) -> None:
    """Measure perplexity with and without the store.

    The documents should not be in the store. Prints the perplexity of the model alone and of the mixture, by
    token, word and byte. "helped" is the share of tokens to which retrieval gives a higher probability than
    the model. With a continuous cache or n-grams, it also prints the perplexity with only the store, with
    only the cache, and with only the n-grams. --json has all values: base_ppl, knn_ppl, store_ppl, cache_ppl,
    ngram_ppl, by_frequency, by_distance and more.

    Examples:
      knnstore eval held-out.jsonl
      knnstore eval held-out.jsonl --details
      knnstore eval held-out.jsonl --per-token tokens.tsv
      knnstore eval held-out.jsonl --cache 400 --cache-lambda 0.1
      knnstore eval held-out.jsonl --ngrams 7 --ngram-lambda 0.5
      knnstore eval held-out.jsonl --audit
      knnstore --home client.knn eval pairs.jsonl --translate --beams 5
      knnstore eval held-out.jsonl --domain news --k 64 --knn-temperature 20 --lambda 0.5 --json
    """
    # 1) Check the options and the files.
    if per_token is not None and is_file_in_paths(per_token, documents.files):
        raise ConfigError(
            f"--per-token would replace {per_token}, which is to be evaluated: name another file"
        )
    if audited and translates:
        raise ConfigError("--audit is for causal models, and --translate for encoder-decoder models")
    if beams != 1 and not translates:
        raise ConfigError("--beams needs --translate")
    documents.check_files()
    if per_token is not None:
        check_writable(per_token)
    # 2) Load the model, and evaluate the documents.
    kind: Kind | None = "causal" if audited else "seq2seq" if translates else None
    with Bar() as bar, ExitStack() as opened:
        lm = opened.enter_context(
            runtime.open_model(
                "r",
                params=read_params(params),
                domains=selected.domains,
                kind=kind,
            )
        )
        from knnstore.lm import KNNLMForSeq2SeqLM, TokenTable, replace_file, usable_documents

        table = None if per_token is None else TokenTable()
        file = None if per_token is None else opened.enter_context(replace_file(per_token))
        selection = selected.make_selection()
        settings = query.resolve_settings(lm.store, selection)
        texts: Iterable[TextDocument] = documents.read_documents(bar)
        if audited or translates:  # the documents are read a second time
            texts = list(usable_documents(lm.reader, texts, documents.make_skip_function(bar)))
        evaluation = lm.evaluate(
            texts,
            knn=settings,
            leave_out=leave_out,
            table=table,
            on_bad=documents.make_skip_function(bar),
            progress=bar,
        )
        is_default = query.is_default(lm.store, selection)
        if file is not None and table is not None and per_token is not None and lm.tokenizer is not None:
            table.write(file, lm.tokenizer, as_json=per_token.suffix == ".jsonl")
        report = lm.audit(texts, settings) if audited else None
        translation = None
        if isinstance(lm, KNNLMForSeq2SeqLM) and translates:
            translation = lm.score_translations(texts, settings, num_beams=beams, progress=bar)
    # 3) Warn if documents are stored, or if the settings were fitted to them.
    if evaluation.stored and not leave_out:
        print_message(
            f"warning: {len(evaluation.stored):,} of these documents are also in the store (for example "
            f"{evaluation.stored[0]!r}), so their own text is retrieved: use --leave-out to prevent this"
        )
    if evaluation.fitted and query.lam is None:
        print_message(
            f"warning: the settings were fitted to {len(evaluation.fitted):,} of these documents (for "
            f"example {evaluation.fitted[0]!r}): expect a higher perplexity on other text"
        )
    # 4) Print the result.
    documents.report()
    result = {**convert_to_dict(evaluation), **documents.left_out, "intervals": convert_intervals(evaluation)}
    del result["by_document"]
    if report is not None:
        result["audit"] = {"passed": report.passed, **convert_to_dict(report)}
    if translation is not None:
        result["translation"] = convert_to_dict(translation)
    parts = [format_summary(result), *(["\n\n", format_details(result)] if details else [])]
    print_result(result, parts, as_json=as_json)
    if is_default and not as_json:
        print_message(
            "these are default settings: `knnstore calibrate` fits them to other text or to stored documents"
        )
    if report is not None:
        for check in report.checks:
            print_message(f"{'passed' if check.passed else 'FAILED'}: {check.name} ({check.found})")
        if not report.passed:
            raise KnnstoreError("the audit found problems that make these figures unreliable: see above")


def format_summary(result: Mapping[str, Any]) -> str:
    """Format the main figures of an evaluation as text of about ten lines.

    Args:
        result: the fields of an `Evaluation`, with ``lam`` as ``lambda``.
    """
    columns = {"model alone": "base", "with the store": "knn"}
    rows = [
        {"": name, **{title: result[f"{side}_{unit}ppl"] for title, side in columns.items()}}
        for name, unit in (("perplexity", ""), ("of a word", "word_"), ("of a byte", "byte_"))
    ]
    if "translation" in result:
        rows += [
            {"": name, **{title: result["translation"][f"{side}_{score}"] for title, side in columns.items()}}
            for name, score in (("BLEU", "bleu"), ("chrF", "chrf"))
        ]
    lam, temperature = result["lambda"], result["temperature"]
    reach = f"k {result['k']:,}" if result["probes"] is None else f"{result['probes']:,} probes"
    components = {"store": "the store", "cache": "the cache", "ngram": "n-grams"}
    component_perplexities = {
        f"{name} alone": result[f"{component}_ppl"] for component, name in components.items()
    }
    values = {
        **{name: ppl for name, ppl in component_perplexities.items() if ppl is not None},
        "documents": result["documents"],
        "tokens": result["tokens"],
        "helped": f"{result['helped']:.1%}",
        "settings": f"{result['mixer']}, lambda {lam:.3g}, T {temperature:.4g}, {reach}",
        "speed": f"{result['tokens_per_s']:,.0f} tokens/s",
    }
    return f"{format_table(rows, ['', *columns])}\n\n{format_pairs(values)}"


def format_details(result: Mapping[str, Any]) -> str:
    """Format the figures that `format_summary` leaves out, and perplexities by groups of tokens, as text."""
    summarized = {
        "documents",
        "tokens",
        "tokens_per_s",
        "k",
        "probes",
        "temperature",
        "lambda",
        "mixer",
        "helped",
    }
    plain_values = {
        name: value
        for name, value in result.items()
        if not (
            value is None
            or isinstance(value, list | tuple | dict)
            or name in summarized
            or name.endswith("ppl")
        )
    }
    translation = result.get("translation", {})
    plain_values |= {name: value for name, value in translation.items() if name.endswith("_signature")}
    groups = {
        "times stored": result["by_frequency"],
        "distance to the nearest": result["by_distance"],
    }
    return "\n\n".join(
        [format_pairs(plain_values), *(_format_groups(name, rows) for name, rows in groups.items())]
    )


def _format_groups(name: str, rows: Any) -> str:
    """Format perplexities by groups of tokens as a table.

    Args:
        name: heading of the column with the range of each group.
        rows: the fields of each `Slice`.
    """
    columns = ["tokens", "base_ppl", "knn_ppl", "helped"]
    shown = [
        {**row, name: f"{row['low']:g} - {row['high']:g}", "helped": f"{row['helped']:.1%}"} for row in rows
    ]
    return format_table(shown, [name, *columns])


def check_writable(file: Path) -> None:
    """Check before a long operation that a file can be created.

    Raises:
        ConfigError: the file's folder is missing, or cannot be written to.
    """
    folder = file.resolve().parent
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{file} cannot be written: its folder {folder} does not exist or is not writable")


def convert_intervals(evaluation: "Evaluation") -> dict[str, dict[str, float]]:
    """Return the confidence intervals of an evaluation as dicts, by name (``base``, ``knn``, ``change``)."""
    return {name: interval._asdict() for name, interval in evaluation.intervals._asdict().items()}
