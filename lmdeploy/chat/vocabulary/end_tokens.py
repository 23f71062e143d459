"""Find the tokens that end an answer, of which checkpoints often state only one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# Special tokens that end a turn or a text in every model that has them.
_TURN_ENDS = (
    "<|im_end|>",  # ChatML
    "<|eot_id|>",  # Llama 3
    "<|eom_id|>",
    "<|eot|>",  # Llama 4
    "<|eom|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",  # Phi
    "</s>",
    "<end_of_turn>",  # Gemma
    "<eos>",
    "<EOT>",
    "▁<EOT>",  # CodeLlama
    "[EOT]",
    "[EOS]",
    "<end_of_utterance>",  # SmolVLM, Granite Docling
    "<|end_of_sentence|>",  # ERNIE
    "<｜end▁of▁sentence｜>",  # DeepSeek
    "<[end▁of▁sentence]>",  # Seed-Coder
    "<seed:eos>",
    "<|END_OF_TURN_TOKEN|>",  # Command R
    "[|endofturn|]",  # EXAONE
    "[e~[",  # MiniMax-M2
)
# In these vocabularies, an answer consists of several messages. <|end|> ends a message, and the
# listed tokens end the answer.
_MESSAGE_END = "<|end|>"
_ANSWER_ENDS = {
    frozenset(("<|channel|>", "<|return|>", "<|call|>")): ("<|return|>", "<|call|>"),  # GPT-OSS
    frozenset(("<|flush|>", "<|calls|>")): ("<|flush|>", "<|calls|>"),  # Solar Open
}
# GLM has no token for the end of a turn: the beginning of the next one ends an answer.
_GLM = frozenset(("[gMASK]", "<sop>"))
_GLM_ENDS = ("<|user|>", "<|observation|>")


def end_ids(backend: Backend, stated: Iterable[int | None]) -> list[int]:
    """Return the ids that end an answer: those that the checkpoint states, and those of known text.

    Only special tokens count, because a known text may be plain text in another model.
    """
    special = {
        token.content: token_id
        for token_id, token in backend.get_added_tokens_decoder().items()
        if token.special
    }
    ends: tuple[str, ...] = _TURN_ENDS
    excluded = None
    for needed, answer_ends in _ANSWER_ENDS.items():
        if needed <= special.keys():
            ends = (*answer_ends, *ends)
            excluded = special.get(_MESSAGE_END)
    if special.keys() >= _GLM:
        ends = (*ends, *_GLM_ENDS)
    ids = [token_id for token_id in stated if token_id is not None]
    ids += [special[text] for text in ends if text in special]
    return [token_id for token_id in dict.fromkeys(ids) if token_id != excluded]
