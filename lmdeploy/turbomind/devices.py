"""The device that computes: the CPU, or a GPU through libturbomind_cuda.so."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmdeploy.environment import free_memory_bytes, usable_cores
from lmdeploy.messages import TurbomindEngineConfig

if TYPE_CHECKING:
    from lmdeploy._turbomind import Device

logger = logging.getLogger("lmdeploy")

_DRIVER_FILE = "/dev/nvidiactl"


def default_batch_size(sm: int) -> int:
    """Of max_batch_size, on a GPU of this `sm` (0: the CPU)."""
    return 128 if sm else 32


@dataclass(frozen=True)
class OpenDevice:
    """A device, and where it is."""

    device: Device
    gpu: int | None = None  # index; None: the CPU

    def free_bytes(self) -> int:
        """Memory that the device could still give."""
        from lmdeploy import _turbomind

        return free_memory_bytes() if self.gpu is None else _turbomind.cuda_free_bytes(self.gpu)

    @property
    def line(self) -> str:
        """For the start of a server."""
        return f"device: {self.device.name}"


def open_device(config: TurbomindEngineConfig) -> OpenDevice:
    """Makes the device that `config` asks for. Where `auto` becomes the CPU the log says why: as a
    warning on machines that have a GPU's driver.

    Raises ValueError, in one line, when a GPU is asked for and cannot be used.
    """
    from lmdeploy import _turbomind

    if config.device_type != "cpu":
        gpu = config.devices[0] if config.devices else 0
        try:
            if config.exact:
                raise ValueError("CUDA is not used: exact is there on CPU only")
            return OpenDevice(_turbomind.make_cuda_device(gpu, config.deterministic), gpu)
        except ValueError as error:
            if config.needs_cuda:
                raise ValueError(f"{error}; change --device or --devices") from None
            level = logging.WARNING if os.path.exists(_DRIVER_FILE) else logging.INFO
            logger.log(level, "%s", error)
    return OpenDevice(_turbomind.make_cpu_device(config.num_threads or usable_cores()))
