"""Which cells are measured on a GPU, the most important first: a run may end at any of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gpu_results import Row

MODES = ("none", "fp8", "nvfp4", "mxfp4", "int8", "int4", "fp8_e5m2")
FEW_MODES = ("none", "fp8", "nvfp4", "mxfp4")
BATCHES = (1, 8, 32, 128, 256)
CONTEXTS = (1024, 8192, 32768, 131072)
# Of all sequences of a cell together: two layers of 16 bit at head_dim 128 are 69 GB then.
MOST_TOKENS = 1 << 23
CHUNK = 2048
# Of an 8B model (hidden 4096, 32 heads of 128, 8 KV heads) as they are multiplied together.
LINEARS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
LINEAR_BATCHES = (1, 32, 128, 2048)
FORMATS = ("bf16", "q8_0", "q4_0", "mxfp4_split")
EXPERTS = {"rows": 5760, "cols": 2880, "experts": 32, "top_k": 4}


@dataclass(frozen=True)
class KernelCell:
    """An op on a shape; `mode` empty where it touches no cache."""

    op: str
    mode: str = ""
    shape: dict[str, int | str] = field(default_factory=dict)
    launches: int = 0  # of a step; 0: as many as usual

    def line(self) -> str:
        """As device_bench reads it."""
        words = {"op": self.op}
        words |= {"mode": self.mode} if self.mode else {}
        words |= {"launches": str(self.launches)} if self.launches else {}
        words |= {key: str(value) for key, value in self.shape.items()}
        return " ".join(f"{key}={value}" for key, value in words.items())

    def row(self, by: str, found: dict[str, Any]) -> Row:
        """What goes to the file."""
        return {"by": by, "op": self.op, "mode": self.mode, "shape": self.shape, **found}


def attention_shape(batch: int, context: int, *, group: int = 8, head_dim: int = 128) -> Row:
    """8 KV heads, as the models of the targets have."""
    return {
        "batch": batch,
        "context": context,
        "kv_heads": 8,
        "group": group,
        "head_dim": head_dim,
    }


def window_shape(batch: int) -> Row:
    """A layer of gpt-oss with a sliding window."""
    return attention_shape(batch, 4096, head_dim=64) | {"window": 128, "sinks": 1}


def of_modes(op: str, shape: Row, *, modes: tuple[str, ...], launches: int = 0) -> list[KernelCell]:
    """One cell for each."""
    return [KernelCell(op, mode, shape, launches) for mode in modes]


def decode_grid(*, group: int, head_dim: int) -> Iterator[KernelCell]:
    """Every batch and context that memory permits; first those that hold much."""
    sizes = [(b, c) for b in BATCHES for c in CONTEXTS if b * c <= MOST_TOKENS]
    for batch, context in sorted(sizes, key=lambda size: -min(size[0] * size[1], 1 << 20)):
        shape = attention_shape(batch, context, group=group, head_dim=head_dim)
        yield from of_modes("decode", shape, modes=MODES)


def target_cells() -> Iterator[KernelCell]:
    """Those that the targets are about."""
    yield KernelCell("copy", "", {"mb": 4096})
    for shape in (
        attention_shape(8, 32768),
        attention_shape(8, 32768, group=4),
        attention_shape(32, 32768),
        attention_shape(128, 8192),
        window_shape(8),
        window_shape(32),
    ):
        yield from of_modes("decode", shape, modes=MODES)
    for context in (8192, 32768):
        shape = attention_shape(1, context) | {"new_tokens": CHUNK}
        yield from of_modes("prefill", shape, modes=FEW_MODES, launches=4)
    for batch, tokens in ((1, CHUNK), (128, 1)):
        yield from write_cells(batch, tokens)


def write_cells(batch: int, tokens: int) -> Iterator[KernelCell]:
    """Plain in every mode, and in four bits as they are served."""
    shape = attention_shape(batch, CHUNK, group=4) | {"new_tokens": tokens}
    yield from of_modes("write", shape, modes=MODES)
    served = shape | {"search": 1, "rotate": 1}
    yield from of_modes("write", served, modes=("nvfp4", "mxfp4"))


def matrix_cells() -> Iterator[KernelCell]:
    """Linear layers of an 8B model, experts of gpt-oss."""
    for batch in LINEAR_BATCHES:
        for rows, cols in LINEARS:
            shape: Row = {"batch": batch, "rows": rows, "cols": cols}
            launches = 4 if batch > 256 else 0
            yield from (
                KernelCell("linear", "", shape | {"format": name}, launches) for name in FORMATS
            )
        yield KernelCell("experts", "", {"batch": batch, **EXPERTS, "format": "mxfp4_split"}, 4)


def kernel_cells() -> list[KernelCell]:
    """Everything, each cell once."""
    cells = list(target_cells())
    cells += list(decode_grid(group=8, head_dim=128))[: 6 * len(MODES)]
    cells += matrix_cells()
    cells += decode_grid(group=8, head_dim=128)
    cells += of_modes("prefill", attention_shape(1, 8192, head_dim=64) | {"new_tokens": CHUNK},
                      modes=FEW_MODES, launches=4)  # fmt: skip
    cells += of_modes("flatten", attention_shape(1, 32768), modes=FEW_MODES)
    cells += decode_grid(group=8, head_dim=64)
    cells += decode_grid(group=4, head_dim=128)
    return list({cell.line(): cell for cell in cells}.values())


def small_cells() -> list[KernelCell]:
    """One of every op, in no time: that the programs work, on any device."""
    shape = attention_shape(2, 96, group=2, head_dim=64) | {"kv_heads": 1}
    cells = [KernelCell("copy", "", {"mb": 1})]
    for mode in FEW_MODES:
        cells += [
            KernelCell("decode", mode, shape, 1),
            KernelCell("write", mode, shape, 1),
            KernelCell("flatten", mode, shape, 1),
            KernelCell("prefill", mode, shape | {"new_tokens": 16}, 1),
        ]
    sizes: Row = {"batch": 2, "rows": 64, "cols": 64}
    cells += [KernelCell("linear", "", sizes | {"format": name}, 1) for name in FORMATS]
    experts = sizes | {"format": "mxfp4_split", "experts": 2, "top_k": 1}
    return [*cells, KernelCell("experts", "", experts, 1)]
