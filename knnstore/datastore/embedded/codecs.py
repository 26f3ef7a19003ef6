"""Codecs: keys as codes of some tens of bytes, which replace the keys.

`int8` rounds each component. `pq32`, `pq64` and so on are product quantizers (Jégou et al. 2011,
https://doi.org/10.1109/TPAMI.2010.57). First the nearest of 256 centers is subtracted from a key. The
residual is rotated, so that its principal components are spread evenly over 32 parts, as in the closed form
of Ge et al. 2013 (https://arxiv.org/abs/1312.4894). Each part is coded as the nearest of 256 entries of its
own codebook.
"""

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.arrays import Keys
from knnstore.datastore.embedded.mapped import MappedFile
from knnstore.durable import StoredFile
from knnstore.errors import ConfigError, CorruptDatastoreError

Codes = NDArray[np.uint8]
"""Codes of n keys, uint8, shape (n, size)."""

_PRODUCT = re.compile(r"pq([1-9]\d{0,3})")
_ENTRIES = 256
_ROUNDS = 5
_SAMPLE, _SAMPLE_VALUES = (
    1 << 15,
    1 << 25,
)  # a sample has at most this many keys and this many components in all
_CHUNK = 1 << 13
_IN_CACHE = 1 << 9  # keys; their scores stay in the cache of a core
_LARGEST = 65504.0  # of half precision


class Codec(ABC):
    """Encodes keys of `dim` components as codes, and decodes them."""

    size: int
    """Bytes of the code of a key."""

    rotation: NDArray[np.float32] | None = None
    """Matrix with orthonormal rows, shape (dim, width), width >= dim. In its space codes are decoded most
    cheaply, and distances stay the same. None means the identity."""

    @abstractmethod
    def encode(self, keys: Keys) -> Codes:
        """Return the codes of keys, shape (n, dim)."""

    @abstractmethod
    def turned(self, codes: Codes) -> Keys:
        """Decode codes in the rotated space. Returns shape (n, width)."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """Return the content of the codec's file; see `codec_of`."""

    def decode(self, codes: Codes) -> Keys:
        """Decode codes. Returns approximations of the keys, float32, shape (n, dim)."""
        turned = self.turned(codes)
        return turned if self.rotation is None else turned @ self.rotation.T


class RoundedCodec(Codec):
    """A codec with one byte for each component and one float32 scale for each key."""

    def __init__(self, dim: int) -> None:
        self.size = 4 + dim

    def encode(self, keys: Keys) -> Codes:
        """Return the codes of keys, shape (n, dim)."""
        scales = np.maximum(np.abs(keys).max(1, keepdims=True) / np.float32(127), np.finfo(np.float32).tiny)
        rounded = np.rint(keys / scales).astype(np.int8)
        return np.concatenate([scales.view(np.uint8), rounded.view(np.uint8)], axis=1)

    def turned(self, codes: Codes) -> Keys:
        """Decode codes; there is no rotation."""
        scales = np.ascontiguousarray(codes[:, :4]).view(np.float32)
        return np.ascontiguousarray(codes[:, 4:]).view(np.int8) * scales

    def to_bytes(self) -> bytes:
        """Return no bytes: there is nothing to fit."""
        return b""


class ProductCodec(Codec):
    """A product quantizer: one byte for the center, and one for the entry of each codebook.

    Args:
        rotation: float16, shape (dim, width).
        centers: in the rotated space, float16, shape (256, width).
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
        """Fit a codec to keys, shape (n, dim), n >= 256. The same keys give the same codec."""
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
        """Create the codec whose `to_bytes` returned `stored`."""
        width = parts * math.ceil(dim / parts)
        values = np.frombuffer(stored, np.float16)
        rotation, centers, books = np.split(values, np.cumsum([dim * width, _ENTRIES * width]))
        return cls(
            rotation.reshape(dim, width), centers.reshape(-1, width), books.reshape(parts, _ENTRIES, -1)
        )

    def encode(self, keys: Keys) -> Codes:
        """Return the codes of keys, shape (n, dim)."""
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
        """Decode codes in the rotated space: add up centers and entries."""
        # `take` copies rows three times as fast as an index does.
        entries: Keys = self._entries.take(codes[:, 1:] + self._offsets, axis=0).reshape(len(codes), -1)
        entries += self.centers.take(codes[:, 0], axis=0)
        return entries

    def to_bytes(self) -> bytes:
        """Return rotation, centers and codebooks as bytes, one after another."""
        return b"".join(array.tobytes() for array in self._stored)


def checked_kind(kind: object) -> str:
    """Check the name of a kind of codes and return it.

    Raises:
        ConfigError: the kind is unknown.
    """
    if kind == "int8" or (isinstance(kind, str) and _PRODUCT.fullmatch(kind)):
        return str(kind)
    raise ConfigError(f"codes must be int8, or pq and a number of bytes, as pq32, got {kind!r}")


def code_size(kind: str, dim: int) -> int:
    """Return the bytes of the code of a key."""
    return 4 + dim if kind == "int8" else 1 + _parts(kind, dim)


def sample_size(dim: int) -> int:
    """Return the number of keys that a codec is fitted to. More keys make it no better."""
    return min(_SAMPLE, _SAMPLE_VALUES // max(1, dim))


def fit_codec(kind: str, keys: Keys) -> Codec:
    """Create a codec of a kind. A product quantizer is fitted to keys, shape (n, dim)."""
    dim = keys.shape[1]
    return RoundedCodec(dim) if kind == "int8" else ProductCodec.fit(keys, _parts(kind, dim))


def codec_of(kind: str, dim: int, stored: bytes) -> Codec:
    """Create a codec from the bytes of `Codec.to_bytes`.

    Raises:
        CorruptDatastoreError: the bytes are not those of a codec of this kind.
    """
    if kind == "int8":
        return RoundedCodec(dim)
    try:
        return ProductCodec.read(stored, dim, _parts(kind, dim))
    except ValueError as error:
        raise CorruptDatastoreError(f"no codec {kind} for {dim} components") from error


class Coding(NamedTuple):
    """The coding of the keys of large groups."""

    kind: str
    """See `checked_kind`."""

    least: int
    """A group with this many records is coded when a segment of it is rewritten. A codec is fitted once, and
    it is better if more records are there."""

    most: int
    """A group with this many records is coded while it grows, to save room."""


@dataclass(frozen=True, slots=True)
class CodesEntry:
    """The coding of the keys of a segment."""

    kind: str
    """See `checked_kind`."""

    file: StoredFile
    """File of the codec. The segments of a group share it. Without it their codes cannot be read."""


class CodecFile:
    """The file of a codec. It is read at its first use.

    Args:
        root: the datastore's directory.
        entry: the codec's entry in the manifest.
        dim: number of components of a key.
        codec: the codec, if this process has just written it.
    """

    def __init__(self, root: Path, entry: CodesEntry, dim: int, codec: Codec | None = None) -> None:
        self.entry = entry
        self._root, self._dim, self._codec = root, dim, codec
        self._file: MappedFile | None = None

    def map(self) -> None:
        """Map the file, so that it stays readable when a newer manifest drops it.

        Raises:
            FileNotFoundError, CorruptDatastoreError: see `MappedFile`.
        """
        if self._codec is None and self._file is None:
            self._file = MappedFile(self._root, self.entry.file)

    @property
    def codec(self) -> Codec:
        """The codec.

        Raises:
            FileNotFoundError: the file is missing.
            CorruptDatastoreError: the file is damaged.
        """
        if self._codec is None:
            self.map()
            assert self._file is not None
            self._file.check()
            self._codec = codec_of(self.entry.kind, self._dim, self._file.bytes.tobytes())
        return self._codec


def _parts(kind: str, dim: int) -> int:
    found = _PRODUCT.fullmatch(kind)
    assert found is not None
    return min(int(found[1]), dim)


def _nearest(keys: Keys, entries: NDArray[np.float32]) -> NDArray[np.intp]:
    """Return the index of the nearest entry to each key: the one with the largest k·e - |e|²/2.

    A column of ones in the keys adds the last term in the same multiplication.
    """
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
        entries = keys[random.integers(len(keys), size=_ENTRIES)]  # for entries without a key
        entries[there] = np.add.reduceat(keys[order], starts, axis=0) / counts[there, None]
    return entries


def _shared_out(keys: Keys, parts: int) -> NDArray[np.float32]:
    """Return principal axes, spread over parts so that each part has about the same product of variances.

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
        # Each added logarithm must be positive, or a part with more components could have a smaller sum.
        part = min(np.flatnonzero(taken < room), key=lambda one: (sums[one], one))
        rotation[:, part, taken[part]] = axes[:, at]
        taken[part] += 1
        sums[part] += logs[at] - logs.min() + 1e-3
    return rotation.reshape(dim, -1)


def _orthonormal(rotation: NDArray[np.float32]) -> NDArray[np.float32]:
    """Make rounded columns orthonormal again, by one Newton-Schulz step."""
    step = np.eye(rotation.shape[1], dtype=np.float32) * 1.5 - (rotation.T @ rotation) * 0.5
    turned: NDArray[np.float32] = rotation @ step.astype(np.float32)
    return turned


def _half(values: NDArray[np.float32]) -> NDArray[np.float16]:
    return values.clip(-_LARGEST, _LARGEST).astype(np.float16)
