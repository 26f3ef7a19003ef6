"""The command that fits settings to a user's own text."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnstore.checks import printable
from knnstore.cli.fits import figures, table_of_fits
from knnstore.cli.inputs import AnyDocuments
from knnstore.cli.logs import LOG
from knnstore.cli.models import StoreRuntime
from knnstore.cli.options import DomainsOption, JsonOption, LeaveOutOption
from knnstore.cli.output import Bar, note, pairs, print_result
from knnstore.errors import ConfigError

if TYPE_CHECKING:
    from knnstore.lm import Comparison

STORED_TOKENS = 64_000
"""Number of stored tokens that are predicted if no held-out text is given."""
_COMPARED = ("model alone", "current")
_MOST_SHOWN = 8
_LEGEND = """\
*       what is saved          k, probes  neighbors, or cells, of each token
T       divides the distances  lambda     weight of what is retrieved, on average
ppl     perplexity held out    low, high  its interval of 95 %
ratio   of ppl to that of the model alone"""


def calibrate(
    *,
    domains: DomainsOption = None,
    max_k: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Neighbors to search for; a quarter of them, and so on, is tried too. Above 1,024 "
            "a fixed lambda and bins are fitted, below all mixers. A store with cells tries 4 to 64 probes "
            "instead, and takes the fewest within 0.5 % of the lowest perplexity.",
        ),
    ] = 4096,
    stored_tokens: Annotated[
        int | None,
        typer.Option(
            "--stored",
            min=1,
            metavar="TOKENS",
            help="Also predict so many tokens of stored documents, each by what is left of the store without "
            f"it; {STORED_TOKENS:,} where no FILE is given. Not for a model that was trained on them.",
        ),
    ] = None,
    leave_out: LeaveOutOption = False,
    networks: Annotated[
        bool,
        typer.Option(
            "--networks/--no-networks", help="Also fit small networks that choose the weights of each token."
        ),
    ] = True,
    ngrams: Annotated[
        bool,
        typer.Option("--ngrams/--no-ngrams", help="Also try n-grams: stored ones, and the text's own."),
    ] = True,
    show: Annotated[
        bool, typer.Option("--show", help="Only say what is saved for these domains, or the whole store.")
    ] = False,
    reset: Annotated[
        bool, typer.Option("--reset", help="Only drop what is saved for exactly these domains.")
    ] = False,
    documents: AnyDocuments,
    runtime: StoreRuntime,
    as_json: JsonOption = False,
) -> None:
    """Fit k or probes, temperature, lambda and mixer to held-out text, or the store's own, and save the best.

    The model reads the documents once. Each candidate is fitted on one half of the documents and evaluated
    on the other half, both ways (two-fold cross-fitting). With 2 to 16 domains, each domain is also searched
    on its own, and one weight for each domain is a further candidate. The table shows held-out perplexities
    with 95 % intervals over documents, and their ratio to the perplexity of the model alone.

    The best settings are saved for these domains (or the whole store); eval, generate and explain use them
    from then on. They are saved only if they beat the model alone, and the settings saved before, beyond
    chance. Saved settings that were fitted to this same text are always replaced. The lowest of many
    perplexities is partly luck, so the perplexity to expect is saved too: that of each half, with the
    settings that are best on the other half.

    At the end the model continues beginnings of the documents. Components that make the generated text repeat
    itself, as a cache can, are left out by generate and by the server.

    Examples:
      knnstore calibrate dev.jsonl
      knnstore calibrate dev.jsonl --domain news --json
      knnstore calibrate dev.jsonl --stored 50000
      knnstore calibrate --show
      knnstore calibrate --domain news --reset
    """
    if show or reset:
        if documents.files or stored_tokens or show == reset:
            raise typer.BadParameter("give --show or --reset alone")
        (_drop_saved if reset else _show_saved)(runtime.home, domains, as_json)
        return
    documents.check()
    of_store = stored_tokens or (0 if documents.files else STORED_TOKENS)
    with Bar() as bar, runtime.open_model("a", domains=domains) as lm:
        found = lm.calibrate(
            documents.read(bar),
            domains=domains,
            stored_tokens=of_store,
            max_k=max_k,
            leave_out=leave_out,
            networks=networks,
            ngrams=ngrams,
            on_bad=documents.skipping(bar),
            progress=bar,
        )
    if found.in_store and found.record is not None:
        note(
            f"{found.in_store:,} of the documents are in the store: once one of them is removed or replaced, "
            "these settings go; of other text expect higher perplexities"
        )
    from knnstore.lm import settings_to_dict

    documents.report()
    rows = _rows(found.comparison)
    result = {
        "candidates": rows,
        "documents": found.comparison.documents,
        "tokens": found.comparison.tokens,
        "saved": None if found.record is None else asdict(found.record),
        "settings": None if found.settings is None else settings_to_dict(found.settings),
        "expected": found.comparison.expected._asdict(),
        "probes": found.comparison.probes,
        "kept": found.kept,
        "scoring_seconds": found.scoring_seconds,
        "fitting_seconds": found.fitting_seconds,
        **documents.left_out,
    }
    print_result(result, _shown_candidates(rows, found.record is not None, found.kept), as_json=as_json)
    if found.comparison.probes and not as_json:
        tried = ", ".join(f"{probes}: {ppl:,.2f}" for probes, ppl in sorted(found.comparison.probes.items()))
        note(
            f"{found.comparison.chosen_probes} cells are visited, the fewest within 0.5 % of the lowest "
            f"perplexity that keys, n-grams and cache have together ({tried})"
        )
    if found.kept and found.comparison.current is not None:
        note(
            "the settings in force stay, perplexity "
            f"{found.comparison.current.held_out.ppl:,.2f}: no candidate beats them beyond chance"
        )
        return
    if found.record is None:
        raise ConfigError(
            f"no candidate beats the model alone (perplexity {found.comparison.base.ppl:,.2f}) beyond "
            "chance: nothing was saved. Store more text of this kind, or give more held-out documents"
        )
    if not as_json:
        where = ", ".join(found.record.domains) or "the whole store"
        note(
            f"saved for {where}: {found.record.mixer}, perplexity {found.record.base_ppl:,.2f} -> "
            f"{found.record.knn_ppl:,.2f} on {found.record.tokens:,} tokens "
            f"({found.scoring_seconds:.0f} s scoring, {found.fitting_seconds:.0f} s fitting)\n"
            "eval, generate and explain use it from now on. Next: `knnstore eval FILE` on other text;\n"
            "`knnstore calibrate --show` says what is saved, --reset takes it back"
        )
        if found.settings is not None:
            written = [asdict(one) for one in found.record.written]
            note(_of_writing(found.settings.scoring_only, written))


def _of_writing(scoring_only: Sequence[str], written: Sequence[Mapping[str, Any]]) -> str:
    """Describe in one line the components for scoring only, and the repetition in generated text.

    Args:
        scoring_only: names of the components that are left out of generation.
        written: measurements of generated text, each with its components and its share of repeated 4-grams.
    """
    left = ", ".join(scoring_only)
    what = f"counts in scoring only: {left}" if left else "everything counts in writing too"
    shares = {one["of"]: one["repeated_4grams"] for one in written}
    if left and shares and f"all but {left}" not in shares:
        what = f"the model writes alone, {what}"
    if not shares:
        return f"{what} (too little text to measure how text repeats itself)"
    names = {
        f"all but {left}": "without",
        "all": "with all",
        "model": "the model alone",
        "text": "the documents",
    }
    said = [f"{shares[of]:.2f} {name}" for of, name in names.items() if of in shares]
    return f"{what} (repeated 4-grams of written text: {', '.join(said)})"


def _rows(comparison: "Comparison") -> list[dict[str, Any]]:
    """Return the table's rows: the model alone, the current settings if any, and each candidate."""
    from knnstore.lm import Interval

    alone = figures(None, 0.0, comparison.base, Interval(1.0, 1.0, 1.0))
    shown = [*([] if comparison.current is None else [comparison.current]), *comparison.candidates]
    return [{"mixer": "model alone", **alone}] + [
        {"mixer": one.name, **figures(one.settings, one.lam, one.held_out, one.change)} for one in shown
    ]


def _shown_candidates(rows: Sequence[Mapping[str, Any]], saved: bool, kept: bool) -> str:
    """Format a table of the model alone, the current settings and the best candidates.

    Args:
        rows: the rows of `_rows`.
        saved: True if settings were saved.
        kept: True if the current settings stay. The star marks them, or else the saved candidate.
    """
    fixed = [row for row in rows if row["mixer"] in _COMPARED]
    tried = sorted((row for row in rows if row["mixer"] not in _COMPARED), key=lambda row: float(row["ppl"]))
    most = len(tried) if LOG.verbose else _MOST_SHOWN
    star = len(fixed) - kept if saved or kept else -1  # the first candidate, or the current settings
    marked = [
        {**row, "mixer": f"{'*' if at == star else ' '} {row['mixer']}"}
        for at, row in enumerate([*fixed, *tried[:most]])
    ]
    more = f"\n  and {len(tried) - most:,} more (-v shows them)" if len(tried) > most else ""
    return f"{table_of_fits(marked, ['mixer'])}{more}\n\n{_LEGEND}"


def _show_saved(home: Path, domains: Sequence[str] | None, as_json: bool) -> None:
    """Print the settings that are saved for these domains or, if none are, for the whole store."""
    import knnstore

    with knnstore.open(home) as store:
        chosen = tuple(domains or ())
        store.record_count(knnstore.Selection(domains=chosen or None))  # raises for an unknown domain
        found = [(scope, store.settings(scope)) for scope in ((chosen, ()) if chosen else ((),))]
        scope, saved = next(((scope, one) for scope, one in found if one and one.query), ((), None))
        known = len(store.stored_content(saved.fitted_on)) if saved else 0
    if saved is None:
        print_result({"settings": None}, "nothing is saved: the defaults are used", as_json=as_json)
        return
    hidden = ("stored", "held_out", "text_hash")
    how = {name: value for name, value in (saved.calibration or {}).items() if name not in hidden}
    where = ", ".join(scope) or "the whole store"
    made = {"calibrated": how["date"][:10]} if how else {"calibrated": "no: the defaults"}
    if how:
        made["writing"] = _of_writing(saved.query.get("scoring_only") or (), how.get("written") or ())
    if known:
        made["goes"] = f"with any of {known:,} stored documents that it was fitted to"
    told = {"k"} if saved.query.get("probes") else set()  # with probes, k has no effect
    told |= {"mixer"} if saved.query.get("gate") else set()  # with a gate, the mixer is only a fallback
    settings = {
        name: value for name, value in saved.query.items() if value not in (None, []) and name not in told
    }
    found_by: dict[str, Any] = {
        name: how[name] for name in ("documents", "tokens", "base_ppl", "knn_ppl") if name in how
    }
    shown = pairs(
        {"for": where, **made, **found_by, **{name: _short(value) for name, value in settings.items()}}
    )
    print_result(
        {"domains": scope, "calibration": how or None, "settings": saved.query}, shown, as_json=as_json
    )


def _drop_saved(home: Path, domains: Sequence[str] | None, as_json: bool) -> None:
    """Delete the settings that are saved for exactly these domains, and print the result.

    Derived defaults do not count as saved. What was trained for components of other packages stays.
    Damaged settings are deleted too.
    """
    import knnstore
    from knnstore.errors import CatalogError
    from knnstore.store import SavedSettings

    chosen = tuple(domains or ())
    with knnstore.open(home, "a") as store:
        try:
            saved = store.settings(chosen)
        except CatalogError:  # the saved settings are damaged
            saved = SavedSettings(query={"damaged": True})
        is_there = saved is not None and bool(saved.query) and saved.derived is None
        if saved is not None and is_there:
            store.save_settings(SavedSettings(trained=saved.trained), chosen)
    where = ", ".join(chosen) or "the whole store"
    said = f"dropped what was saved for {where}" if is_there else f"nothing is saved for {where}"
    print_result({"reset": is_there, "domains": chosen}, printable(said), as_json=as_json)


def _short(value: Any) -> Any:
    """Shorten a value of the settings for one line: a list of numbers becomes the count of its values."""
    if isinstance(value, Mapping):
        parts = {"lambda" if name == "lam" else name: part for name, part in value.items()}
        return ", ".join(f"{name} {_short(part)}" for name, part in parts.items() if part not in (None, []))
    if isinstance(value, list):
        return ", ".join(value) if all(isinstance(one, str) for one in value) else f"{len(value)} values"
    return f"{value:.4g}" if isinstance(value, float) else value
