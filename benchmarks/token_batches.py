"""Batches of real text, the same in every process and for both libraries. Nothing here imports JAX or Torch.

The text is the source code of Python's standard library. A vocabulary of more than 256 tokens gets its pairs of bytes
as tokens: a few common ones and many rare ones, as in a vocabulary that was made for a text. With 256 tokens the
gradient of a large embedding would be a sum into a few rows, which is slower than what happens in a training.
"""

from collections.abc import Sequence

import numpy as np

from examples.gpt import text

BYTES = 256


def text_tokens(vocabulary: int) -> np.ndarray:
    """The text as tokens below `vocabulary`; random ones, few of them common, where Python has no source code."""
    try:
        content = np.frombuffer(text.read_text(None), np.uint8).astype(np.int32)
    except text.TextError:
        rare = np.random.default_rng(0).zipf(1.2, size=text.MAXIMUM_BYTES // 2)
        return (rare % vocabulary).astype(np.int32)
    if vocabulary <= BYTES:
        return content % vocabulary
    pairs = content[: len(content) // 2 * 2].reshape(-1, 2)
    return (BYTES * pairs[:, 0] + pairs[:, 1]) % vocabulary


def token_batches(vocabulary: int, shape: Sequence[int], *, count: int, seed: int = 0) -> np.ndarray:
    """Windows of the text from random places.

    Args:
        vocabulary: all tokens are below it.
        shape: of a batch: microbatches, sequences of each, and tokens of each sequence with its last target.
        count: of batches.
        seed: of the places.

    Returns:
        int32, of shape (count, *shape).
    """
    *batch, length = shape
    windows = text.random_batches(
        text_tokens(vocabulary), seed=seed, count=1, batch_size=count * int(np.prod(batch)), context=length - 1
    )
    return next(windows).reshape(count, *shape)
