"""Tests of checkpoints with experts: all layouts give equal tensors, a bad one one clear line."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from test_checkpoint import matrix_f32
from tiny_gguf import write_gguf
from tiny_models import TINY_MODELS, TinyModel, make_model, save_model
from tiny_moe import (
    GPT_OSS,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    TINY_MOE_MODELS,
    change_config,
    dequantize_mxfp4,
    save_mxfp4,
    write_moe_gguf,
)

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint import load
from lmdeploy.checkpoint.convert import MAPPED_FORMATS, engine_bytes
from lmdeploy.checkpoint.open import Checkpoint, open_checkpoint
from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.decoder_config import MoeSettings
from lmdeploy.models.experts import sparse_experts

EXPERTS = "model.layers.1.mlp.experts"


def names_of(checkpoint: Checkpoint) -> set[str]:
    return {planned.name for planned in checkpoint.tensors}


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mxfp4(make_model(GPT_OSS), tmp_path_factory.mktemp("gpt-oss"))


@pytest.fixture
def copy_of_gpt_oss(gpt_oss: Path, tmp_path: Path) -> Path:
    for file in gpt_oss.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.mark.parametrize("tiny", TINY_MOE_MODELS, ids=lambda tiny: tiny.name)
def test_open_checkpoint_moe_plans_every_value_once(tiny: TinyModel, tmp_path: Path) -> None:
    model = make_model(tiny)
    checkpoint = open_checkpoint(save_model(model, tmp_path))
    assert len(names_of(checkpoint)) == len(checkpoint.tensors)
    planned = sum(p.tensor.rows * p.tensor.cols for p in checkpoint.tensors)
    assert planned == sum(parameter.numel() for parameter in model.parameters())
    assert not any(planned.mapped for planned in checkpoint.tensors)


def test_open_checkpoint_moe_settings_of_every_family_are_read(tmp_path: Path) -> None:
    wanted = {
        "gpt-oss-window-24": MoeSettings(8, 4, 96, layers=(True,) * 4),
        "mixtral": MoeSettings(6, 2, 160, layers=(True,) * 2),
        "qwen2-moe": MoeSettings(8, 3, 48, 80, normalize=False, layers=(True,) * 2),
        "qwen3-moe": MoeSettings(8, 3, 64, layers=(True,) * 2),
    }
    for tiny in (GPT_OSS, MIXTRAL, QWEN2_MOE, QWEN3_MOE):
        model = make_model(tiny)
        folder = open_checkpoint(save_model(model, tmp_path / tiny.name)).config
        write_moe_gguf(model, tmp_path / f"{tiny.name}.gguf")
        file = open_checkpoint(tmp_path / f"{tiny.name}.gguf").config
        assert folder.moe == file.moe == wanted[tiny.name]
        assert file == replace(folder, norm_eps=file.norm_eps)  # GGUF stores it in FP32
    assert folder.activation == "silu"


def test_read_decoder_published_gpt_oss_config_is_read() -> None:
    # The published config.json gives some values and omits others.
    from lmdeploy.models.gpt_oss import FAMILY
    from lmdeploy.models.read_decoder import read_decoder

    values = {
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "hidden_act": "silu",
    }
    reader = ConfigReader(values, "x").with_defaults(FAMILY.hf_defaults)
    config = read_decoder(reader, FAMILY)
    assert config.windows == (128, 0) * 12
    assert (config.head_dim, config.activation, config.swiglu_limit) == (64, "clamped_swiglu", 7.0)
    assert (config.rope.kind, config.rope.theta, config.rope.truncate) == ("yarn", 150000.0, False)
    assert (config.rope.factor, config.rope.original_max_position) == (32.0, 4096)


def test_sparse_experts_layers_follow_step_and_mlp_only_layers() -> None:
    def layers(**values: Any) -> list[int]:
        sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        found = sparse_experts(ConfigReader({**sizes, **values}, "config"), 6).layers
        return [index for index, sparse in enumerate(found) if sparse]

    assert layers() == [0, 1, 2, 3, 4, 5]
    assert layers(decoder_sparse_step=2) == [1, 3, 5]
    assert layers(decoder_sparse_step=4) == [3]
    assert layers(decoder_sparse_step=2, mlp_only_layers=[3, 4]) == [1, 5]
    with pytest.raises(
        ModelFormatError, match=r"mlp_only_layers contains 6\. Layers must be 0 to 5"
    ):
        layers(mlp_only_layers=[0, 6])
    with pytest.raises(ModelFormatError, match=r"mlp_only_layers is .*must be a list of integers"):
        layers(mlp_only_layers="0")


@pytest.mark.parametrize("tiny", [MIXTRAL, QWEN2_MOE, QWEN3_MOE], ids=lambda tiny: tiny.name)
def test_open_checkpoint_stacked_experts_equal_separate_ones(
    tiny: TinyModel, tmp_path: Path
) -> None:
    # transformers 5 stacks experts in memory, and writes them so if conversion is disabled.
    model = make_model(tiny)
    apart = open_checkpoint(save_model(model, tmp_path / "apart"))
    stacked = open_checkpoint(save_model(model, tmp_path / "stacked", save_original_format=False))
    assert any("gate_up_proj" in planned.tensor.name for planned in stacked.tensors)
    assert names_of(apart) == names_of(stacked)
    other = {planned.name: planned for planned in stacked.tensors}
    for planned in apart.tensors:
        np.testing.assert_array_equal(planned.tensor.raw, other[planned.name].tensor.raw)


def test_open_checkpoint_mxfp4_experts_are_views_of_the_file(gpt_oss: Path) -> None:
    stored = load_file(gpt_oss / "model.safetensors")
    checkpoint = open_checkpoint(gpt_oss)
    planned = {planned.name: planned for planned in checkpoint.tensors}
    assert checkpoint.stored_dtype == "float32"  # dtype of all tensors except the experts
    one = planned["layers.1.experts.5.gate_up"]
    assert (one.mapped, one.rows, one.cols) == (True, 192, 64)
    assert MAPPED_FORMATS[one.tensor.format] == "mxfp4_split"
    blocks, scales = (stored[f"{EXPERTS}.gate_up_proj_{part}"] for part in ("blocks", "scales"))
    assert one.tensor.scales is not None
    np.testing.assert_array_equal(one.tensor.raw, blocks[5].reshape(-1))
    np.testing.assert_array_equal(one.tensor.scales, scales[5].reshape(-1))
    assert not one.tensor.raw.flags.owndata and not one.tensor.raw.flags.writeable
    assert engine_bytes(one, False) == blocks[5].nbytes + scales[5].nbytes == 192 * 2 * 17
    assert engine_bytes(one, True) == 192 * 64 * 4


def test_open_checkpoint_transposed_experts_are_transposed_back(tmp_path: Path) -> None:
    model = make_model(GPT_OSS)
    wanted = dict(model.named_parameters())[f"{EXPERTS}.down_proj"][3].detach().numpy().T
    for dtype in (torch.float32, torch.bfloat16):
        folder = save_model(model.to(dtype), tmp_path / str(dtype))
        checkpoint = open_checkpoint(folder)
        planned = {planned.name: planned for planned in checkpoint.tensors}
        down = planned["layers.1.experts.3.down"]
        assert down.transposed and (down.rows, down.cols) == (64, 96)
        got = matrix_f32(checkpoint, "layers.1.experts.3.down")
        np.testing.assert_allclose(got, wanted, rtol=0 if dtype == torch.float32 else 2**-8)


def test_open_checkpoint_gguf_experts_of_every_format_are_planned(tmp_path: Path) -> None:
    for expert_format, mapped in (("MXFP4", True), ("Q8_0", False), ("Q4_1", False)):
        write_moe_gguf(make_model(QWEN3_MOE), tmp_path / "m.gguf", expert_format=expert_format)
        planned = {p.name: p for p in open_checkpoint(tmp_path / "m.gguf").tensors}
        up = planned["layers.1.experts.7.up"]
        assert (up.tensor.format, up.mapped) == (expert_format, mapped)
        assert planned["layers.1.router"].tensor.format == "F32"


def test_convert_routers_stay_in_fp32(tmp_path: Path) -> None:
    write_moe_gguf(make_model(QWEN2_MOE), tmp_path / "m.gguf")
    planned = {p.name: p for p in open_checkpoint(tmp_path / "m.gguf").tensors}
    for name in ("layers.1.router", "layers.0.shared.router"):
        converted = load._convert(planned[name], exact=False)
        assert converted.kind == "f32"
        stored = planned[name].tensor.raw.view("<f4").reshape(converted.values.shape)
        np.testing.assert_array_equal(converted.values, stored)


def test_open_checkpoint_one_dimensional_shared_router_is_one_row(tmp_path: Path) -> None:
    # GGUF drops the dimension of size 1; the engine's tensor is a matrix with one row.
    write_moe_gguf(make_model(QWEN2_MOE), tmp_path / "m.gguf")
    planned = {p.name: p for p in open_checkpoint(tmp_path / "m.gguf").tensors}
    assert planned["layers.0.shared.router"].tensor.shape == (1, 64)


def test_quantize_mxfp4_equals_gguf_library() -> None:
    # Covers every code with every sign except ties, read back by the gguf library.
    import gguf
    from tiny_moe import gguf_blocks, quantize_mxfp4

    values = np.random.default_rng(3).standard_normal((40, 96)).astype(np.float32)
    codes, exponents = quantize_mxfp4(values)
    ours = dequantize_mxfp4(codes, exponents)
    theirs = gguf.quants.dequantize(gguf_blocks(codes, exponents), gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(ours, theirs)
    assert len(np.unique(codes)) >= 15
    assert np.linalg.norm(ours - values) / np.linalg.norm(values) < 0.15


def change_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def without(name: str) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda tensors: tensors.__delitem__(name)


def replaced(name: str, **values: Any) -> Callable[[dict[str, np.ndarray]], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensor = tensors[name]
        if "shape" in values:
            tensor = np.zeros(values["shape"], tensor.dtype)
        tensors[name] = tensor.astype(values.get("dtype", tensor.dtype))

    return change


BAD_TENSORS: list[tuple[Callable[[dict[str, np.ndarray]], None], str]] = [
    (without("model.layers.2.self_attn.sinks"), r"layers\.2\.self_attn\.sinks is missing"),
    (without("model.layers.0.self_attn.o_proj.bias"), r"layers\.0.*o_proj\.bias is missing"),
    (without("model.layers.3.mlp.router.weight"), r"layers\.3\.mlp\.router\.weight is missing"),
    (without("model.layers.0.mlp.router.bias"), r"router\.bias is missing"),
    (without(f"{EXPERTS}.gate_up_proj_blocks"), r"layers\.1.*gate_up_proj_blocks is missing"),
    (without(f"{EXPERTS}.down_proj_scales"), r"layers\.1.*down_proj_scales is missing"),
    (without("model.layers.0.mlp.experts.gate_up_proj_scales"), r"layers\.0.*_scales is missing"),
    (without(f"{EXPERTS}.down_proj_bias"), r"down_proj_bias is missing"),
    (
        replaced(f"{EXPERTS}.down_proj_bias", shape=(7, 64)),
        r"down_proj_bias .*\[7, 64\].*\[8, 64\]",
    ),
    (
        replaced(f"{EXPERTS}.gate_up_proj_blocks", shape=(7, 192, 2, 16)),
        r"has shape \[7, 192, 2, 16\]\. By the config it must be \[8, 192, 2, 16\]",
    ),
    (replaced(f"{EXPERTS}.down_proj_blocks", shape=(8, 64, 48)), r"_blocks .*\[8, 64, 3, 16\]"),
    (replaced(f"{EXPERTS}.down_proj_scales", shape=(8, 64, 2)), r"_scales .*\[8, 64, 3\]"),
    (replaced(f"{EXPERTS}.down_proj_scales", dtype=np.float32), r"_scales has dtype F32.*U8"),
    (replaced(f"{EXPERTS}.gate_up_proj_blocks", dtype=np.int8), r"_blocks has dtype I8.*U8"),
    (replaced("model.layers.0.self_attn.sinks", shape=(7,)), r"sinks has shape \[7\].*\[8\]"),
    (replaced("model.layers.0.mlp.router.weight", shape=(7, 64)), r"router.weight has shape"),
    (
        replaced("model.layers.0.self_attn.q_proj.weight", shape=(1, 512, 64)),
        "must have at most 2 sizes",
    ),
    (lambda t: t.update({f"{EXPERTS}.extra": t["model.norm.weight"]}), "does not use 1 .*extra"),
]


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS, ids=[text for _, text in BAD_TENSORS])
def test_open_checkpoint_bad_moe_tensor_is_named(
    copy_of_gpt_oss: Path, change: Callable[[dict[str, np.ndarray]], None], message: str
) -> None:
    change_tensors(copy_of_gpt_oss, change)
    with pytest.raises(ModelFormatError, match=message) as caught:
        open_checkpoint(copy_of_gpt_oss)
    assert "\n" not in str(caught.value)


BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"quantization_config": {"quant_method": "hqq"}}, "quant_method is 'hqq'.*Use mxfp4"),
    ({"quantization_config": {"bits": 4}}, "quant_method is 'unknown'"),
    ({"num_local_experts": 9}, r"has shape \[8, .*must be \[9"),
    ({"num_local_experts": 0}, "num_local_experts is '0'"),
    ({"num_local_experts": 1 << 30}, "num_local_experts is"),
    ({"num_experts_per_tok": 9}, "uses 9 experts. It must use at most 8"),
    ({"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
    (
        {"intermediate_size": 100},
        "has 100 inputs in the config. Their number must be a multiple of 32|By the config",
    ),
    ({"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5. It must be 1.702"),
    ({"swiglu_limit": 0.0}, "swiglu_limit is '0.0'"),
    ({"layer_types": ["full_attention"]}, "layer_types has 1 entries. It must have 4"),
    ({"layer_types": ["full_attention"] * 3 + ["mamba"]}, "layer_types contains 'mamba'"),
    ({"sliding_window": None}, "sliding_window is missing"),
    ({"architectures": ["MixtralForCausalLM"], "quantization_config": None}, "is missing"),
    ({"architectures": ["LlamaForCausalLM"]}, "is 'mxfp4'. Use awq, .*F32"),
]


@pytest.mark.parametrize(("values", "message"), BAD_CONFIGS, ids=lambda v: str(v)[:40])
def test_open_checkpoint_bad_moe_config_is_one_clear_line(
    copy_of_gpt_oss: Path, values: dict[str, Any], message: str
) -> None:
    change_config(copy_of_gpt_oss, **values)
    with pytest.raises(ModelFormatError, match=message) as caught:
        open_checkpoint(copy_of_gpt_oss)
    assert "\n" not in str(caught.value)


def test_open_checkpoint_qwen_moe_windows_follow_layer_types(tmp_path: Path) -> None:
    folder = save_model(make_model(QWEN2_MOE), tmp_path / "2")
    change_config(folder, use_sliding_window=True, sliding_window=20)
    assert open_checkpoint(folder).config.windows == (0, 0)  # because of layer_types
    change_config(folder, layer_types=["sliding_attention", "full_attention"])
    assert open_checkpoint(folder).config.windows == (20, 0)
    change_config(folder, layer_types=None)
    with pytest.raises(ModelFormatError, match="layer_types is missing"):
        open_checkpoint(folder)
    folder = save_model(make_model(QWEN3_MOE), tmp_path / "3")
    change_config(folder, use_sliding_window=True, sliding_window=20)
    assert open_checkpoint(folder).config.windows == (20, 20)


def test_open_checkpoint_gguf_gpt_oss_windows_and_rope_are_read(tmp_path: Path) -> None:
    model = make_model(GPT_OSS)
    write_moe_gguf(model, tmp_path / "m.gguf")
    config = open_checkpoint(tmp_path / "m.gguf").config
    assert config.windows == (24, 0, 24, 0)
    assert (config.rope.kind, config.rope.truncate) == ("yarn", False)
    assert config.activation == "clamped_swiglu"


BAD_GGUF: list[tuple[bytes, bytes, str]] = [
    (b"blk.2.attn_sinks.weight", b"blk.2.attn_sunks.weight", r"blk\.2\.attn_sinks\.weight is miss"),
    (b"blk.1.ffn_up_exps.weight", b"blk.1.ffn_ux_exps.weight", r"blk\.1\.ffn_up_exps\.weight is m"),
    (b"blk.1.ffn_up_exps.bias", b"blk.1.ffn_ux_exps.bias", r"blk\.1\.ffn_up_exps\.bias is missing"),
    (b"blk.3.ffn_gate_inp.bias", b"blk.3.ffn_gate_ixp.bias", r"ffn_gate_inp\.bias is missing"),
    (b"blk.0.attn_q.bias", b"blk.0.attn_x.bias", r"blk\.0\.attn_q\.bias is missing"),
    (b"gpt-oss.expert_count", b"gpt-oss.expert_cound", "expert_count is missing. It must be set"),
    (b"gpt-oss.expert_used_count", b"gpt-oss.expert_used_cound", "expert_used_count is missing"),
    (b"gpt-oss.attention.sliding_window", b"gpt-oss.attention.sliding_windox", "sliding_window is"),
]


@pytest.mark.parametrize(("old", "new", "message"), BAD_GGUF, ids=[text for *_, text in BAD_GGUF])
def test_open_checkpoint_bad_moe_gguf_is_named(
    old: bytes, new: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_moe_gguf(make_model(GPT_OSS), path, expert_format="MXFP4")
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    with pytest.raises(ModelFormatError, match=message):
        open_checkpoint(path)


def test_open_checkpoint_gguf_unsupported_expert_format_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_moe_gguf(make_model(GPT_OSS), path, expert_format="MXFP4")
    data = bytearray(path.read_bytes())
    name = b"blk.1.ffn_up_exps.weight"
    kind = data.index(name) + len(name) + 4 + 3 * 8
    assert data[kind] == 39  # MXFP4
    data[kind] = 16
    path.write_bytes(data)
    with pytest.raises(ModelFormatError, match=r"blk\.1\.ffn_up_exps\.weight has format IQ2_XXS"):
        open_checkpoint(path)


BAD_METADATA: list[tuple[dict[str, Any], str]] = [
    ({"expert_gating_func": 2}, "expert_gating_func is 2. It must be 1"),
    ({"expert_weights_scale": 2.5}, "expert_weights_scale is 2.5. It must be 1"),
    ({"expert_group_count": 4}, "expert_group_used_count is missing"),
    (
        {"expert_group_count": 3, "expert_group_used_count": 1},
        "8 experts have 3 groups. They must have at most 32 groups of the same size",
    ),
    (
        {"expert_group_count": 4, "expert_group_used_count": 1},
        "3 experts of a token come from 1 of 4 groups of 2. The number must be .* at least 2",
    ),
]


@pytest.mark.parametrize(("extra", "message"), BAD_METADATA, ids=str)
def test_open_checkpoint_gguf_unsupported_routing_is_rejected(
    extra: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_moe_gguf(make_model(QWEN3_MOE), tmp_path / "m.gguf", extra=extra)
    with pytest.raises(ModelFormatError, match=message):
        open_checkpoint(tmp_path / "m.gguf")


def test_open_checkpoint_gguf_experts_in_dense_family_are_rejected(tmp_path: Path) -> None:
    qwen2 = next(tiny for tiny in TINY_MODELS if tiny.architecture == "Qwen2")
    write_gguf(make_model(qwen2), tmp_path / "m.gguf", extra={"expert_count": 8})
    with pytest.raises(
        ModelFormatError, match=r"qwen2\.expert_count is set. It must be missing.*no experts"
    ):
        open_checkpoint(tmp_path / "m.gguf")


def test_open_checkpoint_gguf_expert_weights_norm_is_read(tmp_path: Path) -> None:
    model = make_model(QWEN3_MOE)
    write_moe_gguf(model, tmp_path / "m.gguf", extra={"expert_weights_norm": False})
    moe = open_checkpoint(tmp_path / "m.gguf").config.moe
    assert moe is not None and not moe.normalize


def test_open_checkpoint_codes_and_scales_in_different_shards_are_read(
    gpt_oss: Path, tmp_path: Path
) -> None:
    tensors = load_file(gpt_oss / "model.safetensors")
    weight_map = {}
    for shard in range(2):
        names = sorted(tensors)[shard::2]
        save_file({name: tensors[name] for name in names}, tmp_path / f"{shard}.safetensors")
        weight_map |= dict.fromkeys(names, f"{shard}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_bytes((gpt_oss / "config.json").read_bytes())
    whole, shards = open_checkpoint(gpt_oss), open_checkpoint(tmp_path)
    for one, other in zip(whole.tensors, shards.tensors, strict=True):
        assert one.name == other.name
        np.testing.assert_array_equal(one.tensor.raw, other.tensor.raw)


def read_all(path: Path) -> None:
    """Open a checkpoint and read the ends of every tensor; an error must be one short line."""
    try:
        for planned in open_checkpoint(path).tensors:
            for raw in (planned.tensor.raw, planned.tensor.scales):
                if raw is not None:
                    raw[:4].sum() + raw[-4:].sum()
    except ModelFormatError as error:
        assert len(str(error)) < 1000


def damage(content: bytes, end: int, data: st.DataObject) -> bytes:
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    return bytes(damaged)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_open_checkpoint_damaged_moe_safetensors_never_crashes(
    gpt_oss: Path, copy_of_gpt_oss: Path, data: st.DataObject
) -> None:
    content = (gpt_oss / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    (copy_of_gpt_oss / "model.safetensors").write_bytes(damage(content, end, data))
    read_all(copy_of_gpt_oss)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_moe_gguf(make_model(GPT_OSS), path, expert_format="MXFP4")
    return path


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_open_checkpoint_damaged_moe_gguf_never_crashes(
    gguf_file: Path, data: st.DataObject
) -> None:
    content = gguf_file.read_bytes()
    path = gguf_file.with_name("damaged.gguf")
    path.write_bytes(damage(content, content.rindex(b"blk.3.ffn_down_exps") + 96, data))
    read_all(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 1025}, r"num_experts is '1025'\. It must be an integer from 1 to 1024"),
        (
            {"num_experts": 1024, "num_hidden_layers": 65},
            "have 66560 experts. They must have at most",
        ),
    ],
    ids=["of a layer", "of all layers"],
)
def test_open_checkpoint_too_many_experts_are_rejected(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save_model(make_model(QWEN3_MOE), tmp_path)
    change_config(folder, **change)
    with pytest.raises(ModelFormatError, match=message):
        open_checkpoint(folder)
