"""Text to tokens and back, and the vocabulary of GPT-2, which may not be at hand."""

import json
import string
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.gpt import tokenizers
from examples.gpt.tokenizers import BytePairTokenizer, ByteTokenizer, encoding_of_ranks, get_tokenizer

PAIRS = [first + second for first in string.ascii_lowercase for second in string.ascii_lowercase]


@pytest.fixture(scope="module")
def pairs():
    """A small vocabulary: all bytes, all pairs of small letters, and the word `hello`."""
    pytest.importorskip("tiktoken")
    ranks = {bytes([value]): value for value in range(256)}
    for pair in [*PAIRS, "hell", "hello"]:
        ranks[pair.encode()] = len(ranks)
    return BytePairTokenizer("pairs", encoding_of_ranks(ranks))


@pytest.fixture
def no_network(tmp_path, monkeypatch):
    """A tiktoken with an empty cache, whose downloads fail as they do without a network."""
    load = pytest.importorskip("tiktoken.load")
    requests = pytest.importorskip("requests")
    asked = []

    def read_file(path):
        asked.append(path)
        if "://" in path:
            raise requests.exceptions.ConnectionError("no network in a test")
        with open(path, "rb") as file:
            return file.read()

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(load, "read_file", read_file)
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    return asked


# The printable character that stands for each byte in GPT-2's files.
PRINTABLE = [value for value in range(256) if chr(value).isprintable() and chr(value) != " "]
OTHERS = [value for value in range(256) if value not in PRINTABLE]
CHARACTER = {value: chr(value) for value in PRINTABLE} | {value: chr(256 + at) for at, value in enumerate(OTHERS)}


def write_vocabulary(folder, count):
    """Write files of GPT-2's form: 256 bytes, `count` tokens of two bytes, and `<|endoftext|>`."""
    characters = [CHARACTER[value] for value in PRINTABLE + OTHERS]
    merges = [(first, second) for first in characters for second in characters][:count]
    tokens = characters + [first + second for first, second in merges] + ["<|endoftext|>"]
    lines = ["#version: 0.2", *(f"{first} {second}" for first, second in merges)]
    folder.mkdir(exist_ok=True)
    (folder / "vocab.bpe").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "encoder.json").write_text(json.dumps({token: at for at, token in enumerate(tokens)}))
    return folder


# --- Bytes. ---
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0")), st.binary().filter(lambda x: b"\0" not in x))
def test_a_byte_is_a_token_and_text_comes_back(text, content):
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode(tokenizer.encode(content)) == content.decode(errors="replace")


def test_the_separator_of_bytes_is_not_accepted_as_text():
    with pytest.raises(ValueError, match="a zero byte at position 2"):
        ByteTokenizer().encode(b"ab\0c")


@pytest.mark.parametrize("tokens", [[5, 256, 3], [0, -1]], ids=["large", "negative"])
def test_what_is_no_token_is_refused(tokens):
    with pytest.raises(ValueError, match=r"are not all in the vocabulary of 'bytes', which has 256 tokens; leave out"):
        ByteTokenizer().decode(tokens)
    assert ByteTokenizer().decode([]) == ""


# --- Pairs of bytes. ---
def test_bytes_are_joined_as_far_as_the_vocabulary_goes(pairs):
    token = {text: 256 + at for at, text in enumerate([*PAIRS, "hell", "hello"])}
    assert pairs.encode("hello").tolist() == [token["hello"]]
    assert pairs.encode("help").tolist() == [ord("h"), token["el"], ord("p")]  # the lowest pair first
    assert pairs.encode("a b").tolist() == [ord("a"), ord(" "), ord("b")]
    assert (pairs.vocabulary, pairs.separator) == (256 + len(token) + 1, 256 + len(token))


@given(text=st.text(st.characters(codec="utf-8")))
def test_byte_pairs_come_back_as_the_text_they_were(pairs, text):
    assert pairs.decode(pairs.encode(text)) == text
    assert pairs.decode(pairs.encode("é")[:1]) == "\ufffd"  # half a character
    assert pairs.decode(pairs.encode(b"a\xffb")) == "a\ufffdb"


def test_the_separator_is_text_where_text_is_encoded_and_its_name_where_it_is_decoded(pairs):
    assert pairs.separator not in pairs.encode("<|endoftext|>")
    assert pairs.decode([pairs.separator]) == "<|endoftext|>"
    with pytest.raises(ValueError, match="leave out the padding"):
        pairs.decode([pairs.vocabulary])


def test_a_run_of_a_million_blanks_is_encoded(pairs):
    """The regular expressions of tiktoken fail on so many."""
    text = "a" + " " * 1_000_000 + "b"
    assert pairs.decode(pairs.encode(text)) == text


# --- GPT-2. ---
@given(st.text(st.sampled_from("aé1 ½\t\n!'stlvred\u3000中")))
def test_words_are_cut_as_gpt2_was_published(text):
    """The pattern of OpenAI's `encoder.py`; tiktoken's, which is used here, is written in another way."""
    regex = pytest.importorskip("regex")
    published = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    assert regex.findall(tokenizers.PATTERN, text) == regex.findall(published, text)


def test_without_tiktoken_the_message_has_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ValueError, match="pip install tiktoken"):
        get_tokenizer("gpt2")


def test_without_cache_and_network_the_message_says_where_the_files_are(no_network):
    with pytest.raises(ValueError, match=r"could not fetch it either \(ConnectionError") as caught:
        get_tokenizer("gpt2")
    for part in ("vocab.bpe", "encoder.json", "that OpenAI published", "--vocabulary-files"):
        assert part in str(caught.value)
    assert all("://" in path for path in no_network)


def test_files_with_as_many_tokens_as_gpt2_make_a_tokenizer(no_network, tmp_path):
    tokenizer = get_tokenizer("gpt2", write_vocabulary(tmp_path / "files", 50_000))
    assert (tokenizer.name, tokenizer.vocabulary, tokenizer.separator) == ("gpt2", 50_257, 50_256)
    assert tokenizer.decode(tokenizer.encode("a text, naïve")) == "a text, naïve"
    assert tokenizer.encode("a text").max() >= 256
    assert not any("://" in path for path in no_network)


@pytest.mark.usefixtures("no_network")
def test_a_vocabulary_of_another_size_is_refused_and_read_again_when_it_has_changed(tmp_path):
    """tiktoken keeps a copy of the first files under the same path."""
    with pytest.raises(ValueError, match="files is not GPT-2's: it has 357 tokens, and GPT-2's has 50,257"):
        get_tokenizer("gpt2", write_vocabulary(tmp_path / "files", 100))
    with pytest.raises(ValueError, match="267 tokens"):
        get_tokenizer("gpt2", write_vocabulary(tmp_path / "files", 10))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("vocab.bpe", None),
        ("vocab.bpe", b""),
        ("vocab.bpe", b"\xff\xfe"),
        ("encoder.json", b"{}"),
        ("encoder.json", b"[" * 100_000),
    ],
)
@pytest.mark.usefixtures("no_network")
def test_missing_and_damaged_files_are_refused_with_their_folder(name, content, tmp_path):
    folder = write_vocabulary(tmp_path / "files", 100)
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"cannot read GPT-2's vocabulary in {folder} \("):
        get_tokenizer("gpt2", folder)
