"""What speaks against it: text that is written freely."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from finding import Finding, Plot, Table, count, settle
from judging import RESAMPLES
from lab import Lab
from torch import Tensor

from knnstore.lm import Interval, KNNSettings
from knnstore.lm.components import Form
from knnstore.lm.mixture import build_mixture, look_up
from knnstore.lm.reading import WindowBatch
from knnstore.lm.scoring.token_scores import predict_windows

TITLE = "In free generation retrieval becomes less certain the longer the text"
CLAIM = """Wang et al. 2023: texts written with retrieval are not better by any measure of theirs; the longer
the text that is generated, the faster the entropy of p_kNN grows beside that of the model, since the queries
are of text that a model wrote."""
RULE = """in a domain it holds if the slope of the entropy of p_kNN along texts that the mixture
generated, less the slope along the real continuations of the same prompts, is above 0 with its whole
interval (bootstrap over prompts); the contrary if it is below. Whether it grew faster than the entropy of
p_LM along the same generated texts is counted apart. p_kNN is as the mixture weighs it, with the T that it
chooses for each token. Prompts are the first 32 tokens of documents of test; continuations are sampled from
the whole distribution, without top-p or top-k."""
MINUTES = 12.0
PROMPT = 32
BLOCKS = 8


def run(lab: Lab) -> Finding:
    """Continue prompts with and without the store, and compare with how they really go on."""
    rows, holds, beside_lm, lines = [], [], [], {}
    for domain in lab.domains:
        lab.say(f"{domain}: generating")
        length = lab.limits.generated
        prompts, real = split(lab, domain)
        settings = lab.calibrated(domain)
        texts = {
            "real": real,
            "the model alone": generate(lab, prompts, length, replace(settings, mixer=FixedNone)),
            "the mixture": generate(lab, prompts, length, settings),
        }
        seen = {name: look(lab, prompts, text, settings) for name, text in texts.items()}
        for name, of in seen.items():
            lines[f"{domain}, {name}"] = by_position(of.knn_entropy)
            rows.append(
                [domain, name, float(of.knn_entropy.mean()), resampled(slope(of.knn_entropy) * 100),
                 resampled(slope(of.lm_entropy) * 100), float((-of.log_probs.double().mean()).exp()),
                 distinct(texts[name], 1), distinct(texts[name], 3)]
            )  # fmt: skip
        rise = slope(seen["the mixture"].knn_entropy)
        holds.append(above_zero(rise - slope(seen["real"].knn_entropy)))
        beside_lm.append(above_zero(rise - slope(seen["the mixture"].lm_entropy)))
    head = ["domain", "text", "entropy of p_kNN, nats", "its slope in 100 tokens", "that of p_LM",
            "perplexity under the model alone", "distinct tokens", "distinct triples"]  # fmt: skip
    return Finding(
        settle(holds),
        "Along generated text the entropy of p_kNN grew faster, beyond chance, than along real text in "
        f"{count(holds)}, and than the entropy of p_LM in {count(beside_lm)}.",
        [Table(head, rows)],
        [Plot("drift", "Entropy of p_kNN along the text", "tokens after the prompt", "nats", lines)],
    )


FixedNone = KNNSettings(lam=0.0).mixer


def split(lab: Lab, domain: str) -> tuple[Tensor, Tensor]:
    """Beginnings of test documents, each behind the prefix, and how they go on."""
    prefix, length = lab.reader.prefix, PROMPT + lab.limits.generated
    texts = [ids.astype(np.int64) for ids in lab.reader.tokenize_documents(lab.texts[domain]["test"])]
    long = [torch.from_numpy(ids[:length]) for ids in texts if len(ids) >= length][: lab.limits.prompts]
    together = torch.stack(long)
    prompts = together[:, :PROMPT]
    before = torch.tensor([prefix] * len(long), dtype=torch.long)
    return torch.cat([before, prompts], 1), together[:, PROMPT:]


def generate(lab: Lab, prompts: Tensor, length: int, settings: KNNSettings) -> Tensor:
    """Sample continuations."""
    torch.manual_seed(0)
    prompts = prompts.to(lab.base.lm.device)
    written = lab.base.lm.generate(
        prompts, attention_mask=torch.ones_like(prompts), knn=settings, do_sample=True, top_k=0,
        max_new_tokens=length, min_new_tokens=length, pad_token_id=lab.reader.tokenizer.eos_token_id,
    )  # fmt: skip
    return written[:, prompts.shape[1] :].cpu()


class Seen(NamedTuple):
    """What is known of each token of some texts: all of shape (b, t), in nats."""

    knn_entropy: Tensor
    """Of p_kNN as the mixture weighs it."""
    lm_entropy: Tensor
    """Of p_LM."""
    log_probs: Tensor
    """log p_LM of the token."""


def look(lab: Lab, prompts: Tensor, text: Tensor, settings: KNNSettings) -> Seen:
    """Search for every token of texts that continue prompts, as settings say."""
    lm = lab.base.lm
    ids = torch.cat([prompts, text], 1)
    row, column = torch.arange(text.numel()) // text.shape[1], torch.arange(text.numel()) % text.shape[1]
    at = row * ids.shape[1] + prompts.shape[1] - 1 + column
    batch = WindowBatch(ids.numpy(), at.numpy(), row.numpy(), column.numpy(), text.flatten().numpy())
    read = predict_windows(lm.reader, batch)
    evidence = look_up(lm.store, settings, read.to_batch(lm.store.identity.vocab_size, None), Form.SOURCES)
    # Not at one temperature: a gate, and bins, choose T for each token.
    weights = build_mixture(settings, evidence).weights
    entropy = torch.empty(len(at))
    for one, tokens in enumerate(evidence.tokens.where(weights > 0, 0)):
        p = torch.zeros(lm.store.identity.vocab_size).scatter_add_(0, tokens, weights[one])
        entropy[one] = -torch.xlogy(p, p).sum()
    return Seen(*(of.reshape(text.shape) for of in (entropy, read.lm_entropy, read.lm_log_probs)))


def slope(values: Tensor) -> Tensor:
    """By how much each row rises with every column: least squares, shape (b,)."""
    x = torch.arange(values.shape[1], dtype=torch.float64)
    x -= x.mean()
    return (values.double() * x).sum(1) / (x * x).sum()


def resampled(values: Tensor) -> Interval:
    """Return a mean over prompts, with an interval of 95 %."""
    drawn = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values.numpy()[drawn].mean(1), [0.025, 0.975])
    return Interval(float(values.mean()), float(low), float(high))


def above_zero(values: Tensor) -> bool | None:
    """Whether a mean over prompts is above 0 with its whole interval; None when 0 is inside."""
    found = resampled(values)
    return True if found.low > 0 else False if found.high < 0 else None


def by_position(values: Tensor) -> list[tuple[float, float]]:
    """Means over blocks of columns."""
    blocks = values.mean(0).chunk(BLOCKS)
    middles = torch.arange(values.shape[1]).double().chunk(BLOCKS)
    return [(float(at.mean()), float(block.mean())) for at, block in zip(middles, blocks, strict=True)]


def distinct(text: Tensor, n: int) -> float:
    """Return the share of a text's n-grams that are distinct, mean over texts."""
    grams = text.unfold(1, n, 1)
    return float(np.mean([len(torch.unique(rows, dim=0)) / len(rows) for rows in grams]))
