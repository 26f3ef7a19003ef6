"""Who may do what and how much of it: keys, rights, what a key sees, and its limits."""

from knnstore.server.access.gate import (
    Access,
    Endpoints,
    Gate,
    access,
    check_declared,
    methods_of,
    open_paths,
    whole_paths,
)
from knnstore.server.access.quotas import Quota

__all__ = [
    "Access",
    "Endpoints",
    "Gate",
    "Quota",
    "access",
    "check_declared",
    "methods_of",
    "open_paths",
    "whole_paths",
]
