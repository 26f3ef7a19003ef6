"""What a store says of itself."""

from typing import Any

from knnstore.catalog import Catalog, Engine, Identity, shown
from knnstore.store.fitted import Lineage, SavedSettings, all_saved, settings_are_sound
from knnstore.store.home import Home
from knnstore.store.view import View


def info_of(home: Home, catalog: Catalog, view: View, move_target: Engine | None) -> dict[str, Any]:
    """What a store is made for and what is in it, as JSON values."""
    domains, saved = catalog.domains(), list(all_saved(catalog).values())
    files = {name: lineage for one in saved for name, lineage in one.files().items()}
    with settings_are_sound():
        fitted = {"substitutes": _substitutes(files, view), "calibrated": _calibrated(saved)}
    identity, engine = catalog.identity, view.snapshot.engine
    return {
        "home": str(home.path),
        "catalog": shown(home.catalog_url),
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


def _substitutes(files: dict[str, Lineage | None], view: View) -> list[str]:
    return [
        f"of {', '.join(lineage.domains) or 'the whole store'}: "
        + ("outdated, documents of it are gone" if lineage.gone(view.snapshot) else "ready")
        for lineage in files.values()
        if lineage is not None
    ]


def _calibrated(saved: list[SavedSettings]) -> list[str]:
    return [
        f"for {', '.join(found['domains']) or 'the whole store'}: {found['mixer']}, perplexity "
        f"{found['base_ppl']:,.2f} -> {found['knn_ppl']:,.2f} on {found['tokens']:,} tokens (SHA-256 "
        f"{found['text_hash'][:12]}), {found['date'][:10]}, revision {found['revision']}"
        + (f"; in scoring only: {', '.join(left)}" if left else "")
        for found, left in ((one.calibration, one.query.get("scoring_only")) for one in saved)
        if found
    ]
