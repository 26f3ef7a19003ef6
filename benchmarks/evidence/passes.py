"""Passes of the model that are made once and kept, and passes with retrieved chunks before the text."""

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from chunks import ChunkIndex
from numpy.typing import NDArray
from torch import Tensor

from knnstore.lm.keys import run_without_head
from knnstore.lm.reading import Encoded, Encoder

Row = NDArray[np.int64]
"""Token ids of one window, shape (t,)."""
States = tuple[Tensor, Tensor]
"""The hidden states of one window from which keys are made, and its final ones; float32, shapes (t, h)."""


class KeptPasses(Encoder):
    """An encoder that runs the model once for each window of text, and keeps the window's states in a file.

    Every side that scores the same text with the same model shares these passes, and a run that was stopped
    continues with the window after the last one.

    Args:
        encoder: the encoder of a store, which says where keys are captured and how they are joined.
        folder: folder of the files; created if needed.
    """

    def __init__(self, encoder: Encoder, folder: Path) -> None:
        super().__init__(encoder.model, encoder.location, encoder.joining, encoder.projection)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def encode(
        self, input_ids: NDArray[np.int64] | Tensor, at: NDArray[np.int64] | Tensor, source: None = None
    ) -> Encoded:
        """Return keys and final hidden states at selected positions, from the files where they are known.

        Args:
            input_ids: token ids, shape (b, t); rows may be padded on the right.
            at: indices into the b * t flattened positions, ascending, int64, shape (n,).
            source: None, because the model is causal.
        """
        ids = np.asarray(input_ids)
        row_numbers, columns = np.divmod(np.asarray(at), ids.shape[1])
        selected = [columns[row_numbers == number] for number in range(len(ids))]
        # Later positions, which may be padding, do not change what a causal model says at earlier ones.
        rows = [row[: of_row.max() + 1] for row, of_row in zip(ids, selected, strict=True)]
        if missing := [row for row in rows if not self._file(row).is_file()]:
            started = time.process_time()
            results = self._run(missing)
            seconds = (time.process_time() - started) / len(missing)
            for row, states in zip(missing, results, strict=True):
                self._keep(row, states, seconds)
        keys, finals = [], []
        for row, of_row in zip(rows, selected, strict=True):
            with np.load(self._file(row)) as kept:
                of_keys, final = torch.from_numpy(kept["keys"]), torch.from_numpy(kept["states"])
            keys.append(self.project(self.joining(of_keys[None])[0])[of_row])
            finals.append(final[of_row])
        return Encoded(torch.cat(keys), torch.cat(finals))

    def count_seconds(self) -> float:
        """Return the processor seconds of all kept passes."""
        total = 0.0
        for file in self._folder.glob("*.npz"):
            with np.load(file) as kept:
                total += float(kept["seconds"])
        return total

    def _run(self, rows: Sequence[Row]) -> list[States]:
        """Run the model over some windows in one batch, and return the states of each."""
        ids = torch.zeros((len(rows), max(map(len, rows))), dtype=torch.int64)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.from_numpy(row)
        keys, states = run_without_head(self.model, self.location, ids)
        return [(keys[number, : len(row)], states[number, : len(row)]) for number, row in enumerate(rows)]

    def _keep(self, row: Row, states: States, seconds: float) -> None:
        """Write the states of one window, and the processor seconds that they took, to its file."""
        file = self._file(row)
        part = file.with_suffix(f".{os.getpid()}.part")
        with part.open("wb") as opened:
            np.savez(opened, keys=states[0].numpy(), states=states[1].numpy(), seconds=np.array(seconds))
        os.replace(part, file)

    def _file(self, row: Row) -> Path:
        """Return the path of a window's file, which its tokens name."""
        return self._folder / f"{hashlib.sha256(row.astype(np.int64).tobytes()).hexdigest()[:32]}.npz"


class PromptedPasses(KeptPasses):
    """Passes in which the model sees retrieved chunks of the stored text before the document.

    A document is predicted in pieces of `EVERY` tokens. Before each piece except the first, chunks are
    retrieved with the tokens of the preceding piece as the query, and the model reads the prefix, the
    chunks, and the document up to the piece's end (Ram et al. 2023, https://arxiv.org/abs/2302.00083).

    Args:
        encoder: the encoder of a store.
        folder: folder of the files.
        index: the chunks.
        decode: function that returns the text of tokens.
        prefix: the tokens that precede every document; empty if documents have no prefix.
    """

    EVERY = 200

    def __init__(
        self,
        encoder: Encoder,
        folder: Path,
        index: ChunkIndex,
        decode: Callable[[Sequence[int]], str],
        prefix: Sequence[int],
    ) -> None:
        super().__init__(encoder, folder)
        self._index, self._decode, self._prefix = index, decode, prefix

    def _run(self, rows: Sequence[Row]) -> list[States]:
        return [self._run_in_pieces(row) for row in rows]

    def _run_in_pieces(self, row: Row) -> States:
        """Return the states of one window, each piece after the chunks that were retrieved for it."""
        length = len(self._prefix)
        headed = length if np.array_equal(row[:length], self._prefix) else 0
        pieces = []
        for start in range(0, len(row), self.EVERY):
            piece = row[start : start + self.EVERY]
            chunks = []
            if start:
                chunks = self._index.retrieve(self._decode(row[start - self.EVERY : start].tolist()))
            ids = np.concatenate([row[:headed], *chunks, row[headed : start + len(piece)]])
            keys, states = run_without_head(self.model, self.location, torch.from_numpy(ids)[None])
            pieces.append((keys[0, len(ids) - len(piece) :], states[0, len(ids) - len(piece) :]))
        keys_of_pieces, states_of_pieces = zip(*pieces, strict=True)
        return torch.cat(keys_of_pieces), torch.cat(states_of_pieces)
