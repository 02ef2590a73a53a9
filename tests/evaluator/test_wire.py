"""Packets between the processes: whole or absent, JSON only, nothing but a closed schema from a worker."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluator.worker import schema, wire

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Pair]:
    first, second = wire.pair()
    yield first, second
    first.close()
    second.close()


def test_a_message_arrives_whole(ends: Pair) -> None:
    message = {"op": "run", "numbers": list(range(1000)), "text": "ü"}
    wire.send(ends[0], message)
    assert wire.receive(ends[1], 1.0) == message


def test_descriptors_travel_beside_a_trusted_message(ends: Pair) -> None:
    read, write = os.pipe()
    wire.send(ends[0], {"op": "map"}, [read])
    message, descriptors = wire.receive_trusted(ends[1], 1.0)
    os.write(write, b"x")
    assert message == {"op": "map"}
    assert os.read(descriptors[0], 1) == b"x"
    assert not os.get_inheritable(descriptors[0])
    for number in (read, write, *descriptors):
        os.close(number)


def test_descriptors_of_an_untrusted_sender_are_dropped(ends: Pair) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with open("/dev/null") as file:
        wire.send(ends[0], {"op": "ran"}, [file.fileno()])
    assert wire.receive(ends[1], 1.0) == {"op": "ran"}
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("packet", [b"\xff\xfe", b"[1]", b"nope", b'{"op":', b"[" * 60000, b"7"])
def test_anything_but_an_object_is_forged(ends: Pair, packet: bytes) -> None:
    ends[0].send(packet)
    with pytest.raises(wire.WireForged):
        wire.receive(ends[1], 1.0)


def test_an_oversized_packet_is_forged_and_not_sent_by_us(ends: Pair) -> None:
    with pytest.raises(ValueError, match="over the"):
        wire.send(ends[0], {"text": "x" * wire.MAX_BYTES})
    ends[0].send(b" " * (wire.MAX_BYTES + 1))
    with pytest.raises(wire.WireForged):
        wire.receive(ends[1], 1.0)


def test_silence_and_the_end_differ(ends: Pair) -> None:
    with pytest.raises(wire.WireTimeout):
        wire.receive(ends[1], 0.01)
    ends[0].close()
    with pytest.raises(wire.WireClosed):
        wire.receive(ends[1], 1.0)


LEAF = {
    "path": "0", "plain": True, "type_name": "Tensor", "attributes": 0, "layout": "strided", "device": "cpu",
    "dtype": "float32", "shape": [2], "stride": [1], "storage_bytes": 8, "needed_bytes": 8,
}  # fmt: skip
RAN = {
    "op": "ran",
    "stamps": [1, 2],
    "launch_ns": 0,
    "results": [{"structure": "tensor", "leaves": [LEAF], "aliases": []}],
}


def test_an_answer_of_the_schema_is_parsed() -> None:
    assert schema.parse(RAN, schema.Ran).results[0].leaves[0].shape == [2]


@pytest.mark.parametrize(
    "change",
    [
        {"extra": 1}, {"stamps": [1.0, 2.0]}, {"stamps": [1]}, {"stamps": [-1, 2]}, {"stamps": ["1", "2"]},
        {"results": []}, {"results": RAN["results"] * 65}, {"op": "loaded"}, {"op": "speedup"},
        {"correct": True, "speedup": 50.0},
    ],
)  # fmt: skip
def test_anything_off_the_schema_is_forged(change: dict[str, Any]) -> None:
    with pytest.raises(wire.WireForged):
        schema.parse({**RAN, **change}, schema.Ran)


def test_an_answer_to_another_request_is_forged() -> None:
    with pytest.raises(wire.WireForged):
        schema.parse({"op": "sealed"}, schema.Ran)


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=12,
    )
)
def test_no_json_gets_past_the_parser_as_anything_else(value: Any) -> None:
    message = value if isinstance(value, dict) else {"op": value}
    with pytest.raises(wire.WireForged):
        schema.parse({**message, "forged": 1}, schema.Ran)
