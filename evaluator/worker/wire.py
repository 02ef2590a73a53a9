"""The wire between judge, zygote, reference server and worker: one JSON object a packet, descriptors beside it.

Invariants: SOCK_SEQPACKET, so that a packet is whole or absent; at most `MAX_BYTES` a packet; JSON is parsed into plain
values and checked against a closed schema before use; nothing is ever unpickled; descriptors are accepted only by
`receive_trusted`, so that those a worker sends are dropped by the kernel.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
import time
from collections.abc import Sequence
from typing import Any

MAX_BYTES = 1 << 17
MAX_DESCRIPTORS = 8

Message = dict[str, Any]

_dumps, _loads = json.dumps, json.loads


class WireClosed(ConnectionError):
    """The other side is gone."""


class WireTimeout(TimeoutError):
    """Nothing came before the deadline."""


class WireForged(ValueError):
    """What came is no message of the schema."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends, both close-on-exec."""
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (first, second):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_BYTES)
    return first, second


def send(end: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Sends one message; raises WireClosed when nobody reads any more, ValueError when it is too large."""
    data = _dumps(message, separators=(",", ":")).encode()
    if len(data) > MAX_BYTES:
        raise ValueError(f"message of {len(data)} bytes is over the {MAX_BYTES} that a packet holds")
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    try:
        end.sendmsg([data], ancillary)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise WireClosed("the other side is gone") from error


def receive(end: socket.socket, timeout_s: float | None = None) -> Message:
    """One message without descriptors.

    Raises WireTimeout after `timeout_s`, WireClosed at the end, WireForged for anything but one JSON object.
    """
    _wait_readable(end, timeout_s)
    try:
        data = end.recv(MAX_BYTES + 1)
    except ConnectionResetError as error:
        raise WireClosed("the other side is gone") from error
    return _parsed(data)


def receive_trusted(end: socket.socket, timeout_s: float | None = None) -> tuple[Message, list[int]]:
    """One message of a trusted sender with its descriptors, which the caller must close."""
    _wait_readable(end, timeout_s)
    try:
        data, descriptors, _, _ = socket.recv_fds(end, MAX_BYTES + 1, MAX_DESCRIPTORS)
    except ConnectionResetError as error:
        raise WireClosed("the other side is gone") from error
    for number in descriptors:
        os.set_inheritable(number, False)
    return _parsed(data), descriptors


def _wait_readable(end: socket.socket, timeout_s: float | None) -> None:
    if timeout_s is None:
        return
    deadline = time.monotonic() + timeout_s
    poller = select.poll()
    poller.register(end, select.POLLIN)
    while not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        if time.monotonic() >= deadline:
            raise WireTimeout(f"no answer within {timeout_s:.3g} s")


def _parsed(data: bytes) -> Message:
    if not data:
        raise WireClosed("the other side is gone")
    if len(data) > MAX_BYTES:
        raise WireForged("packet over the size limit")
    try:
        message = _loads(data)
    except (ValueError, RecursionError) as error:
        raise WireForged("packet is not JSON") from error
    if not isinstance(message, dict):
        raise WireForged("packet is not an object")
    return message


def read_text(descriptor: int) -> str:
    """All text of a file descriptor, which stays open."""
    data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    return data.decode()


def write_text(descriptor: int, text: str) -> None:
    """Replaces what a memory file holds."""
    os.ftruncate(descriptor, 0)
    data = text.encode()
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], written)
