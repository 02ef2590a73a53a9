"""Arenas, bursts and placements of the CUDA path on a runtime without a device (`fake_cuda`)."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluator.reference.placement_cuda import CudaPlacement
from evaluator.timing.clock import MOST_LEAD_NS
from evaluator.worker.arena import GUARD_BYTES, Slot
from evaluator.worker.arena_cuda import CudaArena
from evaluator.worker.backend_cuda import CudaBackend

_spec = importlib.util.spec_from_file_location("fake_cuda", Path(__file__).parent / "fake_cuda.py")
assert _spec is not None
assert _spec.loader is not None
fake_cuda = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake_cuda)


def opened() -> tuple[Any, CudaBackend]:
    runtime = fake_cuda.FakeRuntime()
    backend = CudaBackend(runtime)
    backend.open()
    return runtime, backend


def test_what_one_process_writes_another_reads_through_the_handle() -> None:
    _, server = opened()
    other, worker = opened()
    arena = server.arena(5000)
    (seen,) = worker.attach([], [arena.handle], drop=False)
    arena.flat(512, 4, torch.float32).fill_(7.0)
    assert seen.flat(512, 4, torch.float32).tolist() == [7.0] * 4
    seen.fill(Slot(512, 16), 0xFF)
    worker.settle()
    assert torch.isnan(arena.flat(512, 4, torch.float32)).all()
    assert seen.start in other.mapped


def test_private_memory_has_no_handle() -> None:
    _, backend = opened()
    assert backend.private(100).handle is None
    assert backend.arena(100).handle is not None


def test_earlier_arenas_stay_mapped_until_they_are_to_be_dropped() -> None:
    _, server = opened()
    runtime, worker = opened()
    first, second, third = (server.arena(100) for _ in range(3))
    worker.attach([], [first.handle], drop=False)
    worker.attach([], [second.handle], drop=False)
    assert runtime.mapped == {first.start, second.start}
    worker.attach([], [third.handle], drop=True)
    assert runtime.mapped == {third.start}


@pytest.mark.parametrize("handle", [["zz", 100], ["00", 100], [7, 100], ["00" * 64, 0], ["00" * 64, True]])
def test_anything_else_is_no_handle(handle: list[Any]) -> None:
    runtime, _ = opened()
    with pytest.raises((ValueError, fake_cuda.FakeError)):
        CudaArena.opened(runtime, handle)


def test_differences_are_seen_in_whole_words_and_in_the_rest() -> None:
    """A slot of 13 bytes is one word of 8 and 5 bytes behind it."""
    _, backend = opened()
    one, other = backend.arena(4096), backend.private(4096)
    slot = Slot(512, 13)
    assert not one.differs(other, [slot])
    for place in (0, 7, 8, 12):
        one.write(512 + place, b"\x01")
        assert one.differs(other, [slot])
        one.write(512 + place, b"\x00")
    one.write(512 + 13, b"\x01")
    assert not one.differs(other, [slot])


def test_places_that_hold_other_bytes_are_named() -> None:
    _, backend = opened()
    arena = backend.arena(4096)
    for offset in (0, 100, 300):
        arena.write(offset, b"guard")
    arena.write(102, b"X")
    assert arena.unlike([0, 100, 300], b"guard") == [1]
    assert arena.unlike([], b"guard") == []


@pytest.mark.parametrize("lead_ns", [0, 1000])
def test_work_on_a_side_stream_is_missing_from_the_first_result_and_there_in_the_others(lead_ns: int) -> None:
    """The model fills its result by work that the default stream does not wait for."""
    runtime, backend = opened()
    made: list[torch.Tensor] = []

    def model(x: torch.Tensor) -> torch.Tensor:
        result = torch.full_like(x, -1.0)
        made.append(result)
        runtime.side.append(lambda: result.copy_(2 * x))
        return result

    seen: list[list[float]] = []
    calls = [[torch.ones(2)], [torch.ones(2)]]
    results, stamps, _ = backend.run_burst(model, calls, lambda result: seen.append(result.tolist()), lead_ns)
    assert seen == [[-1.0, -1.0]]
    assert results[1].tolist() == [2.0, 2.0]
    assert len(stamps) == 3
    assert stamps[0] == 0
    assert stamps[0] < stamps[1] < stamps[2]


def test_every_call_begins_with_a_reset_and_flushed_cache() -> None:
    runtime, backend = opened()
    fills: list[tuple[int, int]] = []
    fill = runtime.fill
    runtime.fill = lambda address, byte, nbytes: (fills.append((address, nbytes)), fill(address, byte, nbytes))
    backend.run_burst(lambda x: x, [[1], [2], [3]])
    assert runtime.l2_resets == 3
    assert [nbytes for _, nbytes in fills] == [1 << 20] * 3


def test_with_a_lead_the_kernel_that_flushes_holds_the_device_and_nothing_waits_for_it() -> None:
    runtime, backend = opened()
    waits: list[int] = []
    wait = runtime.wait
    runtime.wait = lambda: (waits.append(len(runtime.leads)), wait())
    backend.run_burst(lambda x: x, [[1], [2], [3]], lead_ns=70_000)
    assert runtime.leads == [MOST_LEAD_NS, 70_000, 70_000]  # a caller that slept launches slowly
    assert runtime.l2_resets == 3
    assert waits == [1, 2, 3]  # after each call alone


class _Reference:
    """What a placement asks of a reference: one input of 400 bytes, one output of 16, one parameter."""

    input_bytes = (400,)
    output_bytes = (16,)
    arguments = ()

    def state(self) -> dict[str, torch.Tensor]:
        return {"weight": torch.ones(3)}


def placed(count: int = 2) -> tuple[Any, CudaPlacement, list[Any]]:
    runtime, backend = opened()
    placement = CudaPlacement(_Reference(), backend)  # type: ignore[arg-type]
    return runtime, placement, placement.make(count, random.Random(1))


def test_the_reference_arms_results_are_private_and_wiped_where_it_wrote_them() -> None:
    runtime, placement, arenas = placed()
    call = placement.write_call(0, [torch.arange(100.0)])
    ((offset, _),) = call["slots"]
    arm_outputs = arenas[4]
    private = (placement.expected, placement.snapshot, placement.private_inputs)
    assert [arena.handle for arena in private] == [None, None, None]
    arm_outputs.flat(offset, 4, torch.float32).copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    placement.collect("reference", 1)
    runtime.wait()
    assert placement.expected.flat(offset, 4, torch.float32).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert torch.isnan(arm_outputs.flat(offset, 4, torch.float32)).all()
    assert placement.snapshot.flat(offset, 4, torch.float32).tolist() == [0.0] * 4


def test_both_arms_get_the_same_inputs_and_a_changed_copy_is_found() -> None:
    _, placement, arenas = placed()
    placement.write_call(0, [torch.arange(100.0)])
    call = placement.write_call(1, [torch.arange(100.0) + 1])
    offset = call["specs"][0][3]
    for arena in (arenas[0], arenas[3]):
        assert arena.flat(offset, 100, torch.float32).tolist() == (torch.arange(100.0) + 1).tolist()
    assert placement.changed_inputs(2) == []
    arenas[0].flat(offset, 100, torch.float32)[50] = 0.0
    assert placement.changed_inputs(2) == ["0"]


def test_a_broken_guard_band_is_named() -> None:
    runtime, placement, arenas = placed()
    call = placement.write_call(1, [torch.zeros(100)])
    runtime.wait()
    assert placement.broken_guards() == []
    offset, nbytes = call["slots"][0]
    for place, name in ((offset - 1, "before"), (offset + nbytes + GUARD_BYTES - 1, "behind")):
        byte = arenas[1].flat(place, 1, torch.uint8)
        byte ^= 1
        assert placement.broken_guards() == [f"output slot 1 {name}"]
        byte ^= 1


def test_exported_arenas_are_freed_when_no_worker_can_map_them_any_more() -> None:
    """A device so small that one placement is over a sixteenth of it: dropped at the third, freed at the fourth."""
    runtime, placement, first = placed()
    total = sum(arena.nbytes for arena in first)
    runtime.memory = lambda: (8 * total, 8 * total)
    addresses = [arena.start for arena in first]
    placement.make(2, random.Random(2))
    assert placement.drop
    assert all(address in runtime.sizes for address in addresses)
    placement.make(2, random.Random(3))
    assert not any(address in runtime.sizes for address in addresses)
    placement.forget()
    placement.close()
    assert len(runtime.sizes) == 1  # the memory that flushes the cache
