"""The commands ``substitute`` and ``eval-substitute``: train a substitute of the store, and measure it."""

from dataclasses import asdict
from typing import Annotated

import typer

from knnstore.cli.inputs import Documents
from knnstore.cli.models import StoreRuntime
from knnstore.cli.options import JsonOption, declare_seed_option
from knnstore.cli.output import Bar, format_pairs, print_message, print_result
from knnstore.cli.retrieval_options import ScoringQuery, SelectionOptions


def substitute(
    *,
    domains: Annotated[
        list[str] | None,
        typer.Option(
            "--domain",
            metavar="NAME",
            show_default="the whole store",
            help="Train on this domain; repeat for several.",
        ),
    ] = None,
    rows: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of rows (vectors) that each token gets.")
    ] = 1,
    epochs: Annotated[
        int, typer.Option(min=1, metavar="N", help="Largest number of passes over all records.")
    ] = 4,
    learning_rate: Annotated[
        float, typer.Option(metavar="R", help="Learning rate of the first step; it falls linearly to 0.")
    ] = 5e-3,
    seed: Annotated[int, declare_seed_option("Seed of the random numbers.")] = 0,
    runtime: StoreRuntime,
    as_json: JsonOption = False,
) -> None:
    """Train a substitute of the store, to see how much of the store's gain needs no retrieval.

    The substitute is an output layer with a few rows (vectors) for each token of the vocabulary. The rows are
    trained to predict the stored tokens from their keys; the model itself does not change. Some documents are
    held out, to stop the training early and to fit the weight of the substitute.

    `eval-substitute` then measures how much of the store's gain the substitute recovers. `knnstore calibrate`
    tries the substitute alone, and together with the store. If a training document is removed or replaced,
    the substitute is deleted too, because it holds traces of the document.

    Examples:
      knnstore research substitute
      knnstore research substitute --domain news --rows 3 --epochs 2 --json
    """
    with Bar() as bar, runtime.open_model("a", domains=domains) as lm:
        from knnstore_research.substitute import train_substitute

        trained = train_substitute(
            lm,
            domains=domains,
            rows=rows,
            epochs=epochs,
            learning_rate=learning_rate,
            seed=seed,
            progress=bar,
        )
    found = asdict(trained)
    found["lambda"] = found.pop("substitute")["lam"]
    print_result(found, format_pairs(found), as_json=as_json)
    if trained.epochs == 0:
        print_message(
            "warning: training did not improve on the model's own rows; try a lower --learning-rate"
        )


def eval_substitute(
    *,
    selected: SelectionOptions,
    query: ScoringQuery,
    documents: Documents,
    runtime: StoreRuntime,
    as_json: JsonOption = False,
) -> None:
    """Measure how much of the store's gain the substitute of the same domains recovers.

    Prints the perplexity of the model alone, with the substitute and with the store's keys, and the share of
    the store's gain that the substitute has, in log perplexity. The documents must not be in the store.

    Examples:
      knnstore research eval-substitute held-out.jsonl
      knnstore research eval-substitute held-out.jsonl --domain news --json
    """
    documents.check_files()
    with Bar() as bar, runtime.open_model("r", domains=selected.domains) as lm:
        from knnstore_research.substitute import evaluate_substitute

        settings = query.resolve_settings(lm.store, selected.make_selection())
        found = evaluate_substitute(
            lm,
            documents.read_documents(bar),
            settings,
            on_bad=documents.make_skip_function(bar),
            progress=bar,
        )
    documents.report()
    values = found._asdict()
    print_result({**values, **documents.left_out}, format_pairs(values), as_json=as_json)
