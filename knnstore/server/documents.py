"""Endpoints ``/v1/domains`` and ``/v1/documents``: list, add and remove documents while texts are decoded.

`StoreWriter` makes the changes in a thread of its own. After the answer to a removal, no later token of any
text is retrieved from the removed documents.
"""

import json
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Query, Request

from knnstore.catalog import Right
from knnstore.checks import MAX_NAME
from knnstore.documents import documents_of
from knnstore.errors import DocumentNotFoundError, UnusableDocumentError
from knnstore.server.access import Access, Endpoints, access
from knnstore.server.errors import ApiError, refused
from knnstore.server.protocol import NewDocuments
from knnstore.server.serving import Serving
from knnstore.store import Document

_MOST_LISTED = 1000

Given = Annotated[str, Query(min_length=1, max_length=MAX_NAME)]
Wanted = Annotated[str | None, Query(min_length=1, max_length=MAX_NAME)]


def declare_documents(routes: Endpoints, serving: Serving) -> None:
    """Add the endpoints that list and change the store's documents."""

    @routes.add("GET", "/v1/domains", Right.READ)
    def domains(request: Request) -> dict[str, Any]:
        """List the domains with their documents, tokens and records."""
        who = access(request)
        found = [asdict(one) for one in serving.lm.store.domains() if who.sees(one.name)]
        return {"object": "list", "data": [{"object": "domain", **one} for one in found]}

    @routes.add("GET", "/v1/documents", Right.READ)
    def documents(
        request: Request,
        domain: Wanted = None,
        id: Wanted = None,
        tag: Wanted = None,
        text: bool = False,
        limit: Annotated[int, Query(ge=1, le=_MOST_LISTED)] = 100,
        offset: Annotated[int, Query(ge=0, le=2**53)] = 0,
    ) -> dict[str, Any]:
        """List documents in the order in which they were added, or show one, with its text if wanted.

        The page ends early if it becomes larger than the largest answer; `has_more` is true then.
        """
        who = access(request)
        if domain is not None and not who.sees(domain):
            return {"object": "list", "data": [], "has_more": False}
        seen = (
            None
            if who.domains is None and domain is None
            else [domain]
            if domain
            else sorted(who.domains or ())
        )
        found = serving.lm.store.documents(domains=seen, id=id, tag=tag, offset=offset, limit=limit + 1)
        page, left = list[dict[str, Any]](), serving.limits.answer_bytes
        for one in found[:limit]:
            shown = _shown(one, _text_of(serving, one) if text else None)
            left -= len(json.dumps(shown, ensure_ascii=False).encode())
            if left < 0 and page:
                break
            page.append(shown)
        return {"object": "list", "data": page, "has_more": len(found) > len(page)}

    @routes.add("POST", "/v1/documents", Right.WRITE)
    async def add(request: Request, body: NewDocuments) -> dict[str, Any]:
        """Add documents to a domain. A document of the same id is replaced, unless its text is the same.

        If a document has tokens that the model does not have, the answer is 400; the others are stored.
        """
        _check_seen(access(request), body.domain)
        serving.lm  # noqa: B018
        quota = access(request).quota
        quota.check_and_spend(0)
        given = await serving.read(lambda: list(documents_of(body.documents)))
        counts = {"added": 0, "replaced": 0, "described": 0, "unchanged": 0, "tokens": 0}
        bad: list[UnusableDocumentError] = []
        for document in given:  # one at a time, so that changes of other requests can run between them
            done = await serving.writer.add(
                document, body.domain, body.tags, quota.spend_unchecked, bad.append
            )
            counts = {name: count + done[name] for name, count in counts.items()}
        await serving.writer.count_ngrams()  # so that the next request retrieves from all documents
        if bad:
            raise refused(
                f"{bad[0]}; {len(given) - len(bad)} of {len(given)} documents are stored", "documents"
            )
        return {"object": "documents.added", "domain": body.domain, **counts}

    @routes.add("DELETE", "/v1/documents", Right.WRITE)
    async def remove(request: Request, domain: Given, id: Given) -> dict[str, Any]:
        """Remove a document."""
        _check_seen(access(request), domain)
        serving.lm  # noqa: B018
        gone = await serving.writer.remove(lambda store: store.remove_document(id, domain=domain))
        return {"object": "document.deleted", "deleted": True, "id": gone.id, "domain": gone.domain}

    @routes.add("DELETE", "/v1/domains", Right.WRITE)
    async def remove_domain(request: Request, domain: Given) -> dict[str, Any]:
        """Remove a domain with all its documents."""
        _check_seen(access(request), domain)
        serving.lm  # noqa: B018
        gone = await serving.writer.remove(lambda store: store.remove_domain(domain))
        return {
            "object": "domain.deleted",
            "deleted": True,
            "domain": gone.name,
            "documents": gone.documents,
        }


def _check_seen(who: Access, domain: str) -> None:
    """Check that the client sees a domain.

    Raises:
        ApiError: 404 if it does not, with the same message as for a domain that does not exist.
    """
    if not who.sees(domain):
        raise ApiError(404, "there is no such document or domain", code="document_not_found")


def _text_of(serving: Serving, document: Document) -> str | None:
    """Return the text of a document; None if the document was removed meanwhile."""
    try:
        tokens = serving.lm.store.tokens(document.id, domain=document.domain)
    except DocumentNotFoundError:
        return None
    return serving.text(tokens.tolist()) if len(tokens) else ""


def _shown(document: Document, text: str | None) -> dict[str, Any]:
    shown = {"object": "document", **asdict(document)}
    return shown if text is None else {**shown, "text": text}
