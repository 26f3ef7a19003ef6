"""Access control of the server: authentication by API keys, rights, visible domains, and rate limits."""

from knnstore.server.access.authentication import (
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
