"""Packed records: the same bytes for the same record, and nothing else is ever taken for one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exemplar_store import ExemplarStore
from exemplar_store.codec import pack, read, unpack
from exemplar_store.errors import DamagedValue, StoreError, UnknownSchema
from tasks.records import Exemplar

TASK = "a" * 64


@given(st.text())
def test_every_text_comes_back(text: str) -> None:
    assert unpack(pack(text)) == text
    assert pack(text) == pack(text)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_text_or_one_sentence(data: bytes) -> None:
    with contextlib.suppress(StoreError):
        assert isinstance(unpack(data), str)


def test_a_torn_value_is_never_a_shorter_text(make_exemplar: Callable[..., Exemplar]) -> None:
    whole = pack(make_exemplar(1).model_dump_json())
    for length in range(1, len(whole)):
        with pytest.raises(DamagedValue, match="is damaged"):
            unpack(whole[:length])
    with pytest.raises(UnknownSchema, match="codec -1"):
        unpack(b"")
    with pytest.raises(UnknownSchema, match="codec 7"):
        unpack(b"\x07" + whole[1:])


def test_a_later_versions_record_is_one_sentence(store: ExemplarStore, make_exemplar: Callable[..., Exemplar]) -> None:
    """It has a field more; a draw, the best and the record itself all say so."""
    exemplar = make_exemplar(1)
    later = exemplar.to_json()[:-1] + ',"warp_count":32}'
    with pytest.raises(UnknownSchema, match=r"a stored Exemplar cannot be read by this version \(warp_count"):
        read(Exemplar, pack(later))
    store.insert(exemplar)
    name, id = store.place_keys(exemplar)[0], exemplar.candidate_hash[:32]
    head = store.connection.call("HGET", name, id).rsplit(b"|", 1)[0].split(b"|")[:3]
    store.connection.call("HSET", name, id, b"|".join(head) + b"|" + pack(later))
    for look in (lambda: store.best(TASK, "cpu"), lambda: store.draw(TASK, "cpu", Random(0))):
        with pytest.raises(UnknownSchema, match="use the version that wrote it"):
            look()
