"""Launches machine code through the CUDA driver, in the place of a Triton kernel.

`CubinKernel` is called as the kernel is, `kernel[grid](arguments)`, and launches whichever binary it was
given last: all the rest of measuring, data, routings and the order of launches, stays what it is.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.h200.cubins import Binary

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_...
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_...
_INTEGERS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h: an id, padding to 8 bytes, a union of 64 bytes."""

    _fields_ = (
        ("id", ctypes.c_uint),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


class DriverError(RuntimeError):
    """A call of the driver that failed."""


class Driver:
    """The few calls of the CUDA driver that a launch takes, on the context that is current.

    Args:
        library: the driver's own, or what stands for it.
    """

    def __init__(self, library: Any = None) -> None:  # noqa: ANN401 - a library of C functions
        self._library = library if library is not None else ctypes.CDLL("libcuda.so.1")

    def load(self, cubin: bytes, kernel: str, shared_bytes: int) -> ctypes.c_void_p:
        """Load machine code; the function that it holds, with as much shared memory as it asks for."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(cubin))
        self._call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(kernel.encode()))
        self._call(
            "cuFuncSetAttribute",
            function,
            ctypes.c_int(_MAX_DYNAMIC_SHARED_SIZE_BYTES),
            ctypes.c_int(shared_bytes),
        )
        return function

    def launch(
        self,
        function: ctypes.c_void_p,
        programs: int,
        threads: int,
        shared_bytes: int,
        stream: int,
        values: Sequence[Any],
        *,
        pdl: bool,
    ) -> None:
        """Launch a function on C values."""
        pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
        )
        attribute = LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        config = LaunchConfig(
            programs, 1, 1, threads, 1, 1, shared_bytes, stream, ctypes.pointer(attribute), int(pdl)
        )
        self._call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)

    def _call(self, name: str, *arguments: Any) -> None:  # noqa: ANN401 - C values
        status = getattr(self._library, name)(*arguments)
        if status:
            raise DriverError(f"{name} answers {status}")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A binary on the GPU."""

    binary: Binary
    function: ctypes.c_void_p


class CubinKernel:
    """Stands in for a Triton kernel.

    Args:
        arg_names: of the kernel, in order.
        driver: launches.
        stream: the stream that is current.
    """

    def __init__(self, arg_names: Sequence[str], driver: Driver, stream: Callable[[], int]) -> None:
        self._names, self._driver, self._stream = tuple(arg_names), driver, stream
        self.loaded: Loaded | None = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:  # noqa: ANN401 - what the kernel takes
            assert self.loaded is not None
            binary = self.loaded.binary
            given = dict(zip(self._names, arguments, strict=False)) | named
            values = [
                _INTEGERS[kind](given[name]) if kind in _INTEGERS else ctypes.c_void_p(given[name].data_ptr())
                for name, kind in binary.parameters
            ]
            self._driver.launch(
                self.loaded.function,
                grid[0],
                binary.threads,
                binary.shared_bytes,
                self._stream(),
                [*values, ctypes.c_void_p(0), ctypes.c_void_p(0)],
                pdl=bool(named.get("launch_pdl")),
            )

        return launch
