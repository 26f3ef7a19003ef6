"""Requests of Qdrant's API, as its client models them, in the terms of its in-process engine."""

from typing import Any

import qdrant_edge as edge
from qdrant_client.http import models
from qdrant_faults import ApiError


def edge_filter(where: models.Filter | None) -> edge.Filter | None:
    """Translate a filter."""
    if where is None:
        return None
    clauses = {name: _conditions(getattr(where, name)) for name in ("must", "should", "must_not")}
    if where.min_should:
        raise _unknown("min_should")
    return edge.Filter(**clauses)


def _conditions(conditions: Any) -> list[Any] | None:
    listed = conditions if isinstance(conditions, list) else [conditions] if conditions else []
    return [_condition(condition) for condition in listed] or None  # an empty clause is none


def _condition(condition: Any) -> Any:
    match condition:
        case models.Filter():
            return edge_filter(condition)
        case models.HasIdCondition():
            return edge.HasIdCondition(set(condition.has_id))
        case models.FieldCondition(key=key, match=models.MatchValue(value=value)):
            return edge.FieldCondition(key, match=edge.MatchValue(value))
        case models.FieldCondition(key=key, match=models.MatchAny(any=values)):
            return edge.FieldCondition(key, match=edge.MatchAny(values))
        case models.FieldCondition(key=key, match=models.MatchExcept(except_=values)):
            return edge.FieldCondition(key, match=edge.MatchExcept(values))
        case models.FieldCondition(key=key, range=models.Range() as bounds):
            return edge.FieldCondition(key, range=edge.RangeFloat(**bounds.model_dump()))
    raise _unknown(f"the condition {condition!r}")


def edge_index(schema: models.PayloadFieldSchema) -> Any:
    """Translate what kind of index a payload field gets."""
    if isinstance(schema, str):
        return getattr(edge.PayloadSchemaType, schema.capitalize())
    given = schema.model_dump(exclude={"type", "memory"}, exclude_none=True)
    return getattr(edge, type(schema).__name__)(**given)


def edge_query(request: models.QueryRequest) -> edge.QueryRequest:
    """Translate a query for the nearest neighbors of a vector."""
    query = request.query.nearest if isinstance(request.query, models.NearestQuery) else request.query
    if not isinstance(query, list) or request.prefetch or request.using:
        raise _unknown("a query other than for a vector's nearest neighbors")
    params = request.params or models.SearchParams()
    return edge.QueryRequest(
        limit=10 if request.limit is None else request.limit,
        offset=request.offset or 0,
        query=edge.Query.Nearest(query),
        filter=edge_filter(request.filter),
        score_threshold=request.score_threshold,
        params=edge.SearchParams(hnsw_ef=params.hnsw_ef, exact=bool(params.exact)),
        with_payload=edge_selector(request.with_payload),
        with_vector=bool(request.with_vector),
    )


def edge_scroll(request: models.ScrollRequest) -> edge.ScrollRequest:
    """Translate a request for a page of points; they come by ascending id."""
    if request.order_by:
        raise _unknown("order_by")
    return edge.ScrollRequest(
        offset=request.offset,
        limit=10 if request.limit is None else request.limit,
        filter=edge_filter(request.filter),
        with_payload=True if request.with_payload is None else edge_selector(request.with_payload),
        with_vector=bool(request.with_vector),
    )


def edge_selector(wanted: models.WithPayloadInterface | None) -> Any:
    """Translate which payload fields are wanted."""
    match wanted:
        case models.PayloadSelectorInclude():
            return edge.PayloadSelector.Include(wanted.include)
        case models.PayloadSelectorExclude():
            return edge.PayloadSelector.Exclude(wanted.exclude)
    return wanted or False


def _unknown(what: str) -> ApiError:
    return ApiError(400, f"Wrong input: this test server does not know {what}")
