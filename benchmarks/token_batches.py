"""Batches of tokens, the same in every process and for both libraries. Nothing here imports JAX or Torch.

A few tokens are common and many are rare, as in a text. Were all common, the gradient of the embedding would be a sum
into few rows; were none, into many: both have another speed than a training.
"""

from collections.abc import Sequence

import numpy as np


def token_batches(vocabulary: int, shape: Sequence[int], *, count: int) -> np.ndarray:
    """Return random tokens, int32 (count, *shape).

    Args:
        vocabulary: all tokens are below it.
        shape: of a batch: microbatches, sequences of each, and tokens of each sequence with its last target.
        count: of batches.
    """
    return (np.random.default_rng(0).zipf(1.2, size=(count, *shape)) % vocabulary).astype(np.int32)
