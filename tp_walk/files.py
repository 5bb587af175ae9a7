"""Files that other processes may be reading, or writing, at the same time."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path


def check_writable(directory: Path) -> None:
    """Makes the folder if need be. Raises OSError where no file can be made in it."""
    directory.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=directory).close()


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that a reader finds either the old content or all of the new, whoever else writes it.

    Makes the folder if need be. Raises OSError, leaving nothing behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
