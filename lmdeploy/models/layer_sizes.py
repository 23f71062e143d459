"""Sizes that differ between the layers of a model, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmdeploy._turbomind import LayerSizes


@dataclass(frozen=True)
class LayerSettings:
    """Sizes per layer. An empty tuple stands for the model's own value in every layer."""

    head_dims: tuple[int, ...] = ()
    kv_heads: tuple[int, ...] = ()
    intermediate_sizes: tuple[int, ...] = ()  # of the dense feed-forward
    # The layer whose K and V each layer reads: its own index, or that of an earlier one.
    kv_sources: tuple[int, ...] = ()
    v_is_k: tuple[bool, ...] = ()  # the layer's matrix of K is also that of V

    def owns_kv(self, layer: int) -> bool:
        """Return whether a layer with attention has K and V of its own."""
        return not self.kv_sources or self.kv_sources[layer] == layer

    def to_engine(self) -> LayerSizes:
        """Return the engine's form of these settings."""
        from lmdeploy._turbomind import LayerSizes

        fields = dict(vars(self))
        del fields["v_is_k"]  # the engine has a matrix of V
        return LayerSizes.from_dict(fields)
