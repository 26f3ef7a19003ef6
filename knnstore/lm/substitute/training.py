"""Training the substitute of a store on the keys and tokens that the store holds of some domains."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from datetime import UTC, datetime

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from knnstore.errors import ConfigError, ReadOnlyError
from knnstore.lm.mixing import fit_weight, mix_log_probs
from knnstore.lm.reading import Encoder, TextReader
from knnstore.lm.settings import KNNModel, Substitute, TrainedSubstitute
from knnstore.lm.substitute.head import SubstituteHead, token_scores
from knnstore.lm.substitute.records import RecordBlocks, Records, choose_held_out
from knnstore.progress import Progress
from knnstore.store import SavedSettings, Selection

EPOCHS = 4
LEARNING_RATE = 5e-3
_BATCH = 256
_SPREAD = 0.02  # by how much the rows of one token differ at first


def train_substitute(
    lm: KNNModel,
    *,
    domains: Iterable[str] | None = None,
    rows: int = 1,
    epochs: int = EPOCHS,
    learning_rate: float = LEARNING_RATE,
    seed: int = 0,
    progress: Progress | None = None,
) -> TrainedSubstitute:
    """Train a substitute of the store, which needs no retrieval, and save it for these domains.

    `calibrate` and `evaluate` know it from then on. Full softmax over the tokens that the documents hold,
    Adam with a falling learning rate, on the model's device; the keys are read from the store, so the model
    runs only over a few documents that are held out. On these training stops early, and λ is fitted.

    Args:
        lm: the model, its store opened for writing, so that no document goes meanwhile.
        domains: what to train on; default the whole store.
        rows: of each token, >= 1.
        epochs: at most.
        learning_rate: at the beginning; it falls to zero in a line.
        seed: of the order of records, of the documents held out and of what is random at the beginning.
        progress: is told of each batch.

    Raises:
        ReadOnlyError: the store was opened for reading.
        InputError: there are fewer than two documents.
        DomainNotFoundError: there is no such domain.
    """
    store, reader = lm.store, lm.reader
    if store.mode != "a":
        raise ReadOnlyError('a substitute is saved in the store: open it for writing, mode "a"')
    if store.is_keyless:
        raise ConfigError("a substitute is trained on keys, and this store keeps none")
    if rows < 1 or epochs < 1 or not 0 < learning_rate < math.inf:
        raise ConfigError("rows and epochs must be at least 1 and the learning rate above 0")
    started, shown = time.perf_counter(), progress or Progress()
    names = tuple(sorted(set(domains or ())))
    generator = torch.Generator().manual_seed(seed)
    selection = Selection(domains=names or None)
    held_out = choose_held_out(store, selection, generator)
    lineage, device = store.lineage(names), reader.encoder.model.device
    judge = _Judge(reader, [store.text(number) for number in held_out])
    shown.start("training", unit="rec")
    blocks = RecordBlocks(store, selection, held_out)
    counts = torch.zeros(store.identity.vocab_size, dtype=torch.int64)
    for block in blocks:
        counts += torch.bincount(block.tokens, minlength=len(counts))
    seen, records = counts.nonzero()[:, 0], int(counts.sum())
    shown.expect(records * epochs)
    beginning = _first_rows(reader.encoder, store.identity.dim, seen, rows, generator)
    first = SubstituteHead(beginning.to(device), seen.to(device), len(counts))
    best, best_epoch = fit_rows(
        first, blocks, judge.loss,
        records=records, epochs=epochs, learning_rate=learning_rate, generator=generator, progress=shown,
    )  # fmt: skip
    shown.finish()
    lam, ppl = judge.fit_lambda(best)
    trained = TrainedSubstitute(
        substitute=Substitute(best.save(store), lam, lineage),
        rows=rows,
        tokens=len(seen),
        records=records,
        epochs=best_epoch,
        held_out_tokens=len(judge.gold),
        held_out_base_ppl=float(judge.lm.double().mean().neg().exp()),
        held_out_ppl=ppl,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=time.perf_counter() - started,
    )
    saved = store.settings(names) or SavedSettings()
    query = dict(saved.query)
    if query.get("substitute"):  # in use already: the new one takes its place
        query["substitute"] = asdict(replace(trained.substitute, lam=query["substitute"]["lam"]))
    store.save_settings(replace(saved, query=query, trained_substitute=asdict(trained)), names)
    return trained


def fit_rows(
    head: SubstituteHead,
    blocks: Iterable[Records],
    judge: Callable[[SubstituteHead], float],
    *,
    records: int,
    epochs: int,
    learning_rate: float,
    generator: torch.Generator,
    progress: Progress,
) -> tuple[SubstituteHead, int]:
    """Train rows, beginning with those of `head`, until `judge` finds no improvement; see `train_substitute`.

    The blocks, of so many records together, are shuffled one by one and read once an epoch; `judge` gives
    the loss of rows on other records.

    Returns:
        The best rows, and after how many epochs; 0 when training made nothing better.
    """
    rows = head.rows.clone().requires_grad_()
    optimizer = torch.optim.Adam([rows], lr=learning_rate, betas=(0.9, 0.99))
    steps = epochs * math.ceil(records / _BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    best, best_epoch, best_loss = head, 0, judge(head)
    for epoch in range(1, epochs + 1):
        for block in blocks:
            order = torch.randperm(len(block.tokens), generator=generator)
            for batch in torch.split(order, _BATCH):
                scores = token_scores(block.keys[batch].to(rows.device).float(), rows)
                loss = cross_entropy(scores, head.columns(block.tokens[batch]))
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
                progress.advance(len(batch))
        trained = SubstituteHead(rows.detach().clone(), head.tokens, head.vocab_size)
        loss_there = judge(trained)
        if loss_there >= best_loss:
            break
        best, best_epoch, best_loss = trained, epoch, loss_there
    return best, best_epoch


class _Judge:
    """Documents held out of training, after one pass of the model."""

    def __init__(self, reader: TextReader, documents: list[NDArray[np.uint32]]) -> None:
        keys, lm, gold = [], [], []
        for batch in reader.batches(documents):
            encoded = reader.encoder.encode(batch.input_ids, batch.at)
            keys.append(encoded.keys.cpu())
            lm.append(reader.encoder.gold_log_probs(encoded.states, batch.gold).cpu())
            gold.append(torch.from_numpy(batch.gold))
        self.keys, self.lm, self.gold = torch.cat(keys), torch.cat(lm), torch.cat(gold)

    def loss(self, head: SubstituteHead) -> float:
        """Mean -log p_sub of the tokens that were trained on at all."""
        found = head.gold_log_probs(self.keys, self.gold)
        return float(-found[found.isfinite()].double().mean())

    def fit_lambda(self, head: SubstituteHead) -> tuple[float, float]:
        """The likeliest λ, and the perplexity with it."""
        found = head.gold_log_probs(self.keys, self.gold)
        lam = fit_weight(self.lm, found)
        mixed = mix_log_probs(self.lm, found, lam)
        return lam, math.exp(-float(mixed.double().mean()))


def _first_rows(encoder: Encoder, dim: int, tokens: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """The model's output rows where they fit the keys, else small random ones: shape (rows, tokens, dim)."""
    spread = _SPREAD * torch.randn((rows, len(tokens), dim), generator=generator)
    output = getattr(encoder.head, "weight", None)
    if output is None or output.shape[1] != dim or encoder.joining.discounts or encoder.projection:
        return spread
    first: Tensor = output.detach().cpu().float()[tokens].expand_as(spread)
    return first.clone() if rows == 1 else first + spread
