"""The two sides, each fitted on dev: a model with or without its document's cache, and with a store."""

import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from knnstore_research.one_weight import mix_log_probs
from knnstore_research.substitute import fit_alone, train_substitute
from steps import Floats, Step
from torch import Tensor

import knnstore
from knnstore.documents import TextDocument
from knnstore.lm import KNNLMForCausalLM, KNNSettings, NGramSettings
from knnstore.lm.calibration.candidates import Candidate
from knnstore.lm.calibration.evidence import list_evidence_by_probes
from knnstore.lm.calibration.fits import (
    fit_fixed,
    fit_joint,
)
from knnstore.lm.calibration.scored_text import ScoredText, score_once
from knnstore.lm.calibration.searches import FurtherSearches
from knnstore.lm.calibration.text import choose_stored
from knnstore.lm.components import NGramFitting, RecentFitting
from knnstore.lm.scoring import score_held_out
from knnstore.store import EVERYTHING

CACHED = " + cache"
ALONE = KNNSettings(k=1, lam=0.0)
PROBES = (8, 16, 32)
"""Cells that a classic kNN-LM tries."""
FIXED, KEYS, NGRAMS, STORE, CHOSEN = "keys, fixed", "keys, calibrated", "n-grams", "store", "as saved"
UNFITTED = "keys, unfitted"
ROWS, BOTH = "trained rows", "store, trained rows"
LEARNED = "store, calibrated on its text too"
_LAM = 0.25
_PUBLISHED = KNNSettings(probes=16, temperature=1.0, lam=_LAM)
"""The λ of Khandelwal et al. 2020 in a model's own domain, and their T, which is none."""


@dataclass(frozen=True)
class Workshop:
    """One part of one domain, and how its stores are made."""

    store: Sequence[TextDocument]
    dev: Sequence[TextDocument]
    test: Sequence[TextDocument]
    folder: Path
    """For stores."""
    device: str | None
    codes: str
    states: int

    def classic(self, model: str) -> Step:
        """Return a classic kNN-LM: keys of one state, one λ and one T."""
        lm, seconds = self._stored(model, "classic", codes="none", states=1)
        fitting = time.perf_counter()
        dev = self._scored(lm, self.dev, PROBES)
        tries = [fit_fixed(of) for of in list_evidence_by_probes(dev)]
        best = max(tries, key=lambda one: float(dev.log_probs(one).log_probs.double().sum()))
        sides = Fitted(dev, self._scored(lm, self.test, PROBES))
        fitting = time.perf_counter() - fitting
        self._close(lm)
        found = {"classic": sides.at(best), f"classic{CACHED}": sides.at(sides.cached(best))}
        return Step({"storing": seconds, "fitting": fitting, "settings": repr(best)}, found)

    def alone(self, model: str, name: str) -> Step:
        """Return a model with no store, and with the cache, of the same keys as a store's."""
        lm, _ = self._stored(model, f"alone, {name}", codes="none", states=self.states, only=1)
        fitting = time.perf_counter()
        sides = Fitted(self._scored(lm, self.dev), self._scored(lm, self.test))
        self._close(lm)
        cached = sides.gated(sides.cached(ALONE))
        fitting = time.perf_counter() - fitting
        found = {name: sides.at(ALONE), f"{name}{CACHED}": sides.at(cached)}
        documents = sides.test.documents.numpy()
        return Step({"fitting": fitting}, {**found, "documents": documents})

    def with_store(self, model: str, name: str) -> Step:
        """Return a model with a store as it is calibrated, and the parts of that."""
        lm, seconds = self._stored(model, f"{name}store", codes=self.codes, states=self.states)
        found = lm.calibrate(self.dev)
        candidates = found.comparison.candidates
        gate = next(one.settings for one in candidates if one.name == "gate over all")
        fixed = best(candidates, lambda one: one.name == "fixed")
        keys = best(candidates, lambda one: not one.settings.needs_text and one.settings.retrieves)
        chosen = found.settings or ALONE
        probes = sorted({one.probes for one in (gate, fixed, keys, chosen) if one.probes})
        trained = train_substitute(lm)
        dev, test = (self._scored(lm, text, probes) for text in (self.dev, self.test))
        sides = Fitted(dev, test)
        _, unfitted, _ = self._unfitted(lm)
        self._close(lm)
        fitting = time.perf_counter()
        without = sides.gated(replace(gate, cache=None))
        fitting = time.perf_counter() - fitting
        ngrams, rows = sides.with_ngrams(), sides.with_rows()
        settings = {
            FIXED: fixed, KEYS: keys, STORE: without, f"{STORE}{CACHED}": gate, CHOSEN: chosen,
            NGRAMS: sides.gated(ngrams), f"{NGRAMS}{CACHED}": sides.gated(sides.cached(ngrams)),
            ROWS: rows, f"{ROWS}{CACHED}": sides.gated(sides.cached(rows)),
            BOTH: sides.gated(replace(without, others=rows.others)),
            f"{BOTH}{CACHED}": sides.gated(replace(gate, others=rows.others)),
        }  # fmt: skip
        values: dict[str, Any] = {
            "tokens": seconds["tokens"],
            "storing": seconds,
            "scoring": found.scoring_seconds,
            "calibrating": found.fitting_seconds,
            "fitting": fitting,
            "saved": found.record and found.record.mixer,
            "fixed": repr(fixed),
            "rows": trained.seconds,
        }
        judged = {side: sides.at(one) for side, one in settings.items()} | {UNFITTED: unfitted}
        return Step(values, {f"{name}{side}": of for side, of in judged.items()})

    def calibrated_on_itself(self, model: str, tokens: int) -> Step:
        """Return a store that is calibrated on so many tokens of its own documents beside dev."""
        lm, seconds = self._stored(model, "itself", codes=self.codes, states=self.states)
        found = lm.calibrate(self.dev, stored_tokens=tokens)
        gate = next(one.settings for one in found.comparison.candidates if one.name == "gate over all")
        drawn, probes = choose_stored(lm.store, lm.reader, EVERYTHING, tokens), [gate.probes or 1]
        both = self._scored(lm, [*self.dev, *drawn.documents], probes, drawn.stored)
        sides = Fitted(both, self._scored(lm, self.test, probes))
        self._close(lm)
        values = {"storing": seconds, "calibrating": found.scoring_seconds + found.fitting_seconds}
        without = sides.gated(replace(gate, cache=None))
        return Step(values, {LEARNED: sides.at(without), f"{LEARNED}{CACHED}": sides.at(gate)})

    def timed(self, model: str) -> Step:
        """Return what it takes to have a store, and nothing else."""
        lm, seconds = self._stored(model, "timed", codes=self.codes, states=self.states)
        found = lm.calibrate(self.dev)
        self._close(lm)
        calibrating = found.scoring_seconds + found.fitting_seconds
        return Step(
            {"storing": seconds, "calibrating": calibrating, "dev": found.comparison.expected.ppl}, {}
        )

    def unfitted(self, model: str, name: str, prefix: str) -> Step:
        """Return a model with a store as it is published: nothing is calibrated."""
        lm, seconds = self._stored(model, "unfitted", codes=self.codes, states=self.states)
        alone, mixed, documents = self._unfitted(lm)
        self._close(lm)
        found = {name: alone, f"{prefix}{UNFITTED}": mixed, "documents": documents}
        return Step({"storing": seconds}, found)

    def _stored(
        self, model: str, name: str, *, codes: str, states: int, only: int | None = None
    ) -> tuple[KNNLMForCausalLM, dict[str, float]]:
        """Return a new store of the text, or of its first documents alone; and the seconds that it took."""
        home = self.folder / name
        shutil.rmtree(home, ignore_errors=True)
        started = time.perf_counter()
        lm = knnstore.create(
            home, model, params={"codes": codes}, device=self.device, dtype="float32", states=states
        )
        added = lm.add(list(self.store)[:only], domain="d")
        stored = time.perf_counter()
        lm.store.ngrams()
        ended = time.perf_counter()
        return lm, {
            "tokens": added.tokens, "adding": stored - started,
            "counting": ended - stored,
        }  # fmt: skip

    def _scored(
        self,
        lm: KNNLMForCausalLM,
        texts: Sequence[TextDocument],
        probes: Sequence[int] = (),
        left_out: Mapping[str, Collection[str]] = MappingProxyType({}),
    ) -> ScoredText:
        """Return a text scored in one pass of the model, with sums over `probes` cells; 0 sums nothing."""
        scored = score_once(
            lm.store, lm.reader, texts,
            k=1, selection=EVERYTHING, probes=max(probes, default=None),
            ngrams=NGramSettings() if probes else None, left_out=left_out,
        )  # fmt: skip
        if not probes:
            return scored
        further = FurtherSearches(lm.store, scored, texts, EVERYTHING, left_out)
        return replace(scored, visited=further.search_with_probes(probes))

    def _unfitted(self, lm: KNNLMForCausalLM) -> tuple[Floats, Floats, Floats]:
        """Log p of each test token by the model and with T = 1, outside of what is tried; its document."""
        parts, documents = [], []
        for part in score_held_out(lm.store, lm.reader, self.test, _PUBLISHED):
            knn = part.evidence.searches[0].weights(_PUBLISHED.temperature)[:, 0]
            mixed = mix_log_probs(part.lm_log_probs, knn.log(), _LAM)
            parts.append(torch.stack([part.lm_log_probs, mixed]))
            documents.append(part.documents)
        alone, mixed = torch.cat(parts, 1).double().numpy()
        return alone, mixed, np.concatenate(documents)

    def _close(self, lm: KNNLMForCausalLM) -> None:
        home = lm.store.home.path
        lm.store.close()
        shutil.rmtree(home)


class Fitted:
    """Fits on dev what is then read on test."""

    def __init__(self, dev: ScoredText, test: ScoredText) -> None:
        self.dev, self.test = dev, test
        self._every = torch.arange(len(dev))

    @cached_property
    def _recent(self) -> Any:
        assert self.dev.reading is not None
        return RecentFitting.from_keys(self.dev.reading, self.dev.evidence.found["own n-grams"])

    def at(self, settings: KNNSettings) -> Floats:
        """Log p of each test token."""
        return self.test.log_probs(settings).log_probs.double().numpy()

    def cached(self, settings: KNNSettings) -> KNNSettings:
        """With the cache on top that is the likeliest, and own n-grams over it."""
        below = self.dev.log_probs(settings).log_probs
        return replace(settings, cache=self._recent.fit(below, self._wanted))

    def gated(self, settings: KNNSettings) -> KNNSettings:
        """Return the settings with one gate over all their components; trained rows are one of these."""
        settings = replace(settings, gate=None)
        return replace(settings, gate=fit_joint(self.dev, settings, self._every))

    def with_rows(self) -> KNNSettings:
        """Return settings of the model with trained rows for each token, and no store."""
        return replace(ALONE, others=fit_alone(self._every, self.dev).others)

    def with_ngrams(self) -> KNNSettings:
        """Return the model and n-grams alone."""
        assert self.dev.ngrams is not None
        return replace(ALONE, ngrams=NGramFitting(self.dev.ngrams).fit(self.dev.lm_log_probs, self._wanted))

    @property
    def _wanted(self) -> Tensor:
        return torch.ones(len(self.dev), dtype=torch.bool)


def best(candidates: Sequence[Candidate], wanted: Callable[[Candidate], bool]) -> KNNSettings:
    """Of the candidates that are wanted, the settings with the lowest perplexity on dev."""
    return min(filter(wanted, candidates), key=lambda one: one.held_out.ppl).settings
