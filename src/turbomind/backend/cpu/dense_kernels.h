#pragma once

// The dense kernels, compiled once per instruction set (isa/) and passed as function pointers. Only
// plain structs: files of different instruction sets must share no inline code through this header.
// Every kernel returns the same bits with every instruction set, tile shape and split of the work,
// except for those of FillBf16Kernels, whose bits depend on whether a step has few rows or many.

#include <cstdint>

#include "turbomind/ops/params.h"
#include "turbomind/ops/recurrent_params.h"

namespace turbomind {

// How the activations of a weight are cut into panels, and panels into row blocks. A row block is
// multiplied with one tile after another and should stay in L2.
struct PanelPlan {
  int rows = 0;       // of a full panel
  int64_t bytes = 0;  // of a full panel, which is the largest panel
  int64_t panels_per_block = 0;
};

// Arguments of pack_panel: the rows of activations of a panel, and the panel (packed_layout.h).
// F32 weights keep the activations as they are; BF16 weights round them to BF16. Quantized weights
// round them to 16 bits with an FP32 scale per block of 32, stored as two int8 halves. The kernels
// of FillInt8Kernels round them to 8 bits instead, except for MXFP4. That adds a KL divergence of
// 3e-3 to 4e-3 to SmolLM2; 16 bits add less than 1e-6. Those of FillInt12Kernels round them to 12
// bits for kQ4_0, kQ4_1 and kQ4_K. A block that contains NaN or an infinity gets the scale NaN.
struct PackPanelArgs {
  MatrixFormat format = MatrixFormat::kF32;
  const float* x = nullptr;  // [num_rows, cols]
  int64_t x_stride = 0;
  const int32_t* x_rows = nullptr;  // [num_rows] rows of x; null packs the first rows
  int num_rows = 0;                 // at most PanelPlan::rows
  int all_rows = 0;                 // rows in all panels that are multiplied with this weight
  int64_t cols = 0;
  uint8_t* panel = nullptr;
};

// Arguments of multiply: a run of weight tiles times a run of panels.
struct MultiplyArgs {
  MatrixFormat format = MatrixFormat::kF32;
  int64_t cols = 0;
  const uint8_t* tiles = nullptr;   // [num_tiles, TileBytes]
  const uint8_t* scales = nullptr;  // kMxfp4Split: [num_outputs, cols / 32]
  int num_tiles = 0;
  int64_t num_outputs = 0;          // outputs of this run, at most 16 * num_tiles
  uint8_t* scratch = nullptr;       // scratch_bytes() for this call alone, 64-byte aligned
  const uint8_t* panels = nullptr;  // full panels; the last one holds the remaining rows
  int num_rows = 0;
  int all_rows = 0;             // the value that the panels were packed with
  const float* bias = nullptr;  // [num_outputs] or null
  float* y = nullptr;           // [num_rows, num_outputs]
  int64_t y_stride = 0;
  bool accumulate = false;
};

// The kernels of linear layers with one kind of activations.
struct LinearKernels {
  bool (*computes)(MatrixFormat format) = nullptr;  // null: every format
  int min_rows = 1;                                 // that a weight must have in a step
  void (*pack_panel)(const PackPanelArgs&) = nullptr;
  // Plans the panels of `all_rows` rows. More panels in a block than there are mean all of them.
  PanelPlan (*plan_panels)(MatrixFormat format, int64_t cols, int all_rows) = nullptr;
  void (*multiply)(const MultiplyArgs&) = nullptr;
  // Returns the size of MultiplyArgs::scratch.
  int64_t (*scratch_bytes)(MatrixFormat format, int64_t cols) = nullptr;
};

// FillDenseKernels sets all members but `coarse`, which these set:
//   FillInt8Kernels   activations of 8 bits
//   FillInt12Kernels  activations of 12 bits, for AVX-512
//   FillBf16Kernels   weights and activations rounded to BF16 (isa/amx/bf16_linear.h)
struct CpuDenseKernels {
  LinearKernels coarse;  // first choice for the formats and numbers of rows that it computes
  LinearKernels linear;  // the exact codes of every format, with activations of 16 bits
  // Compute one row of the op.
  void (*norm)(const NormParams& params, int64_t row) = nullptr;
  void (*gated_activation)(const GatedActivationParams& params, int64_t row) = nullptr;
  void (*gated_norm)(const GatedNormParams& params, int64_t row) = nullptr;
  // Compute the values [begin, end) of the op.
  void (*soft_cap)(const SoftCapParams& params, int64_t begin, int64_t end) = nullptr;
  void (*sigmoid_gate)(const SigmoidGateParams& params, int64_t begin, int64_t end) = nullptr;
};

namespace scalar {
void FillDenseKernels(CpuDenseKernels& kernels);
void FillInt8Kernels(CpuDenseKernels& kernels);
}  // namespace scalar
namespace avx2 {
void FillDenseKernels(CpuDenseKernels& kernels);
void FillInt8Kernels(CpuDenseKernels& kernels);
}  // namespace avx2
namespace avx512 {
void FillDenseKernels(CpuDenseKernels& kernels);
void FillInt8Kernels(CpuDenseKernels& kernels);
void FillInt12Kernels(CpuDenseKernels& kernels);
}  // namespace avx512
namespace amx {
void FillDenseKernels(CpuDenseKernels& kernels);
void FillInt8Kernels(CpuDenseKernels& kernels);
void FillBf16Kernels(CpuDenseKernels& kernels);
}  // namespace amx

}  // namespace turbomind
