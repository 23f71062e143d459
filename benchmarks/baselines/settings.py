"""Settings of the KV cache of llama.cpp, three for each workload."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """Types of the KV cache and whether flash attention is used."""

    k: str
    v: str
    flash_attention: bool

    @property
    def name(self) -> str:
        """Return the name in tables and on the command line."""
        types = self.k if self.k == self.v else f"{self.k} keys, {self.v} values"
        return types + (", flash attention" if self.flash_attention else "")


# Three settings per workload. They won most rows of earlier searches over all types. Quantized
# values need flash attention, quantized keys do not.
_PLAIN, _FLASH = Setting("f16", "f16", False), Setting("f16", "f16", True)
_Q8_KEYS, _Q4 = Setting("q8_0", "f16", False), Setting("q4_0", "q4_0", True)
SETTINGS = {
    "16 bit": (_PLAIN, _FLASH, Setting("bf16", "bf16", True)),
    "decode": (_PLAIN, _FLASH, _Q8_KEYS),
    "batch": (_FLASH, _Q8_KEYS, _Q4),
    "server": (_FLASH, _Q8_KEYS, _Q4),
    "prefill": (_FLASH, Setting("f32", "f32", True), Setting("iq4_nl", "f16", False)),
}
BY_NAME = {setting.name: setting for settings in SETTINGS.values() for setting in settings}
