"""The cache of finished libraries: whole or absent, read-only, bounded."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from evaluator.compile.cache import CacheFull, LibraryCache

A, B, C = "a" * 64, "b" * 64, "c" * 64


def test_what_was_published_is_found_read_only(tmp_path: Path) -> None:
    cache = LibraryCache(tmp_path / "new", 1 << 20)
    assert cache.find(A) is None
    path = cache.publish(A, b"library")
    assert cache.find(A) == path
    assert path.read_bytes() == b"library"
    assert path.stat().st_mode & 0o777 == 0o444
    assert not list((tmp_path / "new" / "partial").iterdir())


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    cache = LibraryCache(tmp_path, 250)
    for age, key in ((300, A), (200, B)):
        path = cache.publish(key, bytes(100))
        os.utime(path, (path.stat().st_atime - age, path.stat().st_mtime - age))
    assert cache.find(A) is not None  # used now, so B is the oldest
    cache.publish(C, bytes(100))
    assert cache.find(B) is None
    assert cache.find(A) is not None
    assert cache.size_bytes() == 200


def test_a_library_larger_than_the_cache_is_kept_for_its_own_use(tmp_path: Path) -> None:
    cache = LibraryCache(tmp_path, 10)
    assert cache.publish(A, bytes(100)).exists()


def test_readers_never_see_half_a_library(tmp_path: Path) -> None:
    cache = LibraryCache(tmp_path, 1 << 30)
    data = os.urandom(1 << 20)
    seen: list[bytes] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            path = cache.find(A)
            if path is not None:
                seen.append(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(20):
        cache.publish(A, data)
    stop.set()
    reader.join()
    assert all(part == data for part in seen)


def test_a_full_disk_has_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CacheFull, match="no space"):
        LibraryCache(tmp_path, 1).publish(A, b"x")
    assert not list((tmp_path / "partial").iterdir())
