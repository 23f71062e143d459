"""Options of one answer, with the names, fields and defaults of LMDeploy 0.18.

Fields of unsupported features exist too. They reject every value except their default.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from lmdeploy.base.checks import OptionError, check_number, is_int, refuse, refuse_item
from lmdeploy.config.option import Option, check

logger = logging.getLogger("lmdeploy")

MAX_STOP_WORDS = 256
MAX_STOP_WORD_CHARS = 4096
MAX_ALL_STOP_CHARS = 1 << 16
MAX_TOKEN_IDS = 4096
MAX_LOGIT_BIAS = 4096
MAX_LOGPROBS = 100
MAX_N = 128
MAX_NGRAM = 1024  # of repetition_ngram_size and repetition_ngram_threshold


_PENALTY = Option(low=-2, high=2, to_core=True)
_NGRAM = Option(high=MAX_NGRAM)
_NO_LOGPROBS = Option(high=MAX_LOGPROBS, low=0)
_WORDS = Option(high=MAX_STOP_WORDS)
_TOKEN_IDS = Option(high=MAX_TOKEN_IDS)
_WHOLE_BLOCKS = Option(unsupported="the prefix cache keeps the blocks of every request")


def _check_logit_bias(biases: Any) -> None:
    if not isinstance(biases, dict) or len(biases) > MAX_LOGIT_BIAS:
        wanted = f"a dict of at most {MAX_LOGIT_BIAS} token ids and numbers"
        raise refuse("logit_bias", biases, wanted=wanted)
    for token, bias in biases.items():
        if not is_int(token, low=0):
            raise refuse_item("logit_bias", token, wanted="a token id with a number")
        check_number("logit_bias", bias, wanted=(-100.0, 100.0))


@dataclass
class GenerationConfig:
    """Options for generating the answers to one prompt.

    Args:
        n: number of answers per prompt. They share the computation of the prompt.
        max_new_tokens: most tokens of an answer. session_len and the cache limit it further.
        do_sample: draw each token from the model's distribution. False always chooses the most
            likely one, so that answers repeat.
        top_p: sample from the most likely tokens with this sum. Lower values make answers safer and
            less varied.
        top_k: sample from this number of tokens; 0 allows all. Lower values make answers safer and
            less varied.
        min_p: least probability relative to the most likely token. Higher values remove more of the
            unlikely tokens.
        temperature: divides the logits; 0 chooses the most likely token. Higher values make answers
            more varied and less reliable.
        repetition_penalty: above 1 makes tokens of the prompt and the answer less likely. High
            values also suppress words that must repeat.
        presence_penalty: as in OpenAI's API, subtracted from the logits of tokens of the answer.
            Higher values favor new words.
        frequency_penalty: as presence_penalty, but once for each occurrence. Higher values end
            repetitions sooner.
        ignore_eos: continue after the end token of the model. Answers then end at max_new_tokens
            or a stop word.
        random_seed: seed of the sampling (default: a new one for each response). With the same seed
            and a deterministic engine, a request has the same answer.
        stop_words: texts that end the answer. They are matched across token borders and not
            returned.
        bad_words: texts whose tokens are never completed. Both spellings with and without a space
            before them are excluded.
        stop_token_ids: tokens that end the answer.
        bad_token_ids: tokens that are never sampled.
        min_new_tokens: the answer cannot end before this number of tokens.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: has no effect.
        logprobs: number of alternatives returned per token. None returns no log probabilities.
        prompt_logprobs: the same for the tokens of the prompt. The prompt is then computed anew
            instead of taken from the prefix cache.
        logit_bias: maps token ids to values that are added to their logits.
        response_format: {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema":
            ...}} or {"type": "regex_schema", "regex_schema": "..."}. The answer then has this form.
        output_logits: "generation" or "all", which includes the prompt. None returns no logits.
        include_stop_str_in_output: return the stop word too.
        repetition_ngram_size: stop when a run of so many tokens has occurred
            repetition_ngram_threshold times. 0 and less turn this off, for either.
        repetition_ngram_threshold: number of occurrences of the run.
        cache_salt: requests share cached prefixes only if their salts are equal. None is a salt of
            its own.
        priority: requests with a lower value are served earlier. An old request still gets its
            share, whatever its priority.
        pooling: return the final hidden state of the prompt's last token ("last") or the mean over
            its tokens ("mean") as `Response.embedding`. It needs max_new_tokens 0.

    Raises:
        ValueError: a value is out of range or belongs to an unsupported feature.
    """

    n: Annotated[int, Option(low=1, high=MAX_N)] = 1
    max_new_tokens: Annotated[int, Option(low=0)] = 512
    do_sample: bool = False
    top_p: Annotated[float, Option(low=0, high=1, to_core=True)] = 1.0
    top_k: Annotated[int, Option(low=0, to_core=True)] = 50
    min_p: Annotated[float, Option(low=0, high=1, to_core=True)] = 0.0
    temperature: Annotated[float, Option(low=0, high=2)] = 0.8
    repetition_penalty: Annotated[float, Option(above=0, high=100, to_core=True)] = 1.0
    ignore_eos: Annotated[bool, Option(to_core=True)] = False
    random_seed: Annotated[int | None, Option(low=0, high=2**64 - 1, flags=("--seed",))] = None
    stop_words: Annotated[list[str] | None, _WORDS] = None
    bad_words: Annotated[list[str] | None, _WORDS] = None
    stop_token_ids: Annotated[list[int] | None, _TOKEN_IDS] = None
    bad_token_ids: Annotated[list[int] | None, _TOKEN_IDS] = None
    min_new_tokens: Annotated[int | None, Option(low=0)] = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprobs: Annotated[int | None, _NO_LOGPROBS] = None
    logprob_start_len: Annotated[
        int, Option(unsupported="prompt_logprobs always begins at the first token")
    ] = -1
    response_format: Annotated[
        dict[str, Any] | None, Option(wanted="a dict with the key 'type'")
    ] = None
    logits_processors: Annotated[
        list[Callable[..., Any]] | None, Option(unsupported="sampling runs in C++")
    ] = None
    output_logits: Literal["generation", "all"] | None = None
    output_last_hidden_state: Annotated[
        Literal["all", "generation"] | None, Option(unsupported="pooling returns hidden states")
    ] = None
    include_stop_str_in_output: bool = False
    return_ppl: Annotated[bool, Option(unsupported="get_ppl computes it")] = False
    with_cache: Annotated[bool, _WHOLE_BLOCKS] = False
    preserve_cache: Annotated[bool, _WHOLE_BLOCKS] = False
    migration_request: Annotated[Any, Option(unsupported="a request stays in its engine")] = None
    return_routed_experts: Annotated[
        bool, Option(unsupported="the choice of experts stays in the step")
    ] = False
    repetition_ngram_size: Annotated[int, _NGRAM] = 0
    repetition_ngram_threshold: Annotated[int, _NGRAM] = 0
    # Not in LMDeploy.
    presence_penalty: Annotated[float, _PENALTY] = 0.0
    frequency_penalty: Annotated[float, _PENALTY] = 0.0
    logit_bias: Annotated[dict[int, float] | None, Option(check=_check_logit_bias)] = None
    prompt_logprobs: Annotated[int | None, _NO_LOGPROBS] = None
    cache_salt: Annotated[str | None, Option(wanted="a string that is not empty")] = None
    priority: Annotated[int, Option(to_core=True)] = 0
    pooling: Literal["last", "mean"] | None = None

    def __post_init__(self) -> None:
        check(self, names_flags=False)
        self.repetition_ngram_size = max(self.repetition_ngram_size, 0)
        self.repetition_ngram_threshold = max(self.repetition_ngram_threshold, 0)
        for name in ("stop_words", "bad_words", "stop_token_ids", "bad_token_ids"):
            if getattr(self, name) is not None:
                setattr(self, name, list(getattr(self, name)))
        for name in ("stop_words", "bad_words"):
            words = getattr(self, name) or []
            total = sum(len(word) for word in words)
            if total > MAX_ALL_STOP_CHARS:
                raise OptionError(
                    name,
                    f"has {total} characters in {len(words)} words. It must have at most "
                    f"{MAX_ALL_STOP_CHARS} in all.",
                )
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
