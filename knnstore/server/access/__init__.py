"""Access control of the server: authentication by API keys, rights, visible domains, and rate limits."""

from knnstore.server.access.authentication import (
    Access,
    Endpoints,
    Gate,
    access,
    check_rights_declared,
    list_fixed_paths,
    list_methods,
    list_open_paths,
)
from knnstore.server.access.quotas import Quota

__all__ = [
    "Access",
    "Endpoints",
    "Gate",
    "Quota",
    "access",
    "check_rights_declared",
    "list_fixed_paths",
    "list_methods",
    "list_open_paths",
]
