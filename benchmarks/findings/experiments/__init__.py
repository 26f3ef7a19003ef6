"""The experiments, each a module: a title, what papers claim, a rule for the verdict, and `run`.

``MINUTES`` is about how long each takes on two cores with the default limits; only the proportions matter.
"""

from experiments import (
    adaptation,
    cells,
    codes,
    components,
    drift,
    exactness,
    harm,
    joined,
    key_locations,
    lambdas,
    larger_store,
    many_neighbors,
    mixers,
    neighbors,
    ngrams,
    pruning,
    rare,
    retomaton,
    sizes,
    skipping,
    substitute,
    temperature,
)

EXPERIMENTS = [
    components,
    adaptation,
    larger_store,
    sizes,
    neighbors,
    many_neighbors,
    lambdas,
    temperature,
    key_locations,
    exactness,
    mixers,
    skipping,
    retomaton,
    substitute,
    pruning,
    harm,
    rare,
    drift,
    cells,
    codes,
    joined,
    ngrams,
]
"""In the order of the report."""
