"""Text to tokens and back, and the vocabulary of GPT-2, which may not be at hand."""

import importlib.util
import json
import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.gpt import tokenizers
from examples.gpt.tokenizers import BytePairTokenizer, ByteTokenizer, TokenizerError, get_tokenizer

PAIRS = [first + second for first in string.ascii_lowercase for second in string.ascii_lowercase]


@pytest.fixture(scope="module")
def pairs():
    """A small vocabulary: all bytes, all pairs of small letters, and the word `hello`."""
    pytest.importorskip("tiktoken")
    ranks = {bytes([value]): value for value in range(256)}
    for pair in [*PAIRS, "hell", "hello"]:
        ranks[pair.encode()] = len(ranks)
    return BytePairTokenizer.from_ranks("pairs", ranks)


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
    """Files in the form of GPT-2's: 256 bytes, `count` tokens of two bytes, and `<|endoftext|>`."""
    characters = [CHARACTER[value] for value in PRINTABLE + OTHERS]
    merges = [(first, second) for first in characters for second in characters][:count]
    tokens = characters + [first + second for first, second in merges] + ["<|endoftext|>"]
    lines = ["#version: 0.2", *(f"{first} {second}" for first, second in merges)]
    folder.mkdir(exist_ok=True)
    (folder / "vocab.bpe").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "encoder.json").write_text(json.dumps({token: at for at, token in enumerate(tokens)}), encoding="utf-8")
    return folder


# --- Bytes. ---
def test_a_byte_is_a_token():
    tokenizer = get_tokenizer("bytes")
    tokens = tokenizer.encode("aé")

    assert (tokenizer.name, tokenizer.vocabulary, tokenizer.separator) == ("bytes", 256, 0)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [0x61, 0xC3, 0xA9]


@given(st.text().filter(lambda text: "\0" not in text))
def test_bytes_come_back_as_the_text_they_were(text):
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == text


@given(st.binary().filter(lambda content: b"\0" not in content))
def test_bytes_that_are_no_utf8_are_kept_as_tokens_and_replaced_as_text(content):
    tokens = ByteTokenizer().encode(content)

    assert bytes(tokens.tolist()) == content
    assert ByteTokenizer().decode(tokens) == content.decode(errors="replace")


def test_the_separator_of_bytes_is_not_accepted_as_text():
    with pytest.raises(TokenizerError, match="a zero byte at position 2"):
        ByteTokenizer().encode("ab\0c")


# --- What all have in common. ---
@pytest.mark.parametrize("tokens", [[5, 256, 3], np.array([5, 256], np.uint16), [0, -1]], ids=str)
def test_tokens_outside_of_the_vocabulary_are_refused_with_their_place(tokens):
    with pytest.raises(TokenizerError, match=r"token (256|-1) at position 1 is not in the vocabulary of 'bytes'"):
        ByteTokenizer().decode(tokens)


def test_tokens_that_are_no_integers_in_a_row_are_refused():
    with pytest.raises(TokenizerError, match=r"integers in one row, but are float64 of shape \(2, 1\)"):
        ByteTokenizer().decode(np.ones((2, 1)))


def test_no_tokens_are_no_text(pairs):
    assert ByteTokenizer().decode([]) == pairs.decode([]) == ""


def test_an_unknown_name_is_refused_with_all_that_there_are():
    with pytest.raises(TokenizerError, match="no tokenizer is called 'gpt3'; there are bytes, gpt2"):
        get_tokenizer("gpt3")


def test_files_that_bytes_would_not_look_at_are_refused(tmp_path):
    with pytest.raises(TokenizerError, match="'bytes' needs no vocabulary files"):
        get_tokenizer("bytes", tmp_path)


# --- Byte pairs. ---
def test_bytes_are_joined_as_far_as_the_vocabulary_goes(pairs):
    """`hello` by way of he, ll, hell; of `axe` only the first two letters; never across a blank."""
    tokens = pairs.encode("hello axe")
    number = lambda pair: 256 + PAIRS.index(pair)

    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [256 + len(PAIRS) + 1, ord(" "), number("ax"), ord("e")]
    assert (pairs.vocabulary, pairs.separator) == (256 + len(PAIRS) + 3, 256 + len(PAIRS) + 2)


@given(st.text())
def test_byte_pairs_come_back_as_the_text_they_were(pairs, text):
    assert pairs.decode(pairs.encode(text)) == text


def test_half_a_character_is_decoded_as_a_replacement(pairs):
    assert pairs.decode(pairs.encode("€")[:1]) == "\ufffd"


def test_bytes_that_are_no_utf8_are_encoded_as_a_replacement(pairs):
    assert pairs.decode(pairs.encode(b"a\xffb")) == "a\ufffdb"


def test_the_name_of_the_separator_in_a_text_is_text(pairs):
    tokens = pairs.encode("a<|endoftext|>b")

    assert pairs.separator not in tokens
    assert pairs.decode(tokens) == "a<|endoftext|>b"


def test_the_separator_is_decoded_as_its_name(pairs):
    assert pairs.decode([ord("a"), pairs.separator]) == "a<|endoftext|>"


def test_the_padding_behind_the_vocabulary_is_refused(pairs):
    with pytest.raises(TokenizerError, match="leave out the padding"):
        pairs.decode([pairs.vocabulary])


def test_a_run_of_a_million_blanks_is_encoded(pairs):
    """More than the regular expressions of tiktoken can look back over."""
    text = "a" + " " * 1_000_000 + "b"

    assert pairs.decode(pairs.encode(text)) == text


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({bytes([value]): value + 1 for value in range(256)}, "does not number its 256 tokens 0, 1, 2"),
        ({bytes([value]): value for value in range(255)}, "lacks 1 single bytes, the first 255"),
        ({value.to_bytes(2 if value > 255 else 1): value for value in range(1 << 16)}, "more than fit into 16 bits"),
    ],
    ids=["numbers", "bytes", "size"],
)
def test_a_vocabulary_that_cannot_be_one_is_refused(ranks, message):
    pytest.importorskip("tiktoken")

    with pytest.raises(TokenizerError, match=message):
        BytePairTokenizer.from_ranks("wrong", ranks)


# --- GPT-2. ---
@given(st.text(st.sampled_from("aé1 ½\t\n!'stlvred\u3000中")))
def test_words_are_cut_as_gpt2_was_published(text):
    """The pattern of OpenAI's `encoder.py`; tiktoken's, which is used here, is written in another way."""
    regex = pytest.importorskip("regex")
    published = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

    assert regex.findall(tokenizers.PATTERN, text) == regex.findall(published, text)


def test_without_tiktoken_the_message_has_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(TokenizerError, match="pip install tiktoken"):
        get_tokenizer("gpt2")


def test_without_cache_and_network_the_message_says_where_the_files_are(no_network):
    with pytest.raises(TokenizerError, match=r"could not fetch it \(ConnectionError\)") as caught:
        get_tokenizer("gpt2")
    for part in ("vocab.bpe", "encoder.json", "that OpenAI published", "--vocabulary-files"):
        assert part in str(caught.value)
    assert all("://" in path for path in no_network)


def test_files_that_are_not_there_are_named(no_network, tmp_path):
    (tmp_path / "vocab.bpe").touch()

    with pytest.raises(TokenizerError, match=r"there is no file .*encoder.json.*--vocabulary-files") as caught:
        get_tokenizer("gpt2", tmp_path)
    assert f"no file {tmp_path / 'vocab.bpe'}" not in str(caught.value)


def test_files_with_as_many_tokens_as_gpt2_make_a_tokenizer(no_network, tmp_path):
    tokenizer = get_tokenizer("gpt2", write_vocabulary(tmp_path / "files", 50_000))

    assert (tokenizer.name, tokenizer.vocabulary, tokenizer.separator) == ("gpt2", 50_257, 50_256)
    assert tokenizer.decode(tokenizer.encode("a text, naïve")) == "a text, naïve"
    assert tokenizer.encode("a text").max() >= 256
    assert not any("://" in path for path in no_network)


def test_a_vocabulary_of_another_size_is_refused_by_name(no_network, tmp_path):
    folder = write_vocabulary(tmp_path / "files", 100)

    with pytest.raises(TokenizerError, match="files is not that of GPT-2: it has 357 tokens, and GPT-2 has 50,257"):
        get_tokenizer("gpt2", folder)


def test_a_vocabulary_that_was_changed_since_is_read_again(no_network, tmp_path):
    """tiktoken keeps a copy of the first files under the same path."""
    with pytest.raises(TokenizerError, match="357 tokens"):
        get_tokenizer("gpt2", write_vocabulary(tmp_path / "files", 100))
    with pytest.raises(TokenizerError, match="267 tokens"):
        get_tokenizer("gpt2", write_vocabulary(tmp_path / "files", 10))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("vocab.bpe", b""),
        ("vocab.bpe", b"#version\na b c\n"),
        ("vocab.bpe", b"\xff\xfe"),
        ("vocab.bpe", "#version\n\u4e00 a\n".encode()),
        ("encoder.json", b'{"a"'),
        ("encoder.json", b"[]"),
        ("encoder.json", b"{}"),
        ("encoder.json", b"[" * 100_000),
    ],
)
def test_damaged_files_are_refused_by_name(name, content, no_network, tmp_path):
    folder = write_vocabulary(tmp_path / "files", 100)
    (folder / name).write_bytes(content)

    with pytest.raises(TokenizerError, match=r"in .*files are not GPT-2's vocabulary, or are damaged"):
        get_tokenizer("gpt2", folder)


def test_a_cache_that_cannot_be_used_is_an_error_of_the_tokenizer(no_network, tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "/dev/null/cache")

    with pytest.raises(TokenizerError, match="cannot read the vocabulary"):
        get_tokenizer("gpt2", write_vocabulary(tmp_path / "files", 100))
