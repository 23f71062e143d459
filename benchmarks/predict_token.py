"""Predict the decode steps of whole models on an H100 from the models of their kernels.

    pip install nvidia-cuda-nvdisasm
    python benchmarks/predict_token.py [--nvdisasm PATH]

A step is the sum of linear layers and experts (predict_linear.py, predict_rows.py), decode
attention of the quantized pool and of the 16-bit window (predict_decode.py), the bytes of norms,
activations and the cache's new tokens at a copy's rate, `small_us` for each other launch, and the
host's time between steps, which the profiles measured. `small_us` is fitted to the tokens per
second that d9c15d8 measured; the error of each model is also printed for a constant that was fitted
without it.

The second table is for this tree. Its terms are predictions of kernels that no GPU has run, except
that BF16 matrices are those of cuBLAS: a copy's rate and CUBLAS_US, by four measurements. Launches
per layer are those of tests/cpp/cuda/launch_count_test.cc; with the library, norms and activations
are launches of their own. Nothing is subtracted for launches that overlap.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import predict_decode as decode
import predict_linear as linear
import predict_rows as rows
from compiled_kernel import nvdisasm_option
from h100 import COPY_GBPS

CUBLAS_US = 5.0  # beyond a copy: 3.8 to 7.1 us for four matrices with 1 and 32 rows
HOST_US, HOST_SEQUENCE_US = 44.0, 1.2  # profiled: 44, 70 to 94, and 202 us for 1, 32 and 128
WINDOW16 = 160  # first 64 and newest 64 to 127 positions, in 16 bits
LIBRARY_SHARE, LIBRARY_ROWS = 0.81, 65  # of d9c15d8: 95.8 us for 128 rows of 28,672 x 4,096


@dataclass(frozen=True)
class Model:
    """The sizes of a model. `matrices` are outputs and inputs of a layer's BF16 matrices."""

    name: str
    layers: int
    matrices: tuple[tuple[int, int], ...]
    head: tuple[int, int]
    group: int
    head_dim: int
    old_small: int  # other launches of a layer at d9c15d8, without a 16-bit window
    new_small: int
    is_moe: bool = False


MODELS = {
    model.name: model
    for model in (
        Model(
            "Llama 3.2 1B, BF16",
            16,
            ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
            (128256, 2048),
            *(4, 64, 4, 4),
        ),
        Model(
            "Llama 3 8B, BF16",
            32,
            ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
            (128256, 4096),
            *(4, 128, 4, 4),
        ),
        # 25 ops of a profile with a 16-bit window, less four matrices, the router's and attention.
        Model(
            "GPT-OSS-20B, MXFP4",
            24,
            ((5120, 2880), (2880, 4096)),
            (201088, 2880),
            *(8, 64, 18, 5),
            is_moe=True,
        ),
    )
}
WINDOW = 128  # of every second layer of GPT-OSS


@dataclass(frozen=True)
class Cell:
    """A decode step, and its measured tokens per second, or the goal."""

    model: Model
    mode: str
    batch: int
    context: int
    tokens_per_s: float

    @property
    def us(self) -> float:
        """Return the microseconds of a step."""
        return self.batch / self.tokens_per_s * 1e6


@dataclass(frozen=True)
class Tree:
    """How a version of this repository computes. Functions return microseconds."""

    matrix: Callable[[tuple[int, int], int], float]  # (outputs, inputs), rows
    experts: Callable[[int], float]  # of a layer, by tokens
    attention: Callable[[decode.Shape], float]
    is_old: bool


@dataclass(frozen=True)
class Parts:
    """The parts of a step in microseconds, and its other launches."""

    linear: float
    experts: float
    attention: float
    host: float
    small: int

    def us(self, small_us: float) -> float:
        """Return the time of the step."""
        return self.linear + self.experts + self.attention + self.host + self.small * small_us


def small_bytes(model: Model) -> int:
    """Return the bytes that norms, activations and the cache's writer move for a row and layer."""
    qkv, hidden = model.matrices[0]
    gate_up = rows.GATE_UP[0] * rows.TOP if model.is_moe else model.matrices[2][0]
    return 4 * (2 * 2 * hidden + 2 * qkv + gate_up + gate_up // 2)


def parts_of(cell: Cell, tree: Tree) -> Parts:
    """Add up the kernels of a step."""
    model = cell.model
    matrices = sum(tree.matrix(matrix, cell.batch) for matrix in model.matrices)
    head = tree.matrix(model.head, cell.batch)
    window16 = 0 if cell.mode == "none" else min(WINDOW16, cell.context)
    attention = statistics.mean(
        sum(tree.attention(shape) for shape in shapes_of(cell, window=window, window16=window16))
        for window in ((0, WINDOW) if model.is_moe else (0,))
    )
    experts = tree.experts(cell.batch) if model.is_moe else 0
    copied = cell.batch * small_bytes(model) / COPY_GBPS / 1e3
    layers = model.layers
    return Parts(
        linear=layers * matrices + head,
        experts=layers * experts,
        attention=layers * attention,
        host=HOST_US + HOST_SEQUENCE_US * cell.batch + layers * copied,
        small=layers * (model.old_small if tree.is_old else model.new_small),
    )


def shapes_of(cell: Cell, *, window: int, window16: int) -> list[decode.Shape]:
    """Return the launches of attention: of the pool, and of the 16-bit window if there is one."""
    heads = (8, cell.model.group, cell.model.head_dim)
    visible = min(window or cell.context, cell.context)
    found = []
    if visible > window16:
        found.append(decode.Shape(cell.mode, cell.batch, visible - window16, *heads))
    if window16:
        found.append(decode.Shape("none", cell.batch, min(visible, window16), *heads))
    return found


def cublas_us(matrix: tuple[int, int], _: int) -> float:
    """Return the time of a BF16 matrix by cuBLAS."""
    return matrix[0] * matrix[1] * 2 / COPY_GBPS / 1e3 + CUBLAS_US


def old_matrix_us(matrix: tuple[int, int], batch: int) -> float:
    """Return the time of a BF16 matrix at d9c15d8."""
    outputs, cols = matrix
    if batch >= LIBRARY_ROWS:
        return outputs * cols * 2 / COPY_GBPS / 1e3 / LIBRARY_SHARE
    if batch == 1:
        return linear.predict(linear.Layer("bf16", outputs, cols), linear.OLD["bf16"])
    work = rows.Work("bf16", outputs, cols, batch)
    return rows.predict(work, rows.OLD[rows.form_of(work)]).us


def expert_works(tokens: int) -> list[rows.Work]:
    """Return both products of a layer's experts."""
    return [rows.Work("mxfp4", *shape, tokens, experts=True) for shape in (rows.GATE_UP, rows.DOWN)]


def old_experts_us(tokens: int) -> float:
    """Return the time of a layer's experts at d9c15d8."""
    return sum(rows.predict(w, rows.OLD[rows.form_of(w)]).us for w in expert_works(tokens))


def old_attention_us(shape: decode.Shape) -> float:
    """Return the time of attention at d9c15d8."""
    return decode.predict_us(shape, decode.OLD[shape.mode, shape.head_dim])


OLD_TREE = Tree(old_matrix_us, old_experts_us, old_attention_us, is_old=True)


def tree_of_today(nvdisasm: str, folder: Path) -> Tree:
    """Compile the kernels of this tree."""
    keys = dict.fromkeys(
        (mode, goal.model.head_dim) for goal in GOALS for mode in (goal.mode, "none")
    )
    kernels = {key: decode.count(*key, nvdisasm=nvdisasm, folder=folder) for key in keys}
    stream = rows.count((False, "mxfp4", 2), nvdisasm=nvdisasm, folder=folder)
    wide = rows.count_wide("mxfp4", rows=32, nvdisasm=nvdisasm, folder=folder)

    def experts_us(tokens: int) -> float:
        return sum(
            min(rows.predict(work, stream).us, rows.predict_wide(work, wide).us)
            for work in expert_works(tokens)
        )

    def attention_us(shape: decode.Shape) -> float:
        return decode.best_schedule(shape, kernels[shape.mode, shape.head_dim])[0]

    return Tree(cublas_us, experts_us, attention_us, is_old=False)


def read_cells() -> list[Cell]:
    """Return the measured decode steps."""
    found = []
    for line in decode.MEASURED.read_text("utf-8").splitlines():
        row = json.loads(line)
        if row.get("work") == "decode":
            sizes = (row["batch"], row["context"], row["ours"])
            found.append(Cell(MODELS[row["model"]], row["mode"], *sizes))
    return found


def fit(cells: Sequence[Cell]) -> float:
    """Return `small_us` with the least sum of squared relative errors of the time."""
    above = below = 0.0
    for cell in cells:
        parts = parts_of(cell, OLD_TREE)
        above += parts.small * (cell.us - parts.us(0)) / cell.us**2
        below += (parts.small / cell.us) ** 2
    return above / below


_8B, _1B, _20B = (
    MODELS[n] for n in ("Llama 3 8B, BF16", "Llama 3.2 1B, BF16", "GPT-OSS-20B, MXFP4")
)
GOALS = (
    Cell(_1B, "none", 1, 1024, 950),
    Cell(_8B, "none", 1, 1024, 155),
    Cell(_8B, "nvfp4", 32, 1024, 4500),
    Cell(_8B, "nvfp4", 128, 1024, 13500),
    Cell(_20B, "none", 1, 1024, 500),
    Cell(_20B, "mxfp4", 32, 1024, 5500),
    Cell(_20B, "mxfp4", 128, 1024, 15000),
)


def print_cells(cells: Sequence[Cell], tree: Tree, *, last: str) -> None:
    """Print the parts of steps; for the old tree also the errors without the model's cells."""
    measured = read_cells()
    small_us = fit(measured)
    print(f"\n{small_us:.2f} us for each other launch\n")
    print(
        "| model | cache | batch × context | linear | experts | attention | host, bytes "
        f"| other launches | predicted tok/s | {last} |\n| --- | --- | --- |"
        + " ---: |"
        * (9 if tree.is_old else 8)
    )
    errors: list[tuple[float, float]] = []
    for cell in cells:
        parts = parts_of(cell, tree)
        rate = cell.batch / parts.us(small_us) * 1e6
        others = fit([other for other in measured if other.model != cell.model])
        unseen = cell.batch / parts.us(others) * 1e6
        errors.append((rate / cell.tokens_per_s - 1, unseen / cell.tokens_per_s - 1))
        end = f"{errors[-1][0] * 100:+.0f} % | {errors[-1][1] * 100:+.0f} %"
        if not tree.is_old:
            end = "met" if rate >= cell.tokens_per_s else "missed"
        print(
            f"| {cell.model.name} | {cell.mode} | {cell.batch} × {cell.context:,} | "
            f"{parts.linear:,.0f} | {parts.experts:,.0f} | {parts.attention:,.0f} | "
            f"{parts.host:,.0f} | {parts.small} "
            f"| {rate:,.0f} | {cell.tokens_per_s:,.0f} | {end} |"
        )
    if tree.is_old:
        for title, column in (("fitted", 0), ("held out", 1)):
            sizes = [abs(pair[column]) for pair in errors]
            print(f"{title}: median {statistics.median(sizes):.1%}, worst {max(sizes):.1%}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables."""
    nvdisasm = nvdisasm_option(__doc__, arguments)
    print_cells(read_cells(), OLD_TREE, last="measured | error | held out")
    if nvdisasm is None:
        return 1
    with tempfile.TemporaryDirectory() as folder:
        print_cells(GOALS, tree_of_today(nvdisasm, Path(folder)), last="goal | result")
    return 0


if __name__ == "__main__":
    sys.exit(main())
