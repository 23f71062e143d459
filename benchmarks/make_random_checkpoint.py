"""Write a full-size checkpoint with random weights from a config.

    python benchmarks/make_random_checkpoint.py gpt-oss-20b OUT_FOLDER
    python benchmarks/make_random_checkpoint.py gpt-oss-20b OUT.gguf --format gguf
    python benchmarks/make_random_checkpoint.py llama-3.2-1b OUT.gguf --format gguf --type q4_0
    python benchmarks/make_random_checkpoint.py path/to/config.json OUT_FOLDER --layers 2

The result loads like the real checkpoint: names, shapes, formats, a tokenizer with the special
tokens of the family, a chat template. The weights give finite activations and different logits.
Tensors are written in pieces of at most 16 MiB, and the peak memory of the process stays below
512 MiB. The same seed gives the same bytes, and --layers N gives the first N layers of the longer
model.
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
import yaml
from checkpoint_tensors import (
    GGUF_ARCHITECTURES,
    Encoding,
    RandomTensor,
    Shape,
    gguf_tensors,
    hf_tensors,
)
from random_tokenizer import RandomTokenizer
from results import write_json

if TYPE_CHECKING:
    from tqdm import tqdm

Config = dict[str, Any]

CONFIGS = Path(__file__).with_name("checkpoint_configs.yaml")
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
    """The model to write."""

    name: str
    config: Config
    shape: Shape
    tokenizer: RandomTokenizer
    seed: int


def named_configs() -> dict[str, Config]:
    """Return the published configs by name."""
    configs: dict[str, Config] = yaml.safe_load(CONFIGS.read_text(encoding="utf-8"))
    for config in configs.values():
        if config["model_type"] == "gpt_oss":
            pairs = config["num_hidden_layers"] // 2
            config["layer_types"] = ["sliding_attention", "full_attention"] * pairs
    return configs


def read_config(name: str, layers: int | None) -> Config:
    """Return a named config or that of a file, cut to its first `layers` layers."""
    config = named_configs().get(name) or _config_of_file(name)
    own = config.get("num_hidden_layers")
    if layers is None:
        return config
    if type(own) is not int or not 1 <= layers <= own:
        raise ValueError(f"--layers {layers} is wrong; the model has num_hidden_layers {own!r}.")
    config["num_hidden_layers"] = layers
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = config["layer_types"][:layers]
    return config


def _config_of_file(name: str) -> Config:
    path = Path(name)
    if not path.is_file():
        names = ", ".join(named_configs())
        raise ValueError(f"config {name!r} is unknown; give a config.json or one of {names}.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"config {path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"config {path} holds {type(config).__name__}; it must be an object.")
    return config


def make_model(name: str, *, layers: int | None, seed: int) -> Model:
    """Read and check a config. ValueError is raised for a wrong key."""
    config = read_config(name, layers)
    shape = Shape.of(config)
    tokenizer = RandomTokenizer.of(shape.architecture, shape.vocab)
    if shape.is_gpt_oss:
        config.setdefault("quantization_config", {"quant_method": "mxfp4"})
    return Model(name, config, shape, tokenizer, seed)


def cut_shards(tensors: Sequence[RandomTensor], shard_bytes: int) -> list[list[RandomTensor]]:
    """Group consecutive tensors into shards of `shard_bytes`; a larger tensor has its own."""
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
    """Write a Hugging Face folder: shards, index, config and tokenizer."""
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
    ids = model.tokenizer.config_ids()
    ids["eos_token_id"] = ids["eos_token_id"][0]
    write_json(folder / "config.json", {**model.config, **ids})


def write_shard(path: Path, tensors: Sequence[RandomTensor], *, seed: int, bar: tqdm[Any]) -> None:
    """Write one safetensors file: length of the header, header, tensors without gaps."""
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
    """Write a GGUF file in the layout of llama.cpp's converter, matrices in Q8_0 or Q4_0.

    ValueError is raised for a mixture of dense layers and experts, which GGUF cannot hold.
    """
    import gguf

    experts = model.shape.experts
    if experts and len(experts.layers) < model.shape.layers:
        raise ValueError(
            f"--format gguf: {len(experts.layers)} of {model.shape.layers} layers have experts "
            "(mlp_only_layers, decoder_sparse_step), but GGUF needs experts in all of them."
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
    """Write sizes and RoPE with the names of llama.cpp's converter."""
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
    """Write the format that most of the matrices have."""
    import gguf

    mostly = "MXFP4_MOE" if shape.is_gpt_oss else encoding.value
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{mostly}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def add_rope_keys(writer: Any, config: Config) -> None:
    """Write RoPE, read from the keys of transformers 5 or of earlier versions."""
    import gguf

    rope, kind, theta = rope_of(config)
    writer.add_rope_freq_base(theta)
    if kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif kind not in ("default", "llama3"):
        raise ValueError(f"rope_type {kind!r} has no GGUF form; use default, llama3 or yarn.")


def rope_of(config: Config) -> tuple[Config, str, float]:
    """Return the RoPE keys, their kind and the base."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    return rope, rope.get("rope_type", rope.get("type", "default")), theta


def rope_tensors(config: Config, shape: Shape) -> list[RandomTensor]:
    """Return the divisors of the frequencies, which GGUF stores instead of the `llama3` keys.

    Frequencies with a wavelength over original / low_freq_factor are divided by `factor`. Those
    below original / high_freq_factor stay. Between the two, the quotient changes linearly.
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
    """Write the bytes of one tensor."""
    for piece in tensor.pieces(seed):
        file.write(piece.data)
        bar.update(len(piece))


def check_space(folder: Path, tensors: Sequence[RandomTensor]) -> int:
    """Return the bytes of all tensors. ValueError is raised if the disk has less space."""
    total = sum(tensor.num_bytes for tensor in tensors)
    free = shutil.disk_usage(folder).free
    if total > free:
        raise ValueError(f"{folder} has {free:,} bytes free, but the checkpoint needs {total:,}.")
    return total


def progress(total: int) -> tqdm[Any]:
    """Return a progress bar over bytes."""
    from tqdm import tqdm

    return tqdm(total=total, unit="B", unit_scale=True, disable=None)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("config", help=f"a config.json, or {', '.join(named_configs())}")
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
            raise ValueError(f"{options.output} exists already; choose a new name.")
        if options.seed < 0:
            raise ValueError(f"--seed {options.seed} is wrong; it must be 0 or more.")
        if options.type and options.format != "gguf":
            raise ValueError(f"--type {options.type} needs --format gguf.")
        model = make_model(options.config, layers=options.layers, seed=options.seed)
        if options.format == "gguf":
            write_gguf(model, options.output, encoding=Encoding[(options.type or "q8_0").upper()])
        else:
            write_folder(model, options.output, shard_bytes=options.shard_bytes)
    except (ValueError, KeyError, OSError) as error:
        missing = isinstance(error, KeyError)
        text = f"config has no key {error}; add it." if missing else str(error)
        print(f"make_random_checkpoint.py: {text}", file=sys.stderr)
        return 2
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{options.output}: {model.shape.layers} layers; peak memory {peak} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
