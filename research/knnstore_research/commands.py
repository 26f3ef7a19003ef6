"""The commands of ``knnstore research``."""

from knnstore.cli.command_groups import CommandGroup
from knnstore_research.key_probing_command import probe_keys

RESEARCH = CommandGroup("Measure what the literature proposes.", {"probe-keys": probe_keys})
"""The entry point of the group ``knnstore.commands``."""
