"""① Converts the sampling fields of a request into a GenerationConfig."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmdeploy.base.checks import flag_of, refuse, user_path
from lmdeploy.base.files import read_json_object
from lmdeploy.config.generation import GenerationConfig, sampling_defaults
from lmdeploy.config.option import options_of
from lmdeploy.serve.schema import SamplingFields

_MAX_FILE_BYTES = 1 << 20
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p")
# The fields of a request whose values become the options of the same names.
_SAME_NAMES = [name for name in SamplingFields.model_fields if name in options_of(GenerationConfig)]


def read_sampling(generation_config: str) -> dict[str, Any] | None:
    """Return the defaults of the sampling fields. None means the model's own.

    Args:
        generation_config: "auto" (the model's own), "none" (that of this package, which LMDeploy
            calls "lmdeploy" and vLLM "vllm"), or the path of a generation_config.json or of its
            folder.

    Raises:
        ValueError: if the file cannot be read.
    """
    if generation_config == "auto":
        return None
    if generation_config in ("none", "lmdeploy", "vllm"):
        return sampling_defaults({})
    path = user_path("generation_config", generation_config, flag=flag_of("generation_config"))
    if path.is_dir():
        path = path / "generation_config.json"
    if not path.is_file():
        wanted = "auto, none, lmdeploy, or the path of a generation_config.json or of its folder"
        flag = flag_of("generation_config")
        raise refuse("generation_config", generation_config, wanted=wanted, flag=flag)
    return sampling_defaults(read_json_object(path, _MAX_FILE_BYTES))


@dataclass
class Limits:
    """The options that each endpoint derives from fields of its own."""

    max_new_tokens: int | None  # None and -1 allow all tokens that session_len leaves
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1


def make_config(
    fields: SamplingFields, limits: Limits, *, model_defaults: dict[str, Any], room: int
) -> GenerationConfig:
    """Return the GenerationConfig of a request.

    Fields that are None take the model's defaults. If a request sets a sampling field but not
    do_sample, tokens are sampled even if the model's default is greedy.

    Args:
        room: max_new_tokens if the limits set none.

    Raises:
        OptionError: if GenerationConfig rejects a value.
    """

    given = {name: getattr(fields, name) for name in _SAME_NAMES}
    values = model_defaults | {name: value for name, value in given.items() if value is not None}
    if fields.do_sample is None and not values["do_sample"]:
        values["do_sample"] = any(given[name] is not None for name in _SAMPLING_FIELDS)
    values["top_k"] = max(values["top_k"], 0)
    if fields.min_new_tokens is None:
        values["min_new_tokens"] = fields.min_tokens
    try:
        bias = {int(token): value for token, value in (fields.logit_bias or {}).items()}
    except ValueError:
        raise refuse(
            "logit_bias", fields.logit_bias, wanted="an object whose keys are token ids"
        ) from None
    values |= {
        "n": limits.n,
        "max_new_tokens": room if limits.max_new_tokens in (None, -1) else limits.max_new_tokens,
        "random_seed": None if fields.seed is None else fields.seed % 2**64,
        "stop_words": [fields.stop] if isinstance(fields.stop, str) else fields.stop,
        "logit_bias": bias or None,
        "logprobs": limits.logprobs,
        "prompt_logprobs": limits.prompt_logprobs,
    }
    return GenerationConfig(**values)
