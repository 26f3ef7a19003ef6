"""Keys in clusters, as those of language models are."""

import numpy as np


def clustered(n: int, seed: int = 0, dim: int = 16) -> np.ndarray:
    """Return keys around 50 centers, as float32 that half precision holds exactly."""
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(99).normal(size=(50, dim)) * 3
    keys = centers[rng.integers(0, 50, n)] + rng.normal(size=(n, dim))
    return keys.astype(np.float16).astype(np.float32)
