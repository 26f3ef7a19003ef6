"""The command that fits settings to a user's own text."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnstore.checks import escape_unprintable
from knnstore.cli.fits import build_fit_row, format_fits_table
from knnstore.cli.inputs import AnyDocuments
from knnstore.cli.logs import LOG
from knnstore.cli.models import StoreRuntime
from knnstore.cli.options import DomainsOption, JsonOption, LeaveOutOption
from knnstore.cli.output import Bar, format_pairs, print_message, print_result
from knnstore.errors import ConfigError

if TYPE_CHECKING:
    from knnstore.lm import Candidate, Comparison, Kind, KNNSettings

STORED_TOKENS = 64_000
"""Number of stored tokens that are predicted if no held-out text is given."""
_REFERENCE_ROWS = ("model alone", "current")
_MAX_SHOWN = 8
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
            help="Largest number of neighbors to try; a quarter of it, a sixteenth and so on are tried too. "
            "Up to 1,024 neighbors, all mixers (rules for the weight lambda) are fitted; with more "
            "neighbors, only a fixed lambda and bins. A store with cells tries 4 to 64 probes instead, and "
            "takes the fewest within 0.5 % of the lowest perplexity.",
        ),
    ] = 4096,
    stored_tokens: Annotated[
        int | None,
        typer.Option(
            "--stored",
            min=1,
            metavar="TOKENS",
            help="Also predict this number of tokens of stored documents. Each document is left out of its "
            f"own search. The default is {STORED_TOKENS:,} if no FILE is given, else none. Not for a model "
            "that was trained on these documents.",
        ),
    ] = None,
    leave_out: LeaveOutOption = False,
    networks: Annotated[
        bool,
        typer.Option(
            "--networks/--no-networks",
            help="Also fit small networks that choose the weights for each token.",
        ),
    ] = True,
    ngrams: Annotated[
        bool,
        typer.Option(
            "--ngrams/--no-ngrams", help="Also try n-grams of the stored documents and of the text itself."
        ),
    ] = True,
    repetition: Annotated[
        bool,
        typer.Option(
            "--repetition",
            help="At the end, also generate text, and leave out the components that make generated text "
            "repeat itself. This doubles the time.",
        ),
    ] = False,
    show: Annotated[
        bool,
        typer.Option(
            "--show", help="Only print the settings saved for these domains, or for the whole store."
        ),
    ] = False,
    reset: Annotated[
        bool, typer.Option("--reset", help="Only delete the settings saved for exactly these domains.")
    ] = False,
    documents: AnyDocuments,
    runtime: StoreRuntime,
    as_json: JsonOption = False,
) -> None:
    """Fit the retrieval settings to held-out or stored text, and save the best ones.

    The model reads the documents once. Each candidate is fitted on one half of the documents and evaluated
    on the other half, both ways (two-fold cross-fitting). With 2 to 16 domains, each domain is also searched
    on its own, and one weight for each domain is a further candidate. The table shows held-out perplexities
    with 95 % intervals over documents, and their ratio to the perplexity of the model alone.

    The best settings are saved for these domains (or the whole store); eval, generate and explain use them
    from then on. New settings are saved only if they are better than the model alone, and better than the
    settings that were saved before. Both differences must be larger than chance explains. Settings that were
    fitted to this same text are not compared, because the text cannot judge them; then new settings must only
    be better than the model alone. If they are not, the command fails and the saved settings stay.

    The lowest of many perplexities is partly luck. So the command also saves the perplexity to expect on new
    text. To compute it, each half of the documents is predicted with the candidate that is best on the other
    half.

    The commands generate and serve do not use a cache, because with a cache generated text repeats itself.
    Other components can have this effect too. With --repetition, the model continues beginnings of the
    documents, to find such components.

    Examples:
      knnstore calibrate dev.jsonl
      knnstore calibrate dev.jsonl --domain news --json
      knnstore calibrate dev.jsonl --stored 50000
      knnstore calibrate --show
      knnstore calibrate --domain news --reset
    """
    # 1) --show and --reset need no model.
    if show or reset:
        if documents.files or stored_tokens or show == reset:
            raise typer.BadParameter("give either --show or --reset, without FILE and --stored")
        (_drop_saved if reset else _show_saved)(runtime.home, domains, as_json)
        return
    # 2) Fit the candidates, and save the best.
    documents.check_files()
    store_token_count = stored_tokens or (0 if documents.files else STORED_TOKENS)
    kind: Kind | None = "causal" if repetition else None
    with Bar() as bar, runtime.open_model("a", domains=domains, kind=kind) as lm:
        fitted = lm.calibrate(
            documents.read_documents(bar),
            domains=domains,
            stored_tokens=store_token_count,
            max_k=max_k,
            leave_out=leave_out,
            networks=networks,
            ngrams=ngrams,
            repetition=repetition,
            on_bad=documents.make_skip_function(bar),
            progress=bar,
        )
    if fitted.in_store and fitted.record is not None:
        print_message(
            f"{fitted.in_store:,} of the documents are in the store, so these settings are deleted when one "
            "of them is removed or replaced; expect higher perplexities on other text"
        )
    # 3) Print the table of candidates.
    from knnstore.lm import settings_to_dict

    documents.report()
    rows = _build_rows(fitted.comparison)
    result = {
        "candidates": rows,
        "documents": fitted.comparison.documents,
        "tokens": fitted.comparison.tokens,
        "saved": None if fitted.record is None else asdict(fitted.record),
        "settings": None if fitted.settings is None else settings_to_dict(fitted.settings),
        "expected": fitted.comparison.expected._asdict(),
        "probes": fitted.comparison.probes,
        "kept": fitted.kept,
        "scoring_seconds": fitted.scoring_seconds,
        "fitting_seconds": fitted.fitting_seconds,
        **documents.left_out,
    }
    print_result(result, _format_candidates(rows, fitted.record is not None, fitted.kept), as_json=as_json)
    if fitted.comparison.probes and not as_json:
        perplexities = ", ".join(
            f"{probes}: {ppl:,.2f}" for probes, ppl in sorted(fitted.comparison.probes.items())
        )
        print_message(
            f"{fitted.comparison.chosen_probes} cells are searched, the smallest number within 0.5 % of the "
            f"lowest perplexity of keys, n-grams and cache together ({perplexities})"
        )
    # 4) Say what was saved, or why nothing was saved.
    if fitted.kept and fitted.comparison.current is not None:
        print_message(
            f"the current settings (perplexity {fitted.comparison.current.held_out.ppl:,.2f}) are kept: no "
            "candidate beats them beyond chance"
        )
        return
    if fitted.record is None:
        raise ConfigError(
            f"no candidate beats the model alone (perplexity {fitted.comparison.base.ppl:,.2f}) beyond "
            "chance: nothing was saved. Store more text of this kind, or give more held-out documents"
        )
    if not as_json:
        scope = ", ".join(fitted.record.domains) or "the whole store"
        print_message(
            f"saved for {scope}: {fitted.record.mixer}, perplexity {fitted.record.base_ppl:,.2f} -> "
            f"{fitted.record.knn_ppl:,.2f} on {fitted.record.tokens:,} tokens "
            f"({fitted.scoring_seconds:.0f} s scoring, {fitted.fitting_seconds:.0f} s fitting)\n"
            "eval, generate and explain use it from now on. Next: `knnstore eval FILE` on other text;\n"
            "`knnstore calibrate --show` says what is saved, --reset takes it back"
        )
        if fitted.settings is not None:
            measurements = [asdict(measurement) for measurement in fitted.record.written]
            print_message(_describe_generation(fitted.settings.scoring_only, measurements))
            if repetition and not measurements:
                print_message("there is too little text to measure how generated text repeats itself")
            elif not repetition and set(fitted.settings.scoring_only) - {"cache"}:
                print_message(
                    "the earlier settings left the same components out of generation: --repetition "
                    "measures them again"
                )


def _describe_generation(scoring_only: Sequence[str], written: Sequence[Mapping[str, Any]]) -> str:
    """Return a line of text about generation with calibrated settings.

    The line names the components (sources of predictions) that are used for scoring only, and says how much
    generated text repeats itself.

    Args:
        scoring_only: names of the components that are left out of generation; may be empty.
        written: measurements of generated text: the components used, and the share of repeated 4-grams. Empty
            if nothing was measured.
    """
    left_out = ", ".join(scoring_only)
    sentence = f"used in scoring only: {left_out}" if left_out else "generation uses all components"
    shares = {measurement["of"]: measurement["repeated_4grams"] for measurement in written}
    if left_out and shares and f"all but {left_out}" not in shares:
        sentence = f"the model generates alone, {sentence}"
    if not shares:
        return sentence
    names = {
        f"all but {left_out}": "without",
        "all": "with all",
        "model": "the model alone",
        "text": "the documents",
    }
    shares_text = [f"{shares[of]:.2f} {name}" for of, name in names.items() if of in shares]
    return f"{sentence} (repeated 4-grams of generated text: {', '.join(shares_text)})"


def _build_rows(comparison: "Comparison") -> list[dict[str, Any]]:
    """Return the rows of the candidates' table: model alone, current settings if any, each candidate."""
    from knnstore.lm import Interval

    model_row = build_fit_row(None, 0.0, comparison.base, Interval(1.0, 1.0, 1.0))
    candidates = [*([] if comparison.current is None else [comparison.current]), *comparison.candidates]
    return [{"mixer": "model alone", **model_row}] + [
        {
            "mixer": candidate.name,
            **build_fit_row(
                _get_shown_settings(candidate), candidate.lam, candidate.held_out, candidate.change
            ),
        }
        for candidate in candidates
    ]


def _get_shown_settings(candidate: "Candidate") -> "KNNSettings":
    """Return settings of a candidate with the values that the table shows.

    These are the settings that were fitted to all documents. If a network chooses the temperature, the
    settings of one half of the documents are returned, so that no network is fitted only for the table.
    """
    settings = candidate.by_half[0]
    return settings if settings.chooses_temperature else candidate.settings


def _format_candidates(rows: Sequence[Mapping[str, Any]], is_best_saved: bool, is_current_kept: bool) -> str:
    """Format a table of the model alone, the current settings and the best candidates, with a legend.

    A candidate is a set of settings that was fitted. A star marks the settings that are saved now.

    Args:
        rows: the rows of `_build_rows`.
        is_best_saved: True if the best candidate was saved; it gets the star.
        is_current_kept: True if the current settings stay; they get the star. If both arguments are False,
            nothing is saved and no row has a star.
    """
    reference_rows = [row for row in rows if row["mixer"] in _REFERENCE_ROWS]
    candidate_rows = sorted(
        (row for row in rows if row["mixer"] not in _REFERENCE_ROWS), key=lambda row: float(row["ppl"])
    )
    limit = len(candidate_rows) if LOG.verbose else _MAX_SHOWN
    star = -1
    if is_best_saved or is_current_kept:  # the row after the reference rows, or the last of them
        star = len(reference_rows) - is_current_kept
    printed_rows = [
        {**row, "mixer": f"{'*' if position == star else ' '} {row['mixer']}"}
        for position, row in enumerate([*reference_rows, *candidate_rows[:limit]])
    ]
    more = (
        f"\n  and {len(candidate_rows) - limit:,} more (-v shows them)" if len(candidate_rows) > limit else ""
    )
    return f"{format_fits_table(printed_rows, ['mixer'])}{more}\n\n{_LEGEND}"


def _show_saved(home: Path, domains: Sequence[str] | None, as_json: bool) -> None:
    """Print the settings that are saved for exactly these domains, else the settings of the whole store.

    If neither are saved, prints that nothing is saved.

    Args:
        home: folder of the store.
        domains: names of the domains; None or empty for the whole store.
        as_json: True to print JSON.

    Raises:
        DomainNotFoundError: a domain does not exist.
    """
    import knnstore

    # 1) Find the saved settings: of these domains, else of the whole store.
    with knnstore.open(home) as store:
        scope_domains = tuple(domains or ())
        store.record_count(knnstore.Selection(domains=scope_domains or None))  # raises for an unknown domain
        candidates = [
            (scope, store.settings(scope)) for scope in ((scope_domains, ()) if scope_domains else ((),))
        ]
        scope, saved = next(
            ((scope, candidate) for scope, candidate in candidates if candidate and candidate.query),
            ((), None),
        )
        stored_count = len(store.find_stored_hashes(saved.fitted_on)) if saved else 0
    if saved is None:
        print_result({"settings": None}, "no settings are saved: the defaults are used", as_json=as_json)
        return
    # 2) Leave out the fields that mean nothing to a reader, or have no effect.
    hidden = ("stored", "held_out", "text_hash")
    calibration = {name: value for name, value in (saved.calibration or {}).items() if name not in hidden}
    where = ", ".join(scope) or "the whole store"
    origin = {"calibrated": calibration["date"][:10]} if calibration else {"calibrated": "no: the defaults"}
    if calibration:
        origin["generation"] = _describe_generation(
            saved.query.get("scoring_only") or (), calibration.get("written") or ()
        )
    if stored_count:
        origin["deleted"] = (
            f"when one of the {stored_count:,} stored documents that it was fitted to is removed or replaced"
        )
    hidden_settings = {"k"} if saved.query.get("probes") else set()  # with probes, k has no effect
    hidden_settings |= (
        {"mixer"} if saved.query.get("gate") else set()
    )  # with a gate, the mixer is only a fallback
    settings = {
        name: value
        for name, value in saved.query.items()
        if value not in (None, []) and name not in hidden_settings
    }
    found_by: dict[str, Any] = {
        name: calibration[name]
        for name in ("documents", "tokens", "base_ppl", "knn_ppl")
        if name in calibration
    }
    shown = format_pairs(
        {
            "for": where,
            **origin,
            **found_by,
            **{name: _shorten_value(value) for name, value in settings.items()},
        }
    )
    print_result(
        {"domains": scope, "calibration": calibration or None, "settings": saved.query},
        shown,
        as_json=as_json,
    )


def _drop_saved(home: Path, domains: Sequence[str] | None, as_json: bool) -> None:
    """Delete the settings that are saved for exactly these domains, and print the result.

    Defaults that were derived from the stored keys do not count as saved. Trained components of other
    packages stay. Damaged settings are deleted too.

    Args:
        home: folder of the store.
        domains: names of the domains; None or empty for the settings of the whole store.
        as_json: True to print JSON.
    """
    import knnstore
    from knnstore.errors import CatalogError
    from knnstore.store import SavedSettings

    scope_domains = tuple(domains or ())
    with knnstore.open(home, "a") as store:
        try:
            saved = store.settings(scope_domains)
        except CatalogError:  # the saved settings are damaged
            saved = SavedSettings(query={"damaged": True})
        has_saved = saved is not None and bool(saved.query) and saved.derived is None
        if saved is not None and has_saved:
            store.save_settings(SavedSettings(trained=saved.trained), scope_domains)
    where = ", ".join(scope_domains) or "the whole store"
    message = f"deleted the settings saved for {where}" if has_saved else f"no settings are saved for {where}"
    print_result({"reset": has_saved, "domains": scope_domains}, escape_unprintable(message), as_json=as_json)


def _shorten_value(value: Any) -> Any:
    """Return a value of the settings in a form that fits in one line.

    A mapping becomes pairs of name and value. A list of strings is joined by commas; any other list becomes
    the count of its values. A float gets four significant digits. Any other value is returned unchanged.
    """
    if isinstance(value, Mapping):
        entries = {"lambda" if name == "lam" else name: entry for name, entry in value.items()}
        return ", ".join(
            f"{name} {_shorten_value(entry)}" for name, entry in entries.items() if entry not in (None, [])
        )
    if isinstance(value, list):
        return ", ".join(value) if all(isinstance(item, str) for item in value) else f"{len(value)} values"
    return f"{value:.4g}" if isinstance(value, float) else value
