"""What a store says of itself."""

from typing import Any

from knnstore.catalog import Catalog, Engine, Identity, shown
from knnstore.store.fitted import all_saved
from knnstore.store.home import Home
from knnstore.store.view import View


def info_of(home: Home, catalog: Catalog, view: View, move_target: Engine | None) -> dict[str, Any]:
    """What a store is made for and what is in it, as JSON values."""
    domains, saved = catalog.domains(), all_saved(catalog).values()
    files = {name: lineage for one in saved for name, lineage in one.files().items()}
    identity, engine = catalog.identity, view.snapshot.engine
    return {
        "home": str(home.path),
        "catalog": shown(home.catalog_url),
        "store": engine.adapter,
        "location": engine.location,
        "params": dict(engine.params),
        "unfinished_move": move_target.location if move_target else None,
        **{name: getattr(identity, name) for name in Identity.__slots__},
        "model_fingerprint": identity.model_fingerprint.partition(":")[0],
        "domains": len(domains),
        "documents": sum(domain.documents for domain in domains),
        "tokens": sum(domain.tokens for domain in domains),
        "records": view.datastore.count(),
        "revision": catalog.revision(),
        "substitutes": [
            f"of {', '.join(lineage.domains) or 'the whole store'}: "
            + ("outdated, documents of it are gone" if lineage.gone(view.snapshot) else "ready")
            for lineage in files.values()
            if lineage is not None
        ],
        "calibrated": [
            f"for {', '.join(found['domains']) or 'the whole store'}: {found['mixer']}, perplexity "
            f"{found['base_ppl']:,.2f} -> {found['knn_ppl']:,.2f} on {found['tokens']:,} tokens (SHA-256 "
            f"{found['text_hash'][:12]}), {found['date'][:10]}, revision {found['revision']}"
            for found in (one.calibration for one in saved)
            if found
        ],
    }
