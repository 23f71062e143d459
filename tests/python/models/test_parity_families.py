"""Tests of logits and greedy tokens against transformers in FP32: every structure and family."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import EngineRun
from parity import (
    MAX_RELATIVE_ERROR,
    NUM_GREEDY,
    prompt,
    reference_greedy,
    reference_logits,
    relative_error,
)
from reference.codecs import MODES, round_trip
from reference.quality import rotate_rows
from safetensors.numpy import load_file, save_file
from tiny_families import FAMILY_MODELS
from tiny_latents import TINY_LATENTS
from tiny_models import TINY_MODELS, TinyModel, make_model, save_model
from transformers import DynamicCache

from lmdeploy import Pipeline, TurbomindEngineConfig
from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.open import open_checkpoint
from lmdeploy.models import FAMILIES

# Families that have no tiny model of their own, and why.
_COVERED_ELSEWHERE = {
    "gpt_oss": "test_parity_moe.py",
    "mixtral": "test_parity_moe.py",
    "qwen2_moe": "test_parity_moe.py",
    "qwen3_moe": "test_parity_moe.py",
    "deepseek2": "test_parity_latents.py",
    "internlm2": "below: transformers has no InternLM2",
    "internlm3": "below: transformers has no InternLM3",
}


def _by_name(name: str) -> TinyModel:
    return next(tiny for tiny in FAMILY_MODELS if tiny.name == name)


def _error(folder: Path, wanted: np.ndarray, ids: list[int], **options: Any) -> float:
    with EngineRun(str(folder), exact=True, session_len=512, **options) as run:
        return relative_error(run.logits(ids), wanted)


@pytest.mark.parametrize("tiny", FAMILY_MODELS, ids=lambda tiny: tiny.name)
def test_logits_and_greedy_tokens_equal_transformers(tiny: TinyModel, tmp_path: Path) -> None:
    model = make_model(tiny)
    folder, ids = save_model(model, tmp_path), prompt()
    session_len = 256 if "longrope" in tiny.name else 512
    wanted = reference_logits(model, ids)
    with EngineRun(str(folder), exact=True, session_len=session_len) as run:
        error = relative_error(run.logits(ids), wanted)
        print(f"{tiny.name}: relative error {error:.2e}")
        assert error <= MAX_RELATIVE_ERROR
        assert run.greedy(ids, NUM_GREEDY) == reference_greedy(model, ids, NUM_GREEDY)
    with EngineRun(str(folder), exact=True, session_len=session_len, max_prefill=512) as run:
        assert relative_error(run.logits(ids), wanted) <= MAX_RELATIVE_ERROR  # in one step


def test_every_family_is_compared_with_a_reference() -> None:
    tiny_models = (*FAMILY_MODELS, *TINY_MODELS, *TINY_LATENTS)
    architectures = {f"{tiny.architecture}ForCausalLM" for tiny in tiny_models}
    for family in FAMILIES:
        compared = architectures & set(family.hf_architectures)
        assert compared or family.name in _COVERED_ELSEWHERE, family.name


def test_longrope_chooses_its_factors_by_the_length_of_each_sequence(tmp_path: Path) -> None:
    model = make_model(_by_name("phi3-longrope-partial"))
    folder = save_model(model, tmp_path)
    with EngineRun(str(folder), exact=True, session_len=512) as run:
        for length in (120, 320, 299):  # the original length is 300
            ids = prompt(length)
            wanted = reference_logits(model, ids)
            assert relative_error(run.logits(ids), wanted) <= MAX_RELATIVE_ERROR, length
        ids = prompt(120)
        assert run.greedy(ids, NUM_GREEDY) == reference_greedy(model, ids, NUM_GREEDY)


# One mistake for each structure: a family and a change of its config.json, or of its tensors.
_MISTAKES: dict[str, tuple[str, dict[str, Any]]] = {
    "attention soft cap": ("gemma2", {"attn_logit_softcapping": None}),
    "logit soft cap": ("gemma2", {"final_logit_softcapping": None}),
    "softmax scale": ("gemma2", {"query_pre_attn_scalar": 64}),
    "RoPE by layer": (
        "gemma3",
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "layers without RoPE": ("smollm3", {"no_rope_layers": [0, 1, 0, 1]}),
    "embedding factor": ("granite", {"embedding_multiplier": 1.0}),
    "branch factor": ("granite", {"residual_multiplier": 0.23}),
    "logit factor": ("granite", {"logits_scaling": 4.01}),
    "partial RoPE": ("glm4-moe", {"partial_rotary_factor": 0.25}),
    "routed factor": ("glm4-moe", {"routed_scaling_factor": 1.0}),
    "first dense layers": ("glm4-moe", {"norm_topk_prob": False}),
    "groups of experts": ("glm4-moe-groups", {"n_group": 2}),
    "number of groups": ("glm4-moe-groups", {"topk_group": 3}),
    "temperature of q": ("ministral3", {"llama_4_scaling_beta": 0.49}),
    "temperature without RoPE": ("llama4", {"attn_temperature_tuning": False}),
    "length of the temperature": ("llama4", {"floor_scale": 17}),
    "length of a chunk": ("llama4", {"attention_chunk_size": 25}),
    "layers with chunks": ("llama4", {"layer_types": ["full_attention"] * 4}),
    "norms without weights": ("llama4", {"use_qk_norm": False}),
    "LayerNorm": ("cohere", {"layer_norm_eps": 1e-2}),
    "windows": ("cohere2", {"sliding_window": 25}),
    "cap of Gemma 4": ("gemma4", {"final_logit_softcapping": None}),
    "window of Gemma 4": ("gemma4", {"sliding_window": 25}),
    "turned pairs": (
        "gemma4",
        {
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.5,
                    "rope_theta": 1e6,
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "chosen experts": ("gemma4-experts", {"top_k_experts": 1}),
}


@pytest.mark.parametrize("mistake", _MISTAKES)
def test_a_planted_mistake_in_the_config_is_detected(mistake: str, tmp_path: Path) -> None:
    name, change = _MISTAKES[mistake]
    model = make_model(_by_name(name))
    folder, ids = save_model(model, tmp_path), prompt(80)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if set(change) <= {"partial_rotary_factor", "llama_4_scaling_beta"}:
        config["rope_parameters"].update(change)
    else:
        config.update(change)
    path.write_text(json.dumps(config))
    assert _error(folder, reference_logits(model, ids), ids) > 3 * MAX_RELATIVE_ERROR


# Tensors whose exchange or change must show: (family, a part of the name, another or "").
_TENSOR_MISTAKES = {
    "norm order": ("glm4", "post_self_attn_layernorm", "post_mlp_layernorm"),
    "norm without inputs": ("olmo2", "post_attention_layernorm", "post_feedforward_layernorm"),
    "norm of all heads": ("olmo2", "q_norm", ""),
    "norm after RoPE": ("hunyuan", "query_layernorm", ""),
    "selection bias": ("glm4-moe", "e_score_correction_bias", ""),
    "norm bias": ("starcoder2", "input_layernorm.bias", ""),
    "decay": ("qwen3-5", "A_log", ""),
    "time step": ("qwen3-5", "dt_bias", ""),
    "convolution": ("qwen3-5", "conv1d.weight", ""),
    "gate of attention": ("qwen3-5", "self_attn.q_proj.weight", ""),
    "gates of a recurrent layer": ("qwen3-5", "in_proj_a.weight", "in_proj_b.weight"),
    "norm of a recurrent layer": ("qwen3-5", "linear_attn.norm.weight", ""),
    "heads of qkvz": ("qwen3-next", "in_proj_qkvz.weight", ""),
    "decay of a scan": ("granite-4-h", "A_log", ""),
    "skip of a scan": ("granite-4-h", "mamba.D", ""),
    "order of a scan's inputs": ("granite-4-h-moe", "in_proj.weight", ""),
    "bias of a convolution": ("nemotron-h", "conv1d.bias", ""),
    "groups of a norm": ("nemotron-h", "mixer.norm.weight", ""),
    "experts of a latent size": ("nemotron-h-latent", "fc1_latent_proj", ""),
    "experts without a gate": ("nemotron-h", "experts.1.up_proj", "experts.2.up_proj"),
    "order of gates": ("lfm2", "conv.in_proj.weight", ""),
    "convolution alone": ("lfm2", "conv.conv.weight", ""),
    "experts of LFM2": ("lfm2-moe", "expert_bias", ""),
    "second mixer of a layer": ("falcon-h1", "mamba.out_proj", ""),
    "source of shared K": ("gemma4", "layers.2.self_attn.k_proj", "layers.0.self_attn.k_proj"),
    "source of wide shared V": ("gemma4", "layers.3.self_attn.v_proj", "layers.1.self_attn.v_proj"),
    "factors of layers": ("gemma4", "layers.1.layer_scalar", "layers.4.layer_scalar"),
    "per-layer table": ("gemma4", "embed_tokens_per_layer", ""),
    "per-layer projection": ("gemma4", "per_layer_projection_norm", ""),
    "per-layer gate": ("gemma4", "layers.5.per_layer_input_gate", "layers.4.per_layer_input_gate"),
    "norm of a router": ("gemma4-experts", "router.scale", ""),
    "factors of experts": ("gemma4-experts", "per_expert_scale", ""),
    "norms beside experts": ("gemma4-experts", "layernorm_1", "layernorm_2"),
}


@pytest.mark.parametrize("mistake", _TENSOR_MISTAKES)
def test_a_planted_mistake_in_a_tensor_is_detected(mistake: str, tmp_path: Path) -> None:
    name, part, other = _TENSOR_MISTAKES[mistake]
    model = make_model(_by_name(name))
    folder, ids = save_model(model, tmp_path), prompt(80)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    found = [key for key in tensors if part in key]
    assert found
    for key in found:
        if other:
            twin = key.replace(part, other)
            tensors[key], tensors[twin] = tensors[twin], tensors[key]
        else:
            tensors[key] = np.ascontiguousarray(tensors[key][..., ::-1])
    save_file(tensors, path, metadata={"format": "pt"})
    assert _error(folder, reference_logits(model, ids), ids) > 3 * MAX_RELATIVE_ERROR


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("cohere", {"use_qk_norm": True}),
        ("gemma3", {"use_bidirectional_attention": True}),
        ("gemma4", {"use_bidirectional_attention": "all"}),
        ("gemma4", {"vocab_size_per_layer_input": 200}),
        ("ernie4-5-moe", {"use_bias": True}),
        ("granite-4-h", {"hidden_act": "gelu"}),
        ("nemotron-h", {"mlp_hidden_act": "silu"}),
        ("nemotron-h", {"mamba_hidden_act": "gelu"}),
        ("falcon-h1", {"time_step_limit": [0.001, 0.1]}),
        ("lfm2-moe", {"use_expert_bias": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_config_key_that_is_not_built_is_refused(
    name: str, change: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_model(make_model(_by_name(name)), tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ModelFormatError, match=rf"{next(iter(change))} is "):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama4", {"moe_layers": [1, 9]}, "moe_layers contains 9. Layers must be 0 to 3"),
        ("llama4", {"layer_types": ["sliding_attention"] * 4}, "layer_types contains 'sliding_"),
        ("llama4", {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ("llama4", {"attention_chunk_size": 0}, "attention_chunk_size is '0'"),
        ("llama4", {"floor_scale": 0}, "floor_scale is '0'"),
        ("gemma4", {"num_kv_shared_layers": 5}, "No earlier layer has the K and V"),
        ("gemma4", {"num_kv_shared_layers": 7}, "num_kv_shared_layers is '7'"),
        ("gemma4", {"per_layer_config": {"6": {"head_dim": 64}}}, "'6' is not a layer"),
        ("gemma4", {"per_layer_config": {"1": {"hidden_size": 4}}}, "has 'hidden_size'"),
        ("gemma4", {"per_layer_config": {"1": {"head_dim": 40}}}, "head_dim is 40"),
        ("gemma4", {"per_layer_config": {"1": {"num_key_value_heads": 3}}}, "must divide the 8"),
        (
            "gemma4",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 9.0}}},
            "rope_type is 'yarn'",
        ),
        ("gemma4", {"rope_parameters": {"full_attention": {"rope_theta": 9.0}}}, "has no sliding_"),
        ("gemma4-experts", {"top_k_experts": 7}, "uses 7 experts"),
        ("granite-4-h", {"layer_types": ["mamba"] * 3}, "layer_types has 3 entries"),
        ("granite-4-h", {"layer_types": ["mamba"] * 4}, "no layer with attention"),
        ("granite-4-h", {"mamba_n_groups": 3}, "is 8. It must be a multiple of"),
        ("granite-4-h", {"mamba_d_state": 0}, "mamba_d_state is '0'"),
        ("granite-4-h", {"mamba_d_state": 24}, "is 24. It must be a multiple of 16"),
        ("granite-4-h", {"mamba_d_head": "auto", "mamba_n_heads": 7}, "They must be a multiple of"),
        ("falcon-h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers has 1 values. It must have 5"),
        ("falcon-h1", {"ssm_multipliers": [0.0] * 5}, "It must be a list of numbers above 0"),
        ("falcon-h1", {"mamba_d_conv": 9}, "mamba_d_conv is '9'"),
        ("nemotron-h", {"hybrid_override_pattern": "MXM"}, "must have the letters M"),
        ("nemotron-h", {"layers_block_type": ["mlp", "mla"]}, "layers_block_type contains 'mla'"),
        ("nemotron-h", {"num_hidden_layers": 3}, "has 7 layers. It must have 3"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache is '1'"),
        ("lfm2", {"layer_types": ["mamba"] * 4}, "layer_types contains 'mamba'"),
        ("granite-hybrid-rope", {"position_embedding_type": "alibi"}, "is 'alibi'. It must be"),
        ("glm4-moe-groups", {"n_group": 3}, "8 experts have 3 groups"),
        ("glm4-moe-groups", {"topk_group": 1}, "3 experts of a token come from 1 of 4 groups"),
        ("qwen3-5", {"linear_num_key_heads": 3}, "is 4. It must be a multiple of"),
        ("qwen3-5", {"linear_num_value_heads": 0}, "linear_num_value_heads is '0'"),
        ("qwen3-5", {"linear_key_head_dim": 40}, "is 40. It must be a multiple of 16"),
        ("qwen3-5", {"linear_value_head_dim": 4096}, "linear_value_head_dim is '4096'"),
        ("qwen3-5", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is '1'"),
        ("qwen3-5", {"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim is '9'"),
        ("qwen3-5", {"layer_types": ["linear_attention"] * 4}, "no layer with attention"),
        ("qwen3-5", {"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries"),
        ("qwen3-5", {"layer_types": ["mamba"] * 4}, "layer_types contains 'mamba'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_value_of_a_structure_is_refused(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save_model(make_model(_by_name(name)), tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ModelFormatError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "change", "removed"),
    [
        ("granite-4-h", {"mamba_d_head": "auto"}, ()),
        ("falcon-h1", {"mamba_d_head": "auto"}, ()),
        ("falcon-h1", {"mamba_d_head": "auto", "mamba_d_ssm": 96}, ("mamba_expand",)),
        ("lfm2", {"layer_types": None, "full_attn_idxs": [2]}, ()),
        ("lfm2", {"full_attn_idxs": [2]}, ("layer_types",)),
        ("lfm2", {"tie_embedding": True, "tie_word_embeddings": False}, ()),
        ("lfm2-moe", {"tie_embedding": True, "tie_word_embeddings": False}, ()),
        ("nemotron-h", {"num_hidden_layers": 7}, ()),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_derived_value_is_that_of_transformers(
    name: str, change: dict[str, Any], removed: tuple[str, ...], tmp_path: Path
) -> None:
    folder = save_model(make_model(_by_name(name)), tmp_path)
    wanted = open_checkpoint(folder).config
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({k: v for k, v in values.items() if k not in removed}))
    assert open_checkpoint(folder).config == wanted


def _as_internlm2(folder: Path, config: dict[str, Any]) -> None:
    """Rewrite a folder of Llama with the names of InternLM2 and its packed q, k and v."""
    path = folder / "model.safetensors"
    names = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    tensors = load_file(path)
    kv_heads, dim = config["num_key_value_heads"], config["head_dim"]
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}"
        parts = [
            tensors.pop(f"{base}.self_attn.{x}_proj.weight").reshape(kv_heads, -1, dim, 64)
            for x in "qkv"
        ]
        packed = np.concatenate(parts, axis=1).reshape(-1, 64)
        tensors[f"{base}.attention.wqkv.weight"] = packed
    for old, new in names.items():
        tensors = {key.replace(old, new): value for key, value in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    config["architectures"] = ["InternLM2ForCausalLM"]


def test_internlm2_equals_the_llama_with_its_weights(tmp_path: Path) -> None:
    model = make_model(TINY_MODELS[0])
    folder, ids = save_model(model, tmp_path), prompt(80)
    config = json.loads((folder / "config.json").read_text())
    _as_internlm2(folder, config)
    (folder / "config.json").write_text(json.dumps(config))
    assert _error(folder, reference_logits(model, ids), ids) <= MAX_RELATIVE_ERROR


def test_internlm3_equals_the_llama_with_its_biases(tmp_path: Path) -> None:
    model = make_model(next(tiny for tiny in TINY_MODELS if tiny.name == "llama-bias"))
    folder, ids = save_model(model, tmp_path), prompt(80)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"architectures": ["InternLM3ForCausalLM"], "qkv_bias": True, "bias": True}
    path.write_text(json.dumps(config))
    assert _error(folder, reference_logits(model, ids), ids) <= MAX_RELATIVE_ERROR


# Largest mean difference, relative to the spread of the logits. Most are 1e-6. Where rounding noise
# moves a cached value over a rounding border, its code differs by one step: up to 2.3e-3.
_STORED_MEAN = 5e-3
_PAIRED = ("llama4",)  # of the models below


class _StoredRows(DynamicCache):
    """Keys and values as attention reads them from a cache of a format.

    The engine stores the two values of a pair of RoPE half a head apart. `paired` means that they
    are neighbors in the model, so that the blocks of a format have other values.
    """

    def __init__(self, mode: str, *, rotated: bool, paired: bool = False) -> None:
        super().__init__()
        self._mode, self._rotated, self._paired = mode, rotated, paired

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        order = np.arange(key_states.shape[-1])
        order = order.reshape(-1, 2).T.reshape(-1) if self._paired else order
        ordered = key_states[..., torch.from_numpy(order)].contiguous()
        keys = self._stored(ordered, rotated=self._rotated)
        keys = keys[..., torch.from_numpy(np.argsort(order))]
        values = self._stored(value_states, rotated=False)
        return super().update(keys, values, layer_idx, *args)

    def _stored(self, states: torch.Tensor, *, rotated: bool) -> torch.Tensor:
        rows = states.numpy().reshape(-1, states.shape[-1])
        rows = rotate_rows(rows.astype(np.float64)).astype(np.float32) if rotated else rows
        read = round_trip(self._mode, rows, dtype="float32")
        read = rotate_rows(read.astype(np.float64)).astype(np.float32) if rotated else read
        return torch.from_numpy(np.ascontiguousarray(read)).reshape(states.shape)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name",
    [
        "gemma2",
        "gemma3",
        "gemma4-dim512",
        "smollm3",
        "glm4-moe",
        "olmo2",
        "exaone4",
        "ministral3",
        "llama4",
    ],
)
def test_every_kv_format_equals_the_reference(name: str, mode: str, tmp_path: Path) -> None:
    # Rotation of K works with partial RoPE and without RoPE, and windows alternate by layer.
    model = make_model(_by_name(name))
    folder, ids = save_model(model, tmp_path), prompt(100)
    for rotated in (False, True):
        cache = _StoredRows(mode, rotated=rotated, paired=name in _PAIRED)
        with torch.no_grad():
            wanted = model(torch.tensor([ids]), past_key_values=cache).logits[0].numpy()
        with EngineRun(str(folder), exact=True, kv_format=mode, rotated=rotated) as run:
            difference = np.abs(run.logits(ids) - wanted) / wanted.std()
        print(f"{name} {mode} {rotated=}: mean {difference.mean():.1e}, max {difference.max():.1e}")
        assert difference.mean() <= _STORED_MEAN


def test_the_tolerance_of_stored_values_detects_another_format(tmp_path: Path) -> None:
    model = make_model(_by_name("exaone4"))
    folder, ids = save_model(model, tmp_path), prompt(100)
    with EngineRun(str(folder), exact=True, kv_format="int4") as run:
        got = run.logits(ids)
    for mode, rotated in (("nvfp4", False), ("int4", True)):
        cache = _StoredRows(mode, rotated=rotated)
        with torch.no_grad():
            other = model(torch.tensor([ids]), past_key_values=cache).logits[0].numpy()
        assert (np.abs(got - other) / other.std()).mean() > 4 * _STORED_MEAN


@pytest.mark.parametrize(
    ("name", "architecture", "model_type"),
    [
        ("gemma3", "Gemma3ForConditionalGeneration", "gemma3"),
        ("gemma4", "Gemma4ForConditionalGeneration", "gemma4"),
        ("llama4", "Llama4ForConditionalGeneration", "llama4"),
        ("ministral3", "Mistral3ForConditionalGeneration", "mistral3"),
    ],
)
def test_a_model_with_pictures_loads_its_text_part(
    name: str,
    architecture: str,
    model_type: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make_model(_by_name(name))
    folder, ids = save_model(model, tmp_path), prompt(80)
    path = folder / "model.safetensors"
    tensors = {f"language_model.{key}": value for key, value in load_file(path).items()}
    tensors["vision_tower.encoder.weight"] = np.zeros((4, 4), np.float32)
    if name == "gemma4":
        tensors["audio_tower.layers.0.weight"] = np.zeros((4, 4), np.float32)
        tensors["embed_audio.embedding_projection.weight"] = np.zeros((4, 4), np.float32)
    save_file(tensors, path, metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    outer = {
        "architectures": [architecture],
        "model_type": model_type,
        "text_config": text,
        "vision_config": {"hidden_size": 4},
    }
    (folder / "config.json").write_text(json.dumps(outer))
    with caplog.at_level("INFO", logger="lmdeploy"):
        assert _error(folder, reference_logits(model, ids), ids) <= MAX_RELATIVE_ERROR
    assert f"only the text part of {architecture} is loaded" in caplog.text


def test_names_without_model_have_the_same_scores(tmp_path: Path) -> None:
    model = make_model(TinyModel("x", "Qwen3", {"tie_word_embeddings": True}))
    folder, ids = save_model(model, tmp_path), prompt(80)
    path = folder / "model.safetensors"
    tensors = {key.removeprefix("model."): value for key, value in load_file(path).items()}
    assert {"embed_tokens.weight", "norm.weight"} <= tensors.keys()
    save_file(tensors, path, metadata={"format": "pt"})
    assert _error(folder, reference_logits(model, ids), ids) <= MAX_RELATIVE_ERROR


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "llama4", "llama4-top2-no-norm"])
def test_prefix_hits_preserve_the_answer(name: str, tmp_path: Path) -> None:
    # Several ropes, and chunks that do and do not begin at the edges of blocks.
    folder = save_model(make_model(_by_name(name)), tmp_path)
    config = TurbomindEngineConfig(exact=True, session_len=512, enable_prefix_caching=True)
    ids = prompt(140)
    with Pipeline(str(folder), config) as pipe:
        first, second = (pipe.get_ppl(ids) for _ in range(2))
        assert first == second


def test_a_family_with_a_fused_matrix_reports_its_shape(tmp_path: Path) -> None:
    tiny = replace(_by_name("phi3-window"), settings={"pad_token_id": 0})
    folder = save_model(make_model(tiny), tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    key = "model.layers.0.self_attn.qkv_proj.weight"
    tensors[key] = np.ascontiguousarray(tensors[key][:-1])
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelFormatError, match=r"qkv_proj\.weight has shape \[511, 64\].*512"):
        open_checkpoint(folder)
