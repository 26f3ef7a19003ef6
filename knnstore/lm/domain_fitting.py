"""Fitting the weight and the temperature of each domain, after one pass that searched each on its own.

The log-likelihood of p = λ_0 p_LM + Σ_j λ_j p_kNN^(j) is concave in λ; expectation maximisation climbs it.
The temperatures are taken from a ladder, in turns, while they make it larger.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from knnstore.lm.domain_weights import DomainWeights
from knnstore.lm.ladder import gold_on_ladder, ladder
from knnstore.lm.mixing import MAX_LAMBDA
from knnstore.lm.settings import KNNSettings
from knnstore.store import KNNStore, Selection, tokens_of

MOST_DOMAINS = 16
_LEAST = 1e-30  # probabilities are kept above, so that quotients stay finite
_LEAST_WEIGHT = 1e-3  # a domain with less is not worth a search
_GAP = 1e-5  # nats for each token between weights found and the best ones, at most
_ITERATIONS = 2_000
_TURNS = 8


@dataclass(frozen=True, slots=True)
class DomainEvidence:
    """What n tokens say about the weights of domains: 4 bytes a token, domain and temperature."""

    k: int
    domains: tuple[str, ...]
    temperatures: Tensor
    """The ladder, float32, shape (m,), ascending."""
    knn: Tensor
    """p_kNN^(j) of each token at each temperature, float32, shape (j, n, m); p_LM where nothing was found,
    to which the weight falls there."""
    found: Tensor
    """Whether anything was, bool, shape (j, n)."""
    lm: Tensor
    """p_LM of each token, float32, shape (n,)."""

    def only(self, wanted: Tensor) -> "DomainEvidence":
        """The evidence of some tokens, bool, shape (n,)."""
        return replace(self, knn=self.knn[:, wanted], found=self.found[:, wanted], lm=self.lm[wanted])

    def log_probs(self, settings: KNNSettings, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Mix as settings say that were fitted on evidence of the same pass.

        Args:
            settings: their T_j are among the temperatures.
            tokens: indices, int64, shape (m,).

        Returns:
            log p of each of the m tokens, and λ in force: float32, shape (m,).
        """
        mixer = settings.mixer
        assert isinstance(mixer, DomainWeights)
        wanted = (settings.temperature * torch.tensor(mixer.temperature_factors)).log()
        rungs = (self.temperatures.log() - wanted[:, None]).abs().argmin(1)
        lambdas = torch.tensor(mixer.lambdas)
        knn = torch.stack([self.knn[at, tokens, rung] for at, rung in enumerate(rungs.tolist())])
        lm, found = self.lm[tokens], self.found[:, tokens]
        mixed = (lm + lambdas @ (knn - lm)).clamp(min=_LEAST)
        return mixed.log(), lambdas @ found.float()


class DomainPass:
    """Computes `DomainEvidence` while text is scored.

    Args:
        domains: their names.
        k: neighbours of each token in each of them.
        total: how many tokens will come.
    """

    def __init__(self, domains: Sequence[str], k: int, total: int) -> None:
        self.domains = tuple(domains)
        self.k = k
        self._done = 0
        self._temperatures = torch.empty(0)
        self._knn = torch.empty(0)
        self._found = torch.zeros((len(domains), total), dtype=torch.bool)
        self._lm = torch.empty(total)

    def add(
        self, store: KNNStore, keys: Tensor, gold: Tensor, lm_log_probs: Tensor, selection: Selection
    ) -> None:
        """Search every domain for a batch of n tokens.

        Args:
            store: where to search.
            keys: float32, shape (n, d).
            gold: the tokens, int64, shape (n,).
            lm_log_probs: log p_LM of each, float32, shape (n,).
            selection: among which documents; its domains are those of the pass.
        """
        rows = slice(self._done, self._done + len(gold))
        self._lm[rows] = lm_log_probs.exp().clamp(min=_LEAST)
        for number, domain in enumerate(self.domains):
            neighbors = store.search(keys.numpy(), self.k, replace(selection, domains=(domain,)))
            distances = torch.from_numpy(neighbors.distances)
            found = distances[:, 0].isfinite()
            if not len(self._temperatures):
                self._temperatures = ladder(distances[found])
                size = (*self._found.shape, len(self._temperatures))
                self._knn = torch.empty(size)
            knn = self._lm[rows, None].repeat(1, len(self._temperatures))
            log_weights = neighbors.log_weights
            hits = torch.from_numpy(tokens_of(neighbors.ids)) == gold[:, None]
            knn[found] = gold_on_ladder(
                distances[found], hits[found], [self.k], self._temperatures,
                None if log_weights is None else torch.from_numpy(log_weights)[found],
            )[0]  # fmt: skip
            self._knn[number, rows] = knn
            self._found[number, rows] = found
        self._done = rows.stop

    def evidence(self) -> DomainEvidence:
        """What was found so far."""
        done = slice(self._done)
        return DomainEvidence(
            self.k, self.domains, self._temperatures,
            self._knn[:, done], self._found[:, done], self._lm[done],
        )  # fmt: skip


def fit_domains(evidence: DomainEvidence) -> KNNSettings:
    """Fit λ_j and T_j of each domain j; the weights are within `_GAP` of the best for their temperatures."""
    count = len(evidence.domains)
    # Where each domain would begin if it were the only one, with a weight of one half.
    losses = [-(evidence.lm[:, None] + knn).log().mean(0) for knn in evidence.knn]
    rungs = torch.stack(losses).argmin(1)
    for _ in range(_TURNS):
        before = rungs.clone()
        lambdas = _weights(evidence, rungs)
        for number in range(count):
            knn = _at(evidence, rungs)
            others = (1 - lambdas.sum()) * evidence.lm + lambdas @ knn - lambdas[number] * knn[number]
            mixed = others[:, None] + lambdas[number] * evidence.knn[number]
            rungs[number] = mixed.clamp_(min=_LEAST).log().mean(0).argmax()
        if torch.equal(rungs, before):
            break
    lambdas = _weights(evidence, rungs)
    worth = lambdas >= _LEAST_WEIGHT
    lambdas = _weights(evidence, rungs, worth)
    lambdas = lambdas * (MAX_LAMBDA / lambdas.sum().clamp(min=MAX_LAMBDA))
    temperatures = evidence.temperatures[rungs]
    heaviest = float(temperatures[lambdas.argmax()])
    mixer = DomainWeights(
        evidence.domains, tuple(lambdas.tolist()), tuple((temperatures / heaviest).tolist())
    )
    return KNNSettings(evidence.k, heaviest, mixer)


def mixture_weights(probs: Tensor) -> Tensor:
    """Find the weights with which a mixture is likeliest, by expectation maximisation.

    No weights are likelier by more than ``_GAP`` nats for each observation: of concave functions the largest
    component of the gradient tells (it is 1 for every component in use at the optimum).

    Args:
        probs: of n observations by c components, above 0, shape (n, c).

    Returns:
        float64, shape (c,), sum 1.
    """
    probs = probs.double()
    weights = probs.new_full((probs.shape[1],), 1 / probs.shape[1])
    for _ in range(_ITERATIONS):
        gradient = (probs / (probs @ weights)[:, None]).mean(0)
        weights = weights * gradient
        if gradient.max() < 1 + _GAP:
            break
    return weights


def _weights(evidence: DomainEvidence, rungs: Tensor, worth: Tensor | None = None) -> Tensor:
    """The λ_j at these temperatures, 0 for domains that are not worth it; float32, shape (j,)."""
    worth = torch.ones(len(rungs), dtype=torch.bool) if worth is None else worth
    probs = torch.cat([evidence.lm[:, None], _at(evidence, rungs)[worth].T], 1).clamp(min=_LEAST)
    weights = torch.zeros(len(rungs))
    weights[worth] = mixture_weights(probs)[1:].float()
    return weights


def _at(evidence: DomainEvidence, rungs: Tensor) -> Tensor:
    """p_kNN of each domain at one temperature each, shape (j, n)."""
    return torch.stack([knn[:, rung] for knn, rung in zip(evidence.knn, rungs.tolist(), strict=True)])
