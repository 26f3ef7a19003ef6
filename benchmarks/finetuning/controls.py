"""What else might do what a store does (Xu et al. 2023): the model's likeliest tokens, an overfitted model.

Each is mixed with the model by one λ, as p_kNN is in a classic kNN-LM; λ is fitted on dev.
"""

from collections.abc import Sequence

import torch
from knnstore_research.one_weight import fit_one_weight, mix_log_probs
from steps import Step
from texts import reader_of
from torch import Tensor
from training import fine_tune, predictions

from knnstore.documents import TextDocument
from knnstore.lm.reading import TextReader

CUTS = (1, 4, 16, 64, 256, 1024)
"""Tokens that p_LM is cut to, as sparse as p_kNN is: what they gain is taken from its tail."""
CUT, OVERFITTED, MIXED = "cut", "overfitted", "with an overfitted model"
AGAIN = "the model, read again"
"""To see that all are of the same tokens."""


def controls(
    model: str,
    store: Sequence[TextDocument],
    dev: Sequence[TextDocument],
    test: Sequence[TextDocument],
    rate: float,
    device: str | None,
    epochs: int,
) -> Step:
    """Log p of each test token by the model cut and by the model with an overfitted one.

    Args:
        model: folder of the base model.
        store: what is overfitted to.
        dev: for λ.
        test: judged.
        rate: of learning.
        device: to run on.
        epochs: until it is overfitted.
    """
    reader = reader_of(model, device)
    base, judged = log_probs(reader, dev), log_probs(reader, test)
    tries = [(fit_one_weight(base[0], column), at) for at, column in enumerate(base)][1:]
    lam, at = max(tries, key=lambda one: float(mixed(base[0], base[one[1]], one[0]).sum()))
    seconds = fine_tune(reader, store, epochs, rate)
    known, over = log_probs(reader, dev)[0], log_probs(reader, test)[0]
    weight = fit_one_weight(base[0], known)
    found = {
        AGAIN: judged[0].double(),
        CUT: mixed(judged[0], judged[at], lam),
        OVERFITTED: over.double(),
        MIXED: mixed(judged[0], over, weight),
    }
    values = {"cut to": CUTS[at - 1], "its λ": lam, "λ of the overfitted": weight, "seconds": seconds}
    return Step(values, {name: of.numpy() for name, of in found.items()})


def log_probs(reader: TextReader, documents: Sequence[TextDocument]) -> list[Tensor]:
    """Log p of each token by the model, then by it cut to its likeliest tokens: float32, shapes (n,)."""
    rows = []
    for logits, gold in predictions(reader, documents):
        at = logits.gather(1, gold[:, None])
        columns = [at - logits.logsumexp(1, keepdim=True)]
        for most in CUTS:
            kept = logits.topk(min(most, logits.shape[1]), 1).values
            inside = at - kept.logsumexp(1, keepdim=True)
            columns.append(inside.where(at >= kept[:, -1:], -torch.inf))
        rows.append(torch.cat(columns, 1).cpu())
    return list(torch.cat(rows).T)


def mixed(base: Tensor, other: Tensor, lam: float) -> Tensor:
    """Log p of a mixture of two by their log p: float64, shape (n,)."""
    return mix_log_probs(base, other, lam).double()
