"""Write a full-size checkpoint with random weights from a config.

    python benchmarks/make_random_checkpoint.py gpt-oss-20b OUT_FOLDER
    python benchmarks/make_random_checkpoint.py gpt-oss-20b OUT.gguf --format gguf
    python benchmarks/make_random_checkpoint.py llama-3.2-1b OUT.gguf --format gguf --type q4_0
    python benchmarks/make_random_checkpoint.py llama-3.2-1b OUT.gguf --format gguf --type q4_k_m
    python benchmarks/make_random_checkpoint.py path/to/config.json OUT_FOLDER --layers 2

The result loads like the real checkpoint: names, shapes, formats, a tokenizer of the same size and
a chat template. The weights give finite activations and different logits.
Tensors are written in pieces of at most 16 MiB, and the peak memory of the process stays below
512 MiB. The same seed gives the same bytes, and --layers N gives the first N layers of the longer
model.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from checkpoint_tensors import MIXTURES, Layout, RandomTensor, has_mxfp4
from random_tokenizer import RandomTokenizer
from results import write_json

from lmdeploy.models import family_of_hf
from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.decoder_config import DecoderConfig, RopeSettings
from lmdeploy.models.read_decoder import read_decoder

Config = dict[str, Any]

CONFIGS = Path(__file__).with_name("checkpoint_configs.yaml")
GGUF_ALIGNMENT = 32


@dataclass(frozen=True)
class Model:
    """The model to write. `config` is that of its config.json."""

    name: str
    config: Config
    layout: Layout
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
    path, configs = Path(name), named_configs()
    if name not in configs and not path.is_file():
        raise ValueError(
            f"config {name!r} is unknown; give a config.json or one of {', '.join(configs)}."
        )
    config = configs[name] if name in configs else json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"config {path} holds {type(config).__name__}; it must be an object.")
    own = config.get("num_hidden_layers")
    if layers is None:
        return config
    if type(own) is not int or not 1 <= layers <= own:
        raise ValueError(f"--layers {layers} is wrong; the model has num_hidden_layers {own!r}.")
    config["num_hidden_layers"] = layers
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = config["layer_types"][:layers]
    return config


def make_model(name: str, *, layers: int | None, seed: int) -> Model:
    """Read and check a config. Raise ValueError for a wrong key."""
    config = read_config(name, layers)
    reader = ConfigReader(config, name)
    architecture = (reader.texts("architectures") or [""])[0]
    family = family_of_hf(architecture, name)
    reader = family.completed(reader)
    decoder = read_decoder(reader, family)
    tokenizer = RandomTokenizer.of(architecture, decoder.vocab_size)
    if has_mxfp4(family):
        config.setdefault("quantization_config", {"quant_method": "mxfp4"})
    more = family.hf_extra_tensors(reader)
    layout = Layout(family, decoder, family.hf_bias(reader), more_tensors=more)
    return Model(name, config, layout, tokenizer, seed)


def write_folder(model: Model, folder: Path) -> None:
    """Write a Hugging Face folder: weights, config and tokenizer."""
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", model.layout.tensors(), seed=model.seed)
    model.tokenizer.save(folder)
    ids = model.tokenizer.config_ids()
    ids["eos_token_id"] = ids["eos_token_id"][0]
    write_json(folder / "config.json", {**model.config, **ids})


def write_safetensors(path: Path, tensors: Sequence[RandomTensor], *, seed: int) -> None:
    """Write the length of the header, the header, and the tensors without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        shape = list(tensor.shape)
        if tensor.encoding == "E2M1":
            shape[-1] //= 2
        header[tensor.name] = {
            "dtype": "BF16" if tensor.encoding == "BF16" else "U8",
            "shape": shape,
            "data_offsets": [offset, offset + tensor.num_bytes],
        }
        offset += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.writelines(piece.data for piece in tensor.pieces(seed))


def write_gguf(model: Model, path: Path, *, encoding: str) -> None:
    """Write a GGUF file in the layout of llama.cpp's converter, matrices in `encoding`.

    Raise ValueError for a mixture of dense layers and experts, which GGUF cannot hold, and for
    columns that the encoding cannot hold.
    """
    import gguf

    layout = replace(model.layout, matrices=encoding)
    moe, layers = layout.config.moe, layout.config.num_layers
    if moe and sum(moe.layers) < layers:
        raise ValueError(
            f"--format gguf: {sum(moe.layers)} of {layers} layers have experts "
            "(mlp_only_layers, decoder_sparse_step), but GGUF needs experts in all of them."
        )
    tensors = layout.tensors() + rope_tensors(layout.config.rope, layout.config.head_dim)
    unfinished = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(unfinished, layout.family.gguf_architectures[0])
    add_gguf_keys(writer, layout, name=f"{Path(model.name).stem} random")
    model.tokenizer.add_to_gguf(writer)
    kinds = gguf.GGMLQuantizationType
    for tensor in tensors:
        kind, values = kinds[tensor.encoding], np.dtype(np.float32)
        writer.add_tensor_info(tensor.name, tensor.shape, values, tensor.num_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with unfinished.open("ab") as file:
        for tensor in tensors:
            file.write(bytes(-file.tell() % GGUF_ALIGNMENT))
            file.writelines(piece.data for piece in tensor.pieces(model.seed))
        file.write(bytes(-file.tell() % GGUF_ALIGNMENT))
    unfinished.rename(path)


def add_gguf_keys(writer: Any, layout: Layout, *, name: str) -> None:
    """Write sizes, RoPE and file type with the names of llama.cpp's converter."""
    import gguf

    config, moe, rope = layout.config, layout.config.moe, layout.config.rope
    writer.add_type("model")
    writer.add_name(name)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    if writer.arch == "llama" or config.recurrent:
        writer.add_rope_dimension_count(rope.dim or config.head_dim)
    if moe:
        writer.add_expert_count(moe.num_experts)
        writer.add_expert_used_count(moe.top_k)
        if layout.family.name != "mixtral":
            writer.add_expert_feed_forward_length(moe.intermediate_size)
        if moe.shared_intermediate_size:
            writer.add_expert_shared_feed_forward_length(moe.shared_intermediate_size)
    add_mixer_keys(writer, config)
    if any(config.windows):
        writer.add_sliding_window(max(config.windows))
    writer.add_rope_freq_base(rope.theta)
    if rope.kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope.factor)
        writer.add_rope_scaling_orig_ctx_len(rope.original_max_position)
    elif rope.kind not in ("default", "llama3"):
        raise ValueError(f"rope_type {rope.kind!r} has no GGUF form; use default, llama3 or yarn.")
    is_mxfp4 = has_mxfp4(layout.family) or layout.matrices == "MXFP4"
    mostly = "MXFP4_MOE" if is_mxfp4 else layout.matrices
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{mostly}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def add_mixer_keys(writer: Any, config: DecoderConfig) -> None:
    """Write the KV heads, and the sizes and places of recurrent layers."""
    recurrent, kv_heads = config.recurrent, config.num_kv_heads
    if recurrent is None or recurrent.rule == "gated_delta":
        writer.add_head_count_kv(kv_heads)
    else:
        layers = range(config.num_layers)
        writer.add_head_count_kv([kv_heads if config.has_attention(i) else 0 for i in layers])
    if recurrent is None:
        return
    if recurrent.rule == "short_convolution":
        writer.add_shortconv_l_cache(recurrent.kernel)
        return
    writer.add_ssm_conv_kernel(recurrent.kernel)
    writer.add_ssm_state_size(recurrent.key_dim)
    writer.add_ssm_group_count(recurrent.num_key_heads)
    writer.add_ssm_time_step_rank(recurrent.num_value_heads)
    writer.add_ssm_inner_size(recurrent.value_size)
    if recurrent.rule == "gated_delta":
        # Text has one position for all three, and llama.cpp does not rotate pairs beyond them.
        pairs = config.rope.dim // 2
        writer.add_rope_dimension_sections([-(-pairs // 3), -(-(pairs - 1) // 3), pairs // 3, 0])
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", list(recurrent.layers))


def rope_tensors(rope: RopeSettings, head_dim: int) -> list[RandomTensor]:
    """Return the divisors of the frequencies, which GGUF stores instead of the `llama3` keys.

    Frequencies with a wavelength over original / low_freq_factor are divided by `factor`. Those
    below original / high_freq_factor stay. Between the two, the quotient changes linearly.
    """
    if rope.kind != "llama3":
        return []
    half = head_dim // 2
    turns = rope.original_max_position / (2 * np.pi) * rope.theta ** (-np.arange(half) / half)
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = np.clip((turns - rope.low_freq_factor) / span, 0.0, 1.0)
    values = tuple(float(x) for x in 1.0 / (kept + (1.0 - kept) / rope.factor))
    return [RandomTensor("rope_freqs.weight", (half,), "F32", 0.0, values=values)]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("config", help=f"a config.json, or {', '.join(named_configs())}")
    parser.add_argument("output", type=Path, help="folder (safetensors) or file (gguf) to make")
    parser.add_argument("--format", choices=("safetensors", "gguf"), default="safetensors")
    parser.add_argument(
        "--type",
        choices=("q8_0", "q4_0", "nvfp4", "mxfp4", *map(str.lower, MIXTURES)),
        help="of a GGUF file's matrices (default: q8_0)",
    )
    parser.add_argument("--layers", type=int, help="write only the first N layers")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the checkpoint, print its size and this process's peak memory."""
    options = parse_arguments(arguments)
    try:
        if options.output.exists():
            raise ValueError(f"{options.output} exists already; choose a new name.")
        if options.type and options.format != "gguf":
            raise ValueError(f"--type {options.type} needs --format gguf.")
        model = make_model(options.config, layers=options.layers, seed=options.seed)
        if options.format == "gguf":
            write_gguf(model, options.output, encoding=(options.type or "q8_0").upper())
        else:
            write_folder(model, options.output)
    except (ValueError, OSError) as error:
        print(f"make_random_checkpoint.py: {error}", file=sys.stderr)
        return 2
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{options.output}: {model.layout.config.num_layers} layers; peak memory {peak} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
