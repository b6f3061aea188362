"""Text to tokens and back: bytes without a file, else the tokenizer of a checkpoint or of a GGUF file."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from testbed.common.errors import InputError
from testbed_generation.weights import Gguf, open_weights

KEY = ("workload", "model", "weights")
UNKNOWN = "\ufffd".encode()
"""Text of a token without text."""


class Tokens(Protocol):
    """Converts text to tokens, and knows the text of each token."""

    end: int | None
    """The token after which a text is complete; None for a vocabulary without such a token."""
    pieces: Sequence[bytes]
    """Text of each token, in UTF-8; several tokens may form one letter."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""


class TextDecoder:
    """Decodes the tokens of a text one by one, as they are generated.

    A character may take several tokens. Its text belongs to the last of them; the others have none.

    >>> decoder = TextDecoder(Bytes().pieces)
    >>> [decoder.decode(token) for token in "é!".encode()]
    ['', 'é', '!']
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """``pieces`` are the bytes of each token."""
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def decode(self, token: int) -> str:
        """Return the characters that a token completes; invalid UTF-8 and tokens without text become U+FFFD."""
        piece = self._pieces[token] if token < len(self._pieces) else UNKNOWN
        return self._decoder.decode(piece)


def text_of(tokens: Sequence[int], pieces: Sequence[bytes]) -> str:
    """Return the text of tokens; invalid UTF-8 and tokens without text become U+FFFD.

    Example:
        >>> text_of([104, 105], Bytes().pieces)
        'hi'
    """
    known = b""
    for token in tokens:
        # The output matrix of a network may have more rows than its tokenizer has tokens.
        known += pieces[token] if token < len(pieces) else UNKNOWN
    # Decoded together: several tokens may form one character.
    return known.decode(errors="replace")


class Bytes:
    """One token for each byte of UTF-8."""

    end: int | None = None
    pieces: Sequence[bytes] = tuple(bytes([value]) for value in range(256))

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())


class Vocabulary:
    """The tokens of a tokenizer of the package ``tokenizers``."""

    def __init__(self, tokenizer: Any, end: int | None) -> None:
        """``tokenizer`` is a ``tokenizers.Tokenizer``, ``end`` the token that ends a text."""
        self._tokenizer = tokenizer
        self.end = end
        pieces = []
        for token in range(tokenizer.get_vocab_size()):
            pieces.append(_token_bytes(tokenizer.id_to_token(token)))
        self.pieces: Sequence[bytes] = pieces

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(self._tokenizer.encode(text).ids)


def _byte_letters() -> dict[str, int]:
    """Return the bytes of a byte-level vocabulary by GPT-2's letters for them."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    letters = {chr(value): value for value in printable}
    # GPT-2 gives all other bytes, such as the space, the letters from U+0100 on, in the order of the bytes.
    letter = 256
    for value in range(256):
        if value not in printable:
            letters[chr(letter)] = value
            letter += 1
    return letters


_LETTERS = _byte_letters()


def _token_bytes(token: str | None) -> bytes:
    """Return the text of a token: letters represent bytes in byte-level vocabularies, else themselves."""
    if token is None:
        return UNKNOWN
    # SentencePiece writes a byte without a letter as <0x0A>, and a space as ▁.
    if token.startswith("<0x") and len(token) == 6:
        return bytes([int(token[3:5], 16)])
    if "▁" in token:
        return token.replace("▁", " ").encode()
    values = []
    for letter in token:
        if letter not in _LETTERS:
            # A special token, or one of a vocabulary of characters.
            return token.encode()
        values.append(_LETTERS[letter])
    return bytes(values)


def _import_tokenizers(path: Path) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise InputError(
            f"{path}: its tokenizer needs a package: pip install tokenizers", KEY
        ) from None
    return tokenizers


def open_tokens(path: Path | None) -> Tokens:
    """Return the tokens of a weights file, or bytes without one; raises `InputError`."""
    if path is None:
        return Bytes()
    return _from_gguf(path) if path.suffix == ".gguf" else _from_checkpoint(path)


def _from_checkpoint(path: Path) -> Tokens:
    file = (path if path.is_dir() else path.parent) / "tokenizer.json"
    if not file.is_file():
        raise InputError(
            f"{file}: no such file: put the model's tokenizer.json beside its weights",
            KEY,
        )
    tokenizer = _import_tokenizers(path).Tokenizer.from_file(str(file))
    # A tokenizer.json does not say which token ends a text; chat models end with the first of these that they have.
    for text in ("</s>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>"):
        end = tokenizer.token_to_id(text)
        if end is not None:
            return Vocabulary(tokenizer, end)
    return Vocabulary(tokenizer, None)


def _from_gguf(path: Path) -> Tokens:
    """Return the byte-pair tokenizer whose vocabulary and merges a GGUF file contains."""
    tokenizers = _import_tokenizers(path)
    file = open_weights(path)
    assert isinstance(file, Gguf)
    if file.text("tokenizer.ggml.model") != "gpt2":
        raise InputError(
            f"{path}: only byte-pair tokenizers are read: name a folder with tokenizer.json",
            KEY,
        )
    texts = file.strings("tokenizer.ggml.tokens")
    vocabulary = {text: index for index, text in enumerate(texts)}
    # A merge is written as two tokens with a space between them.
    merges = []
    for merge in file.strings("tokenizer.ggml.merges"):
        merges.append(tuple(merge.split(" ", 1)))
    model = tokenizers.models.BPE(vocab=vocabulary, merges=merges)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    # Marks such as <|im_start|> are single tokens, which merges of their letters would not give.
    special = [text for text in texts if text.startswith("<|") and text.endswith("|>")]
    tokenizer.add_special_tokens(special)
    end = file.number("tokenizer.ggml.eos_token_id")
    return Vocabulary(tokenizer, None if end is None else int(end))
