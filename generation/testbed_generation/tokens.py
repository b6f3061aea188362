"""Text to tokens and back: bytes without a file, else the tokenizer of a checkpoint or of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from testbed.common.errors import InputError
from testbed_generation.weights import Gguf


class Tokens(Protocol):
    """Converts text to tokens and back."""

    end: int | None
    """The token after which a text is complete; None: there is none."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""


class Bytes:
    """One token for each byte of UTF-8. Tokens from 256 on, which a network may still choose, are shown as U+FFFD.

    Example:
        >>> Bytes().encode("hi")
        [104, 105]
    """

    end: int | None = None

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes; what is no UTF-8 becomes U+FFFD."""
        known = b"".join(bytes([token]) if token < 256 else b"\xff" for token in tokens)
        return known.decode(errors="replace")


class File:
    """The tokenizer of a checkpoint: its file ``tokenizer.json``, read by the package ``tokenizers``."""

    def __init__(self, tokenizer: Any, end: int | None) -> None:
        """Take a ``tokenizers.Tokenizer``."""
        self._tokenizer = tokenizer
        self.end = end

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self._tokenizer.decode(list(tokens)))


def _tokenizers(path: Path) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise InputError(f"{path}: its tokenizer needs a package: pip install tokenizers") from None
    return tokenizers


def open_tokens(path: Path | None) -> Tokens:
    """Return the tokens of a weights file, or bytes without one; raises `InputError`."""
    if path is None:
        return Bytes()
    return _from_gguf(path) if path.suffix == ".gguf" else _from_checkpoint(path)


def _from_checkpoint(path: Path) -> Tokens:
    file = (path if path.is_dir() else path.parent) / "tokenizer.json"
    if not file.is_file():
        raise InputError(f"{file}: no such file: put the model's tokenizer.json beside its weights")
    tokenizer = _tokenizers(path).Tokenizer.from_file(str(file))
    ends = [tokenizer.token_to_id(text) for text in ("</s>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>")]
    return File(tokenizer, next((end for end in ends if end is not None), None))


def _from_gguf(path: Path) -> Tokens:
    """Return the byte-pair tokenizer whose vocabulary and merges a GGUF file contains."""
    tokenizers = _tokenizers(path)
    file = Gguf(path)
    if file.text("tokenizer.ggml.model") != "gpt2":
        raise InputError(f"{path}: only byte-pair tokenizers are read from GGUF: name a folder with tokenizer.json")
    texts = file.strings("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in file.strings("tokenizer.ggml.merges")]
    model = tokenizers.models.BPE(vocab={text: index for index, text in enumerate(texts)}, merges=merges)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = [text for text in texts if text.startswith("<|") and text.endswith("|>")]
    tokenizer.add_special_tokens(special)
    end = file.number("tokenizer.ggml.eos_token_id")
    return File(tokenizer, None if end is None else int(end))
