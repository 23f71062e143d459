"""Granite 3 with experts, and with a shared expert (GraniteMoeShared)."""

from dataclasses import replace

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.decoder_config import MoeSettings
from lmdeploy.models.experts import (
    GGUF_EXPERTS,
    GGUF_SHARED,
    MAX_WIDTH,
    Experts,
    ExpertTensors,
    TensorLocation,
    local_experts,
)
from lmdeploy.models.family import ModelFamily, configured_bias
from lmdeploy.models.granite import gguf_granite_defaults, granite_structure

_BLOCK = "model.layers.{i}.block_sparse_moe"


def _experts(*, inputs: str, outputs: str, router: str) -> ExpertTensors:
    return {
        "router": TensorLocation(f"{_BLOCK}.{router}.weight"),
        "experts.gate": TensorLocation(f"{_BLOCK}.{inputs}", stacked=True, half=0),
        "experts.up": TensorLocation(f"{_BLOCK}.{inputs}", stacked=True, half=1),
        "experts.down": TensorLocation(f"{_BLOCK}.{outputs}", stacked=True),
    }


# Published checkpoints, and the names of transformers 5.
_PUBLISHED = _experts(
    inputs="input_linear.weight", outputs="output_linear.weight", router="router.layer"
)
_STACKED = _experts(inputs="experts.gate_up_proj", outputs="experts.down_proj", router="router")
_SHARED: ExpertTensors = {
    "shared.gate": TensorLocation("model.layers.{i}.shared_mlp.input_linear.weight", half=0),
    "shared.up": TensorLocation("model.layers.{i}.shared_mlp.input_linear.weight", half=1),
    "shared.down": TensorLocation("model.layers.{i}.shared_mlp.output_linear.weight"),
}
# llama.cpp has one architecture for both.
_GGUF: tuple[ExpertTensors, ...] = (GGUF_EXPERTS, {**GGUF_EXPERTS, **GGUF_SHARED})


def shared_experts(config: ConfigReader, num_layers: int) -> MoeSettings:
    """Return settings with experts in every layer, and a shared one if it has a size."""
    shared = config.integer("shared_intermediate_size", default=0, low=0, high=MAX_WIDTH)
    return replace(
        local_experts(config, num_layers), shared_intermediate_size=shared, shared_gate=False
    )


FAMILY = ModelFamily(
    name="granite_moe",
    models="Granite 3 MoE",
    differs="as Granite, with experts",
    hf_architectures=("GraniteMoeForCausalLM",),
    gguf_architectures=("granitemoe",),
    hf_bias=configured_bias,
    gguf_interleaved_rope=True,
    structure=granite_structure,
    gguf_defaults=gguf_granite_defaults,
    experts=Experts(settings=shared_experts, hf=(_PUBLISHED, _STACKED), gguf=_GGUF),
)
SHARED_FAMILY = replace(
    FAMILY,
    name="granite_moe_shared",
    models="Granite MoE with a shared expert",
    differs="as Granite, with experts and a shared one without a gate",
    hf_architectures=("GraniteMoeSharedForCausalLM",),
    gguf_architectures=(),
    experts=Experts(
        settings=shared_experts, hf=({**_PUBLISHED, **_SHARED}, {**_STACKED, **_SHARED}), gguf=()
    ),
)
