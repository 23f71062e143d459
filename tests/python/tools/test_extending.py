"""Follows the recipes of docs/extending.md."""

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from reference.decoder import Decoder, Shape, random_weights
from reference.moe import Experts
from reference.rope import Rope
from reference_runs import collect_logits
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from lmdeploy import _turbomind
from lmdeploy import models as families
from lmdeploy.engine.model_files import load_model

ROOT = Path(__file__).resolve().parents[3]
RECIPES = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
SHAPE = Shape(2, 64, 96, 4, 2, 64, 80, Rope(64), optional=frozenset({"bias", "qk_norm", "head"}))
MOE_SHAPE = Shape(
    2, 64, 48, 4, 2, 64, 80, Rope(64), optional=frozenset({"head"}), experts=Experts(6, 2, 48)
)
# BF16 weights are exact here (they are rounded first); what is left is FP32 rounding.
LOGIT_TOLERANCE = 5e-4


def recipe(title: str) -> str:
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", RECIPES, re.M | re.S)
    return str(text)


def write_checkpoint(folder: Path, shape: Shape, architecture: str) -> dict[str, np.ndarray]:
    """A tiny random model in Hugging Face's form; returns the engine's names of its weights."""
    weights = random_weights(shape, seed=5)
    names = {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight"}
    names["final_norm"] = "model.norm.weight"
    parts = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
    parts |= {name: f"self_attn.{name}_proj" for name in "qkvo"}
    parts |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
    parts |= {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    tensors = {}
    for name, value in weights.items():
        if name in names:
            tensors[names[name]] = value
            continue
        _, layer, part, *bias = name.split(".")
        if part == "router":
            tensors[f"model.layers.{layer}.moe.router.weight"] = value
            continue
        if part == "experts":
            continue
        tensors[f"model.layers.{layer}.{parts[part]}.{bias[0] if bias else 'weight'}"] = value
    if shape.experts is not None:
        tensors |= stacked_experts(shape, weights)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": [architecture],
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 512,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": 1,
    }
    if shape.experts is not None:
        config["num_local_experts"] = shape.experts.count
        config["num_experts_per_tok"] = shape.experts.top_k
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {char: i for i, char in enumerate(sorted(ByteLevel.alphabet())[: shape.vocab])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return weights


def stacked_experts(shape: Shape, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    assert shape.experts is not None
    return {
        f"model.layers.{i}.moe.{part}": np.stack(
            [weights[f"layers.{i}.experts.{e}.{part}"] for e in range(shape.experts.count)]
        )
        for i in range(shape.layers)
        for part in ("gate", "up", "down")
    }


@pytest.mark.parametrize(
    ("title", "name", "shape"),
    [("A model", "nova", SHAPE), ("A model with experts", "orbit", MOE_SHAPE)],
    ids=["dense", "experts"],
)
def test_a_model_is_a_file_of_data(
    title: str, name: str, shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", recipe(title), re.S)
    path = tmp_path / f"{name}.py"
    path.write_text(re.sub(r"^   ", "", code, flags=re.M), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    architecture = f"{name.capitalize()}ForCausalLM"
    weights = write_checkpoint(tmp_path, shape, architecture)
    device = _turbomind.make_cpu_device(1)
    with pytest.raises(ValueError, match=architecture):
        load_model(str(tmp_path), dtype="float32", exact=True, device=device, progress=False)

    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, module.FAMILY))
    loaded = load_model(str(tmp_path), dtype="float32", exact=True, device=device, progress=False)
    options = _turbomind.EngineConfig()
    options.kv_mode, options.session_len, options.max_batch_size = "none", 256, 1
    ids = np.random.default_rng(6).integers(0, shape.vocab, 50)
    engine = _turbomind.Engine(loaded.config, options, loaded.weights, device, 1 << 28)
    try:
        got = collect_logits(engine, ids)
    finally:
        engine.close()
    wanted = Decoder(shape, weights).logits(ids)
    assert np.abs(got - wanted).max() / wanted.std() < LOGIT_TOLERANCE


def compile_errors(source: Path, include: Path) -> str:
    """What the compiler says; empty when it is satisfied."""
    command = ["g++", "-std=c++20", "-fsyntax-only", "-Werror=switch", "-ffp-contract=off"]
    done = subprocess.run(
        [*command, f"-I{include}", str(source)], capture_output=True, text=True, check=False
    )
    return done.stderr if done.returncode else ""


def test_a_format_that_is_not_finished_does_not_compile(tmp_path: Path) -> None:
    assert "kAllKvCacheModes" in recipe("A KV format") and "Codec<Mode>" in recipe("A KV format")
    source = tmp_path / "use.cc"
    source.write_text(
        '#include "turbomind/kv/codec.h"\n'
        "int Bits(turbomind::KvCacheMode mode) {\n"
        "  return turbomind::DispatchMode(mode, []<turbomind::KvCacheMode M>() {\n"
        "    return static_cast<int>(turbomind::Codec<M>::kBits);\n"
        "  });\n"
        "}\n"
    )
    shutil.copytree(ROOT / "src", tmp_path / "src")
    assert compile_errors(source, tmp_path / "src") == ""

    modes = tmp_path / "src/turbomind/kv/kv_cache_mode.h"
    text = modes.read_text()
    modes.write_text(text.replace("  kFp4Nv,\n};", "  kFp4Nv,\n  kNew,\n};", 1))
    assert "kNew" in compile_errors(source, tmp_path / "src")  # the switch is checked

    case = "    case KvCacheMode::kFp4Nv:\n      return fn"
    new = "    case KvCacheMode::kNew:\n      return fn.template operator()<KvCacheMode::kNew>();\n"
    modes.write_text(modes.read_text().replace(case, new + case, 1))
    assert "Codec" in compile_errors(source, tmp_path / "src")  # no definition

    codec = tmp_path / "src/turbomind/kv/codec.h"
    with codec.open("a") as file:
        file.write(
            "namespace turbomind {\n"
            "template <> struct Codec<KvCacheMode::kNew> : Codec<KvCacheMode::kFp4Nv> {};\n"
            "}\n"
        )
    assert compile_errors(source, tmp_path / "src") == ""


DEVICE = """
#include "turbomind/ops/device.h"
namespace turbomind {
class Other final : public Device {
 public:
  DeviceCapability capability() const override { return {}; }
  std::string name() const override { return "other"; }
  void* Reserve(size_t) override { return nullptr; }
  void Release(void*, size_t) override {}
  void Copy(void*, const void*, size_t) override {}
  std::unique_ptr<PackedMatrix> PackMatrix(const MatrixSource&, bool) override { return nullptr; }
  void Embed(const EmbedParams&) override {}
  void FillRope(const FillRopeParams&) override {}
  void RmsNorm(const RmsNormParams&) override {}
  void Linear(const LinearParams&) override {}
  void GatedActivation(const GatedActivationParams&) override {}
  void GroupedLinear(const GroupedLinearParams&) override {}
  void RouteExperts(const RouteExpertsParams&) override {}
  void GroupRows(const GroupRowsParams&) override {}
  void CombineExperts(const CombineExpertsParams&) override {}
  void ProcessKV(const ProcessKVParams&) override {}
  void QuantiseBlocks(const QuantiseBlocksParams&) override {}
  void FlattenKV(const FlattenKVParams&) override {}
  void PrefillAttention(const AttentionParams&) override {}
  void DecodeAttention(const AttentionParams&) override {}
};
std::unique_ptr<Device> Make() { return std::make_unique<Other>(); }
}  // namespace turbomind
"""


def test_a_device_is_one_class(tmp_path: Path) -> None:
    assert "src/turbomind/ops/device.h" in recipe("A device")
    source = tmp_path / "other.cc"
    source.write_text(DEVICE)
    assert compile_errors(source, ROOT / "src") == ""
    source.write_text(re.sub(r".*DecodeAttention.*\n", "", DEVICE))
    assert "DecodeAttention" in compile_errors(source, ROOT / "src")
