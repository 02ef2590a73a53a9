"""CUDA devices by a driver library without a driver."""

from __future__ import annotations

from typing import Any

import pytest

from evaluator import device_cuda
from evaluator.timing import hygiene
from evaluator.timing.clock import slots_on_device
from tasks.errors import UsageError


class _Nvml:
    """Three devices, the third with an odd UUID."""

    NVMLError = RuntimeError
    names = ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA L40S")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}abc"

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return self.names[handle].encode()

    def nvmlDeviceGetMinorNumber(self, handle: int) -> int:
        raise RuntimeError("not supported")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_cuda, "_nvml", _Nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("product", "expected"),
    [
        ("NVIDIA H200", "H200"), ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA H100 80GB HBM3", "H100"),
        ("Tesla T4", "T4"), ("NVIDIA GeForce RTX 4090", "RTX4090"), ("NVIDIA L40S", "L40S"), ("NVIDIA", "NVIDIA"),
    ],
)  # fmt: skip
def test_type_is_the_word_that_clusters_use(product: str, expected: str) -> None:
    assert device_cuda.type_of(product) == expected


@pytest.mark.usefixtures("nvml")
def test_a_device_is_known_by_its_uuid() -> None:
    device = device_cuda.open_cuda("cuda:1")
    assert (device.name, device.type, device.uuid) == ("cuda:1", "A100", "GPU-1abc")
    assert dict(device.environment)["CUDA_VISIBLE_DEVICES"] == "GPU-1abc"
    assert device.lock_path.endswith("kontrast-GPU-1abc.lock")
    assert device_cuda.open_cuda("cuda").name == "cuda:0"


@pytest.mark.usefixtures("nvml")
@pytest.mark.parametrize(
    ("listed", "index", "uuid"),
    [("2,0", 0, "GPU-2abc"), ("2,0", 1, "GPU-0abc"), ("GPU-1abc", 0, "GPU-1abc"), ("1,9,0", 0, "GPU-1abc")],
)
def test_the_index_counts_visible_devices(monkeypatch: pytest.MonkeyPatch, listed: str, index: int, uuid: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert device_cuda.open_cuda(f"cuda:{index}").uuid == uuid


@pytest.mark.usefixtures("nvml")
@pytest.mark.parametrize(("listed", "name"), [(None, "cuda:3"), ("", "cuda"), ("1,9,0", "cuda:1"), (None, "cuda:x")])
def test_a_missing_device_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, listed: str | None, name: str) -> None:
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    with pytest.raises(UsageError, match="there is no device"):
        device_cuda.open_cuda(name)


def test_every_device_has_one_core_for_both_of_its_arms_and_the_rest_is_for_everything_else() -> None:
    cores = list(range(16))
    assert device_cuda.split_cores(cores, 0, 1) == ((15,), tuple(range(15)))
    assert [device_cuda.split_cores(cores, index, 4) for index in range(4)] == [
        ((core,), tuple(range(12))) for core in (15, 14, 13, 12)
    ]
    assert device_cuda.split_cores([0, 1], 1, 8) == ((1,), (0,))
    assert device_cuda.split_cores([3], 0, 1) == ((3,), (3,))


def test_only_a_throttled_device_spoils_a_pair() -> None:
    """0x4 is the software power cap, 0x8 a hardware slowdown, 0x40 a thermal one."""
    assert hygiene.spoiled({}) == "" == hygiene.spoiled({"reasons": 4.0})
    assert hygiene.spoiled({"reasons": 8.0}) == hygiene.SPOILED == hygiene.spoiled({"reasons": 68.0})


def test_readings_are_summed_up() -> None:
    readings: list[dict[str, Any]] = [
        {"sm_mhz": 1980.0, "power_w": 100.0, "reasons": 1.0}, {"sm_mhz": 1400.0, "power_w": 690.0, "reasons": 4.0},
        {"sm_mhz": 1500.0},
    ]  # fmt: skip
    found = hygiene.summary(readings)
    assert found == {"sm_mhz": [1400.0, 1500.0, 1980.0], "power_w_max": 690.0, "reasons": "0x5"}


def test_slots_on_a_device() -> None:
    """Seven copies in half of the free memory, at most 16, more for short calls, two for long ones."""
    gib = 1 << 30
    assert slots_on_device(1 << 20, 2, 100 * gib, 0.1) == 16
    assert slots_on_device(1 << 20, 2, 100 * gib, 0.05) == 32  # 1.6 ms / 0.05 ms
    assert slots_on_device(1 << 20, 2, 100 * gib, 0.001) == 64
    assert slots_on_device(1 * gib, 2, 100 * gib, 0.1) == 7  # 50 GiB / (7 x 1 GiB)
    assert slots_on_device(1 << 20, 2, 100 * gib, 2.5) == 2
    assert slots_on_device(3 * gib, 2, 100 * gib, 0.1) == 2
    assert slots_on_device(4 * gib, 2, 100 * gib, 0.1) == 0
    assert slots_on_device(1 << 10, 64, 100 * gib, 0.1) == 4  # 256 leaves a message


class _Properties:
    """An H200's properties, or a driver that does not know them."""

    NVMLError = RuntimeError
    NVML_CLOCK_MEM, NVML_CLOCK_SM = 2, 1

    def __init__(self, known: bool) -> None:
        self.known = known

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetMaxClockInfo(self, handle: str, clock: int) -> int:
        if not self.known:
            raise RuntimeError("not supported")
        return {2: 3201, 1: 1980}[clock]

    def nvmlDeviceGetMemoryBusWidth(self, handle: str) -> int:
        return 6144

    def nvmlDeviceGetNumGpuCores(self, handle: str) -> int:
        return 16896


def test_peaks_come_from_the_device_s_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    """H200: 2 * 3.201 GHz * 6144 bit / 8 = 4.917 TB/s; 2 * 1.98 GHz * 16896 = 66.9 TFLOP/s."""
    monkeypatch.setattr(device_cuda, "_nvml", lambda: _Properties(known=True))
    peaks = device_cuda.Gauges("GPU-0").peaks()
    assert peaks["bytes_per_s"] == pytest.approx(4.917e12, rel=1e-3)
    assert peaks["fp32_per_s"] == pytest.approx(66.9e12, rel=1e-3)
    monkeypatch.setattr(device_cuda, "_nvml", lambda: _Properties(known=False))
    assert device_cuda.Gauges("GPU-0").peaks() == {}
