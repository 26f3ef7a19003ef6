"""Where in the model the keys are taken."""

from finding import Finding, Table, settle
from knnstore_research.key_probing import Probed, probe_keys
from lab import Lab
from texts import SPLITS

TITLE = "The normalized input of the last feed-forward part is the best key"
CLAIM = """Khandelwal et al. 2020, table 5 (dev, alone 17.96): input of the feed-forward part after its
normalization 16.06, before it 17.06; input of the attention 16.76 and 17.14; output of the model 17.01
and 17.07. Xu et al. 2023: inner products do about as well as distances."""
RULE = """in a domain it holds if `ffn_input` with distances has the lowest perplexity of all places of
the table, of the last layer and behind it; the contrary if the interval of its ratio to the model
alone is above, as a whole, that of the best place. `knnstore research probe-keys` measures it on a sample
of the domain's documents, of all splits, of which it holds out a third: T and λ are fitted on one half of
those and judged on the other."""
MINUTES = 8.0
WANTED = "ffn_input"
KEYS = [
    f"{place}{norm}" for place in (WANTED, "attention_input", "final_hidden") for norm in ("", "_before_norm")
]


def run(lab: Lab) -> Finding:
    """Probe the places on a sample of each domain."""
    rows, holds, first = [], [], []
    base = lab.base.lm.base
    for domain in lab.domains:
        lab.say(f"{domain}: probing keys")
        texts = [document for split in SPLITS for document in lab.texts[domain][split]]
        found = probe_keys(base, lab.reader.tokenizer, texts, keys=KEYS, metrics=["l2", "ip"], states=())
        by_place = {(one.key, one.metric): one for one in found.candidates}
        distances = [one for one in found.candidates if one.metric == "l2"]
        best, wanted = distances[0], by_place[WANTED, "l2"]
        first.append(f"{best.key} in {domain}")
        worse = change(wanted).low > change(best).high
        holds.append(True if best is wanted else False if worse else None)
        rows += [
            [domain, one.key, one.fitted.held_out, change(one), change(by_place[one.key, "ip"]).ppl]
            for one in distances
        ]
    head = ["domain", "key", "perplexity", "÷ the model alone", "the same, inner product"]
    return Finding(settle(holds), f"Best: {'; '.join(first)}.", [Table(head, rows)])


def change(probed: Probed):
    """Perplexity divided by that of the model alone."""
    return probed.fitted.change
