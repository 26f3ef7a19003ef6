"""Pointers in place of searches."""

from dataclasses import replace

import torch
from finding import Finding, Plot, Table, below, count, every, settle
from judging import best_fixed, interval, ppl, ratio
from lab import Lab
from torch import Tensor

from knnstore.datastore import Neighbors
from knnstore.lm import KNNSettings, PointerSettings
from knnstore.lm.components import Form, look_up, mixture_of, search_records
from knnstore.lm.retrieval import retrieve_in_step
from knnstore.lm.scoring import ReadTokens, score_held_out
from knnstore.store import Selection

TITLE = "Pointers to what comes next save searches, better than leaving them out at random"
CLAIM = """Alon et al. 2022 (RetoMaton): with 81 % of the searches saved, the perplexity of a kNN-LM that
searches always; without saving any, 16.08 in place of 16.65. Pointers beat skipping at random at every
share."""
RULE = """in a domain it holds if, in every row of the table that saves at least a tenth of the searches,
perplexity is below that of leaving out as many at random, with the whole interval; the contrary if it is
above once with the whole interval. One λ and one T, fitted on dev with all searches. Clusters are of 1,000
records on average; all of those that pointers lead to are compared with in place of a search. Every search is
made once, before any is saved."""
MINUTES = 45.0
CLUSTER = 1_000
POINTERS = [
    PointerSettings(None),
    *(PointerSettings(enough) for enough in (64, 8)),
    *(PointerSettings(enough, cluster_size=CLUSTER) for enough in (8, 4, 2)),
]


def run(lab: Lab) -> Finding:
    """Score test with fewer and fewer searches."""
    rows, holds, lines, most = [], [], {}, []
    for domain in lab.domains:
        test = lab.test(domain)
        settings = replace(best_fixed(lab.dev(domain)), selection=Selection(domains=(domain,)))
        plain = test.log_probs(settings).log_probs
        lab.say(f"{domain}: searching for every token of test")
        whole, found = search_once(lab, domain, settings)
        assert torch.equal(whole.targets, test.targets), "in another order"
        rows.append([domain, "no pointers", "0%", interval(test, plain), None, None])
        better, free = [], 0.0
        for pointers in POINTERS:
            lab.say(f"{domain}: following, {name_of(pointers)}")
            log_probs, searched = follow(lab, whole, found, replace(settings, pointers=pointers))
            saved = 1 - searched
            drawn = torch.rand(len(test), generator=torch.Generator().manual_seed(0)) >= saved
            random = torch.where(drawn, plain, test.lm_log_probs)
            against = ratio(test, log_probs, random)
            if saved >= 0.1:
                better.append(below(against))
            change = ratio(test, log_probs, plain)
            free = max(free, saved) if change.ppl <= 1.005 else free
            rows.append(
                [domain, name_of(pointers), f"{saved:.0%}", interval(test, log_probs), change, against]
            )
            kind = domain if pointers.cluster_size is None else f"{domain}, clusters"
            for name, of in ((kind, log_probs), (f"{domain}, at random", random)):
                lines.setdefault(name, []).append((saved, ppl(of) / ppl(plain)))
        holds.append(every(better))
        most.append(f"{free:.0%}")
    in_order = {name: sorted(points) for name, points in lines.items()}
    head = ["domain", "pointers", "searches saved", "perplexity", "÷ no pointers", "÷ at random"]
    return Finding(
        settle(holds),
        f"Better than at random throughout in {count(holds)}; at most 0.5 % of perplexity is lost up to "
        f"{', '.join(most)} of the searches.",
        [Table(head, rows)],
        [Plot("retomaton", "Perplexity by share of searches saved", "saved", "÷ no pointers", in_order)],
    )


def name_of(pointers: PointerSettings) -> str:
    """How the table calls it."""
    if pointers.min_pointers is None:
        return "always searches"
    clusters = "" if pointers.cluster_size is None else " with clusters"
    return f"{pointers.min_pointers:,} suffice{clusters}"


def search_once(lab: Lab, domain: str, settings: KNNSettings) -> tuple[ReadTokens, Neighbors]:
    """Score test and search for every token, whichever searches are saved afterwards."""
    lm, documents = lab.base.lm, lab.texts[domain]["test"]
    parts = [part.read for part in score_held_out(lm.store, lm.reader, documents, settings)]
    read = ReadTokens.joined(parts)
    (found,) = search_records(lm.store, read.keys.numpy(), settings)
    return read, found


def follow(lab: Lab, whole: ReadTokens, neighbors: Neighbors, settings: KNNSettings) -> tuple[Tensor, float]:
    """Return log p of every token where pointers save searches, and the share of searches made."""
    store = lab.base.lm.store
    steps = retrieve_in_step(
        store, whole.keys.numpy(), whole.targets.numpy(), whole.documents, whole.positions,
        settings, neighbors.rows,
    )  # fmt: skip
    log_probs, made = torch.empty(len(whole)), 0
    for rows, (found, searched) in steps:
        step = whole.select_rows(torch.from_numpy(rows))
        batch = step.batch(store.identity.vocab_size, None).with_neighbors(found, searched)
        mixture = mixture_of(settings, look_up(store, settings, batch, Form.TARGET))
        log_probs[torch.from_numpy(rows)] = mixture.gold(step.lm_log_probs, step.targets)
        made += int(searched.sum())
    return log_probs, made / len(whole)
