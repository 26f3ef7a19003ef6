"""Pointers in place of searches."""

from typing import NamedTuple

import torch
from finding import Finding, Plot, Table, below, count, every, settle
from judging import best_fixed, interval, ppl, ratio
from knnstore_research.retomaton import Clusters, follow_pointers
from knnstore_research.stored_records import StoredRecords
from lab import Lab

from knnstore.lm.mixing import FixedLambda
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


class Setting(NamedTuple):
    """When pointers take the place of a search."""

    min_pointers: int | None
    """This many suffice; None searches always."""
    has_clusters: bool = False

    def __str__(self) -> str:
        """Return the name in the table."""
        if self.min_pointers is None:
            return "always searches"
        return f"{self.min_pointers:,} suffice{' with clusters' if self.has_clusters else ''}"


SETTINGS = [Setting(None), Setting(64), Setting(8), *(Setting(enough, True) for enough in (8, 4, 2))]


def run(lab: Lab) -> Finding:
    """Score test with fewer and fewer searches."""
    rows, holds, lines, most = [], [], {}, []
    for domain in lab.domains:
        test, settings = lab.test(domain), best_fixed(lab.dev(domain))
        plain = test.log_probs(settings).log_probs
        mixer = settings.mixer
        assert isinstance(mixer, FixedLambda)
        lab.say(f"{domain}: searching for every token of test")
        store, selection = lab.base.lm.store, Selection(domains=(domain,))
        found = store.search(test.evidence.keys.numpy(), settings.k, selection)
        records = StoredRecords(store, selection)
        clusters = Clusters(records, CLUSTER)
        rows.append([domain, "no pointers", "0%", interval(test, plain), None, None])
        better, free = [], 0.0
        for setting in SETTINGS:
            lab.say(f"{domain}: following, {setting}")
            followed = follow_pointers(
                records, test, found, settings.temperature,
                min_pointers=setting.min_pointers, clusters=clusters if setting.has_clusters else None,
            )  # fmt: skip
            log_probs, saved = followed.log_probs(test.lm_log_probs, mixer.lam), followed.saved
            drawn = torch.rand(len(test), generator=torch.Generator().manual_seed(0)) >= saved
            random = torch.where(drawn, plain, test.lm_log_probs)
            against = ratio(test, log_probs, random)
            if saved >= 0.1:
                better.append(below(against))
            change = ratio(test, log_probs, plain)
            free = max(free, saved) if change.ppl <= 1.005 else free
            rows.append([domain, str(setting), f"{saved:.0%}", interval(test, log_probs), change, against])
            kind = f"{domain}, clusters" if setting.has_clusters else domain
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
