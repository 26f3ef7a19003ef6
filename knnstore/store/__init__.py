"""The store: documents in a catalog (SQL database) and their keys in a vector engine; both always agree."""

from typing import TYPE_CHECKING

from knnstore.lazy_imports import attach_lazy_imports

if TYPE_CHECKING:
    from knnstore.catalog import (
        KEYLESS,
        PAIR_MARK,
        Difference,
        Document,
        Domain,
        Engine,
        Identity,
        Lease,
        NewDocument,
        StoredVersion,
        classify_change,
    )
    from knnstore.store.current import Mode
    from knnstore.store.erasing import Erased
    from knnstore.store.fitted import Lineage, SavedSettings, Weights, load_weights, save_weights
    from knnstore.store.home import Home, check_new
    from knnstore.store.ingest import Ingest, LeasedIngest
    from knnstore.store.ngrams import DEPTH as LONGEST_NGRAM
    from knnstore.store.ngrams import (
        KNOWN,
        Draft,
        KeptStep,
        Letters,
        Matches,
        NGramCounts,
        Occurrence,
        Suffixes,
        draft_continuation,
    )
    from knnstore.store.ngrams import Distribution as NGramDistribution
    from knnstore.store.provenance import Provenance
    from knnstore.store.reader_protocol import Reader
    from knnstore.store.relocation import Moved
    from knnstore.store.selection import EVERYTHING, Selection
    from knnstore.store.store import KNNStore
    from knnstore.store.uploads import UploadStore, UploadTarget
    from knnstore.store.verify import PLAN_FILES
else:
    __getattr__, __dir__ = attach_lazy_imports(__name__)

__all__ = [
    "EVERYTHING",
    "KEYLESS",
    "KNOWN",
    "LONGEST_NGRAM",
    "PAIR_MARK",
    "PLAN_FILES",
    "Difference",
    "Document",
    "Domain",
    "Draft",
    "Engine",
    "Erased",
    "Home",
    "Identity",
    "Ingest",
    "KNNStore",
    "KeptStep",
    "Lease",
    "LeasedIngest",
    "Letters",
    "Lineage",
    "Matches",
    "Mode",
    "Moved",
    "NGramCounts",
    "NGramDistribution",
    "NewDocument",
    "Occurrence",
    "Provenance",
    "Reader",
    "SavedSettings",
    "Selection",
    "StoredVersion",
    "Suffixes",
    "UploadStore",
    "UploadTarget",
    "Weights",
    "check_new",
    "classify_change",
    "draft_continuation",
    "load_weights",
    "save_weights",
]
