"""Making a plan: dividing new documents into shards, and reserving their positions in the store.

A position is the number of a token in the store.
"""

from collections.abc import Iterable
from dataclasses import replace
from uuid import uuid4

from transformers import PreTrainedTokenizerBase

from knnstore.checks import check_distinct_names, check_name
from knnstore.distributed.plan_folder import Plan, PlanFolder, PlannedDocument, ShardWriter
from knnstore.documents import OnBad
from knnstore.errors import ConfigError, PlanError
from knnstore.failpoints import failpoint
from knnstore.lm import (
    BATCH_TOKENS,
    DocumentTokenizer,
    NewDocuments,
    check_tokenizer,
    load_decoder_prefix,
    prefix_of,
)
from knnstore.progress import Progress
from knnstore.store import KNNStore

SHARD_TOKENS = 100_000
"""Default number of tokens from which a shard is complete; its last document may exceed this number."""


def make_plan(
    store: KNNStore,
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[object],
    folder: PlanFolder,
    *,
    domain: str,
    tags: Iterable[str] = (),
    model: str | None = None,
    shard_tokens: int = SHARD_TOKENS,
    batch_tokens: int = BATCH_TOKENS,
    on_bad: OnBad | None = None,
    progress: Progress | None = None,
) -> Plan | None:
    """Divide the new and the changed documents into shards, and reserve their positions in the store.

    Documents that are stored with the same text are not planned; their metadata and tags are updated at once.
    The other documents are tokenized and written into the folder. If the folder already has an uncommitted
    plan of the same documents, that plan is returned unchanged. A committed plan in the folder is replaced.

    Args:
        store: the store, opened for writing. It keeps keys.
        tokenizer: the tokenizer of the store's model.
        documents: rows ``{"id", "text", ...metadata}``, texts or `TextDocument` objects, with distinct ids.
            A store of an encoder-decoder model needs pairs: rows with the field ``source`` too.
        folder: folder of the plan, which need not exist.
        domain: the domain's name; it is created when the plan is committed.
        tags: tags that are added to every document; tags that a stored document has are kept.
        model: folder or hub id of the store's model; only the configuration of an encoder-decoder model is
            read. Default is the name with which the store was made.
        shard_tokens: number of tokens from which a shard is complete. A document is never divided.
        batch_tokens: number of tokens in one forward pass, padding included.
        on_bad: called with the error of each document that cannot be used; the document is skipped. None
            raises the first error, and nothing is planned.
        progress: progress display, which receives the number of tokens of each document.

    Returns:
        The plan; None if all documents are stored already. Then no plan is written.

    Raises:
        InputError: a name is not valid, or a document cannot be used and `on_bad` is None.
        PlanError: the folder has a plan of another store, or an uncommitted plan of other documents or for
            another domain.
        ConfigError: the store keeps no keys.
        FingerprintMismatchError: the store was made with another tokenizer, or for other languages.
        ReadOnlyError: the store was opened for reading.
    """
    shown = progress or Progress()
    if store.is_keyless:
        raise ConfigError("a store without keys needs no plan: adding documents does not run the model")
    identity = store.identity
    decoder_prefix = load_decoder_prefix(model or identity.model) if identity.is_paired else None
    check_tokenizer(tokenizer, identity, decoder_prefix)
    check_name(domain, "the domain's name")
    names = check_distinct_names(tags, "tag")
    earlier = _find_earlier_plan(store, folder)
    if earlier is not None and earlier.domain != domain:
        raise PlanError(
            f"{folder.path} has a plan for the domain {earlier.domain!r}, not {domain!r}: commit it with "
            f"`knnstore commit`, drop it with `knnstore plan {folder.path} --drop`, or choose another folder"
        )
    prefix = prefix_of(tokenizer) if decoder_prefix is None else decoder_prefix
    shown.start(f"planning for {domain}")
    with ShardWriter(folder, store.id, 0 if prefix else 1) as writer:
        # 1) Write the documents, shard by shard. Nothing is reserved yet.
        max_source = identity.max_length if identity.is_paired else None
        reading = DocumentTokenizer(tokenizer, identity.vocab_size, max_source)
        incoming = NewDocuments(store, reading, documents, domain=domain, tags=names, on_bad=on_bad)
        waiting: list[PlannedDocument] = []
        waiting_tokens = 0
        for new in incoming:
            document = replace(new.document, tags=names)
            waiting.append(PlannedDocument(document, new.version.start if new.version else None))
            waiting_tokens += len(new.document.tokens)
            shown.advance(len(new.document.tokens))
            if waiting_tokens >= shard_tokens:
                writer.write_shard(waiting)
                waiting, waiting_tokens = [], 0
        if waiting:
            writer.write_shard(waiting)
        if incoming.refused is not None:
            raise incoming.refused
        shown.finish()
        # 2) Return the earlier plan if it has the same documents.
        if earlier is not None:
            if earlier.content != writer.content:
                raise PlanError(
                    f"{folder.path} has a plan of other documents: commit it with `knnstore commit`, drop it "
                    f"with `knnstore plan {folder.path} --drop`, or choose another folder"
                )
            return earlier
        if not writer.shards:
            return None
        # 3) Reserve the positions, and publish the plan.
        folder.remove_plan()
        tokens = sum(shard.tokens for shard in writer.shards)
        lease = store.lease(uuid4().hex, tokens, folder.path)
        failpoint("plan.leased")
        plan = Plan(
            id=lease.id,
            store=store.id,
            domain=domain,
            identity=identity,
            dtype="float32" if store.datastore.capabilities.exact_keys else "float16",
            prefix=prefix,
            batch_tokens=batch_tokens,
            added=incoming.counts["added"],
            replaced=incoming.counts["replaced"],
            content=writer.content,
            start=lease.start,
            target=store.prepare_uploads(domain),
            shards=tuple(writer.shards),
        )
        writer.finish(plan, store.home.weights / identity.projection if identity.projection else None)
    incoming.warn_of_other_ids()
    return plan


def _find_earlier_plan(store: KNNStore, folder: PlanFolder) -> Plan | None:
    """Return the uncommitted plan of a folder.

    Returns None if the folder has no plan, or if its plan was committed or dropped.

    Raises:
        PlanError: the plan belongs to another store, or is damaged.
    """
    if not folder.exists:
        return None
    plan = folder.plan
    if plan.store != store.id:
        raise PlanError(f"{folder.path} has a plan of another store: choose another folder")
    lease = next((lease for lease in store.leases() if lease.id == plan.id), None)
    return plan if lease is not None and not lease.is_committed else None
