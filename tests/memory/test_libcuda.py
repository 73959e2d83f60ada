"""The binding to the driver's library, on a library that only answers: what is called, in which order, and errors."""

import ctypes
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from kvcoord.errors import ConfigError, DriverCallFailed
from kvcoord.memory import libcuda
from kvcoord.memory.driver import HANDLE_BYTES
from kvcoord.memory.libcuda import LibCuda


class Function:
    """One function of the library. ctypes sets `argtypes` and `restype` on it."""

    def __init__(self, name: str, act: Callable[..., int], calls: list[str]) -> None:
        self.name, self.act, self.calls = name, act, calls
        self.argtypes: tuple[Any, ...] = ()

    def __call__(self, *arguments: Any) -> int:
        assert len(arguments) == len(self.argtypes), self.name
        self.calls.append(self.name)
        return self.act(*arguments)


class Library:
    """Answers 0 to every call, apart from those named in `answers`; without the functions named in `absent`."""

    def __init__(self, answers: dict[str, Callable[..., int]] | None = None, absent: tuple[str, ...] = ()) -> None:
        self.calls: list[str] = []
        self.answers = {"cuDeviceGetCount": lambda count: write(count, 1), **(answers or {})}
        self.absent = absent

    def __getattr__(self, name: str) -> Function:
        if name in self.absent:
            raise AttributeError(name)
        function = Function(name, self.answers.get(name, lambda *_: 0), self.calls)
        self.__dict__[name] = function
        return function


def write(reference: Any, value: int) -> int:
    reference._obj.value = value
    return 0


def note(seen: list[Any], given: object) -> int:
    seen.append(given)
    return 0


ONE = array("Q", [16]), array("Q", [32]), array("Q", [8])
TWO = array("Q", [16, 48]), array("Q", [32, 64]), array("Q", [8, 8])


def test_a_host_without_a_driver_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libcuda, "LIBRARY", "libno-such-driver.so.1")
    with pytest.raises(ConfigError, match="needs an NVIDIA driver") as caught:
        LibCuda()
    assert caught.value.field == "copies.engine"


def test_a_gpu_that_this_process_does_not_see_is_refused() -> None:
    for ordinal in (1, -1):
        with pytest.raises(ConfigError, match="sees 1 GPUs"):
            LibCuda(ordinal, Library())


def test_a_driver_that_is_too_old_is_refused_by_the_function_it_lacks() -> None:
    with pytest.raises(ConfigError, match="cuStreamWaitEvent"):
        LibCuda(0, Library(absent=("cuStreamWaitEvent",)))


def test_every_call_runs_in_this_devices_context() -> None:
    library = Library()
    driver = LibCuda(0, library)
    library.calls.clear()
    event = driver.make_event(shared=True)
    driver.record(event, driver.open_stream(urgent=True))
    assert library.calls[::2] == ["cuCtxSetCurrent"] * 3
    assert library.calls[1::2] == ["cuEventCreate", "cuStreamCreateWithPriority", "cuEventRecord"]


def test_events_park_the_thread_and_shared_ones_have_no_time() -> None:
    flags: list[int] = []
    driver = LibCuda(0, Library({"cuEventCreate": lambda _, given: note(flags, given)}))
    driver.make_event(shared=False)
    driver.make_event(shared=True)
    assert flags == [1, 1 | 2 | 4]


def test_an_urgent_stream_has_the_greatest_priority_of_the_device() -> None:
    made: list[tuple[int, int]] = []
    answers: dict[str, Callable[..., int]] = {
        "cuCtxGetStreamPriorityRange": lambda least, greatest: write(least, 0) or write(greatest, -5),
        "cuStreamCreateWithPriority": lambda _, kind, priority: note(made, (kind, priority)),
    }
    driver = LibCuda(0, Library(answers))
    driver.open_stream(urgent=True)
    driver.open_stream(urgent=False)
    assert made == [(1, -5), (1, 0)]


@pytest.mark.parametrize(
    ("absent", "called"),
    [
        ((), ["cuMemcpyBatchAsync_v2"]),
        (("cuMemcpyBatchAsync_v2",), ["cuMemcpyBatchAsync"]),
        (("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync"), ["cuMemcpyAsync", "cuMemcpyAsync"]),
    ],
)
def test_many_pieces_are_one_call_where_the_driver_has_one(absent: tuple[str, ...], called: list[str]) -> None:
    library = Library(absent=absent)
    driver = LibCuda(0, library)
    stream = driver.open_stream(urgent=False)
    library.calls.clear()
    driver.copy(stream, *TWO)
    assert [name for name in library.calls if name != "cuCtxSetCurrent"] == called
    library.calls.clear()
    driver.copy(stream, *ONE)
    assert [name for name in library.calls if name != "cuCtxSetCurrent"] == ["cuMemcpyAsync"]
    library.calls.clear()
    driver.copy(stream, array("Q"), array("Q"), array("Q"))
    assert library.calls == []


def test_a_batch_names_destinations_then_sources_and_reads_them_in_stream_order() -> None:
    seen: list[tuple[Any, ...]] = []
    driver = LibCuda(0, Library({"cuMemcpyBatchAsync_v2": lambda *given: note(seen, given)}))
    driver.copy(driver.open_stream(urgent=False), *TWO)
    [(destinations, sources, sizes, count, attributes, first, attribute_count, _)] = seen
    numbers = ctypes.c_uint64 * 2
    assert list(numbers.from_address(destinations)) == [32, 64]
    assert list(numbers.from_address(sources)) == [16, 48]
    assert list(numbers.from_address(sizes)) == [8, 8]
    assert (count, attribute_count, first._obj.value) == (2, 1, 0)
    assert (attributes._obj.source_order, attributes._obj.flags) == (1, 1)


def test_an_error_carries_the_call_its_code_and_the_drivers_own_words() -> None:
    def describe(code: int, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_TOO_BAD" if code == 719 else None
        return 0

    answers: dict[str, Callable[..., int]] = {"cuEventSynchronize": lambda _: 719, "cuGetErrorName": describe}
    driver = LibCuda(0, Library(answers))
    with pytest.raises(DriverCallFailed) as caught:
        driver.synchronize(driver.make_event(shared=False))
    assert (caught.value.call, caught.value.code, caught.value.detail) == (
        "cuEventSynchronize",
        719,
        "CUDA_ERROR_TOO_BAD",
    )


def test_a_gpu_is_found_on_the_bus_under_the_name_that_the_system_uses() -> None:
    def write_text(text: Any, length: int, number: int) -> int:
        text.value = b"0000:3B:00.0"
        return 0 if (length, number) == (len(text), 0) else 1

    assert LibCuda(0, Library({"cuDeviceGetPCIBusId": write_text})).pci_bus_id == "0000:3b:00.0"


def test_handles_travel_whole() -> None:
    seen: list[bytes] = []
    answers: dict[str, Callable[..., int]] = {
        "cuIpcOpenMemHandle_v2": lambda _, handle, flags: note(seen, bytes(handle.data)) + flags - 1,
        "cuIpcOpenEventHandle": lambda _, handle: note(seen, bytes(handle.data)),
    }
    driver = LibCuda(0, Library(answers))
    handle = bytes(range(HANDLE_BYTES))
    driver.open_memory(handle)
    driver.open_event(handle)
    assert seen == [handle, handle]
    assert len(driver.export_memory(4096)) == len(driver.export_event(driver.open_event(handle))) == HANDLE_BYTES


def test_the_context_is_given_back_once() -> None:
    library = Library()
    driver = LibCuda(0, library)
    driver.close()
    driver.close()
    assert library.calls.count("cuDevicePrimaryCtxRelease_v2") == 1
