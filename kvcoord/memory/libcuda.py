"""The seam to the GPU's driver, performed: calls into `libcuda.so.1`, the library that comes with every NVIDIA driver.

It needs neither torch nor a CUDA toolkit, so a sidecar is ready in milliseconds and stays small. It uses the device's
primary context, the one that torch uses too, so in an engine's own process both see the same memory and streams; a
`torch.cuda.Stream` is known here by its `cuda_stream`. A call lets other threads run while it is under way.
"""

import ctypes
import threading
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any, Final, Protocol

from kvcoord.errors import ConfigError, DriverCallFailed
from kvcoord.memory.driver import HANDLE_BYTES, Addresses, Event, Stream

LIBRARY: Final = "libcuda.so.1"

_NON_BLOCKING_STREAM: Final = 1
_BLOCKING_SYNC: Final = 1
_DISABLE_TIMING: Final = 2
_INTERPROCESS: Final = 4
_HOST_PORTABLE: Final = 1
_LAZY_PEER_ACCESS: Final = 1
_SOURCE_IN_STREAM_ORDER: Final = 1
_PREFER_OVERLAP: Final = 1
_PCI_BUS_ID_BYTES: Final = 32


class _Handle(Structure):
    """CUipcMemHandle and CUipcEventHandle, which travel by value."""

    _fields_ = [("data", c_ubyte * HANDLE_BYTES)]


class _Uuid(Structure):
    _fields_ = [("data", c_ubyte * 16)]


class _Location(Structure):
    """CUmemLocation: a hint that matters for managed memory only."""

    _fields_ = [("type", c_int), ("id", c_int)]


class _CopyAttributes(Structure):
    """CUmemcpyAttributes."""

    _fields_ = [("source_order", c_int), ("source", _Location), ("destination", _Location), ("flags", c_uint)]


_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid_v2": (POINTER(_Uuid), c_int),
    "cuDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxGetStreamPriorityRange": (POINTER(c_int), POINTER(c_int)),
    "cuStreamCreateWithPriority": (POINTER(c_void_p), c_uint, c_int),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuIpcGetMemHandle": (POINTER(_Handle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), _Handle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuIpcGetEventHandle": (POINTER(_Handle), c_void_p),
    "cuIpcOpenEventHandle": (POINTER(c_void_p), _Handle),
}

_BATCH: Final = (c_void_p, c_void_p, c_void_p, c_size_t, POINTER(_CopyAttributes), POINTER(c_size_t), c_size_t)
_OPTIONAL: Final[dict[str, tuple[Any, ...]]] = {
    "cuMemcpyBatchAsync_v2": (*_BATCH, c_void_p),
    "cuMemcpyBatchAsync": (*_BATCH, POINTER(c_size_t), c_void_p),
}
"""Drivers from CUDA 13.0 on have the first, from 12.8 on the second, older ones neither."""


class Library(Protocol):
    """What is needed of a loaded library: its functions as attributes."""

    def __getattr__(self, name: str) -> Any: ...


def load() -> ctypes.CDLL:
    """The driver's library. Raises ConfigError, with what to do, on a host without one."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as cause:
        fix = f"needs an NVIDIA driver on this host and, in a container, its libraries ({cause}); or use the engine cpu"
        raise ConfigError("copies.engine", "cuda", fix) from cause


class LibCuda:
    """One GPU through its driver. Makes its primary context the calling thread's current one with every call.

    `ordinal` numbers the GPUs that this process sees. Raises ConfigError without such a GPU, DriverCallFailed when the
    driver cannot begin.
    """

    def __init__(self, ordinal: int = 0, library: Library | None = None) -> None:
        self._library = load() if library is None else library
        self._functions: dict[str, Any] = {}
        self._bind()
        self._ask("cuInit", 0)
        self._number = self._device_number(ordinal)
        uuid = _Uuid()
        self._ask("cuDeviceGetUuid_v2", byref(uuid), self._number)
        self._uuid = bytes(uuid.data).hex()
        context = c_void_p()
        self._ask("cuDevicePrimaryCtxRetain", byref(context), self._number)
        self._context = context
        self._closing = threading.Lock()
        self._closed = False
        self._urgent = self._most_urgent()

    @property
    def device(self) -> str:
        return self._uuid

    @property
    def pci_bus_id(self) -> str:
        text = ctypes.create_string_buffer(_PCI_BUS_ID_BYTES)
        self._ask("cuDeviceGetPCIBusId", text, len(text), self._number)
        return text.value.decode().lower()

    @property
    def batches(self) -> bool:
        """Whether this driver takes many copies in one call."""
        return any(name in self._functions for name in _OPTIONAL)

    def close(self) -> None:
        """Give the context back, after everything made through it has ended. May be called again."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._ask("cuDevicePrimaryCtxRelease_v2", self._number)

    # --- streams and events ---------------------------------------------------------------------------------------

    def open_stream(self, *, urgent: bool) -> Stream:
        stream = c_void_p()
        self._call("cuStreamCreateWithPriority", byref(stream), _NON_BLOCKING_STREAM, self._urgent if urgent else 0)
        return Stream(stream.value or 0)

    def close_stream(self, stream: Stream) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def make_event(self, *, shared: bool) -> Event:
        event = c_void_p()
        flags = _BLOCKING_SYNC | (_INTERPROCESS | _DISABLE_TIMING if shared else 0)
        self._call("cuEventCreate", byref(event), flags)
        return Event(event.value or 0)

    def drop_event(self, event: Event) -> None:
        self._call("cuEventDestroy_v2", event)

    def record(self, event: Event, stream: Stream) -> None:
        self._call("cuEventRecord", event, stream)

    def wait(self, stream: Stream, event: Event) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0)

    def synchronize(self, event: Event) -> None:
        self._call("cuEventSynchronize", event)

    def elapsed_s(self, first: Event, last: Event) -> float:
        milliseconds = c_float()
        self._call("cuEventElapsedTime", byref(milliseconds), first, last)
        return milliseconds.value / 1000

    # --- copies ---------------------------------------------------------------------------------------------------

    def copy(self, stream: Stream, sources: Addresses, destinations: Addresses, sizes: Addresses) -> None:
        count = len(sizes)
        if not count:
            return
        if count == 1 or not self.batches:
            for source, destination, size_bytes in zip(sources, destinations, sizes, strict=True):
                self._call("cuMemcpyAsync", destination, source, size_bytes, stream)
            return
        attributes = _CopyAttributes(source_order=_SOURCE_IN_STREAM_ORDER, flags=_PREFER_OVERLAP)
        first = c_size_t(0)
        pointers = [each.buffer_info()[0] for each in (destinations, sources, sizes)]
        if "cuMemcpyBatchAsync_v2" in self._functions:
            self._call("cuMemcpyBatchAsync_v2", *pointers, count, byref(attributes), byref(first), 1, stream)
        else:
            failed = c_size_t()
            self._call(
                "cuMemcpyBatchAsync", *pointers, count, byref(attributes), byref(first), 1, byref(failed), stream
            )

    # --- memory ---------------------------------------------------------------------------------------------------

    def allocate(self, size_bytes: int) -> int:
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), size_bytes)
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", address)

    def register_host(self, address: int, size_bytes: int) -> None:
        self._call("cuMemHostRegister_v2", address, size_bytes, _HOST_PORTABLE)

    def unregister_host(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def allocation(self, address: int) -> tuple[int, int]:
        base, size_bytes = c_uint64(), c_size_t()
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size_bytes), address)
        return base.value, size_bytes.value

    # --- between processes ----------------------------------------------------------------------------------------

    def export_memory(self, base_address: int) -> bytes:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", byref(handle), base_address)
        return bytes(handle.data)

    def open_memory(self, handle: bytes) -> int:
        address = c_uint64()
        self._call("cuIpcOpenMemHandle_v2", byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        return address.value

    def close_memory(self, base_address: int) -> None:
        self._call("cuIpcCloseMemHandle", base_address)

    def export_event(self, event: Event) -> bytes:
        handle = _Handle()
        self._call("cuIpcGetEventHandle", byref(handle), event)
        return bytes(handle.data)

    def open_event(self, handle: bytes) -> Event:
        event = c_void_p()
        self._call("cuIpcOpenEventHandle", byref(event), _Handle.from_buffer_copy(handle))
        return Event(event.value or 0)

    # --- calls ----------------------------------------------------------------------------------------------------

    def _bind(self) -> None:
        for name, types in (*_SIGNATURES.items(), *_OPTIONAL.items()):
            try:
                function = getattr(self._library, name)
            except AttributeError as cause:
                if name in _OPTIONAL:
                    continue
                fix = f"the driver's library has no {name}: install a driver for CUDA 12 or later"
                raise ConfigError("copies.engine", "cuda", fix) from cause
            function.argtypes = types
            function.restype = c_int
            self._functions[name] = function

    def _call(self, name: str, *arguments: object) -> None:
        """One call with this device's context as the thread's current one."""
        self._ask("cuCtxSetCurrent", self._context)
        self._ask(name, *arguments)

    def _ask(self, name: str, *arguments: object) -> None:
        code = self._functions[name](*arguments)
        if code:
            raise DriverCallFailed(name, code, self._describe(code))

    def _describe(self, code: int) -> str:
        texts = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = c_char_p()
            if self._functions[name](code, byref(text)) == 0 and text.value is not None:
                texts.append(text.value.decode())
        return ": ".join(texts) or "unknown to this driver"

    def _device_number(self, ordinal: int) -> int:
        count, number = c_int(), c_int()
        self._ask("cuDeviceGetCount", byref(count))
        if not 0 <= ordinal < count.value:
            raise ConfigError("copies.cuda_device", ordinal, f"this process sees {count.value} GPUs, counted from 0")
        self._ask("cuDeviceGet", byref(number), ordinal)
        return number.value

    def _most_urgent(self) -> int:
        least, greatest = c_int(), c_int()
        self._call("cuCtxGetStreamPriorityRange", byref(least), byref(greatest))
        return greatest.value
