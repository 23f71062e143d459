"""Read a decoder from the keys of config.json. GGUF metadata is translated to them first."""

from dataclasses import replace

from lmdeploy.models.config_reader import MAX_POSITION, ConfigReader
from lmdeploy.models.decoder_config import DecoderConfig, MoeSettings
from lmdeploy.models.experts import MAX_EXPERT_GROUPS, MAX_EXPERTS_OF_MODEL, MAX_WIDTH
from lmdeploy.models.family import ModelFamily
from lmdeploy.models.rope import rope_from_hf

_MAX_LAYERS = 4096
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "relu2",
}


def read_decoder(reader: ConfigReader, family: ModelFamily) -> DecoderConfig:
    """Return the config in the keys of config.json.

    Raise ModelFormatError if a value is missing, malformed or not supported.
    """
    hidden = reader.integer("hidden_size", high=MAX_WIDTH)
    heads = reader.integer("num_attention_heads", high=MAX_WIDTH)
    head_dim = max(hidden // heads, 1)
    key = "hidden_activation" if reader.has("hidden_activation") else "hidden_act"
    activation = reader.text(key, default="silu")
    if activation not in _ACTIVATIONS:
        raise reader.refuse(
            f"{key} is {activation[:40]!r}. It must be one of {', '.join(_ACTIVATIONS)}."
        )
    if not reader.flag("is_causal", default=True):
        raise reader.refuse(f"{reader.name('is_causal')} is false. It must be true.")
    max_position = reader.integer("max_position_embeddings", default=2048, high=MAX_POSITION)
    layers = reader.integer("num_hidden_layers", high=_MAX_LAYERS)
    moe = None
    if family.experts is not None and (found := family.experts.settings(reader, layers)):
        moe = replace(
            found,
            num_groups=reader.integer("n_group", default=1),
            top_groups=reader.integer("topk_group", default=1),
        )
    if family.ropes is not None:
        ropes, layer_ropes = family.ropes(reader, num_layers=layers, max_position=max_position)
    else:
        ropes, layer_ropes = (rope_from_hf(reader, max_position, default=family.hf_rope),), ()
    return _check_config(
        reader,
        DecoderConfig(
            num_layers=layers,
            hidden_size=hidden,
            intermediate_size=reader.integer(family.hf_dense_size, high=MAX_WIDTH),
            num_heads=heads,
            num_kv_heads=reader.integer("num_key_value_heads", default=heads, high=MAX_WIDTH),
            head_dim=reader.integer("head_dim", default=head_dim, high=MAX_WIDTH),
            vocab_size=reader.integer("vocab_size", high=MAX_WIDTH),
            max_position=max_position,
            norm_eps=reader.number(family.hf_norm_eps, default=1e-6, high=1.0),
            windows=family.windows(reader, layers),
            tied_head=reader.flag("tie_word_embeddings", default=False),
            activation=family.activation or _ACTIVATIONS[activation],
            ropes=ropes,
            layer_ropes=layer_ropes,
            moe=moe,
            recurrent=family.recurrent.settings(reader, layers) if family.recurrent else None,
            latent=family.latent(reader) if family.latent else None,
            branches=family.branches(reader, layers),
            layer_sizes=family.layer_sizes(reader, layers),
            structure=family.structure(reader),
            swiglu_limit=reader.number("swiglu_limit", default=7.0, low=1e-3),
        ),
    )


def _check_config(reader: ConfigReader, config: DecoderConfig) -> DecoderConfig:
    """Return the config. Raise ModelFormatError if its heads or experts are inconsistent."""
    if config.num_heads % config.num_kv_heads:
        raise reader.refuse(
            f"The number of query heads is {config.num_heads}. It must be a multiple of the "
            f"{config.num_kv_heads} KV heads."
        )
    if not any(config.has_attention(layer) for layer in range(config.num_layers)):
        raise reader.refuse("The model has no layer with attention. It needs at least one.")
    for head_dim in (config.head_dim, *config.layer_sizes.head_dims):
        if head_dim % 16:
            raise reader.refuse(f"head_dim is {head_dim}. It must be a multiple of 16.")
    for kv_heads in config.layer_sizes.kv_heads:
        if config.num_heads % kv_heads:
            raise reader.refuse(
                f"A layer has {kv_heads} KV heads. They must divide the {config.num_heads} query "
                "heads."
            )
    for rope in config.ropes:
        half = (rope.dim or config.head_dim) // 2
        for factors in (rope.freq_factors, rope.long_factors):
            if factors and len(factors) != half:
                raise reader.refuse(
                    f"RoPE has {len(factors)} factors of longrope ({reader.name('short_factor')}, "
                    f"{reader.name('long_factor')}). They must be {half} for the {2 * half} "
                    "rotated values of a head."
                )
    if config.moe is not None:
        experts = config.moe.num_experts
        if config.moe.top_k > experts:
            raise reader.refuse(
                f"Each token uses {config.moe.top_k} experts. It must use at most {experts}."
            )
        _check_groups(reader, config.moe)
        total = experts * sum(config.moe.layers)
        if total > MAX_EXPERTS_OF_MODEL:
            raise reader.refuse(
                f"The layers have {total} experts. They must have at most {MAX_EXPERTS_OF_MODEL}."
            )
    return config


def _check_groups(reader: ConfigReader, moe: MoeSettings) -> None:
    groups, size = moe.num_groups, moe.num_experts // moe.num_groups
    if groups == moe.top_groups == 1:
        return
    if groups > MAX_EXPERT_GROUPS or moe.num_experts != groups * size or size < 2:
        raise reader.refuse(
            f"The {moe.num_experts} experts have {groups} groups. They must have at most "
            f"{MAX_EXPERT_GROUPS} groups of the same size, which must be at least 2."
        )
    if moe.top_groups > groups or moe.top_groups * size < moe.top_k:
        raise reader.refuse(
            f"The {moe.top_k} experts of a token come from {moe.top_groups} of {groups} groups of "
            f"{size}. The number must be at most {groups} and at least "
            f"{-(-moe.top_k // size)}."
        )
