"""`calibrate`: fit settings to held-out text, and save the best with a record of the calibration."""

import hashlib
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

from knnstore.documents import OnBad, TextDocument
from knnstore.errors import (
    ConfigError,
    CorruptWeightsError,
    FingerprintMismatchError,
    InputError,
    ReadOnlyError,
)
from knnstore.lm.calibration.candidates import (
    Comparison,
    choose_probes,
    compare_candidates,
    list_ks,
    measure_probes,
)
from knnstore.lm.calibration.fits import MOST_DOMAINS
from knnstore.lm.calibration.scored_text import score_once
from knnstore.lm.calibration.scoring_only import find_scoring_only
from knnstore.lm.calibration.searches import FurtherSearches, WideEvidence
from knnstore.lm.calibration.text import choose_text
from knnstore.lm.components import NGramSettings
from knnstore.lm.reading import usable_documents
from knnstore.lm.scoring import group_by_left_out
from knnstore.lm.settings import (
    DEFAULT_PROBES,
    CalibrationRecord,
    GeneratingModel,
    KNNSettings,
    Repetition,
    count_records,
    find_saved_settings,
    resolve,
    save_settings,
)
from knnstore.progress import Progress
from knnstore.store import KNNStore, Lineage, Selection

MAX_K = 4096
"""Largest k that is tried. p_kNN over more neighbors was hardly better, see docs/findings.md."""
PASS_K = 1024
"""Largest number of neighbors that are kept for each token, for mixers that use them. For larger k only p_kNN
is kept."""
PROBES = (4, 8, 16, 32, 64)
"""Numbers of searched cells (groups of records with near keys) that are tried for each query; the smallest
sufficient number is chosen."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The result of `calibrate`."""

    comparison: Comparison
    """All tried settings with their perplexities."""
    record: CalibrationRecord | None
    """The saved record. None if nothing was saved: no candidate is better than the model alone and the
    settings in force by more than chance explains."""
    scoring_seconds: float
    """Duration of scoring the text and of all searches, in seconds."""
    fitting_seconds: float
    """Duration of fitting and, if it was asked for, of measuring generated text, in seconds."""
    settings: KNNSettings | None = None
    """The settings that were saved, or the settings that were kept; None if nothing was saved or kept."""
    kept: bool = False
    """True if earlier settings stay in force, because no candidate is better by more than chance explains."""
    in_store: int = 0
    """Number of the documents that are in the store. When one of these documents is removed, the settings
    are deleted."""


def calibrate(
    lm: GeneratingModel,
    documents: Iterable[object] = (),
    *,
    domains: Iterable[str] | None = None,
    stored_tokens: int = 0,
    max_k: int = MAX_K,
    leave_out: bool = False,
    networks: bool = True,
    ngrams: bool = True,
    repetition: bool = False,
    on_bad: OnBad | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Fit all settings on held-out text, and save the best settings for a selection of domains.

    The model scores the text once. The store is searched with k up to `PASS_K`, then with larger k (or
    several numbers of cells), then in each domain alone. All candidates (settings of different kinds) are
    fitted on these results; see `compare_candidates`.

    Settings are saved only if they are better than the model alone. They must also be better than the
    settings in force, unless these are the derived default. Better means that the perplexity is lower by more
    than chance explains. Saved settings that were fitted to this same text are not compared, because the text
    cannot judge them. New settings replace them if the new settings are better than the model alone.

    Saved settings use a continuous cache in scoring only, because with a cache generated text repeats itself.
    ``lm.knn`` is set to the saved settings if it selects the same domains.

    Args:
        lm: the model; its store is opened for writing.
        documents: held-out text like the text that will be predicted, in any form that `add` takes.
        domains: the domains to search, for which the settings are saved; default is the whole store.
        stored_tokens: number of tokens of stored documents, chosen at random, that are also used. Each of
            these documents is left out of its own search; see `choose_stored`. Do not use it for a model that
            was trained on the stored documents. When one of these documents is removed or replaced, the
            settings are deleted.
        max_k: largest number of neighbors to try; smaller numbers are tried too. In a store with cells
            (groups of records with near keys), numbers of searched cells are tried instead: the numbers in
            `PROBES`. Each number is tried with keys, n-grams and cache together on a sample of the documents.
            Each searched cell takes time, so the smallest number is chosen whose perplexity is at most 0.5 %
            above the lowest.
        leave_out: True to leave a document that is in the store out of its own search; when the stored
            document is removed or replaced, the settings are deleted. With False, the document raises an
            error.
        networks: True to fit gates (networks that choose weights for each token) as further candidates.
        ngrams: True to try n-grams of the stored text and, with a continuous cache, of the text itself.
        repetition: True to find, as a last step, components besides the cache that make generated text repeat
            itself, and to use them in scoring only. The model continues beginnings of the documents, which
            takes longer than all other steps. Settings that stay in force are measured too. If False, new
            settings leave out of generation the cache, and the components that the settings in force leave
            out.
        on_bad: called for each document that cannot be used, or that has a token which the model does not
            have; the document is then left out. With None the first bad document raises an error.
        progress: progress display, which receives the number of tokens of each batch; None for no display.

    Raises:
        ReadOnlyError: the store was opened for reading.
        ConfigError: `max_k` or `stored_tokens` is out of range, or `repetition` is not possible because the
            model is an encoder-decoder model.
        InputError: the store is empty, a document is in the store or cannot be used, there is too little
            text, or a stored document of the text was removed during the calibration.
    """
    # 1) Check the arguments.
    store, reader = lm.store, lm.reader
    if store.mode != "a":
        raise ReadOnlyError('calibrated settings are saved in the store: open it for writing, mode "a"')
    if max_k < 1:
        raise ConfigError(f"max_k must be at least 1, got {max_k}")
    if repetition and reader.reads_pairs:
        raise ConfigError(
            "repetition can be measured only for causal models: leave it out for encoder-decoder models"
        )
    if stored_tokens < 0:
        raise ConfigError(f"stored_tokens must be at least 0, got {stored_tokens}")
    names = tuple(sorted(set(domains or ())))
    selection = Selection(domains=names or None)
    revision, lineage, records = store.revision(), store.lineage(names), count_records(store, names)
    if not records:
        raise InputError("the store is empty: add documents before calibrating")
    # 2) Choose the text, and the settings that candidates are compared with.
    given = usable_documents(reader, documents, on_bad)
    text = choose_text(store, reader, given, selection, stored_tokens, leave_out=leave_out)
    listed, reached = text.documents, text.reached
    started = time.perf_counter()
    current, saved = _resolve_usable(store, selection), find_saved_settings(store, selection)
    if saved is not None and text.is_known_to(saved.fitted_on):
        current = None  # the text cannot judge settings that were fitted to it
    # 3) Score the text once, and search further for it.
    probes = DEFAULT_PROBES if store.has_cells else None
    needed = current and current.ngrams  # to judge the settings in force, also if no n-grams are tried
    counted = needed or (NGramSettings() if ngrams else None)
    scored = score_once(
        store,
        reader,
        listed,
        k=min(max_k, records, PASS_K),
        selection=selection,
        probes=probes,
        ngrams=counted,
        left_out=reached,
        progress=progress,
    )
    wide: list[WideEvidence] = []
    by_probes: Mapping[int, float] = {}
    apart = None
    if len(scored.found):
        further = FurtherSearches(store, scored, listed, selection, reached, progress)
        if probes is not None:
            in_force = {current.probes} if current and current.probes else set[int]()
            sample, by_probes = measure_probes(further, sorted({*PROBES, *in_force}), ngrams=ngrams)
            if len(sample) == len(scored):
                scored = sample
            else:
                chosen = sorted({choose_probes(by_probes), *in_force})
                scored = replace(scored, visited=further.search_with_probes(chosen))
        else:
            larger = [k for k in list_ks(min(max_k, records)) if k >= 2 * scored.k]
            wide = further.search_with_k(larger) if larger else []
        searched = [domain.name for domain in store.domains() if not names or domain.name in names]
        if 2 <= len(searched) <= MOST_DOMAINS:
            apart = further.search_each_domain(searched, scored.k, probes)
    between = time.perf_counter()
    # 4) Fit and judge every candidate.
    found = compare_candidates(
        scored,
        current,
        wide=wide,
        domains=apart,
        by_probes=by_probes,
        networks=networks,
        ngrams=ngrams,
        progress=progress,
    )
    # 5) Keep the settings in force, or save the best candidate.
    record = settings = None
    chosen_before = saved is not None and saved.derived is None and found.current is not None
    kept = chosen_before and not (found.beats_base and found.beats_current)
    if kept:
        settings = current
        is_renewed = current is not None and _renew_record(store, selection, records, lineage)
        if current is not None and is_renewed:
            if current.cache is not None and "cache" not in current.scoring_only:
                settings = current = replace(current, scoring_only=("cache", *current.scoring_only))
                _save_scoring_only(store, selection, current.scoring_only)
            if repetition:
                settings = replace(
                    current, scoring_only=_measure_generation(lm, current, listed, reached, progress)
                )
    elif found.beats_base:
        text.check_stored(store)
        # The settings are saved before generated text is measured, so that an error there loses no fit.
        left_out = {"cache", *(saved.query.get("scoring_only", ()) if saved is not None else ())}
        settings = found.best.settings
        settings = replace(
            settings, scoring_only=tuple(name for name in settings.components if name in left_out)
        )
        record = CalibrationRecord(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            mixer=found.best.name,
            documents=found.documents,
            tokens=found.tokens,
            text_hash=hashlib.sha256("\n".join(sorted(text.hashes)).encode()).hexdigest(),
            revision=revision,
            records=records,
            base_ppl=found.base.ppl,
            knn_ppl=found.expected.ppl,
            domains=names,
            stored=lineage,
            held_out=tuple(sorted(text.hashes)),
        )
        save_settings(store, settings, names, record)
        _apply_saved_settings(lm, names)
        if repetition:
            selected = replace(settings, selection=selection)
            settings = replace(
                settings, scoring_only=_measure_generation(lm, selected, listed, reached, progress)
            )
        record = CalibrationRecord.for_selection(store, selection)
    if settings is not None:
        _apply_saved_settings(lm, names)
    fitted = time.perf_counter()
    return Calibration(found, record, between - started, fitted - between, settings, kept, text.in_store)


def _resolve_usable(store: KNNStore, selection: Selection) -> KNNSettings | None:
    """Return the settings in force for a selection of documents.

    If a network that the saved settings use is damaged or was fitted for other keys, a warning is logged, and
    None is returned.
    """
    try:
        return resolve(store, KNNSettings(selection=selection))
    except (CorruptWeightsError, FingerprintMismatchError) as error:
        _logger.warning("the saved settings are not used: %s", error)
        return None


def _renew_record(store: KNNStore, selection: Selection, records: int, lineage: Lineage) -> bool:
    """Update the saved calibration record of settings that were judged again and kept.

    The updated record says that the settings are valid for the current records, so they do not count as
    stale.

    Args:
        store: the store, opened for writing.
        selection: the domains whose settings were kept.
        records: number of records that were searched.
        lineage: the documents that were searched, as the store identifies them.

    Returns:
        True if the record was updated. False if no settings are saved, or if they were not calibrated; then
        nothing is changed.
    """
    domains = selection.domains or ()
    saved, record = store.settings(domains), CalibrationRecord.for_selection(store, selection)
    if saved is None or saved.calibration is None or record is None:
        return False
    renewed = asdict(replace(record, records=records, stored=lineage))
    store.save_settings(replace(saved, calibration=renewed), domains)
    return True


def _measure_generation(
    lm: GeneratingModel,
    settings: KNNSettings,
    documents: Sequence[TextDocument],
    reached: Mapping[str, Collection[str]],
    progress: Progress | None,
) -> tuple[str, ...]:
    """Find the components that make generated text repeat itself; save and return their names.

    The saved settings use these components when text is scored, and leave them out when text is generated. To
    find them, the model continues beginnings of documents. It uses the documents whose searches leave out no
    stored document. If there are none, it uses a group of documents whose searches leave out the same stored
    documents. If there is too little text to measure, nothing is saved, and ``settings.scoring_only`` is
    returned.

    Args:
        lm: the model.
        settings: the calibrated settings, with their selection.
        documents: the text that the settings were fitted to.
        reached: stored documents that the search for a document leaves out. It maps the content hash of the
            document to the content hashes of the stored documents.
        progress: progress display, which receives the start and the end of each generation; None for no
            display.
    """
    groups = group_by_left_out(documents, reached)
    members, excluded = next((group for group in groups if not group[1]), groups[0])
    begun, narrowed = [documents[index] for index in members], settings.selection.without_content(*excluded)
    scoring_only, written = find_scoring_only(lm, begun, replace(settings, selection=narrowed), progress)
    if not written:
        return settings.scoring_only
    _save_scoring_only(lm.store, settings.selection, scoring_only, written)
    return scoring_only


def _save_scoring_only(
    store: KNNStore,
    selection: Selection,
    scoring_only: tuple[str, ...],
    repetitions: Sequence[Repetition] = (),
) -> None:
    """Change which components of saved, calibrated settings are used in scoring only.

    Does nothing if no calibrated settings are saved for the selection.

    Args:
        store: the store, opened for writing.
        selection: the domains whose settings are changed.
        scoring_only: names of the components.
        repetitions: measured repetition of generated text, for the calibration record; empty if nothing was
            measured.
    """
    domains = selection.domains or ()
    saved = store.settings(domains)
    if saved is not None and saved.calibration is not None:
        query = {**saved.query, "scoring_only": scoring_only}
        record = {**saved.calibration, "written": [asdict(repetition) for repetition in repetitions]}
        store.save_settings(replace(saved, query=query, calibration=record), domains)


def _apply_saved_settings(lm: GeneratingModel, domains: Sequence[str]) -> None:
    """Set ``lm.knn`` to the saved settings if ``lm.knn`` selects exactly these domains."""
    if set(domains) == set(lm.knn.selection.domains or ()):
        lm.knn = resolve(lm.store, KNNSettings(selection=lm.knn.selection))
