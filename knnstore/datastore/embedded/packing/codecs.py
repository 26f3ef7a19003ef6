"""Keys as codes of some tens of bytes, which are all that is kept of them.

`int8` rounds each component. `pq32` and its like are product quantizers (Jégou et al. 2011,
https://doi.org/10.1109/TPAMI.2010.57): of a key the nearest of 256 centers is taken first; what is left is
turned so that the principal components are shared out evenly among 32 parts, as in the closed form of Ge et
al. 2013 (https://arxiv.org/abs/1312.4894), and each part is named by the nearest of 256 entries of a codebook
of its own.
"""

import math
import re
from abc import ABC, abstractmethod
from typing import Self

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.arrays import Keys
from knnstore.errors import ConfigError, CorruptDatastoreError

Codes = NDArray[np.uint8]
"""Shape (n, size)."""

_PRODUCT = re.compile(r"pq([1-9]\d{0,3})")
_ENTRIES = 256
_ROUNDS = 5
_SAMPLE, _SAMPLE_VALUES = 1 << 15, 1 << 25  # keys, of so many components in all
_CHUNK = 1 << 13
_IN_CACHE = 1 << 9  # keys; their scores stay in the cache of a core
_LARGEST = 65504.0  # of half precision


class Codec(ABC):
    """Turns keys of `dim` components into codes and back."""

    size: int
    """Bytes of a key."""

    rotation: NDArray[np.float32] | None = None
    """Turns keys so that codes are read most cheaply: shape (dim, at least dim); distances between keys that
    are turned are what they were. None leaves keys as they are."""

    @abstractmethod
    def encode(self, keys: Keys) -> Codes:
        """The codes of keys, shape (n, dim)."""

    @abstractmethod
    def turned(self, codes: Codes) -> Keys:
        """What `decode` gives, times `rotation`."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """All that `codec_of` needs."""

    def decode(self, codes: Codes) -> Keys:
        """About the keys that the codes were made of, shape (n, dim)."""
        turned = self.turned(codes)
        return turned if self.rotation is None else turned @ self.rotation.T


class RoundedCodec(Codec):
    """A byte for each component, and a scale for each key."""

    def __init__(self, dim: int) -> None:
        self.size = 4 + dim

    def encode(self, keys: Keys) -> Codes:
        """The codes of keys, shape (n, dim)."""
        scales = np.maximum(np.abs(keys).max(1, keepdims=True) / np.float32(127), np.finfo(np.float32).tiny)
        rounded = np.rint(keys / scales).astype(np.int8)
        return np.concatenate([scales.view(np.uint8), rounded.view(np.uint8)], axis=1)

    def turned(self, codes: Codes) -> Keys:
        """The keys, rounded."""
        scales = np.ascontiguousarray(codes[:, :4]).view(np.float32)
        return np.ascontiguousarray(codes[:, 4:]).view(np.int8) * scales

    def to_bytes(self) -> bytes:
        """Nothing."""
        return b""


class ProductCodec(Codec):
    """A center, and an entry of each of some codebooks.

    Args:
        rotation: float16, shape (dim, width).
        centers: of all components, turned, float16, shape (256, width).
        books: float16, shape (parts, 256, width / parts).
    """

    def __init__(
        self, rotation: NDArray[np.float16], centers: NDArray[np.float16], books: NDArray[np.float16]
    ) -> None:
        self._stored = rotation, centers, books
        self.centers: NDArray[np.float32] = centers.astype(np.float32)
        """Shape (256, width)."""
        self.books: NDArray[np.float32] = books.astype(np.float32)
        """Shape (parts, 256, width / parts)."""
        self._entries = self.books.reshape(-1, books.shape[2])
        self._offsets = np.arange(len(books)) * _ENTRIES
        self.rotation = _orthonormal(rotation.astype(np.float32))
        self.size = 1 + len(books)

    @classmethod
    def fit(cls, keys: Keys, parts: int) -> Self:
        """Fit everything to keys, shape (n, dim), n >= 256; the same keys give the same."""
        random = np.random.default_rng(0)
        centers = _k_means(keys, random)
        left = keys - centers[_nearest(keys, centers)]
        rotation = _shared_out(left, parts).astype(np.float16)
        turn = _orthonormal(rotation.astype(np.float32))
        pieces = (left @ turn).reshape(len(left), parts, -1)
        books = np.stack([_k_means(np.ascontiguousarray(pieces[:, part]), random) for part in range(parts)])
        return cls(rotation, _half(centers @ turn), _half(books))

    @classmethod
    def read(cls, stored: bytes, dim: int, parts: int) -> Self:
        """Undo `to_bytes`."""
        width = parts * math.ceil(dim / parts)
        values = np.frombuffer(stored, np.float16)
        rotation, centers, books = np.split(values, np.cumsum([dim * width, _ENTRIES * width]))
        return cls(
            rotation.reshape(dim, width), centers.reshape(-1, width), books.reshape(parts, _ENTRIES, -1)
        )

    def encode(self, keys: Keys) -> Codes:
        """The codes of keys, shape (n, dim)."""
        assert self.rotation is not None
        codes = np.empty((len(keys), self.size), np.uint8)
        for start in range(0, len(keys), _CHUNK):
            rows = slice(start, start + _CHUNK)
            turned = keys[rows] @ self.rotation
            codes[rows, 0] = nearest = _nearest(turned, self.centers)
            pieces = (turned - self.centers[nearest]).reshape(len(turned), len(self.books), -1)
            for part, book in enumerate(self.books):
                codes[rows, part + 1] = _nearest(np.ascontiguousarray(pieces[:, part]), book)
        return codes

    def turned(self, codes: Codes) -> Keys:
        """The sums of centers and entries."""
        # `take` copies rows three times as fast as an index does.
        entries: Keys = self._entries.take(codes[:, 1:] + self._offsets, axis=0).reshape(len(codes), -1)
        entries += self.centers.take(codes[:, 0], axis=0)
        return entries

    def to_bytes(self) -> bytes:
        """Rotation, centers and codebooks, one after another."""
        return b"".join(array.tobytes() for array in self._stored)


def checked_kind(kind: object) -> str:
    """The name of a kind of codes.

    Raises:
        ConfigError: there is no such kind.
    """
    if kind == "int8" or (isinstance(kind, str) and _PRODUCT.fullmatch(kind)):
        return str(kind)
    raise ConfigError(f"codes must be int8, or pq and a number of bytes, as pq32, got {kind!r}")


def code_size(kind: str, dim: int) -> int:
    """Bytes of a key."""
    return 4 + dim if kind == "int8" else 1 + _parts(kind, dim)


def sample_size(dim: int) -> int:
    """To how many keys a codec is fitted; to more makes it no better."""
    return min(_SAMPLE, _SAMPLE_VALUES // max(1, dim))


def fit_codec(kind: str, keys: Keys) -> Codec:
    """Make a codec of a kind, and fit it to keys, shape (n, dim), if it is of those that are fitted."""
    dim = keys.shape[1]
    return RoundedCodec(dim) if kind == "int8" else ProductCodec.fit(keys, _parts(kind, dim))


def codec_of(kind: str, dim: int, stored: bytes) -> Codec:
    """Undo `Codec.to_bytes`.

    Raises:
        CorruptDatastoreError: these are not the bytes of such a codec.
    """
    if kind == "int8":
        return RoundedCodec(dim)
    try:
        return ProductCodec.read(stored, dim, _parts(kind, dim))
    except ValueError as error:
        raise CorruptDatastoreError(f"no codec {kind} for {dim} components") from error


def _parts(kind: str, dim: int) -> int:
    found = _PRODUCT.fullmatch(kind)
    assert found is not None
    return min(int(found[1]), dim)


def _nearest(keys: Keys, entries: NDArray[np.float32]) -> NDArray[np.intp]:
    """The nearest entry to each key: by k·e - |e|²/2, to which a column of ones contributes the last."""
    norms = (entries * entries).sum(1, keepdims=True) / np.float32(-2)
    weights = np.ascontiguousarray(np.concatenate([entries, norms], axis=1).T)
    extended = np.concatenate([keys, np.ones((len(keys), 1), np.float32)], axis=1)
    found, scores = np.empty(len(keys), np.intp), np.empty((_IN_CACHE, len(entries)), np.float32)
    for start in range(0, len(keys), _IN_CACHE):
        some = extended[start : start + _IN_CACHE]
        np.matmul(some, weights, out=scores[: len(some)])
        scores[: len(some)].argmax(1, out=found[start : start + len(some)])
    return found


def _k_means(keys: Keys, random: np.random.Generator) -> NDArray[np.float32]:
    """Fit 256 entries (Lloyd 1982)."""
    entries = keys[random.choice(len(keys), _ENTRIES, replace=len(keys) < _ENTRIES)]
    for _ in range(_ROUNDS):
        owners = _nearest(keys, entries)
        order, counts = np.argsort(owners, kind="stable"), np.bincount(owners, minlength=_ENTRIES)
        there = np.flatnonzero(counts)
        starts = (np.cumsum(counts) - counts)[there]
        entries = keys[random.integers(len(keys), size=_ENTRIES)]  # for those without a key
        entries[there] = np.add.reduceat(keys[order], starts, axis=0) / counts[there, None]
    return entries


def _shared_out(keys: Keys, parts: int) -> NDArray[np.float32]:
    """Principal components, dealt out so that the variances of each part have about the same product.

    Returns:
        float32, shape (dim, width): orthonormal columns, and columns of zeros to fill parts up.
    """
    dim = keys.shape[1]
    room = math.ceil(dim / parts)
    variances, axes = np.linalg.eigh(np.cov(keys, rowvar=False, ddof=0, dtype=np.float64).reshape(dim, dim))
    logs = np.log(np.maximum(variances, variances.max() * 1e-9 + 1e-30))
    rotation = np.zeros((dim, parts, room), np.float32)
    taken, sums = np.zeros(parts, int), np.zeros(parts)
    for at in range(dim - 1, -1, -1):
        # Sums of logarithms may only grow, else a part that has more would seem to have less.
        part = min(np.flatnonzero(taken < room), key=lambda one: (sums[one], one))
        rotation[:, part, taken[part]] = axes[:, at]
        taken[part] += 1
        sums[part] += logs[at] - logs.min() + 1e-3
    return rotation.reshape(dim, -1)


def _orthonormal(rotation: NDArray[np.float32]) -> NDArray[np.float32]:
    """Undo what rounding did to orthonormal columns, by a step of Newton and Schulz."""
    step = np.eye(rotation.shape[1], dtype=np.float32) * 1.5 - (rotation.T @ rotation) * 0.5
    turned: NDArray[np.float32] = rotation @ step.astype(np.float32)
    return turned


def _half(values: NDArray[np.float32]) -> NDArray[np.float16]:
    return values.clip(-_LARGEST, _LARGEST).astype(np.float16)
