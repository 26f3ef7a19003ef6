"""Components that are mixed with the model, one file each; `knnstore.lm.mixture` lists them."""

from knnstore.lm.components.component import (
    KEYS,
    Citations,
    Component,
    Fitting,
    Form,
    Found,
    Place,
    Question,
    TextComponent,
    find_by_name,
)
from knnstore.lm.components.distribution import (
    DistributionComponent,
    DistributionFitting,
    OneWeightComponent,
    Places,
)
from knnstore.lm.components.gate import ScoredPart, collect_experts, fit_gate_over, weigh_by_gate
from knnstore.lm.components.keys import (
    Keys,
    KeySettings,
    bound_record_count,
    limit_k_to_store,
    probes_cells,
    search_records,
    sum_cells,
)
from knnstore.lm.components.ngrams import (
    NGramFitting,
    NGrams,
    NGramSettings,
    TargetContinuation,
    select_ngram_lambdas,
)
from knnstore.lm.components.own_ngrams import OwnNGrams
from knnstore.lm.components.recent import (
    RECENT_SIZES,
    CacheSettings,
    DocumentKeys,
    Recent,
    RecentFitting,
    RecentText,
)
from knnstore.lm.components.registry import check_others, load_plugin_components, register_component

__all__ = [
    "KEYS",
    "RECENT_SIZES",
    "CacheSettings",
    "Citations",
    "Component",
    "DistributionComponent",
    "DistributionFitting",
    "DocumentKeys",
    "Fitting",
    "Form",
    "Found",
    "KeySettings",
    "Keys",
    "NGramFitting",
    "NGramSettings",
    "NGrams",
    "OneWeightComponent",
    "OwnNGrams",
    "Place",
    "Places",
    "Question",
    "Recent",
    "RecentFitting",
    "RecentText",
    "ScoredPart",
    "TargetContinuation",
    "TextComponent",
    "bound_record_count",
    "check_others",
    "collect_experts",
    "find_by_name",
    "fit_gate_over",
    "limit_k_to_store",
    "load_plugin_components",
    "probes_cells",
    "register_component",
    "search_records",
    "select_ngram_lambdas",
    "sum_cells",
    "weigh_by_gate",
]
