"""Option classes of LMDeploy whose features do not exist here. They say what to use instead."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn


class _Absent:
    advice: ClassVar[str]

    def __new__(cls, *_: Any, **__: Any) -> NoReturn:
        """Raise ValueError: no object of the class can be made."""
        raise ValueError(f"{cls.__name__} is not supported. {cls.advice}")


class PytorchEngineConfig(_Absent):
    """Options of LMDeploy's PyTorch engine, which does not exist here."""

    advice = (
        "Use TurbomindEngineConfig, which has the same names for session_len, max_batch_size, "
        "cache_max_entry_count, quant_policy and others; block_size is cache_block_seq_len."
    )


class VisionConfig(_Absent):
    """Options of vision models, of which only the text part is loaded."""

    advice = "Remove it, because of a vision model only the text part is loaded."


class SpeculativeConfig(_Absent):
    """Options of speculative decoding, which are fields of TurbomindEngineConfig here."""

    advice = (
        "Use speculative_algorithm, speculative_draft_model and speculative_num_draft_tokens of "
        "TurbomindEngineConfig."
    )
