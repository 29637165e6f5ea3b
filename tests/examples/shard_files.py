"""A folder of shards for tests."""

from examples.gpt import shards
from examples.gpt.shards import Index, Shard, Source


def write_folder(folder, names, tokens, vocabulary):
    """Shards of these names, all with the same tokens, and their index: training or validation by the name."""
    for name in names:
        shards.write_shard(folder / name, tokens, vocabulary=vocabulary)
    training, validation = (
        tuple(Shard(name, len(tokens)) for name in names if name.startswith(part))
        for part in ("training", "validation")
    )
    source = Source(("a text",), documents=3, bytes=5000, sha256="abc")
    index = Index("bytes", vocabulary, 0, training=training, validation=validation, text=source)
    shards.write_index(folder, index)
    return index
