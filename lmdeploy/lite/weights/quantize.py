"""`lmdeploy lite auto_gptq` and `auto_awq`: quantize a folder to 4 bits and measure the result."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from lmdeploy.base.checks import refuse
from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.files.tensor_file import PLAIN_FORMATS
from lmdeploy.checkpoint.hub import resolve_model
from lmdeploy.checkpoint.open import Checkpoint, open_checkpoint
from lmdeploy.config.lite_options import WeightOptions
from lmdeploy.lite.divergence import Score, cut_contexts, read_text
from lmdeploy.lite.weights.compare import compare_folders
from lmdeploy.lite.weights.folder import write_folder
from lmdeploy.lite.weights.layers import MATRICES, quantize_layers, round_layers
from lmdeploy.lite.weights.rounding import Grid
from lmdeploy.models.structure import Structure

_WORD_OUTPUTS = 8  # outputs that share a word of a folder
_MAX_EVALUATED = 4096  # tokens


def quantize_folder(
    model_path: str, text_path: Path, *, output: Path, options: WeightOptions
) -> dict[str, Score]:
    """Write the quantized model to the folder `output`, and return scores by label.

    The last part of the text is not used for quantization: it compares the result with the
    original and with rounding to nearest.

    Raises:
        ValueError, OSError: if the text, the model or a path cannot be used.
    """
    from lmdeploy.chat.tokenizer import tokenizer_from_folder

    check_empty(output)
    text = read_text(text_path)
    checkpoint = open_checkpoint(resolve_model(model_path))
    grid, method = Grid(options.w_group_size, options.w_sym), options.method
    check_model(checkpoint, grid)
    ids = tokenizer_from_folder(checkpoint.path).encode(text, add_special=False)
    context = min(options.context, checkpoint.config.max_position)
    prompts, kept = split_text(ids, context, max_tokens=options.tokens)
    output.mkdir(exist_ok=True)
    layers = quantize_layers(checkpoint, prompts, method=method, grid=grid)
    write_folder(checkpoint, output, layers=layers, method=method, grid=grid)
    with tempfile.TemporaryDirectory(dir=output.parent) as name:
        nearest = Path(name)
        rounded = round_layers(checkpoint, grid=grid)
        write_folder(checkpoint, nearest, layers=rounded, method=method, grid=grid)
        others = {method: output, "round to nearest": nearest}
        return compare_folders(checkpoint.path, others, contexts=kept)


def check_empty(output: Path) -> None:
    """Raise ValueError unless the folder is empty, or can be made. Call it before the work."""
    is_free = not any(output.iterdir()) if output.is_dir() else not output.exists()
    if not is_free or not output.parent.is_dir():
        wanted = "an empty folder, or a new one in an existing folder"
        raise refuse("work_dir", str(output), wanted=wanted, flag="--work-dir")


def check_model(checkpoint: Checkpoint, grid: Grid) -> None:
    """Raise ModelFormatError for a model that the tools do not support."""
    where = f"{checkpoint.path}: "
    if checkpoint.is_gguf:
        raise ModelFormatError(where + "A GGUF file is not supported. Give a Hugging Face folder.")
    if checkpoint.config.moe is not None:
        raise ModelFormatError(where + "The model has experts, which are not supported.")
    if not _is_like_llama(checkpoint):
        raise ModelFormatError(
            f"{where}The family {checkpoint.family.name} computes its layers differently from "
            "Llama, which is not supported."
        )
    for planned in checkpoint.tensors:
        tensor = planned.tensor
        if tensor.format not in PLAIN_FORMATS:
            raise ModelFormatError(
                f"{where}tensor {tensor.name} is {tensor.format}. The weights must be F32, F16 or "
                "BF16."
            )
        if planned.name.rpartition(".")[2] not in MATRICES or len(tensor.shape) == 1:
            continue
        if tensor.cols % grid.group:
            raise ModelFormatError(
                f"{where}tensor {tensor.name} has {tensor.cols} inputs, which groups of "
                f"{grid.group} do not divide. Change --w-group-size."
            )
        if tensor.rows % _WORD_OUTPUTS:
            raise ModelFormatError(
                f"{where}tensor {tensor.name} has {tensor.rows} outputs. They must be a multiple "
                f"of {_WORD_OUTPUTS}."
            )


def _is_like_llama(checkpoint: Checkpoint) -> bool:
    """Return whether the layers are Llama's, except for biases, windows and norms of heads."""
    config = checkpoint.config
    return (
        config.structure == Structure()
        and len(config.ropes) == 1
        and not config.layer_ropes
        and config.rope.dim == 0
        and config.rope.kind != "longrope"
        and not checkpoint.family.hf_interleaved_rope
        and all(isinstance(name, str) for name in checkpoint.family.hf_tensors.values())
    )


def split_text(
    ids: Sequence[int], context: int, *, max_tokens: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the contexts for quantization, and those for the evaluation at the end.

    An eighth of the contexts is kept for the evaluation, but at least one and at most 4,096 tokens.

    Raises:
        ValueError: if there are fewer ids than two contexts.
    """
    if min(len(ids), max_tokens) < 2 * context:
        raise ValueError(
            f"{min(len(ids), max_tokens)} tokens do not fill two contexts of {context}. Use a "
            "longer text (--text), more of its --tokens, or a smaller --context."
        )
    contexts = cut_contexts(ids, context, max_tokens=max_tokens)
    kept = max(1, min(len(contexts) // 8, _MAX_EVALUATED // context))
    return contexts[:-kept], contexts[-kept:]
