"""Endpoints ``/v1/domains`` and ``/v1/documents``: list, add and remove documents while texts are decoded.

A domain is a named set of documents. `StoreWriter` makes the changes in its own thread. When a removal has
been answered, no later token of any text is retrieved from the removed documents.
"""

import json
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Query, Request

from knnstore.catalog import Right
from knnstore.checks import MAX_NAME
from knnstore.documents import FIELDS, PAIR_FIELDS, convert_rows_to_documents
from knnstore.errors import DocumentNotFoundError, UnusableDocumentError
from knnstore.server.access import Access, Endpoints, get_access
from knnstore.server.errors import ApiError, bad_request_error
from knnstore.server.protocol import NewDocuments
from knnstore.server.serving import Serving
from knnstore.store import Document

_MAX_LISTED = 1000
"""Largest number of documents that one answer lists."""

RequiredName = Annotated[str, Query(min_length=1, max_length=MAX_NAME)]
OptionalName = Annotated[str | None, Query(min_length=1, max_length=MAX_NAME)]


def declare_documents(routes: Endpoints, serving: Serving) -> None:
    """Declare the endpoints for domains (list, remove) and documents (list, add, remove).

    No endpoint creates a domain; it is created when its first document is added.

    Args:
        routes: the object with which endpoints are added to the application.
        serving: the server's state, with the store.
    """

    @routes.add("GET", "/v1/domains", Right.READ)
    def domains(request: Request) -> dict[str, Any]:
        """List the domains that the client may see, with their numbers of documents, tokens and records."""
        who = get_access(request)
        visible = [asdict(domain) for domain in serving.lm.store.domains() if who.may_see_domain(domain.name)]
        return {"object": "list", "data": [{"object": "domain", **domain} for domain in visible]}

    @routes.add("GET", "/v1/documents", Right.READ)
    def documents(
        request: Request,
        domain: OptionalName = None,
        id: OptionalName = None,
        tag: OptionalName = None,
        text: bool = False,
        limit: Annotated[int, Query(ge=1, le=_MAX_LISTED)] = 100,
        offset: Annotated[int, Query(ge=0, le=2**53)] = 0,
    ) -> dict[str, Any]:
        """List documents in the order in which they were added, or show one document.

        The parameters `domain`, `id` and `tag` choose the documents; `limit` and `offset` choose a page of
        the list; `text` adds the texts. The page ends early if it becomes larger than the largest answer;
        `has_more` is true then.
        """
        who = get_access(request)
        if domain is not None and not who.may_see_domain(domain):
            return {"object": "list", "data": [], "has_more": False}
        searched_domains = (
            None
            if who.domains is None and domain is None
            else [domain]
            if domain
            else sorted(who.domains or ())
        )
        matches = serving.lm.store.documents(
            domains=searched_domains, id=id, tag=tag, offset=offset, limit=limit + 1
        )
        page, bytes_left = list[dict[str, Any]](), serving.limits.answer_bytes
        for document in matches[:limit]:
            fields = _document_fields(document, _get_document_text(serving, document) if text else None)
            bytes_left -= len(json.dumps(fields, ensure_ascii=False).encode())
            if bytes_left < 0 and page:
                break
            page.append(fields)
        return {"object": "list", "data": page, "has_more": len(matches) > len(page)}

    @routes.add("POST", "/v1/documents", Right.WRITE)
    async def add(request: Request, body: NewDocuments) -> dict[str, Any]:
        """Add documents to a domain. A document of the same id is replaced, unless its text is the same.

        If a document has tokens that the model does not have, the answer is 400, and this document is left
        out. All other documents of the request are stored.
        """
        _check_domain_visible(get_access(request), body.domain)
        serving.lm  # noqa: B018
        quota = get_access(request).quota
        quota.check_and_spend(0)
        fields = PAIR_FIELDS if serving.reads_source else FIELDS
        new_documents = await serving.run_tokenizing(
            lambda: list(convert_rows_to_documents(body.documents, fields=fields))
        )
        counts = {"added": 0, "replaced": 0, "described": 0, "unchanged": 0, "tokens": 0}
        bad: list[UnusableDocumentError] = []
        for (
            document
        ) in new_documents:  # one at a time, so that changes of other requests can run between them
            change = await serving.writer.add_document(
                document, body.domain, body.tags, quota.spend_unchecked, bad.append
            )
            counts = {name: count + change[name] for name, count in counts.items()}
        await serving.writer.count_ngrams()  # so that the next request retrieves from all documents
        if bad:
            raise bad_request_error(
                f"{bad[0]}; {len(new_documents) - len(bad)} of {len(new_documents)} documents are stored",
                "documents",
            )
        return {"object": "documents.added", "domain": body.domain, **counts}

    @routes.add("DELETE", "/v1/documents", Right.WRITE)
    async def remove(request: Request, domain: RequiredName, id: RequiredName) -> dict[str, Any]:
        """Remove the document with this id from a domain.

        The answer is 404 if there is no such document.
        """
        _check_domain_visible(get_access(request), domain)
        serving.lm  # noqa: B018
        removed = await serving.writer.remove_and_wait(lambda store: store.remove_document(id, domain=domain))
        return {"object": "document.deleted", "deleted": True, "id": removed.id, "domain": removed.domain}

    @routes.add("DELETE", "/v1/domains", Right.WRITE)
    async def remove_domain(request: Request, domain: RequiredName) -> dict[str, Any]:
        """Remove a domain (a named set of documents) with all its documents.

        The answer is 404 if there is no such domain.
        """
        _check_domain_visible(get_access(request), domain)
        serving.lm  # noqa: B018
        removed = await serving.writer.remove_and_wait(lambda store: store.remove_domain(domain))
        return {
            "object": "domain.deleted",
            "deleted": True,
            "domain": removed.name,
            "documents": removed.documents,
        }


def _check_domain_visible(who: Access, domain: str) -> None:
    """Check that a client may see a domain. The domain need not exist.

    Args:
        who: the permissions of the client.
        domain: name of the domain.

    Raises:
        ApiError: 404 if the client may not see the domain. The message is the same as for a domain that does
            not exist.
    """
    if not who.may_see_domain(domain):
        raise ApiError(404, "there is no such document or domain", code="document_not_found")


def _get_document_text(serving: Serving, document: Document) -> str | None:
    """Return the text of a document, decoded from its stored tokens.

    Returns None if the document was removed meanwhile. A document without tokens has an empty text.
    """
    try:
        tokens = serving.lm.store.tokens(document.id, domain=document.domain)
    except DocumentNotFoundError:
        return None
    if serving.reads_source:
        tokens = tokens[:-1]  # without the EOS token
    return serving.detokenize(tokens.tolist()) if len(tokens) else ""


def _document_fields(document: Document, text: str | None) -> dict[str, Any]:
    """Return a document as a JSON object.

    Args:
        document: the document, with its metadata.
        text: the text of the document; None leaves the field out.
    """
    fields = {"object": "document", **asdict(document)}
    return fields if text is None else {**fields, "text": text}
