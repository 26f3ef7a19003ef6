"""Components that are mixed with the model: each is one file, and stands in the list of `mixture`."""

from knnstore.lm.components.component import Citations, Component, Fitting, Form, Found, Place
from knnstore.lm.components.distribution import DistributionComponent, DistributionFitting, Places
from knnstore.lm.components.gate import ScoredPart, collect_experts, fit_gate_over
from knnstore.lm.components.keys import Keys, most_records, probes_cells, reachable, search_records, sum_cells
from knnstore.lm.components.mixture import all_components, look_up, mixture_of
from knnstore.lm.components.ngrams import NGramFitting, NGrams, TargetContinuation, ngram_lambdas
from knnstore.lm.components.own_ngrams import OwnNGrams
from knnstore.lm.components.recent import RECENT_SIZES, DocumentKeys, Recent, RecentFitting, RecentText

__all__ = [
    "RECENT_SIZES",
    "Citations",
    "Component",
    "DistributionComponent",
    "DistributionFitting",
    "DocumentKeys",
    "Fitting",
    "Form",
    "Found",
    "Keys",
    "NGramFitting",
    "NGrams",
    "OwnNGrams",
    "Place",
    "Places",
    "Recent",
    "RecentFitting",
    "RecentText",
    "ScoredPart",
    "TargetContinuation",
    "all_components",
    "collect_experts",
    "fit_gate_over",
    "look_up",
    "mixture_of",
    "most_records",
    "ngram_lambdas",
    "probes_cells",
    "reachable",
    "search_records",
    "sum_cells",
]
