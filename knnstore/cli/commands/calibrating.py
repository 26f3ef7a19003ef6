"""The command that fits settings to a user's own text."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnstore.cli.models import open_model
from knnstore.cli.options import (
    DEFAULT_HOME,
    DeviceOption,
    DomainsOption,
    DtypeOption,
    FilesArgument,
    HomeOption,
    JsonOption,
    SkipBadOption,
)
from knnstore.cli.output import Bar, note, one_line, print_json, print_table
from knnstore.errors import ConfigError

if TYPE_CHECKING:
    from knnstore.errors import InputError
    from knnstore.lm import Comparison, Interval


def calibrate(
    files: FilesArgument,
    domains: DomainsOption = None,
    max_k: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Neighbours to search for; a quarter of them, and so on, is tried too. Above 1,024 "
            "a fixed lambda and bins are fitted, below all mixers.",
        ),
    ] = 4096,
    leave_out: Annotated[
        bool,
        typer.Option("--leave-out", help="A document that is in the store does not retrieve from itself."),
    ] = False,
    networks: Annotated[
        bool,
        typer.Option(
            "--networks/--no-networks",
            help="Also fit a small network as one more mixer, and one that tells where searches can be left "
            "out.",
        ),
    ] = True,
    skip: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="Save settings that leave out this share of the searches, as 0.5."
        ),
    ] = None,
    skip_bad: SkipBadOption = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """Fit k, temperature, lambda and mixer to held-out text, and save the best.

    The model reads the documents once; then every candidate is fitted on half of the documents and judged
    on the other half, both ways. Where there are 2 to 16 domains, each is searched on its own too, and
    weights of their own are a candidate. The table gives held-out perplexities with
    intervals of 95 % (bootstrap over documents), and their quotient by that of the model alone. What is best
    is saved for these domains (or the whole store) and used by eval, generate and explain from then
    on; nothing is saved unless it beats the model alone.

    A second table tells what it costs to leave out those searches that are expected to help least.

    Examples:
      knnstore calibrate dev.jsonl
      knnstore calibrate dev.jsonl --domain news --json
      knnstore calibrate dev.jsonl --skip 0.25
    """
    from knnstore.documents import read_documents
    from knnstore.lm import settings_to_dict

    bad: list[InputError] = []

    def pass_over(error: "InputError") -> None:
        bad.append(error)
        note(f"skipped {one_line(error)}")

    with Bar() as bar:
        lm = open_model(home, "a", device=device, dtype=dtype)
        with lm.store:
            found = lm.calibrate(
                read_documents(files, on_bad=pass_over if skip_bad else None),
                domains=domains,
                max_k=max_k,
                leave_out=leave_out,
                networks=networks,
                skip=skip,
                progress=bar,
            )
    if found.in_store and networks:
        note(
            f"{found.in_store:,} of the documents are in the store: no network was trained on them, since it "
            "would outlast their removal"
        )
    rows = _rows(found.comparison)
    savings = [
        {"saved": of.share, "ppl": of.ppl, "quotient": of.quotient, "random": of.random}
        for of in found.savings
    ]
    if as_json:
        print_json(
            {
                "candidates": rows,
                "saved": None if found.record is None else asdict(found.record),
                "settings": None if found.settings is None else settings_to_dict(found.settings),
                "savings": savings,
                "scoring_seconds": found.scoring_seconds,
                "fitting_seconds": found.fitting_seconds,
                "skipped": len(bad),
            }
        )
    else:
        print_table(
            [{**row, "quotient": f"{row['quotient']:.3f}"} for row in rows],
            ["mixer", "k", "temperature", "lambda", "ppl", "low", "high", "quotient"],
        )
        if savings:
            note("leaving out the searches expected to help least, and its quotient when chosen at random:")
            print_table(
                [
                    {
                        "saved": f"{row['saved']:.0%}",
                        "ppl": row["ppl"],
                        **{name: f"{row[name]:.3f}" for name in ("quotient", "random")},
                    }
                    for row in savings
                ],
                ["saved", "ppl", "quotient", "random"],
            )
    if found.record is None:
        raise ConfigError(
            f"no candidate beats the model alone (perplexity {found.comparison.base.ppl:,.2f}) beyond "
            "chance: nothing was saved. Store more text of this kind, or give more held-out documents"
        )
    if skip is not None and not found.record.skipped:
        note(f"warning: --skip has no effect, the best settings ({found.record.mixer}) make no search")
    if not as_json:
        where = ", ".join(found.record.domains) or "the whole store"
        note(
            f"saved for {where}: {found.record.mixer}, perplexity {found.record.base_ppl:,.2f} -> "
            f"{found.record.knn_ppl:,.2f} on {found.record.tokens:,} held-out tokens "
            f"({found.scoring_seconds:.0f} s scoring, {found.fitting_seconds:.0f} s fitting)"
        )


def _rows(comparison: "Comparison") -> list[dict[str, Any]]:
    """A row for the model alone, for the settings until now, and for each candidate."""
    shown = [*([] if comparison.current is None else [comparison.current]), *comparison.candidates]
    rows: list[dict[str, Any]] = [
        {"mixer": "model alone", "k": 0, "temperature": None, "lambda": 0.0, **_bounds(comparison.base)}
    ]
    rows[0] |= {"quotient": 1.0, "quotient_low": 1.0, "quotient_high": 1.0}
    for candidate in shown:
        change = {f"quotient_{name}": value for name, value in _bounds(candidate.change).items()}
        rows.append(
            {
                "mixer": candidate.name,
                "k": candidate.settings.k,
                "temperature": candidate.settings.temperature,
                "lambda": candidate.lam,
                **_bounds(candidate.held_out),
                "quotient": change.pop("quotient_ppl"),
                **change,
            }
        )
    return rows


def _bounds(interval: "Interval") -> dict[str, float]:
    return interval._asdict()
