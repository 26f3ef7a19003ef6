"""Identity and contents of a store, for `knnstore info`."""

from typing import Any

from knnstore.catalog import Catalog, Engine, Identity, mask_password
from knnstore.store.fitted import Lineage, SavedSettings, convert_damage_errors, load_all_settings
from knnstore.store.home import Home
from knnstore.store.view import View


def describe_store(home: Home, catalog: Catalog, view: View, move_target: Engine | None) -> dict[str, Any]:
    """Return a description of a store as JSON values by name, which `knnstore info` prints.

    The values are the store's identity, its engine, its numbers of documents, tokens and records, and its
    trained and calibrated settings.

    Args:
        home: folder of the store.
        catalog: catalog of the store.
        view: the documents of the store at the latest revision.
        move_target: target engine of an unfinished move of the keys; None if no move is unfinished.

    Raises:
        CatalogError: if saved settings are damaged.
    """
    domains, saved = catalog.domains(), list(load_all_settings(catalog).values())
    with convert_damage_errors():
        fitted = {"trained": _describe_trained(saved, view), "calibrated": _describe_calibrations(saved)}
    identity, engine = catalog.identity, view.snapshot.engine
    return {
        "home": str(home.path),
        "catalog": mask_password(home.catalog_url),
        "store": engine.adapter,
        "location": engine.location,
        "params": dict(engine.params),
        "codes": view.datastore.capabilities.codes,
        "coded_from": view.datastore.capabilities.coded_from,
        "unfinished_move": move_target.location if move_target else None,
        **{name: getattr(identity, name) for name in Identity.__slots__},
        **({"key": None, "dim": None, "metric": None} if engine.is_keyless else {}),
        "model_fingerprint": identity.model_fingerprint.partition(":")[0],
        "domains": len(domains),
        "documents": sum(domain.documents for domain in domains),
        "tokens": sum(domain.tokens for domain in domains),
        "records": view.datastore.count(),
        "revision": catalog.revision(),
        **fitted,
    }


def _describe_trained(saved: list[SavedSettings], view: View) -> list[str]:
    """Return one line of text for each component that was trained on stored documents.

    A component is one source of predictions, such as a trained substitute for the search. A line has the
    component's name, the domains of the documents, and the state: "ready", or that documents were removed
    since.

    Args:
        saved: all saved settings of the store.
        view: the documents of the store at the latest revision.
    """
    described = dict[tuple[str, str], str]()
    for settings in saved:
        trained = [(name, record.get(name) or {}) for name, record in settings.trained.items()]
        for name, component in (*settings.trained_components().items(), *trained):
            if "weights" in component and "traces" in component:
                lineage = Lineage.from_dict(component["traces"])
                state = (
                    "outdated, because documents were removed"
                    if lineage.removed_share(view.snapshot)
                    else "ready"
                )
                where = ", ".join(lineage.domains) or "the whole store"
                described[name, component["weights"]] = f"{name} of {where}: {state}"
    return list(described.values())


def _describe_calibrations(saved: list[SavedSettings]) -> list[str]:
    """Return one line of text for each calibration (settings that were fitted to held-out text).

    A line has the domains, the kind of mixer (the rule that weights the store), the perplexities without and
    with the store, the number of tokens and the SHA-256 of the held-out text, the date, and the revision of
    the store.

    Args:
        saved: all saved settings of the store; settings without a calibration are left out.
    """
    return [
        f"for {', '.join(record.get('domains', ())) or 'the whole store'}: {record['mixer']}, perplexity "
        f"{record['base_ppl']:,.2f} -> {record['knn_ppl']:,.2f} on {record['tokens']:,} tokens (SHA-256 "
        f"{record['text_hash'][:12]}), {record['date'][:10]}, revision {record['revision']}"
        + (f"; in scoring only: {', '.join(scoring_only)}" if scoring_only else "")
        for record, scoring_only in (
            (settings.calibration, settings.query.get("scoring_only")) for settings in saved
        )
        if record
    ]
