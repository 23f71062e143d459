"""Mamba-2 layers: settings and tensor names that Granite 4-H, Nemotron-H and Falcon-H1 share.

The engine calls C, B and x of Mamba-2 q, k and v, and the time step a.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.decoder_config import RecurrentSettings
from lmdeploy.models.experts import MAX_WIDTH, TensorLocation
from lmdeploy.models.family import TensorNames, stored_parts

# The engine has the same limits.
_MAX_HEADS = 1 << 16
_MAX_DIM = 256
_MAX_KERNEL = 8
_INPUTS = tuple(f"recurrent.{part}" for part in ("z", "v", "k", "q", "a"))


@dataclass(frozen=True)
class Mamba2Keys:
    """The keys of a config.json."""

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state: str = "mamba_d_state"
    kernel: str = "mamba_d_conv"


def mamba2_settings(
    config: ConfigReader,
    layers: tuple[bool, ...],
    *,
    keys: Mamba2Keys = Mamba2Keys(),
    has_norm: bool = True,
    gate_first: bool = True,
) -> RecurrentSettings:
    """Return the settings. `layers` says which layers are recurrent.

    Raise ModelFormatError for sizes that the engine does not have, and for limits of the time
    step, which transformers applies to prompts alone.
    """
    limits = config.any_text("time_step_limit")
    if limits and not (limits.startswith(("[0.0, ", "[0, ")) and "inf" in limits.lower()):
        raise config.refuse(
            f"{config.name('time_step_limit')} is {limits}. It must be 0 to infinity."
        )
    groups = config.integer(keys.groups, default=1, high=_MAX_HEADS)
    heads = config.integer(keys.heads, high=_MAX_HEADS)
    if heads % groups:
        raise config.refuse(
            f"{config.name(keys.heads)} is {heads}. It must be a multiple of "
            f"{config.name(keys.groups)}, {groups}."
        )
    sizes = {
        keys.head_dim: config.integer(keys.head_dim, high=_MAX_DIM),
        keys.state: config.integer(keys.state, high=_MAX_DIM),
    }
    for key, size in sizes.items():
        if size % 16:
            raise config.refuse(f"{config.name(key)} is {size}. It must be a multiple of 16.")
    return RecurrentSettings(
        layers=layers,
        kernel=config.integer(keys.kernel, default=4, low=2, high=_MAX_KERNEL),
        rule="selective_scan",
        num_key_heads=groups,
        num_value_heads=heads,
        key_dim=sizes[keys.state],
        value_dim=sizes[keys.head_dim],
        norm_groups=groups if has_norm else 0,
        gate_first=gate_first,
    )


def mamba2_head_dim(config: ConfigReader, *, size: int) -> Mapping[str, int]:
    """Return `mamba_d_head` of a mixer with `size` values, for files that lack it.

    Raise ModelFormatError if the heads do not divide it.
    """
    heads = config.integer("mamba_n_heads", high=_MAX_HEADS)
    if size % heads:
        raise config.refuse(
            f"The recurrent layers have {size} values. They must be a multiple of "
            f"{config.name('mamba_n_heads')}, {heads}."
        )
    return {"mamba_d_head": size // heads}


def gguf_mamba2_head_dim(config: ConfigReader) -> Mapping[str, int]:
    """Return `mamba_d_head` from the size that GGUF has instead."""
    return mamba2_head_dim(config, size=config.integer("mamba_d_ssm", high=MAX_WIDTH))


def hf_mamba2(mixer: str, *, has_norm: bool = True) -> TensorNames:
    """Return the Hugging Face names of a layer whose tensors begin with `mixer`."""
    norm = {"recurrent.norm": f"{mixer}.norm.weight"} if has_norm else {}
    return {
        **stored_parts(f"{mixer}.in_proj.weight", _INPUTS),
        "recurrent.convolution": TensorLocation(f"{mixer}.conv1d.weight", convert=np.transpose),
        "recurrent.decay": TensorLocation(f"{mixer}.A_log", convert=np.exp),
        "recurrent.dt_bias": f"{mixer}.dt_bias",
        "recurrent.skip": f"{mixer}.D",
        **norm,
        "recurrent.o": f"{mixer}.out_proj.weight",
    }


GGUF_MAMBA2: TensorNames = {
    **stored_parts("blk.{i}.ssm_in.weight", _INPUTS),
    "recurrent.convolution": TensorLocation("blk.{i}.ssm_conv1d.weight", convert=np.transpose),
    "recurrent.decay": TensorLocation("blk.{i}.ssm_a", convert=np.negative),
    "recurrent.dt_bias": "blk.{i}.ssm_dt.bias",
    "recurrent.skip": "blk.{i}.ssm_d",
    "recurrent.norm": TensorLocation("blk.{i}.ssm_norm.weight", convert=np.ravel, grouped=True),
    "recurrent.o": "blk.{i}.ssm_out.weight",
}


def mamba2_bias(
    config: ConfigReader, *, convolution: str, inputs: str, outputs: str
) -> tuple[str, ...]:
    """Return the tensors with a bias. The arguments are the keys that switch them on."""
    names: tuple[str, ...] = ()
    if config.flag(convolution, default=True):
        names += ("recurrent.convolution",)
    if config.flag(inputs, default=False):
        names += _INPUTS
    if config.flag(outputs, default=False):
        names += ("recurrent.o",)
    return names
