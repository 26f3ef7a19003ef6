"""Codecs, which compress each key to a code of some tens of bytes. The codes are stored in place of the keys.

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
_ONE_THREAD = 1 << 18
"""Largest product of the three sizes of a matrix multiplication for which OpenBLAS uses one thread.

OpenBLAS divides larger multiplications among threads, which spin while they wait for each other. If another
process needs a core at this time, a small multiplication takes twenty times as long.
"""
_FEWEST_ROWS = 8
"""Number of rows below which a matrix multiplication with one thread is too slow."""
_LARGEST = 65504.0  # of half precision


class Codec(ABC):
    """Compresses keys of `dim` components to codes, and decodes codes to approximate keys.

    A code is a fixed number of bytes that stands for one key.
    """

    size: int
    """Number of bytes of the code of a key."""

    rotation: NDArray[np.float32] | None = None
    """Matrix with orthonormal rows, shape (dim, width), width >= dim; None means the identity.

    ``key @ rotation`` is the key in the *rotated space*. Distances between rotated keys equal distances
    between the keys, and decoding to the rotated space is faster than decoding to the keys.
    """

    @abstractmethod
    def encode(self, keys: Keys) -> Codes:
        """Compress keys, float32, shape (n, dim), to codes, uint8, shape (n, size), in the same order."""

    @abstractmethod
    def decode_rotated(self, codes: Codes) -> Keys:
        """Decode codes (compressed keys) to approximate keys that are multiplied by `rotation`.

        Args:
            codes: uint8, shape (n, size).

        Returns:
            Approximations of ``keys @ rotation``, float32, shape (n, width). If `rotation` is None, these are
            approximations of the keys.
        """

    @abstractmethod
    def to_bytes(self) -> bytes:
        """Return the fitted values of this codec (compressor of keys) as the content of a file.

        `codec_from_bytes` makes the codec from this content again.
        """

    def decode(self, codes: Codes) -> Keys:
        """Decode codes, uint8, shape (n, size), to approximate keys, float32, shape (n, dim).

        Codes are compressed keys.
        """
        turned = self.decode_rotated(codes)
        return turned if self.rotation is None else turned @ self.rotation.T


class RoundedCodec(Codec):
    """A codec that rounds each component to one signed byte, with one float32 scale for each key.

    Args:
        dim: number of components of a key.
    """

    def __init__(self, dim: int) -> None:
        self.size = 4 + dim

    def encode(self, keys: Keys) -> Codes:
        """Compress keys, float32, shape (n, dim), to codes, uint8, shape (n, 4 + dim)."""
        scales = np.maximum(np.abs(keys).max(1, keepdims=True) / np.float32(127), np.finfo(np.float32).tiny)
        rounded = np.rint(keys / scales).astype(np.int8)
        return np.concatenate([scales.view(np.uint8), rounded.view(np.uint8)], axis=1)

    def decode_rotated(self, codes: Codes) -> Keys:
        """Decode codes (compressed keys), uint8, shape (n, 4 + dim), to keys, float32, shape (n, dim).

        The keys are approximate. They are not rotated, because this codec has no rotation.
        """
        scales = np.ascontiguousarray(codes[:, :4]).view(np.float32)
        return np.ascontiguousarray(codes[:, 4:]).view(np.int8) * scales

    def to_bytes(self) -> bytes:
        """Return empty bytes, because this codec (a compressor of keys) has no fitted values to store."""
        return b""


class ProductCodec(Codec):
    """A product quantizer: a codec (compressor of keys) whose codes are indices into fitted tables.

    A key is first rotated. The first byte of its code is the index of the nearest of 256 centers. The
    difference of the rotated key and this center is cut into parts of equal length. Each part has a table of
    256 vectors, its codebook. For each part, the code has one more byte: the index of the nearest vector in
    the part's codebook.

    Args:
        rotation: matrix by which keys are multiplied first, float16, shape (dim, width).
        centers: the 256 centers, already rotated, float16, shape (256, width).
        books: the codebook of each part, float16, shape (parts, 256, width / parts).
    """

    def __init__(
        self, rotation: NDArray[np.float16], centers: NDArray[np.float16], books: NDArray[np.float16]
    ) -> None:
        self._stored = rotation, centers, books
        self.centers: NDArray[np.float32] = centers.astype(np.float32)
        """The 256 rotated centers, shape (256, width)."""
        self.books: NDArray[np.float32] = books.astype(np.float32)
        """The codebook of each part, shape (parts, 256, width / parts)."""
        self._entries = self.books.reshape(-1, books.shape[2])
        self._offsets = np.arange(len(books)) * _ENTRIES
        self.rotation = _orthonormalize(rotation.astype(np.float32))
        self.size = 1 + len(books)

    @classmethod
    def fit(cls, keys: Keys, parts: int) -> Self:
        """Fit centers, rotation and codebooks to keys, and return the codec (compressor of keys).

        The same keys always give the same codec.

        Args:
            keys: float32, shape (n, dim), n >= 1. If n < 256, some keys are used several times.
            parts: number of parts into which the components of a key are divided, 1 to dim. A code has
                parts + 1 bytes.
        """
        random = np.random.default_rng(0)
        centers = _fit_entries(keys, random)
        residuals = keys - centers[_find_nearest_entries(keys, centers)]
        rotation = _spread_principal_axes(residuals, parts).astype(np.float16)
        turn = _orthonormalize(rotation.astype(np.float32))
        pieces = (residuals @ turn).reshape(len(residuals), parts, -1)
        books = np.stack(
            [_fit_entries(np.ascontiguousarray(pieces[:, part]), random) for part in range(parts)]
        )
        return cls(rotation, _round_to_half(centers @ turn), _round_to_half(books))

    @classmethod
    def read(cls, stored: bytes, dim: int, parts: int) -> Self:
        """Create a codec (a compressor of keys) from bytes that `to_bytes` returned.

        Args:
            stored: the bytes.
            dim: number of components of a key.
            parts: number of parts into which the components are divided.

        Raises:
            ValueError: the number of bytes does not fit to `dim` and `parts`.
        """
        width = parts * math.ceil(dim / parts)
        values = np.frombuffer(stored, np.float16)
        rotation, centers, books = np.split(values, np.cumsum([dim * width, _ENTRIES * width]))
        return cls(
            rotation.reshape(dim, width), centers.reshape(-1, width), books.reshape(parts, _ENTRIES, -1)
        )

    def encode(self, keys: Keys) -> Codes:
        """Compress keys, float32, shape (n, dim), to codes, uint8, shape (n, 1 + parts)."""
        assert self.rotation is not None
        codes = np.empty((len(keys), self.size), np.uint8)
        for start in range(0, len(keys), _CHUNK):
            rows = slice(start, start + _CHUNK)
            turned = keys[rows] @ self.rotation
            codes[rows, 0] = nearest = _find_nearest_entries(turned, self.centers)
            pieces = (turned - self.centers[nearest]).reshape(len(turned), len(self.books), -1)
            for part, book in enumerate(self.books):
                codes[rows, part + 1] = _find_nearest_entries(np.ascontiguousarray(pieces[:, part]), book)
        return codes

    def decode_rotated(self, codes: Codes) -> Keys:
        """Decode codes to approximate rotated keys: the center plus the codebook vector of each part.

        Codes are compressed keys.

        Args:
            codes: uint8, shape (n, 1 + parts).

        Returns:
            Approximations of ``keys @ rotation``, float32, shape (n, width).
        """
        # `take` copies rows three times as fast as an index does.
        entries: Keys = self._entries.take(codes[:, 1:] + self._offsets, axis=0).reshape(
            len(codes), self.centers.shape[1]
        )
        entries += self.centers.take(codes[:, 0], axis=0)
        return entries

    def to_bytes(self) -> bytes:
        """Return rotation, centers and codebooks as bytes, one after another."""
        return b"".join(array.tobytes() for array in self._stored)


def validate_kind(kind: object) -> str:
    """Return the name of a kind of codes (compressed keys), if it is known.

    Args:
        kind: ``"int8"``, which rounds each component to a byte, or ``"pqN"`` with a number N, for example
            ``"pq32"``: a product quantizer with N parts.

    Raises:
        ConfigError: the kind is unknown.
    """
    if kind == "int8" or (isinstance(kind, str) and _PRODUCT.fullmatch(kind)):
        return str(kind)
    raise ConfigError(f"codes must be int8, or pq and a number of bytes such as pq32, got {kind!r}")


def code_size(kind: str, dim: int) -> int:
    """Return the number of bytes of the code (compressed form) of a key.

    Args:
        kind: kind of codes, ``"int8"`` or ``"pqN"``.
        dim: number of components of a key.
    """
    return 4 + dim if kind == "int8" else 1 + _count_parts(kind, dim)


def sample_size(dim: int) -> int:
    """Return the number of keys to sample for fitting a codec (a compressor of keys), at most 32,768.

    More keys would hardly make the codec better.

    Args:
        dim: number of components of a key. Large keys give a smaller number, to bound the memory.
    """
    return min(_SAMPLE, _SAMPLE_VALUES // max(1, dim))


def fit_codec(kind: str, keys: Keys) -> Codec:
    """Return a new codec (a compressor of keys) that is fitted to a sample of keys.

    Args:
        kind: ``"int8"`` for rounding, for which nothing is fitted; ``"pqN"`` for a product quantizer with N
            parts.
        keys: sample of the keys, float32, shape (n, dim), n >= 1.
    """
    dim = keys.shape[1]
    return RoundedCodec(dim) if kind == "int8" else ProductCodec.fit(keys, _count_parts(kind, dim))


def codec_from_bytes(kind: str, dim: int, stored: bytes) -> Codec:
    """Create a codec (a compressor of keys) from the bytes that `Codec.to_bytes` returned.

    Args:
        kind: kind of codes, ``"int8"`` or ``"pqN"``.
        dim: number of components of a key.
        stored: content of the codec's file; ignored for ``int8``.

    Raises:
        CorruptDatastoreError: the number of bytes does not fit to `kind` and `dim`.
    """
    if kind == "int8":
        return RoundedCodec(dim)
    try:
        return ProductCodec.read(stored, dim, _count_parts(kind, dim))
    except ValueError as error:
        raise CorruptDatastoreError(f"no codec {kind} for {dim} components") from error


class Coding(NamedTuple):
    """Rules for compressing keys to codes: the kind of codes, and the sizes of groups that are compressed.

    A group is a numbered set of records, such as a domain.
    """

    kind: str
    """Kind of codes: ``"int8"``, or ``"pqN"`` such as ``"pq32"``."""

    least: int
    """Smallest number of records of a group whose keys are compressed when one of its files is rewritten.

    A codec is fitted to a group only once. It fits better if the group has more records at that time.
    """

    most: int
    """Smallest number of records of a group whose new keys are compressed when they are added.

    This saves space while many records are added.
    """


@dataclass(frozen=True, slots=True)
class CodesEntry:
    """The kind and the file of a codec (compressor of keys), as the manifest has them.

    The manifest is the list of all files in use.
    """

    kind: str
    """Kind of codes: ``"int8"``, or ``"pqN"`` such as ``"pq32"``."""

    file: StoredFile
    """File of the codec, which all coded keys of a group share. Without this file, the keys are lost."""


class CodecFile:
    """A codec (compressor of keys) that is read from its file at the first use.

    Args:
        root: the datastore's directory.
        entry: kind and file of the codec.
        dim: number of components of a key.
        codec: the codec, if this process has just written its file; with None, the file is read when needed.
    """

    def __init__(self, root: Path, entry: CodesEntry, dim: int, codec: Codec | None = None) -> None:
        self.entry = entry
        self._root, self._dim, self._codec = root, dim, codec
        self._file: MappedFile | None = None

    def map(self) -> None:
        """Map the codec's file into memory, so that it stays readable when another process removes the file.

        A codec compresses keys. Does nothing if the file is mapped already, or if the codec is in memory.

        Raises:
            FileNotFoundError: the file is missing.
            CorruptDatastoreError: the file has a wrong size, or is no regular file.
        """
        if self._codec is None and self._file is None:
            self._file = MappedFile(self._root, self.entry.file)

    @property
    def codec(self) -> Codec:
        """The codec (a compressor of keys). The first use reads the codec's file and checks its SHA-256.

        Raises:
            FileNotFoundError: the file is missing.
            CorruptDatastoreError: the file is damaged.
        """
        if self._codec is None:
            self.map()
            assert self._file is not None
            self._file.check()
            self._codec = codec_from_bytes(self.entry.kind, self._dim, self._file.bytes.tobytes())
        return self._codec


def _count_parts(kind: str, dim: int) -> int:
    """Return the number of parts of a product quantizer of kind ``"pqN"``: N, but at most `dim`.

    Args:
        kind: kind of codes (compressed keys), for example ``"pq32"``.
        dim: number of components of a key.
    """
    match = _PRODUCT.fullmatch(kind)
    assert match is not None
    return min(int(match[1]), dim)


def _find_nearest_entries(keys: Keys, entries: NDArray[np.float32]) -> NDArray[np.intp]:
    """Return for each key the index of the nearest entry by Euclidean distance, shape (n,).

    For a key k, this is the entry e with the largest k·e - |e|²/2. A column of ones is appended to the keys,
    so that one matrix multiplication computes both terms.

    Args:
        keys: float32, shape (n, d), n >= 1.
        entries: vectors to choose from, float32, shape (e, d).
    """
    norms = (entries * entries).sum(1, keepdims=True) / np.float32(-2)
    weights = np.concatenate([entries, norms], axis=1).T.copy()
    # 1) Divide the keys into blocks. `matmul` multiplies one block after another, each with one thread.
    rows = _ONE_THREAD // weights.size
    if rows < _FEWEST_ROWS:  # entries of many components: several threads are worth their waiting
        rows = min(len(keys), _CHUNK)
    blocks = np.ones((math.ceil(len(keys) / rows), rows, len(weights)), np.float32)
    blocks.reshape(-1, len(weights))[: len(keys), :-1] = keys
    # 2) Find the entries with the largest scores, for a few blocks at a time.
    step = max(1, _IN_CACHE // rows)
    indices, scores = np.empty(blocks.shape[:2], np.intp), np.empty((step, rows, len(entries)), np.float32)
    for start in range(0, len(blocks), step):
        found = np.matmul(blocks[start : start + step], weights, out=scores[: len(blocks) - start])
        found.argmax(2, out=indices[start : start + step])
    return indices.reshape(-1)[: len(keys)]


def _fit_entries(keys: Keys, random: np.random.Generator) -> NDArray[np.float32]:
    """Fit 256 centers to keys by five rounds of k-means (Lloyd 1982).

    Args:
        keys: float32, shape (n, d), n >= 1.
        random: generator that chooses the first centers, and replaces centers without keys.

    Returns:
        The centers, float32, shape (256, d).
    """
    entries = keys[random.choice(len(keys), _ENTRIES, replace=len(keys) < _ENTRIES)]
    for _ in range(_ROUNDS):
        owners = _find_nearest_entries(keys, entries)
        order, counts = np.argsort(owners, kind="stable"), np.bincount(owners, minlength=_ENTRIES)
        used_entries = np.flatnonzero(counts)
        starts = (np.cumsum(counts) - counts)[used_entries]
        entries = keys[random.integers(len(keys), size=_ENTRIES)]  # for entries without a key
        entries[used_entries] = np.add.reduceat(keys[order], starts, axis=0) / counts[used_entries, None]
    return entries


def _spread_principal_axes(keys: Keys, parts: int) -> NDArray[np.float32]:
    """Compute a rotation of keys to their principal axes, with the axes divided evenly among parts.

    Each part gets about the same number of axes, and about the same product of the variances along its axes.
    So the parts of a rotated key are about equally hard to compress.

    Args:
        keys: shape (n, dim).
        parts: number of parts, at most dim.

    Returns:
        Matrix, float32, shape (dim, width). Each part has width / parts consecutive columns: first its axes
        as orthonormal columns, then columns of zeros up to this number.
    """
    dim = keys.shape[1]
    room = math.ceil(dim / parts)
    variances, axes = np.linalg.eigh(np.cov(keys, rowvar=False, ddof=0, dtype=np.float64).reshape(dim, dim))
    logs = np.log(np.maximum(variances, variances.max() * 1e-9 + 1e-30))
    rotation = np.zeros((dim, parts, room), np.float32)
    counts, sums = np.zeros(parts, int), np.zeros(parts)
    for axis in range(dim - 1, -1, -1):
        # Each added logarithm must be positive, or a part with more components could have a smaller sum.
        part = min(np.flatnonzero(counts < room), key=lambda candidate: (sums[candidate], candidate))
        rotation[:, part, counts[part]] = axes[:, axis]
        counts[part] += 1
        sums[part] += logs[axis] - logs.min() + 1e-3
    return rotation.reshape(dim, -1)


def _orthonormalize(rotation: NDArray[np.float32]) -> NDArray[np.float32]:
    """Remove rounding errors from a rotation matrix by one Newton-Schulz step.

    Args:
        rotation: matrix whose nonzero columns are orthonormal up to rounding, shape (dim, width).

    Returns:
        A matrix of the same shape whose nonzero columns are orthonormal to float32 precision.
    """
    step = np.eye(rotation.shape[1], dtype=np.float32) * 1.5 - (rotation.T @ rotation) * 0.5
    turned: NDArray[np.float32] = rotation @ step.astype(np.float32)
    return turned


def _round_to_half(values: NDArray[np.float32]) -> NDArray[np.float16]:
    """Convert values to float16; values beyond ±65504 become 65504 or -65504."""
    return values.clip(-_LARGEST, _LARGEST).astype(np.float16)
