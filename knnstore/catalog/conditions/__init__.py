"""Conditions on the metadata of documents: a small language, and what it is in SQL."""

from knnstore.catalog.conditions.grammar import check_condition, fields_of, parsed
from knnstore.catalog.conditions.statements import meets, regexp_replace

__all__ = ["check_condition", "fields_of", "meets", "parsed", "regexp_replace"]
