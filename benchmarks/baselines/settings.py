"""Settings of llama.cpp: the types of its KV cache, flash attention and the micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Setting:
    """Types of the KV cache, whether flash attention is used, and the tokens of a micro-batch."""

    k: str
    v: str
    flash_attention: bool
    micro_batch: int = 512

    @property
    def name(self) -> str:
        """Return the name in tables and on the command line."""
        types = self.k if self.k == self.v else f"{self.k} keys, {self.v} values"
        flash = ", flash attention" if self.flash_attention else ""
        return types + flash + (f", micro-batch {self.micro_batch}" * (self.micro_batch != 512))


# The fastest setting depends on the length and the machine. Quantized values need flash attention.
_PLAIN, _FLASH = Setting("f16", "f16", False), Setting("f16", "f16", True)
_F32, _Q8 = Setting("f32", "f32", True), Setting("q8_0", "q8_0", True)
_Q5_KEYS, _Q8_KEYS = Setting("q5_1", "f16", False), Setting("q8_0", "f16", False)
_ANY = (_FLASH, _F32, _Q8, _PLAIN, _Q5_KEYS)
_MANY = (_FLASH, _Q8_KEYS, Setting("q4_0", "q4_0", True))
SETTINGS = {
    "16 bit": (_PLAIN, _FLASH, Setting("bf16", "bf16", True)),
    "decode": (*_ANY, _Q8_KEYS),
    "batch": _MANY,
    "server": _MANY,
    "prefill": (*_ANY, replace(_FLASH, micro_batch=2048), replace(_F32, micro_batch=2048)),
}
BY_NAME = {setting.name: setting for settings in SETTINGS.values() for setting in settings}
