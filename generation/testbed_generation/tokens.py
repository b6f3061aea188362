"""Tokenizers: single bytes without a file of weights, or the tokenizer of a checkpoint or of a GGUF file.

A token is a number; its piece is the bytes of text that it stands for, which may be a part of a character.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from testbed.common.errors import InputError
from testbed_generation.weights import GgufFile, open_weights

KEY = ("workload", "model", "weights")
"""Key of the scenario that names the file, for errors."""
UNKNOWN = "\ufffd".encode()
"""Piece of a token without a text: U+FFFD, the replacement character."""


class Tokenizer(Protocol):
    """Converts text to tokens, and has the piece of each token."""

    end_token: int | None
    """The token after which a text is complete; None for a vocabulary without such a token."""
    pieces: Sequence[bytes]
    """The bytes of each token's text in UTF-8."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""


class TextDecoder:
    """Decodes the tokens of a text one by one during generation.

    A character may take several tokens. Then the last of these tokens gets the character, and the others no text.

    >>> decoder = TextDecoder(ByteTokenizer().pieces)
    >>> [decoder.decode(token) for token in "é!".encode()]
    ['', 'é', '!']
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """``pieces`` are the bytes of each token."""
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def decode(self, token: int) -> str:
        """Return the characters completed by a token; invalid UTF-8 and tokens without text become U+FFFD."""
        piece = self._pieces[token] if token < len(self._pieces) else UNKNOWN
        return self._decoder.decode(piece)


def decode_tokens(tokens: Sequence[int], pieces: Sequence[bytes]) -> str:
    """Return the text of tokens; invalid UTF-8 and tokens without text become U+FFFD.

    Example:
        >>> decode_tokens([104, 105], ByteTokenizer().pieces)
        'hi'
    """
    encoded = b""
    for token in tokens:
        # The output matrix of a model may have more rows than its tokenizer has tokens.
        encoded += pieces[token] if token < len(pieces) else UNKNOWN
    # Decoded together, since several tokens may form one character.
    return encoded.decode(errors="replace")


class ByteTokenizer:
    """One token for each byte of UTF-8."""

    end_token: int | None = None
    pieces: Sequence[bytes] = tuple(bytes([value]) for value in range(256))

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())


class VocabularyTokenizer:
    """The tokens of a tokenizer of the package ``tokenizers``."""

    def __init__(self, tokenizer: Any, end_token: int | None) -> None:
        """``tokenizer`` is a ``tokenizers.Tokenizer``, and ``end_token`` the token after which a text is complete."""
        self._tokenizer = tokenizer
        self.end_token = end_token
        pieces = []
        for token in range(tokenizer.get_vocab_size()):
            pieces.append(_token_bytes(tokenizer.id_to_token(token)))
        self.pieces: Sequence[bytes] = pieces

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(self._tokenizer.encode(text).ids)


def _byte_letters() -> dict[str, int]:
    """Return the byte represented by each letter of GPT-2's byte-level vocabulary."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    byte_of_letter = {chr(value): value for value in printable}
    # GPT-2 represents all other bytes, such as the space, by the letters from U+0100 on, in the order of the bytes.
    code_point = 0x100
    for value in range(256):
        if value not in printable:
            byte_of_letter[chr(code_point)] = value
            code_point += 1
    return byte_of_letter


_BYTE_OF_LETTER = _byte_letters()


def _token_bytes(text: str | None) -> bytes:
    """Return the piece of a token from its text in the vocabulary, which writes some bytes in other letters.

    ``text`` is None for a token without a text.
    """
    if text is None:
        return UNKNOWN
    # SentencePiece writes a byte that is no character as <0x0A>, and a space as ▁.
    if text.startswith("<0x") and len(text) == 6:
        return bytes([int(text[3:5], 16)])
    if "▁" in text:
        return text.replace("▁", " ").encode()
    values = []
    for letter in text:
        if letter not in _BYTE_OF_LETTER:
            # The vocabulary writes this token as it is: a special token, or a token of characters.
            return text.encode()
        values.append(_BYTE_OF_LETTER[letter])
    return bytes(values)


def _import_tokenizers(path: Path) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise InputError(
            f"{path}: install the package that runs its tokenizer: pip install tokenizers",
            KEY,
        ) from None
    return tokenizers


def open_tokenizer(path: Path | None) -> Tokenizer:
    """Return the tokenizer of a file of weights, or `ByteTokenizer` without a file; raises `InputError`."""
    if path is None:
        return ByteTokenizer()
    return _from_gguf(path) if path.suffix == ".gguf" else _from_checkpoint(path)


def _from_checkpoint(path: Path) -> Tokenizer:
    file = (path if path.is_dir() else path.parent) / "tokenizer.json"
    if not file.is_file():
        raise InputError(
            f"{file}: no such file: put the model's tokenizer.json beside its weights",
            KEY,
        )
    tokenizer = _import_tokenizers(path).Tokenizer.from_file(str(file))
    # tokenizer.json does not name the end token. It is the first of these that exists; chat models have several.
    for text in ("</s>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>"):
        end_token = tokenizer.token_to_id(text)
        if end_token is not None:
            return VocabularyTokenizer(tokenizer, end_token)
    return VocabularyTokenizer(tokenizer, None)


def _from_gguf(path: Path) -> Tokenizer:
    """Return the byte-pair tokenizer whose vocabulary and merges a GGUF file contains."""
    tokenizers = _import_tokenizers(path)
    file = open_weights(path)
    # `open_weights` chooses the class by the suffix, which is .gguf here.
    assert isinstance(file, GgufFile)
    if file.read_text("tokenizer.ggml.model") != "gpt2":
        raise InputError(
            f"{path}: its tokenizer is not a byte-pair tokenizer: name a folder with tokenizer.json",
            KEY,
        )
    texts = file.read_strings("tokenizer.ggml.tokens")
    vocabulary = {text: index for index, text in enumerate(texts)}
    # A merge is written as two tokens with a space between them.
    merges = []
    for merge in file.read_strings("tokenizer.ggml.merges"):
        merges.append(tuple(merge.split(" ", 1)))
    model = tokenizers.models.BPE(vocab=vocabulary, merges=merges)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    # Marks such as <|im_start|> are single tokens, which merges of letters would not produce.
    marks = [text for text in texts if text.startswith("<|") and text.endswith("|>")]
    tokenizer.add_special_tokens(marks)
    end_token = file.read_number("tokenizer.ggml.eos_token_id")
    return VocabularyTokenizer(tokenizer, None if end_token is None else int(end_token))
