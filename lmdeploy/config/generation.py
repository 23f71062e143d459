"""Options of one answer, with the names, fields and defaults of LMDeploy 0.18.

Fields of unsupported features exist too. They reject every value except their default.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from lmdeploy.base.checks import (
    OptionError,
    check_bool,
    check_choice,
    check_ids,
    check_int,
    check_number,
    check_strings,
    is_int,
    refuse,
    refuse_item,
    refuse_unsupported,
)
from lmdeploy.config.unsupported import GENERATION, unsupported_fields

logger = logging.getLogger("lmdeploy")

MAX_STOP_WORDS = 256
MAX_STOP_WORD_CHARS = 4096
MAX_ALL_STOP_CHARS = 1 << 16
MAX_TOKEN_IDS = 4096
MAX_LOGIT_BIAS = 4096
MAX_LOGPROBS = 100
MAX_N = 128
MAX_NGRAM = 1024  # of repetition_ngram_size and repetition_ngram_threshold


@dataclass
class GenerationConfig:
    """Options for generating the answers to one prompt.

    Args:
        n: number of answers per prompt.
        max_new_tokens: maximum length of the answer. session_len and the cache limit it further.
        do_sample: False always chooses the most likely token.
        top_p, top_k, min_p, temperature: sampling options. top_k 0 allows all tokens.
        repetition_penalty: a value above 1 makes tokens of the prompt and the answer less likely.
        presence_penalty, frequency_penalty: as in OpenAI's API, over the tokens of the answer.
        ignore_eos: continue after the end token of the model.
        random_seed: None uses a fresh seed.
        stop_words: texts that end the answer. They are matched across token borders and not
            returned.
        bad_words: texts whose tokens are never completed.
        stop_token_ids, bad_token_ids: the same for token ids.
        min_new_tokens: the answer cannot end before this number of tokens.
        logprobs: number of alternatives returned per token. None returns no log probabilities.
        prompt_logprobs: the same for the tokens of the prompt.
        logit_bias: maps token ids to values that are added to their logits.
        response_format: {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema":
            ...}} or {"type": "regex_schema", "regex_schema": "..."}.
        output_logits: "generation" or "all", which includes the prompt. None returns no logits.
        include_stop_str_in_output: return the stop word too.
        repetition_ngram_size: stop when a run of so many tokens has occurred
            repetition_ngram_threshold times. 0 and less turn this off, for either.
        cache_salt: requests share cached prefixes only if their salts are equal. None is a salt of
            its own.
        priority: requests with a lower value are served earlier. An old request still gets its
            share, whatever its priority.
        pooling: return the final hidden state of the prompt's last token ("last") or the mean over
            its tokens ("mean") as `Response.embedding`. It needs max_new_tokens 0.

    Raises:
        ValueError: a value is out of range or belongs to an unsupported feature.
    """

    n: int = 1
    max_new_tokens: int = 512
    do_sample: bool = False
    top_p: float = 1.0
    top_k: int = 50
    min_p: float = 0.0
    temperature: float = 0.8
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    random_seed: int | None = None
    stop_words: list[str] | None = None
    bad_words: list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprobs: int | None = None
    logprob_start_len: int = -1
    response_format: dict[str, Any] | None = None
    logits_processors: list[Callable[..., Any]] | None = None
    output_logits: Literal["all", "generation"] | None = None
    output_last_hidden_state: Literal["all", "generation"] | None = None
    include_stop_str_in_output: bool = False
    return_ppl: bool = False
    with_cache: bool = False
    preserve_cache: bool = False
    migration_request: Any = None
    return_routed_experts: bool = False
    repetition_ngram_size: int = 0
    repetition_ngram_threshold: int = 0
    # Not in LMDeploy.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    priority: int = 0
    pooling: Literal["last", "mean"] | None = None

    def __post_init__(self) -> None:
        refuse_unsupported(self, unsupported_fields(GENERATION))
        check_int("n", self.n, low=1, high=MAX_N)
        check_int("max_new_tokens", self.max_new_tokens, low=0)
        if self.cache_salt is not None and (
            not isinstance(self.cache_salt, str) or not self.cache_salt
        ):
            raise refuse("cache_salt", self.cache_salt, wanted="a string that is not empty")
        check_int("priority", self.priority, low=-(2**31), high=2**31 - 1)
        if self.min_new_tokens is not None:
            check_int("min_new_tokens", self.min_new_tokens, low=0)
        for name in ("repetition_ngram_size", "repetition_ngram_threshold"):
            check_int(name, getattr(self, name), low=-(2**31), high=MAX_NGRAM)
            setattr(self, name, max(getattr(self, name), 0))
        self._check_sampling()
        self._check_words()
        self._check_output()

    def _check_sampling(self) -> None:
        check_number("top_p", self.top_p, wanted=(0.0, 1.0))
        check_number("min_p", self.min_p, wanted=(0.0, 1.0))
        check_number("temperature", self.temperature, wanted=(0.0, 2.0))
        check_int("top_k", self.top_k, low=0)
        if check_number("repetition_penalty", self.repetition_penalty, wanted=(0.0, 100.0)) == 0:
            raise refuse("repetition_penalty", self.repetition_penalty, wanted="a number above 0")
        check_number("presence_penalty", self.presence_penalty, wanted=(-2.0, 2.0))
        check_number("frequency_penalty", self.frequency_penalty, wanted=(-2.0, 2.0))
        if self.random_seed is not None:
            check_int("random_seed", self.random_seed, low=0, high=2**64 - 1)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict) or len(self.logit_bias) > MAX_LOGIT_BIAS:
                wanted = f"a dict of at most {MAX_LOGIT_BIAS} token ids and numbers"
                raise refuse("logit_bias", self.logit_bias, wanted=wanted)
            for token, bias in self.logit_bias.items():
                if not is_int(token, low=0):
                    raise refuse_item("logit_bias", token, wanted="a token id with a number")
                check_number("logit_bias", bias, wanted=(-100.0, 100.0))

    def _check_words(self) -> None:
        for name in ("stop_words", "bad_words"):
            if getattr(self, name) is not None:
                words = check_strings(
                    name,
                    getattr(self, name),
                    max_items=MAX_STOP_WORDS,
                    max_chars=MAX_STOP_WORD_CHARS,
                )
                total = sum(len(word) for word in words)
                if total > MAX_ALL_STOP_CHARS:
                    raise OptionError(
                        name,
                        f"has {total} characters in {len(words)} words. It must have at most "
                        f"{MAX_ALL_STOP_CHARS} in all.",
                    )
                setattr(self, name, words)
        for name in ("stop_token_ids", "bad_token_ids"):
            if getattr(self, name) is not None:
                setattr(self, name, check_ids(name, getattr(self, name), max_items=MAX_TOKEN_IDS))

    def _check_output(self) -> None:
        for name in (
            "do_sample",
            "ignore_eos",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
        ):
            check_bool(name, getattr(self, name))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), low=0, high=MAX_LOGPROBS)
        check_choice("output_logits", self.output_logits, choices=(None, "generation", "all"))
        check_choice("pooling", self.pooling, choices=(None, "last", "mean"))
        if self.pooling is not None and (
            self.max_new_tokens > 0
            or self.prompt_logprobs is not None
            or self.output_logits is not None
        ):
            raise OptionError(
                "pooling",
                f"is {self.pooling}, which needs max_new_tokens 0 and no prompt_logprobs or "
                "output_logits.",
            )
        if self.response_format is not None and not isinstance(self.response_format, dict):
            raise refuse(
                "response_format", self.response_format, wanted="a dict with the key 'type'"
            )


# Defaults of the server and `lmdeploy chat` for fields that generation_config.json lacks.
_SAMPLING_DEFAULTS: dict[str, float | int] = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 1.0,
    "top_k": 40,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


def sampling_defaults(generation_config: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling options of the model's generation_config.json, completed by defaults.

    If GenerationConfig rejects a value, log a warning and use the default. Requests must not fail
    because of it.
    """
    result: dict[str, Any] = dict(_SAMPLING_DEFAULTS)
    for name, own_default in _SAMPLING_DEFAULTS.items():
        value = generation_config.get(name)
        if value is None:
            continue
        try:
            GenerationConfig(**{name: value})
        except OptionError as error:
            logger.warning(
                "generation_config.json: %s The default %s is used instead.", error, own_default
            )
        else:
            result[name] = value
    return result
