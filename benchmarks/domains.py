"""Perplexity of each domain of a data folder, with and without its store.

    python benchmarks/domains.py DATA [--model DIR] [--limit DOMAIN=STORE,DEV,TEST ...]

DATA holds a folder for each domain with ``store.jsonl``, ``dev.jsonl`` and ``test.jsonl``, split by
document. The store is filled from ``store``, one temperature and one λ are chosen on ``dev`` and
reported on ``test``, which nothing was chosen on. JSON on standard output.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import torch

import knnstore
from knnstore.documents import TextDocument, read_documents
from knnstore.lm import KNNLMForCausalLM, KNNSettings
from knnstore.lm.mixing import mix_gold, neighbor_weights
from knnstore.lm.scoring.held_out import score

TINY_LM = Path(__file__).parent.parent / "examples" / "tiny-lm"
TEMPERATURES = (1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 40.0, 60.0, 100.0)


class Scores:
    """p_LM of every gold token, and p_kNN at each temperature, from one search."""

    def __init__(
        self, lm: KNNLMForCausalLM, documents: list[TextDocument], k: int, temperatures: tuple[float, ...]
    ) -> None:
        log_probs, knn, found = [], [], []
        started = time.perf_counter()
        for part in score(lm.store, lm.reader, documents, KNNSettings(k=k)):
            weights = [neighbor_weights(part.distances, temperature) for temperature in temperatures]
            hits = part.tokens == part.gold[:, None]
            log_probs.append(part.lm_log_probs)
            found.append(weights[0].sum(1) > 0)
            knn.append(torch.stack([(of * hits).sum(1).clamp(max=1.0) for of in weights]))
        self.seconds = time.perf_counter() - started
        self.log_probs, self.found = torch.cat(log_probs), torch.cat(found)
        self.knn = dict(zip(temperatures, torch.cat(knn, dim=1), strict=True))

    def base_ppl(self) -> float:
        return math.exp(-self.log_probs.double().mean())

    def ppl(self, temperature: float, lam: float) -> float:
        mixed = mix_gold(self.log_probs, self.knn[temperature], lam * self.found)
        return math.exp(-mixed.double().mean())

    def best_lambda(self, temperature: float) -> float:
        """EM for the weight of a mixture of two: exact, for the likelihood has one maximum."""
        lm, knn, lam = self.log_probs.double().exp(), self.knn[temperature].double(), 0.5
        for _ in range(200):
            lam = float((lam * knn / (lam * knn + (1 - lam) * lm)).mean())
        return lam


def measure(domain: Path | None, model: str, limits: list[int | None], k: int, params: dict) -> dict:
    splits = [list(islice(documents, n)) for documents, n in zip(read(domain), limits, strict=True)]
    store, dev, test = splits
    with tempfile.TemporaryDirectory() as folder:
        lm = knnstore.create(Path(folder) / "home", model=model, store="faiss", params=params)
        added = lm.add(store, domain="domain")
        tuning = Scores(lm, dev, k, TEMPERATURES)
        fitted = {t: tuning.best_lambda(t) for t in TEMPERATURES}
        temperature = min(fitted, key=lambda t: tuning.ppl(t, fitted[t]))
        held_out = Scores(lm, test, k, (temperature,))
        lm.store.close()
    lam = fitted[temperature]
    return {
        "documents": [len(store), len(dev), len(test)],
        "stored_tokens": added.tokens,
        "stored_tokens_per_s": added.tokens_per_s,
        "test_tokens": len(held_out.log_probs),
        "k": k,
        "temperature": temperature,
        "lambda": lam,
        "dev_ppl_by_temperature": {t: tuning.ppl(t, fitted[t]) for t in TEMPERATURES},
        "base_ppl": held_out.base_ppl(),
        "knn_ppl": held_out.ppl(temperature, lam),
        "helped": float((held_out.knn[temperature] > held_out.log_probs.exp()).double().mean()),
        "test_tokens_per_s": len(held_out.log_probs) / held_out.seconds,
    }


def read(domain: Path | None):
    if domain is not None:
        return [read_documents([domain / f"{split}.jsonl"]) for split in ("store", "dev", "test")]
    rows = [TextDocument(name, text) for name, text in sorted(topics.items()) if text.strip()]
    return [iter(rows[2:]), iter(rows[:1]), iter(rows[1:2])]  # for --smoke


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?", help="folder of domains")
    parser.add_argument("--model", default=str(TINY_LM))
    parser.add_argument("--limit", nargs="*", default=[], metavar="DOMAIN=STORE,DEV,TEST",
                        help="use only the first documents of each split")  # fmt: skip
    parser.add_argument("-k", type=int, default=1024)
    parser.add_argument("--param", nargs="*", default=[], metavar="NAME=VALUE", help="of the FAISS adapter")
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to see that it runs")
    options = parser.parse_args()
    if options.data is None and not options.smoke:
        parser.error("name a data folder, or use --smoke")
    limits = {
        name: list(map(int, counts.split(","))) for name, counts in (e.split("=") for e in options.limit)
    }
    params = dict(entry.split("=", 1) for entry in options.param)
    domains = [None] if options.smoke else sorted(path for path in options.data.iterdir() if path.is_dir())
    results = {}
    for domain in domains:
        name = "smoke" if domain is None else domain.name
        if limits and not options.smoke and name not in limits:
            continue
        cut = [20, 1, 1] if options.smoke else limits.get(name, [None] * 3)
        results[name] = measure(domain, options.model, cut, options.k, params)
        print(name, json.dumps(results[name]), file=sys.stderr)
    print(json.dumps({"model": options.model, "params": params, "domains": results}, indent=2))


if __name__ == "__main__":
    main()
