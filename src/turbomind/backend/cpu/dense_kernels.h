#pragma once

// The dense kernels that are compiled once per instruction set (isa/), as function pointers.
// Plain structs: files of different instruction sets share no inline code through this header.
// Every kernel gives the same bits with every instruction set, tile shape and split of the work.

#include <cstdint>

#include "turbomind/ops/params.h"

namespace turbomind {

// Up to kPanelRows rows of activations → one panel (packed_layout.h). Rounds to BF16, not at all,
// or for quantized weights to 16 bits with an FP32 scale per block of 32, stored as two int8
// halves: one int8 pass adds a KL divergence of 3e-3 to 4e-3 to SmolLM2, two add less than 1e-6. A
// block with NaN or an infinity gets the scale NaN.
struct PackPanelArgs {
  MatrixFormat format = MatrixFormat::kF32;
  const float* x = nullptr;  // [num_rows, cols]
  int64_t x_stride = 0;
  const int32_t* x_rows = nullptr;  // [num_rows] which rows of x; null: the first ones
  int num_rows = 0;                 // at most kPanelRows
  int all_rows = 0;                 // of the panels that one weight is multiplied with
  int64_t cols = 0;
  uint8_t* panel = nullptr;
};

// A run of weight tiles times a run of panels.
struct MultiplyArgs {
  MatrixFormat format = MatrixFormat::kF32;
  int64_t cols = 0;
  const uint8_t* tiles = nullptr;   // [num_tiles, TileBytes]
  const uint8_t* scales = nullptr;  // kMxfp4Split: [num_outputs, cols / 32]
  int num_tiles = 0;
  int64_t num_outputs = 0;          // of this run: at most 16 * num_tiles
  uint8_t* scratch = nullptr;       // scratch_bytes() of this call's own, 64-byte aligned
  const uint8_t* panels = nullptr;  // full panels, the last one with what remains of num_rows
  int num_rows = 0;
  int all_rows = 0;             // as the panels were packed with
  const float* bias = nullptr;  // [num_outputs] or null
  float* y = nullptr;           // [num_rows, num_outputs]
  int64_t y_stride = 0;
  bool accumulate = false;
};

struct CpuDenseKernels {
  void (*pack_panel)(const PackPanelArgs&) = nullptr;
  // Of a full panel; no other takes more.
  int64_t (*panel_bytes)(MatrixFormat format, int64_t cols) = nullptr;
  // Packed activations that are multiplied with one tile after another: they stay in L2.
  int64_t row_block_bytes = 256 << 10;
  int64_t mxfp4_row_block_bytes = 640 << 10;  // more, so that a transposed tile serves more rows
  void (*multiply)(const MultiplyArgs&) = nullptr;
  // Of MultiplyArgs::scratch.
  int64_t (*scratch_bytes)(MatrixFormat format, int64_t cols) = nullptr;
  void (*rms_norm)(const float* x, const float* weight, float eps, int dim, float* out) = nullptr;
  // One row of the op.
  void (*gated_activation)(const GatedActivationParams& params, int64_t row) = nullptr;
};

namespace scalar {
void FillDenseKernels(CpuDenseKernels& kernels);
}
namespace avx2 {
void FillDenseKernels(CpuDenseKernels& kernels);
}
namespace avx512 {
void FillDenseKernels(CpuDenseKernels& kernels);
}
namespace amx {
void FillDenseKernels(CpuDenseKernels& kernels);
}

}  // namespace turbomind
