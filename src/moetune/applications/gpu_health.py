"""Clock, temperature and throttling of one GPU, through NVML."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

# NVML's reasons that mean "slower than asked for"; idle and application clocks do not
# (nvidia-ml-py: nvmlClocksEventReasonSwPowerCap, ...HwSlowdown, SwThermal, HwThermal, HwPowerBrake).
_REASONS = {0x4: "power", 0x8: "hardware", 0x20: "temperature", 0x40: "temperature", 0x80: "power brake"}


@dataclass(frozen=True, slots=True)
class Health:
    """How a GPU is at the moment. None: the driver does not say.

    Attributes:
        clock_mhz: of the multiprocessors.
        temperature_c: of the board.
        throttled: why it runs slower than it could; empty when it does not.
    """

    clock_mhz: int | None = None
    temperature_c: int | None = None
    throttled: tuple[str, ...] = ()


class HealthMonitor:
    """Asks the driver about one GPU; a machine without a driver knows nothing.

    Args:
        uuid: the GPU.
        nvml: the module `pynvml` or what stands for it; None imports it.
    """

    def __init__(self, uuid: str, nvml: ModuleType | None = None) -> None:
        self._nvml: Any = None
        self._handle: object = None
        try:
            module: Any = importlib.import_module("pynvml") if nvml is None else nvml
            module.nvmlInit()
            self._handle = module.nvmlDeviceGetHandleByUUID(uuid)
            self._nvml = module
        except Exception:  # noqa: BLE001 - no driver, no such GPU, no binding: nothing is known
            self._nvml = None

    def look(self) -> Health:
        """How it is now."""
        if self._nvml is None:
            return Health()
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons") or self._ask(
            "nvmlDeviceGetCurrentClocksThrottleReasons"
        )
        names = dict.fromkeys(name for bit, name in _REASONS.items() if (reasons or 0) & bit)
        return Health(
            clock_mhz=self._ask("nvmlDeviceGetClockInfo", getattr(self._nvml, "NVML_CLOCK_SM", 1)),
            temperature_c=self._ask(
                "nvmlDeviceGetTemperature", getattr(self._nvml, "NVML_TEMPERATURE_GPU", 0)
            ),
            throttled=tuple(names),
        )

    def _ask(self, function: str, *arguments: object) -> Any:  # noqa: ANN401 - the binding has no types
        try:
            return getattr(self._nvml, function)(self._handle, *arguments)
        except Exception:  # noqa: BLE001 - this driver or board does not know it
            return None
