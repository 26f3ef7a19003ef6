"""The command `substitute`, which trains a substitute of the store."""

from dataclasses import asdict
from typing import Annotated

import typer

from knnstore.cli.models import StoreRuntime
from knnstore.cli.options import JsonOption, seed_option
from knnstore.cli.output import Bar, note, pairs, print_result


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
    rows: Annotated[int, typer.Option(min=1, metavar="N", help="Rows for each token.")] = 1,
    epochs: Annotated[
        int, typer.Option(min=1, metavar="N", help="How often to go through all records, at most.")
    ] = 4,
    learning_rate: Annotated[
        float, typer.Option(metavar="R", help="At the beginning; it falls to zero in a line.")
    ] = 5e-3,
    seed: Annotated[int, seed_option("Of all that is random.")] = 0,
    runtime: StoreRuntime,
    as_json: JsonOption = False,
) -> None:
    """Train a substitute of the store, to see how much of its gain needs no retrieval.

    The substitute has a few rows for each token of the vocabulary. They are trained to predict the stored
    tokens from their keys; the model itself does not change. Some documents are held out, for early stopping
    and to fit the weight of the substitute. `eval --substitute` measures how much of the store's gain it
    recovers, and `calibrate` tries it alone and together with the store from then on. When a document of its
    training is removed or replaced, the substitute is deleted too, because it holds traces of the document.

    Examples:
      knnstore substitute
      knnstore substitute --domain news --rows 3 --epochs 2 --json
    """
    with Bar() as bar, runtime.open_model("a", domains=domains) as lm:
        trained = lm.train_substitute(
            domains=domains, rows=rows, epochs=epochs, learning_rate=learning_rate, seed=seed, progress=bar
        )
    found = asdict(trained)
    found["lambda"] = found.pop("substitute")["lam"]
    print_result(found, pairs(found), as_json=as_json)
    if trained.epochs == 0:
        note("warning: training made nothing better than the model's own rows; try a lower --learning-rate")
