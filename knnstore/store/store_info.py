"""Identity and contents of a store, for `knnstore info`."""

from typing import Any

from knnstore.catalog import Catalog, Engine, Identity, mask_password
from knnstore.store.fitted import Lineage, SavedSettings, all_saved, settings_are_sound
from knnstore.store.home import Home
from knnstore.store.view import View


def info_of(home: Home, catalog: Catalog, view: View, move_target: Engine | None) -> dict[str, Any]:
    """Return a store's identity and contents as JSON values."""
    domains, saved = catalog.domains(), list(all_saved(catalog).values())
    with settings_are_sound():
        fitted = {"trained": _describe_trained(saved, view), "calibrated": _calibrated(saved)}
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
    """Describe each component that was trained on stored documents: its name, the domains, and its state."""
    described = dict[tuple[str, str], str]()
    for one in saved:
        trained = [(name, record.get(name) or {}) for name, record in one.trained.items()]
        for name, part in (*one.trained_components().items(), *trained):
            if "weights" in part and "traces" in part:
                lineage = Lineage.from_dict(part["traces"])
                state = "outdated, documents of it are gone" if lineage.gone(view.snapshot) else "ready"
                where = ", ".join(lineage.domains) or "the whole store"
                described[name, part["weights"]] = f"{name} of {where}: {state}"
    return list(described.values())


def _calibrated(saved: list[SavedSettings]) -> list[str]:
    return [
        f"for {', '.join(found['domains']) or 'the whole store'}: {found['mixer']}, perplexity "
        f"{found['base_ppl']:,.2f} -> {found['knn_ppl']:,.2f} on {found['tokens']:,} tokens (SHA-256 "
        f"{found['text_hash'][:12]}), {found['date'][:10]}, revision {found['revision']}"
        + (f"; in scoring only: {', '.join(left)}" if left else "")
        for found, left in ((one.calibration, one.query.get("scoring_only")) for one in saved)
        if found
    ]
