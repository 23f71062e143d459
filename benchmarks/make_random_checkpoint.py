"""Writes a full-size checkpoint with random weights from a config.

    python benchmarks/make_random_checkpoint.py gpt-oss-20b OUT_FOLDER
    python benchmarks/make_random_checkpoint.py gpt-oss-20b OUT.gguf --format gguf
    python benchmarks/make_random_checkpoint.py llama-3.2-1b OUT.gguf --format gguf --type q4_0
    python benchmarks/make_random_checkpoint.py path/to/config.json OUT_FOLDER --layers 2

The result loads like the real one: names, shapes, formats, tokenizer with the family's special
tokens, chat template. The weights give finite activations and logits that differ. Tensors go to the
file in pieces of at most 16 MiB; the peak of the whole process is printed and stays below 512 MiB
whatever the model. The same seed gives the same bytes, and --layers N gives the first N layers of
the longer model.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from checkpoint_configs import NAMED_CONFIGS, Config, read_config
from checkpoint_tensors import GGUF_ARCHITECTURES, Shape, gguf_tensors, hf_tensors
from random_tensors import Encoding, RandomTensor
from random_tokenizer import RandomTokenizer

if TYPE_CHECKING:
    from tqdm import tqdm

DEFAULT_SHARD_BYTES = 5_000_000_000
GGUF_ALIGNMENT = 32
_SAFETENSORS_DTYPES = {
    Encoding.F32: "F32",
    Encoding.BF16: "BF16",
    Encoding.E2M1_PAIRS: "U8",
    Encoding.E8M0: "U8",
}


@dataclass(frozen=True)
class Model:
    """What is written."""

    name: str
    config: Config
    shape: Shape
    tokenizer: RandomTokenizer
    seed: int


def make_model(name: str, *, layers: int | None, seed: int) -> Model:
    """Reads and checks a config. ValueError says which key is wrong."""
    config = read_config(name, layers)
    shape = Shape.of(config)
    tokenizer = RandomTokenizer.of(shape.architecture, shape.vocab)
    if shape.is_gpt_oss:
        config.setdefault("quantization_config", {"quant_method": "mxfp4"})
    return Model(name, config, shape, tokenizer, seed)


def cut_shards(tensors: Sequence[RandomTensor], shard_bytes: int) -> list[list[RandomTensor]]:
    """Neighbouring tensors together, at most `shard_bytes` unless one alone is larger."""
    shards: list[list[RandomTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    return shards


def write_folder(model: Model, folder: Path, *, shard_bytes: int) -> None:
    """A Hugging Face folder: shards, index, config and tokenizer."""
    tensors = hf_tensors(model.shape)
    total = check_space(folder.parent, tensors)
    folder.mkdir()
    shards = cut_shards(tensors, shard_bytes)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    with progress(total) as bar:
        for name, shard in zip(names, shards, strict=True):
            bar.set_postfix_str(name)
            write_shard(folder / name, shard, seed=model.seed, bar=bar)
    if len(shards) > 1:
        weight_map = {t.name: name for name, s in zip(names, shards, strict=True) for t in s}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)
    model.tokenizer.save(folder)
    special = model.tokenizer.special
    ids = {"eos_token_id": model.tokenizer.eos_ids[0]}
    ids["pad_token_id"] = model.tokenizer.id_of(special.pad)
    if special.bos is not None:
        ids["bos_token_id"] = model.tokenizer.id_of(special.bos)
    write_json(folder / "config.json", {**model.config, **ids})


def write_shard(path: Path, tensors: Sequence[RandomTensor], *, seed: int, bar: tqdm[Any]) -> None:
    """One safetensors file: length of the header, header, tensors without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        shape = list(tensor.shape)
        if tensor.encoding is Encoding.E2M1_PAIRS:
            shape[-1] //= 2
        header[tensor.name] = {
            "dtype": _SAFETENSORS_DTYPES[tensor.encoding],
            "shape": shape,
            "data_offsets": [offset, offset + tensor.num_bytes],
        }
        offset += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            write_pieces(file, tensor, seed=seed, bar=bar)


def write_gguf(model: Model, path: Path, *, encoding: Encoding) -> None:
    """A GGUF file as llama.cpp's converter lays it out, matrices in Q8_0 or Q4_0.

    Raises ValueError for a mixture of dense layers and experts, which GGUF's architectures lack.
    """
    import gguf

    experts = model.shape.experts
    if experts and len(experts.layers) < model.shape.layers:
        raise ValueError(
            f"--format gguf: {len(experts.layers)} of {model.shape.layers} layers have experts "
            "(mlp_only_layers, decoder_sparse_step), wanted all of them"
        )
    tensors = gguf_tensors(model.shape, encoding) + rope_tensors(model.config, model.shape)
    total = check_space(path.parent, tensors)
    unfinished = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(unfinished, GGUF_ARCHITECTURES[model.shape.architecture])
    add_gguf_keys(writer, model)
    add_file_type(writer, model.shape, encoding=encoding)
    model.tokenizer.add_to_gguf(writer)
    kinds = gguf.GGMLQuantizationType
    for tensor in tensors:
        kind, values = kinds[tensor.encoding.value], np.dtype(np.float32)
        writer.add_tensor_info(tensor.name, tensor.shape, values, tensor.num_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with unfinished.open("ab") as file, progress(total) as bar:
        for tensor in tensors:
            file.write(bytes(-file.tell() % GGUF_ALIGNMENT))
            write_pieces(file, tensor, seed=model.seed, bar=bar)
        file.write(bytes(-file.tell() % GGUF_ALIGNMENT))
    unfinished.rename(path)


def add_gguf_keys(writer: Any, model: Model) -> None:
    """Sizes and RoPE, under the names of llama.cpp's converter. KeyError for a missing key."""
    shape, config = model.shape, model.config
    writer.add_type("model")
    writer.add_name(f"{Path(model.name).stem} random")
    writer.add_block_count(shape.layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.width)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_vocab_size(shape.vocab)
    if writer.arch == "llama":
        writer.add_rope_dimension_count(shape.head_dim)
    if shape.experts:
        writer.add_expert_count(shape.experts.count)
        writer.add_expert_used_count(shape.experts.per_token)
        if shape.architecture != "MixtralForCausalLM":
            writer.add_expert_feed_forward_length(shape.experts.width)
        if shape.experts.shared_width:
            writer.add_expert_shared_feed_forward_length(shape.experts.shared_width)
    if shape.is_gpt_oss:
        writer.add_sliding_window(config["sliding_window"])
    add_rope_keys(writer, config)


def add_file_type(writer: Any, shape: Shape, *, encoding: Encoding) -> None:
    """The format that most of the matrices have."""
    import gguf

    mostly = "MXFP4_MOE" if shape.is_gpt_oss else encoding.value
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{mostly}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def add_rope_keys(writer: Any, config: Config) -> None:
    """RoPE as transformers 5 spells it, or as before. ValueError for a kind that is not built."""
    import gguf

    rope, kind, theta = rope_of(config)
    writer.add_rope_freq_base(theta)
    if kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif kind not in ("default", "llama3"):
        raise ValueError(
            f"rope_type: got {kind!r}, wanted default, llama3 or yarn with --format gguf"
        )


def rope_of(config: Config) -> tuple[Config, str, float]:
    """RoPE's own keys, its kind and its base."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    return rope, rope.get("rope_type", rope.get("type", "default")), theta


def rope_tensors(config: Config, shape: Shape) -> list[RandomTensor]:
    """The divisors of the frequencies, which GGUF has instead of the keys of `llama3`.

    Frequencies whose wavelength is beyond original / low_freq_factor are divided by `factor`, those
    below original / high_freq_factor stay, and between them the quotient changes linearly.
    """
    rope, kind, theta = rope_of(config)
    if kind != "llama3":
        return []
    half = shape.head_dim // 2
    turns = (
        rope["original_max_position_embeddings"] / (2 * np.pi) * theta ** (-np.arange(half) / half)
    )
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    factors = 1.0 / (kept + (1.0 - kept) / rope["factor"])
    values = tuple(float(factor) for factor in factors)
    return [RandomTensor("rope_freqs.weight", (half,), Encoding.F32, 0.0, values=values)]


def write_pieces(file: BinaryIO, tensor: RandomTensor, *, seed: int, bar: tqdm[Any]) -> None:
    """The bytes of one tensor."""
    for piece in tensor.pieces(seed):
        file.write(piece.data)
        bar.update(len(piece))


def check_space(folder: Path, tensors: Sequence[RandomTensor]) -> int:
    """Bytes of all tensors. ValueError when the disk does not have them."""
    total = sum(tensor.num_bytes for tensor in tensors)
    free = shutil.disk_usage(folder).free
    if total > free:
        raise ValueError(f"output: {folder} has {free:,} bytes free, wanted {total:,}")
    return total


def progress(total: int) -> tqdm[Any]:
    """A bar over bytes."""
    from tqdm import tqdm

    return tqdm(total=total, unit="B", unit_scale=True, disable=None)


def write_json(path: Path, value: Config) -> None:
    """Indented, as the hub's files are."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("config", help=f"a config.json, or {', '.join(NAMED_CONFIGS)}")
    parser.add_argument("output", type=Path, help="folder (safetensors) or file (gguf) to make")
    parser.add_argument("--format", choices=("safetensors", "gguf"), default="safetensors")
    parser.add_argument(
        "--type", choices=("q8_0", "q4_0"), help="of a GGUF file's matrices (default: q8_0)"
    )
    parser.add_argument("--layers", type=int, help="write only the first N layers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--shard-bytes", type=int, default=DEFAULT_SHARD_BYTES, help="default: %(default)s"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the checkpoint, print its size and this process's peak memory."""
    options = parse_arguments(arguments)
    try:
        if options.output.exists():
            raise ValueError(f"output: {options.output} is there already, wanted a new name")
        if options.seed < 0:
            raise ValueError(f"--seed: got {options.seed}, wanted 0 or more")
        if options.type and options.format != "gguf":
            raise ValueError(f"--type {options.type}: wanted --format gguf beside it")
        model = make_model(options.config, layers=options.layers, seed=options.seed)
        if options.format == "gguf":
            write_gguf(model, options.output, encoding=Encoding[(options.type or "q8_0").upper()])
        else:
            write_folder(model, options.output, shard_bytes=options.shard_bytes)
    except (ValueError, KeyError, OSError) as error:
        missing = isinstance(error, KeyError)
        text = f"config: {error}: missing, wanted a value" if missing else str(error)
        print(f"make_random_checkpoint.py: {text}", file=sys.stderr)
        return 2
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{options.output}: {model.shape.layers} layers; peak memory {peak} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
