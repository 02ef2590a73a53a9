"""Finished libraries by content address: published whole or not at all, read-only, least recently used out first.

Layout: `<root>/<first two digits>/<key>.so`, beside it nothing; what is being written lies in `<root>/partial`.
Invariants: a file under its key never changes; several processes may share the folder; losing it costs time only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path


class CacheFull(OSError):
    """The disk took no more."""


def default_root() -> Path:
    """`$XDG_CACHE_HOME/kontrast/compile`, else `~/.cache/kontrast/compile`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "kontrast" / "compile"


class LibraryCache:
    """The folder. `limit_bytes` bounds it after each publication."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self.root = root
        self._limit = limit_bytes

    def find(self, key: str) -> Path | None:
        """The library of a key, marked as just used; None when it is not there."""
        path = self._path(key)
        try:
            os.utime(path)
        except OSError:
            return None
        return path

    def publish(self, key: str, data: bytes | memoryview) -> Path:
        """Puts a library under its key and returns its path; a second publication of a key changes nothing.

        Raises CacheFull when the disk is full, OSError when the folder cannot be written.
        """
        path = self._path(key)
        partial = self.root / "partial" / secrets.token_hex(12)
        try:
            for folder in (partial.parent, path.parent):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(partial, "xb") as file:
                file.write(data)
                file.flush()
                os.fchmod(file.fileno(), 0o444)
                os.fsync(file.fileno())
            os.rename(partial, path)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise CacheFull(
                    error.errno, f"no space for a library under {self.root}: free some or move it"
                ) from error
            raise
        finally:
            partial.unlink(missing_ok=True)
        self._shrink(keep=path)
        return path

    def size_bytes(self) -> int:
        """Bytes of all libraries."""
        return sum(size for _, size, _ in self._entries())

    def _path(self, key: str) -> Path:
        return self.root / key[:2] / f"{key}.so"

    def _entries(self) -> list[tuple[float, int, Path]]:
        entries = []
        for path in self.root.glob("??/*.so"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                entries.append((status.st_mtime, status.st_size, path))
        return sorted(entries)

    def _shrink(self, keep: Path) -> None:
        entries = self._entries()
        total = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            if total <= self._limit:
                return
            if path != keep:
                path.unlink(missing_ok=True)
                total -= size
