"""The trainable substitute of a store: what part of its gain needs no retrieval (Xu et al. 2023).

    p_sub(y|x) ∝ Σ_{rows w of y} exp(w · f(x))        p'(y) = λ p_sub(y) + (1 - λ) p(y)

f(x) is the query vector of the store. Every token of the vocabulary that occurs in the documents has n rows
(vectors), which are trained on the keys and tokens of these documents; the language model is not changed
(https://arxiv.org/abs/2301.02828). p is the model alone, or its mixture with the other components that the
settings use.

The module has the rows (`SubstituteHead`), the component that mixes them in (`Substitute`), their training
(`train_substitute`), and what the experiments need: `add_substitute`, `fit_alone`, `fit_beside` and
`evaluate_substitute`.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import chain, islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from knnstore.datastore import tokens_from_ids
from knnstore.documents import OnBad
from knnstore.errors import (
    ConfigError,
    FingerprintMismatchError,
    InputError,
    OutdatedWeightsError,
    ReadOnlyError,
)
from knnstore.lm.calibration import GridEvidence, ScoredText
from knnstore.lm.components import DistributionFitting, Form, OneWeightComponent, Places, Question
from knnstore.lm.keys import run_without_autocast
from knnstore.lm.mixing import Contribution, FixedLambda
from knnstore.lm.reading import Encoder, TextReader, usable_documents
from knnstore.lm.scoring import HeldOut, evaluate
from knnstore.lm.settings import (
    KNNModel,
    KNNSettings,
    find_traces,
    find_trained_settings,
    is_outdated,
    resolve,
)
from knnstore.progress import Progress
from knnstore.store import Identity, KNNStore, Reader, SavedSettings, Selection
from knnstore_research.one_weight import fit_one_weight, mix_log_probs

EPOCHS = 4
LEARNING_RATE = 5e-3
HELD_OUT_SHARE = 0.05
HELD_OUT_TOKENS = 20_000
"""Largest number of tokens that are held out, in whole documents, to stop the training and to fit λ."""

_BATCH = 256
_SPREAD = 0.02
"""Standard deviation of the differences between the first rows of one token."""
_CHUNK_VALUES = 1 << 24
"""Number of probabilities that are in memory at once: 64 MiB of float32."""
_BLOCK_VALUES = 1 << 26
"""Number of key values that are in memory at once and shuffled together: 128 MiB of float16."""
_CACHED_HEADS = 2
"""Number of substitutes (their rows) of one store that stay in memory."""
_ROUNDS = 2
"""Rounds of fitting the store's settings and the substitute's λ in turn."""
_MADE_FOR = ("model_fingerprint", "key", "projection", "dim", "vocab_size")
"""Fields of a store's identity that the rows are trained for."""

# -- the rows


class SubstituteHead:
    """The trained output layer of a substitute: n weight vectors ("rows") for each of s tokens.

    Args:
        rows: n rows (vectors) of each of s tokens, float32, shape (n, s, d).
        tokens: the s tokens, each once, int64, shape (s,).
        vocab_size: number of tokens of the vocabulary, v; tokens without rows have the probability 0.
    """

    def __init__(self, rows: Tensor, tokens: Tensor, vocab_size: int) -> None:
        self.rows = rows
        self.tokens = tokens
        self.vocab_size = vocab_size
        self._columns = torch.full((vocab_size,), -1, device=tokens.device)
        self._columns[tokens] = torch.arange(len(tokens), device=tokens.device)

    def find_columns(self, tokens: Tensor) -> Tensor:
        """Return the index of each token in ``self.tokens``, int64, in the shape of the argument.

        The index is -1 for a token without rows.
        """
        return self._columns[tokens.to(self._columns.device)]

    def token_log_probs(self, keys: Tensor) -> Tensor:
        """Compute the substitute's log-probability of every token that has rows.

        Args:
            keys: query vectors, float32, shape (m, d), on any device.

        Returns:
            float32, shape (m, s), on the device of the rows.
        """
        keys = keys.to(self.rows.device)
        log_probs = torch.empty((len(keys), len(self.tokens)), device=keys.device)
        for at in self._chunks(len(keys)):
            log_probs[at] = score_tokens(keys[at], self.rows).log_softmax(1)
        return log_probs

    def log_probs(self, keys: Tensor) -> Tensor:
        """Compute the substitute's log-probability of every token of the vocabulary.

        Args:
            keys: query vectors, float32, shape (m, d), on any device.

        Returns:
            Float32, shape (m, v), on the device of the rows; -inf for a token without rows.
        """
        log_probs = torch.full((len(keys), self.vocab_size), -torch.inf, device=self.rows.device)
        log_probs[:, self.tokens] = self.token_log_probs(keys)
        return log_probs

    def target_log_probs(self, keys: Tensor, gold: Tensor) -> Tensor:
        """Compute the substitute's log-probability of the target token for each query.

        Args:
            keys: query vectors, float32, shape (m, d), on any device.
            gold: the target tokens, int64, shape (m,).

        Returns:
            Float32, shape (m,), on the device of `keys`; -inf for a token without rows.
        """
        return self.gold_and_largest(keys, gold)[0]

    def gold_and_largest(self, keys: Tensor, gold: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the log-probabilities of the target token and of the most probable token for each query.

        Args:
            keys: query vectors, float32, shape (m, d), on any device.
            gold: the target tokens, int64, shape (m,).

        Returns:
            Two float32 tensors of shape (m,), on the device of `keys`. The first is -inf for a target token
            without rows.
        """
        columns = self.find_columns(gold)
        found, largest = torch.empty(len(keys)), torch.empty(len(keys))
        for at in self._chunks(len(keys)):
            scores = score_tokens(keys[at].to(self.rows.device), self.rows)
            total = scores.logsumexp(1)
            chosen = scores.gather(1, columns[at, None].clamp(min=0))[:, 0] - total
            found[at] = torch.where(columns[at] >= 0, chosen, -torch.inf).cpu()
            largest[at] = (scores.amax(1) - total).cpu()
        return found.to(keys.device), largest.to(keys.device)

    def save(self, store: KNNStore) -> str:
        """Save the rows in a store that is opened for writing, and return the name of the new file."""
        tensors = {"rows": self.rows.cpu().numpy(), "tokens": self.tokens.cpu().numpy()}
        return store.save_weights(tensors, _select_made_for(store.identity))

    def _chunks(self, count: int) -> Iterator[slice]:
        """Yield slices that together cover `count` queries; the probabilities of one slice fit in memory."""
        step = max(1, _CHUNK_VALUES // max(1, len(self.tokens)))
        return (slice(start, start + step) for start in range(0, count, step))


def score_tokens(keys: Tensor, rows: Tensor) -> Tensor:
    """Compute the logit of each of s tokens for m query vectors.

    With several rows of a token, the logit is the logarithm of the sum of exp over its rows.

    Args:
        keys: query vectors, shape (m, d).
        rows: n rows of each token, shape (n, s, d).

    Returns:
        Shape (m, s).
    """
    return torch.stack([keys @ row.T for row in rows]).logsumexp(0) if len(rows) > 1 else keys @ rows[0].T


def load_head(
    store: Reader, settings: Mapping[str, Any], device: torch.device | str = "cpu"
) -> SubstituteHead:
    """Load the rows (trained vectors) of a substitute from the file that its settings name.

    Args:
        store: the store.
        settings: settings of the component ``substitute``.
        device: device of the rows.

    Raises:
        OutdatedWeightsError: a document that the rows were trained on was removed or replaced.
        FingerprintMismatchError: the rows were trained for another model or other keys.
        CorruptWeightsError: the file of the rows is missing or damaged.
    """
    _refuse_outdated(store, settings)
    weights = store.load_weights(settings["weights"])
    for name, needed in _select_made_for(store.identity).items():
        if weights.metadata.get(name) != needed:
            raise FingerprintMismatchError(
                f"the substitute {settings['weights'][:12]} was trained for {name} "
                f"{weights.metadata.get(name)!r}, but the store has {needed!r}: train one for this store "
                "(knnstore research substitute)"
            )
    rows, tokens = (torch.from_numpy(weights.tensors[name]).to(device) for name in ("rows", "tokens"))
    return SubstituteHead(rows, tokens, store.identity.vocab_size)


def _refuse_outdated(store: Reader, settings: Mapping[str, Any]) -> None:
    """Raise an error if a training document of the substitute was removed or replaced.

    Raises:
        OutdatedWeightsError: a document was removed or replaced.
    """
    if is_outdated(store, settings):
        where = ", ".join(settings["traces"]["domains"]) or "the whole store"
        raise OutdatedWeightsError(
            f"the substitute of {where} was trained on documents that were removed or replaced since: train "
            "it again (knnstore research substitute), or use settings without it"
        )


def _select_made_for(identity: Identity) -> dict[str, Any]:
    """Return the fields of a store's identity, by name, that must stay equal for the rows to be usable."""
    return {name: getattr(identity, name) for name in _MADE_FOR}


# -- the component


class TargetProbability(NamedTuple):
    """The substitute's probability of the target token at n positions."""

    probs: Tensor
    """Probability of the target token, float32, shape (n,); NaN at padding."""
    largest: Tensor
    """Probability of the most probable token, float32, shape (n,); NaN at padding."""

    @property
    def width(self) -> int:
        """Number of values that are kept for each position: always 2."""
        return 2

    def select_rows(self, rows: slice | Tensor) -> "TargetProbability":
        """Return the probabilities at the selected positions; `rows` is a slice, indices or a mask."""
        return TargetProbability(self.probs[rows], self.largest[rows])

    def to(self, device: torch.device) -> "TargetProbability":
        """Return the probabilities with both tensors on a device."""
        return TargetProbability(self.probs.to(device), self.largest.to(device))

    @classmethod
    def concatenate(cls, parts: Sequence["TargetProbability"]) -> "TargetProbability":
        """Concatenate the probabilities of several groups of positions."""
        return cls(*(torch.cat(column) for column in zip(*parts, strict=True)))


class Substitute(OneWeightComponent):
    """The component ``substitute``: a trained output layer that predicts the next token from the query.

    Its settings are λ (``lam``), the file with the trained vectors in the store's home (``weights``), and the
    documents that the vectors were trained on (``traces``, a `Lineage` as a dict). `train_substitute` returns
    the settings.
    """

    name = "substitute"

    def __init__(self) -> None:
        self._heads: WeakKeyDictionary[Reader, OrderedDict[tuple[str, str], SubstituteHead]]
        self._heads = WeakKeyDictionary()

    def settings_to_fit(self, reader: Reader, selection: Selection) -> Mapping[str, Any] | None:
        """Return the settings of the substitute that was trained on exactly the selected domains.

        None if no substitute was trained on these domains, or if a document of its training was removed or
        replaced.
        """
        settings = find_trained_settings(reader, selection, self.name)
        return None if settings is None or is_outdated(reader, settings) else settings

    def check_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Check the settings, and return a copy; the weight λ must be between 0 and 1.

        Raises:
            ConfigError: a name is unknown or missing, or a value is out of range.
        """
        apart = {name: settings.get(name) for name in ("weights", "traces")}
        rest = {name: value for name, value in settings.items() if name not in apart}
        lineage = find_traces(apart)
        if not isinstance(apart["weights"], str) or lineage is None:
            raise ConfigError(
                "the settings of the component 'substitute' name its weights and the documents that these "
                "were trained on (traces): take them from what knnstore research substitute trained"
            )
        return {**super().check_settings(rest), "weights": apart["weights"], "traces": asdict(lineage)}

    def look_up(self, question: Question[Mapping[str, Any]], form: Form) -> Places | TargetProbability:
        """Predict the next token at n positions from their query vectors.

        Args:
            question: the positions with their query vectors, the store and the settings.
            form: how much of the result is kept.

        Returns:
            `Places` (all tokens with rows) if `form` is `Form.DISTRIBUTION`, else a `TargetProbability` (the
            target token only).

        Raises:
            OutdatedWeightsError: a document that the substitute was trained on was removed or replaced.
            FingerprintMismatchError: the substitute was trained for another model or other keys.
            CorruptWeightsError: the file of the substitute is missing or damaged.
        """
        assert question.keys is not None
        keys, contexts = question.keys.float(), question.contexts
        head = self._load(question.reader, question.settings, keys.device)
        is_text = torch.from_numpy(contexts.owners >= 0).to(keys.device)
        if form is Form.DISTRIBUTION:
            probs = head.token_log_probs(keys).exp()
            return Places(probs * is_text[:, None], head.tokens.expand(len(keys), -1))
        rows = np.flatnonzero(contexts.owners >= 0)
        found = TargetProbability(
            *(torch.full((len(keys),), torch.nan, device=keys.device) for _ in range(2))
        )
        targets = torch.from_numpy(contexts.target_tokens(rows)).to(keys.device)
        for column, log_probs in zip(found, head.gold_and_largest(keys[is_text], targets), strict=True):
            column[is_text] = log_probs.exp()
        return found

    def weigh(self, found: Places | TargetProbability, settings: Mapping[str, Any]) -> Contribution:
        """Return the predictions as a contribution to the mixture, with one weight λ for all positions.

        Args:
            found: the result of `look_up`.
            settings: the component's settings, which contain λ as ``lam``.
        """
        if isinstance(found, Places):
            lam = torch.full((len(found.weights),), float(settings["lam"]), device=found.weights.device)
            return Contribution(found.weights, lam, found.tokens, name=self.name)
        probs = found.probs
        weights = torch.stack([probs, 1 - probs], 1).where(probs.isfinite()[:, None], 0.0)
        hits = torch.tensor([[True, False]], device=probs.device).expand(len(probs), -1)
        return Contribution(
            weights, torch.full_like(probs, float(settings["lam"])), hits=hits, name=self.name
        )

    def features(self, found: Places | TargetProbability, unit: float) -> Tensor:
        """Return the probability of the most probable token, float32, shape (n, 1), as input of a gate.

        A gate is a network that weighs all components. `unit` is ignored.
        """
        return found.weights.amax(1, keepdim=True) if isinstance(found, Places) else found.largest[:, None]

    def _load(self, store: Reader, settings: Mapping[str, Any], device: torch.device) -> SubstituteHead:
        """Return the rows that settings name, from memory if they were loaded before.

        Args:
            store: the store.
            settings: settings of the component, which name the file of the rows.
            device: device of the rows.

        Raises:
            OutdatedWeightsError: a document that the substitute was trained on was removed or replaced.
            FingerprintMismatchError: the substitute was trained for another model or other keys.
            CorruptWeightsError: the file of the substitute is missing or damaged.
        """
        _refuse_outdated(store, settings)
        heads = self._heads.setdefault(store, OrderedDict())
        key = settings["weights"], str(device)
        if key not in heads:
            heads[key] = load_head(store, settings, device)
            if len(heads) > _CACHED_HEADS:
                heads.popitem(last=False)
        return heads[key]


# -- training


@dataclass(frozen=True, slots=True)
class TrainedSubstitute:
    """A substitute and how it was trained."""

    substitute: Mapping[str, Any]
    """Settings of the component, for ``KNNSettings(others={"substitute": ...})``."""
    rows: int
    """Number of rows of each token."""
    tokens: int
    """Number of tokens of the vocabulary that have rows: all tokens that occur in the training documents."""
    records: int
    """Number of records that the rows were trained on."""
    epochs: int
    """Epochs until the loss of the held-out documents was lowest; 0 if the first rows were best."""
    held_out_tokens: int
    """Number of tokens of the stored documents that were held out."""
    held_out_base_ppl: float
    """Perplexity of the model alone on the held-out documents."""
    held_out_ppl: float
    """Perplexity of model and substitute together on the held-out documents."""
    date: str
    """Date and time of the end of the training, ISO 8601, UTC."""
    seconds: float
    """Duration of the training in seconds."""


@run_without_autocast
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
    """Train a substitute (an output layer that predicts what a store predicts), and save it in the store.

    The loss is the cross-entropy of a full softmax over the tokens that occur in the documents. Adam
    minimizes it with a falling learning rate, on the model's device. The keys are read from the store, so the
    model runs only on documents that are held out. The loss on these documents decides when training stops,
    and the weight λ is fitted on them. Afterwards `calibrate` tries the saved substitute. If the settings
    saved for these domains use a substitute, the new substitute replaces it with the same λ.

    Args:
        lm: the model; its store is opened for writing, so that no document is removed meanwhile.
        domains: the domains to train on; default is the whole store.
        rows: number of rows of each token, >= 1.
        epochs: largest number of epochs, >= 1.
        learning_rate: learning rate of the first step; it falls linearly to 0.
        seed: seed of the order of records, of the choice of held-out documents and of random first rows.
        progress: receives the number of records of each batch.

    Raises:
        ReadOnlyError: the store was opened for reading.
        ConfigError: a value is out of range, or the store keeps no keys.
        InputError: there are fewer than two documents.
        DomainNotFoundError: a domain does not exist.
    """
    # 1) Check what is asked for.
    store, reader = lm.store, lm.reader
    if store.mode != "a":
        raise ReadOnlyError('a substitute is saved in the store: open it for writing, mode "a"')
    if store.is_keyless:
        raise ConfigError("a substitute is trained on keys, but this store has none")
    if rows < 1 or epochs < 1 or not 0 < learning_rate < math.inf:
        raise ConfigError("rows and epochs must be at least 1 and the learning rate above 0")
    started, shown = time.perf_counter(), progress or Progress()
    # 2) Hold out documents, and score them with the model.
    names = tuple(sorted(set(domains or ())))
    generator = torch.Generator().manual_seed(seed)
    selection = Selection(domains=names or None)
    held_out = choose_held_out(store, selection, generator)
    lineage, device = store.lineage(names), reader.encoder.model.device
    judge = _Judge(reader, [store.tokens_by_number(number) for number in held_out])
    # 3) Count the tokens of the other documents, and train rows for them.
    shown.start("training", unit="rec")
    blocks = RecordBlocks(store, selection, held_out)
    counts = torch.zeros(store.identity.vocab_size, dtype=torch.int64)
    for block in blocks:
        counts += torch.bincount(block.tokens, minlength=len(counts))
    seen, records = counts.nonzero()[:, 0], int(counts.sum())
    shown.expect(records * epochs)
    beginning = make_first_rows(reader.encoder, store.identity.dim, seen, rows, generator)
    first = SubstituteHead(beginning.to(device), seen.to(device), len(counts))
    best, best_epoch = fit_rows(
        first,
        blocks,
        judge.loss,
        records=records,
        epochs=epochs,
        learning_rate=learning_rate,
        generator=generator,
        progress=shown,
    )
    shown.finish()
    # 4) Fit λ, and save everything.
    lam, ppl = judge.fit_lambda(best)
    trained = TrainedSubstitute(
        substitute={"lam": lam, "weights": best.save(store), "traces": asdict(lineage)},
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
    _save_trained(store, names, trained)
    return trained


def _save_trained(store: KNNStore, domains: tuple[str, ...], trained: TrainedSubstitute) -> None:
    """Save a trained substitute in the store for exactly these domains.

    If the settings saved for these domains use a substitute, the settings get the new rows and keep their
    weight λ.
    """
    name = Substitute.name
    saved = store.settings(domains) or SavedSettings()
    query, in_use = dict(saved.query), saved.trained_components().get(name)
    if in_use is not None:
        query.pop(name, None)  # where earlier versions saved it
        query["others"] = {**(query.get("others") or {}), name: {**trained.substitute, "lam": in_use["lam"]}}
    records = {**saved.trained, name: asdict(trained)}
    store.save_settings(replace(saved, query=query, trained=records), domains)


def fit_rows(
    head: SubstituteHead,
    blocks: Iterable["Records"],
    judge: Callable[[SubstituteHead], float],
    *,
    records: int,
    epochs: int,
    learning_rate: float,
    generator: torch.Generator,
    progress: Progress,
) -> tuple[SubstituteHead, int]:
    """Train rows of a substitute with Adam until the loss on other records no longer falls.

    Args:
        head: the rows to begin with.
        blocks: the training records, read once in each epoch; each block is shuffled.
        judge: computes the loss of rows on other records.
        records: number of records in all blocks.
        epochs: largest number of epochs.
        learning_rate: learning rate of the first step.
        generator: random generator that shuffles the records.
        progress: receives the number of records of each batch.

    Returns:
        The rows with the lowest loss, and the number of epochs until then; 0 if `head` has the lowest loss.
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
                scores = score_tokens(block.keys[batch].to(rows.device).float(), rows)
                loss = cross_entropy(scores, head.find_columns(block.tokens[batch]))
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
                progress.advance(len(batch))
        trained = SubstituteHead(rows.detach().clone(), head.tokens, head.vocab_size)
        held_out_loss = judge(trained)
        if held_out_loss >= best_loss:
            break
        best, best_epoch, best_loss = trained, epoch, held_out_loss
    return best, best_epoch


class _Judge:
    """Computes the loss of rows on held-out documents, and fits λ on them.

    The model runs once over the documents, in the constructor.

    Args:
        reader: runs the model.
        documents: token ids of the held-out documents.
    """

    def __init__(self, reader: TextReader, documents: list[NDArray[np.uint32]]) -> None:
        keys, lm, gold = [], [], []
        for batch in reader.batch_windows(documents):
            encoded = reader.encoder.encode(batch.input_ids, batch.at)
            keys.append(encoded.keys.cpu())
            lm.append(reader.encoder.target_log_probs(encoded.states, batch.gold).cpu())
            gold.append(torch.from_numpy(batch.gold))
        self.keys, self.lm, self.gold = torch.cat(keys), torch.cat(lm), torch.cat(gold)

    def loss(self, head: SubstituteHead) -> float:
        """Return the mean of -log p of the held-out tokens that have rows, where p is the substitute's."""
        found = head.target_log_probs(self.keys, self.gold)
        return float(-found[found.isfinite()].double().mean())

    def fit_lambda(self, head: SubstituteHead) -> tuple[float, float]:
        """Fit the weight λ of a substitute on the held-out tokens.

        Returns:
            The λ with the largest likelihood, and the perplexity of the mixture of model and substitute with
            this λ.
        """
        found = head.target_log_probs(self.keys, self.gold)
        lam = fit_one_weight(self.lm, found)
        mixed = mix_log_probs(self.lm, found, lam)
        return lam, math.exp(-float(mixed.double().mean()))


def make_first_rows(
    encoder: Encoder, dim: int, tokens: Tensor, rows: int, generator: torch.Generator
) -> Tensor:
    """Create the rows at the start of training, float32, shape (rows, len(tokens), dim).

    If the keys are the input of the model's output layer, the vectors of this layer are used, with small
    random differences if `rows` is above 1. Otherwise the rows are small random vectors.

    Args:
        encoder: the encoder of the store's keys.
        dim: number of components of a key.
        tokens: the tokens with rows, int64.
        rows: number of rows of each token.
        generator: random generator.
    """
    spread = _SPREAD * torch.randn((rows, len(tokens), dim), generator=generator)
    output = getattr(encoder.head, "weight", None)
    if output is None or output.shape[1] != dim or encoder.joining.discounts or encoder.projection:
        return spread
    first: Tensor = output.detach().cpu().float()[tokens].expand_as(spread)
    return first.clone() if rows == 1 else first + spread


# -- the records that it is trained on


class Records(NamedTuple):
    """Keys of m stored records, and the token that each key predicts."""

    keys: Tensor
    """Keys, float16, shape (m, d)."""
    tokens: Tensor
    """Tokens, int64, shape (m,)."""


class RecordBlocks:
    """Iterates over the records of selected documents in blocks of bounded size.

    If there is only one block, it stays in memory.

    Args:
        store: the store.
        selection: the documents.
        without: numbers of documents that are left out.
    """

    def __init__(self, store: Reader, selection: Selection, without: Collection[int] = ()) -> None:
        self._store = store
        self._selection = selection
        self._without = without
        self._only: Records | None = None

    def __iter__(self) -> Iterator[Records]:
        if self._only is not None:
            yield self._only
            return
        read = list(islice(blocks := self._read(), 2))
        if len(read) == 1:
            self._only = read[0]
        yield from chain(read, blocks)

    def _read(self) -> Iterator[Records]:
        """Read the records from the store, and yield them in blocks."""
        parts: list[Records] = []
        room = 0
        for ids, keys in self._store.records(self._selection, without=self._without):
            if room < len(ids) and parts:
                yield _join_records(parts)
                parts = []
            if not parts:
                room = max(1, _BLOCK_VALUES // keys.shape[1])
            parts.append(Records(torch.from_numpy(keys).half(), torch.from_numpy(tokens_from_ids(ids))))
            room -= len(ids)
        if parts:
            yield _join_records(parts)


def _join_records(parts: list[Records]) -> Records:
    """Concatenate several groups of records to one, at least one group."""
    return Records(*(torch.cat(column) for column in zip(*parts, strict=True)))


def choose_held_out(store: Reader, selection: Selection, generator: torch.Generator) -> list[int]:
    """Choose random documents that are held out of training, and return their numbers.

    Together they have at most `HELD_OUT_SHARE` of all tokens, and at most `HELD_OUT_TOKENS` tokens. If every
    single document is longer than this, only the shortest document is held out.

    Args:
        store: the store.
        selection: the documents to choose from.
        generator: random generator.

    Raises:
        InputError: there are fewer than two documents.
    """
    lengths = {number: tokens for number, tokens in store.lengths(selection).items() if tokens}
    if len(lengths) < 2:
        raise InputError(
            f"{len(lengths)} documents are too few to train on: at least 2 are needed, since some are held "
            "out"
        )
    left = min(HELD_OUT_TOKENS, int(HELD_OUT_SHARE * sum(lengths.values())))
    numbers, held_out = list(lengths), []
    for at in torch.randperm(len(numbers), generator=generator).tolist():
        if lengths[numbers[at]] <= left:
            left -= lengths[numbers[at]]
            held_out.append(numbers[at])
    return held_out or [min(lengths, key=lengths.__getitem__)]


# -- measuring it


def add_substitute(
    scored: ScoredText, store: Reader, selection: Selection, device: torch.device | str
) -> ScoredText:
    """Return a copy of a scored text with the predictions of a substitute.

    This is for a substitute that was trained after the text was scored. `score_once` itself adds a substitute
    that was trained before.

    Args:
        scored: the text; returned unchanged if no substitute can be used.
        store: the store.
        selection: the selection whose domains the substitute was trained on.
        device: device of the computation.
    """
    component = Substitute()
    settings = component.settings_to_fit(store, selection)
    if settings is None or scored.reading is None:
        return scored
    keys, targets = scored.reading.keys, scored.reading.targets
    gold, largest = load_head(store, settings, device).gold_and_largest(keys, targets)
    found = {**scored.evidence.found, component.name: TargetProbability(gold.exp(), largest.exp())}
    evidence = replace(scored.evidence, found=found)
    return replace(scored, evidence=evidence, others={**scored.others, component.name: settings})


def fit_alone(tokens: Tensor, scored: ScoredText) -> KNNSettings:
    """Fit the weight λ of the substitute in a mixture with the model alone, and return the settings.

    The settings retrieve nothing.

    Args:
        tokens: indices of the tokens to fit on, int64, shape (n,).
        scored: the text, scored with a substitute.
    """
    every = torch.ones(len(tokens), dtype=torch.bool)
    fitted = _make_fitting(scored, tokens).fit(scored.lm_log_probs[tokens], every)
    return KNNSettings(1, 1.0, FixedLambda(0.0), others={Substitute.name: fitted})


def fit_beside(
    evidence: GridEvidence, scored: ScoredText, fit: Callable[[GridEvidence], KNNSettings]
) -> KNNSettings:
    """Fit the keys' settings and the weight λ of the substitute alternately; return settings with both.

    Args:
        evidence: probabilities of the tokens to fit on.
        scored: the text, scored with a substitute.
        fit: fits the settings of the keys.
    """
    tokens = evidence.tokens
    fitting, every = _make_fitting(scored, tokens), torch.ones(len(tokens), dtype=torch.bool)
    settings, fitted = KNNSettings(), {**fitting.settings, "lam": 0.0}
    for _ in range(_ROUNDS):
        # λ of the keys mixes p_LM and p_kNN, after the substitute was mixed into both with the same λ.
        lam = fitted["lam"]
        part = lam * fitting.found.probs[:, None]
        settings = fit(
            replace(evidence, lm=(1 - lam) * evidence.lm + part, knn=(1 - lam) * evidence.knn + part)
        )
        fitted = fitting.fit(scored.log_probs(settings, tokens).log_probs, every)
    return settings.with_part(Substitute.name, fitted)


def _make_fitting(scored: ScoredText, tokens: Tensor) -> DistributionFitting:
    """Return the object that fits the weight λ of the substitute to some tokens of a text.

    Args:
        scored: the text, scored with a substitute.
        tokens: indices of the tokens, int64, shape (n,).
    """
    name = Substitute.name
    found = scored.evidence.found[name].select_rows(tokens)
    return DistributionFitting(Substitute(), found, scored.target_tokens(tokens), scored.others[name])


class SubstituteEvaluation(NamedTuple):
    """The result of `evaluate_substitute`: perplexities on held-out documents."""

    tokens: int
    """Number of predicted tokens."""
    base_ppl: float
    """Perplexity of the model alone."""
    substitute_ppl: float
    """Perplexity of the model with the substitute, without retrieval."""
    store_ppl: float
    """Perplexity of the model with the store's keys."""
    share: float | None
    """The substitute's gain in log perplexity divided by the store's gain; None if the store gains
    nothing."""


def evaluate_substitute(
    lm: KNNModel,
    documents: Iterable[object],
    knn: KNNSettings | None = None,
    *,
    on_bad: OnBad | None = None,
    progress: Progress | None = None,
) -> SubstituteEvaluation:
    """Measure how much of the store's gain (in log perplexity) the substitute recovers.

    The documents are scored twice: with the store's keys, and with the substitute.

    Args:
        lm: the model.
        documents: held-out text, in any form that `add` takes.
        knn: settings of this call; default ``lm.knn``. Only the component of the keys is used. The substitute
            must be trained on exactly the selected domains.
        on_bad: called for each document that cannot be used; the document is left out. With None the first
            bad document raises an error.
        progress: receives the number of scored tokens.

    Raises:
        ConfigError: no substitute was trained on exactly these domains, or the selection has other conditions
            than domains.
        InputError: a document is in the store, or there is no token to predict.
        OutdatedWeightsError: a document that the substitute was trained on was removed or replaced.
    """
    store = lm.store
    settings = resolve(store, knn or lm.knn)
    selection = settings.selection
    if Selection(domains=selection.domains) != selection:
        raise ConfigError("a substitute covers whole domains: leave out --tag and --where")
    trained = find_trained_settings(store, selection, Substitute.name)
    if trained is None:
        options = "".join(f" --domain {name}" for name in selection.domains or ())
        raise ConfigError(
            f"no substitute was trained on exactly these domains: run knnstore research substitute{options}"
        )
    _refuse_outdated(store, trained)
    listed = list(usable_documents(lm.reader, documents, on_bad))
    HeldOut.compare_with_store(store, lm.reader, listed, selection).refuse_stored()
    keys = replace(settings, cache=None, ngrams=None, others={})
    alone = KNNSettings(k=1, lam=0.0, selection=selection, others={Substitute.name: trained})
    by_store = evaluate(lm, listed, keys, progress=progress)
    by_substitute = evaluate(lm, listed, alone, progress=progress)
    base, substitute_ppl = by_store.base_ppl, by_substitute.knn_ppl
    gain = math.log(base / by_store.knn_ppl)
    share = math.log(base / substitute_ppl) / gain if gain > 0 else None
    return SubstituteEvaluation(by_store.tokens, base, substitute_ppl, by_store.knn_ppl, share)
