"""The commands of ``knnstore research``."""

from knnstore.cli.command_groups import CommandGroup
from knnstore_research.key_probing_command import probe_keys
from knnstore_research.size_curve_command import size_curve
from knnstore_research.substitute_command import eval_substitute, substitute

RESEARCH = CommandGroup(
    "Measure what the literature proposes.",
    {
        "eval-substitute": eval_substitute,
        "probe-keys": probe_keys,
        "size-curve": size_curve,
        "substitute": substitute,
    },
)
"""The entry point of the group ``knnstore.commands``."""
