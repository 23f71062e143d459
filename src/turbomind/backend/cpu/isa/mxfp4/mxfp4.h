#pragma once

// Linear layers with MXFP4 weights in their stored layout; see dense_kernels.h for the arguments.
//
// Definition of the arithmetic: an output has four FP32 sums. Block b of its row is added to sum b
// % 4, in the order of b:
//   sum = fma(float(Σ 2 * E2M1(code) * activation code) * d, 2^(e - 127), sum)
// where d is half the scale of the activations. The integer is exact (at most 32 * 12 * 32512 <
// 2^24), whatever the order of the nibbles. The result is (sum 0 + sum 1) + (sum 2 + sum 3). Blocks
// that a row lacks to a multiple of four count as zeros.

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/linear.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::TM_ISA {

inline constexpr int kMxOutputs = 4;  // rows of the matrix that are read together

// The operands of one call: up to 4 adjacent outputs, R rows of a panel.
struct MxRun {
  // Start of each output's row, with codes or blocks separate from the scales. Missing outputs
  // repeat the last one.
  const uint8_t* rows[kMxOutputs] = {};
  const uint8_t* scales[kMxOutputs] = {};  // kMxfp4Split
  int64_t blocks = 0;                      // blocks per row
  const uint8_t* next = nullptr;           // prefetched, as many bytes as the rows have
  const uint8_t* next_scales = nullptr;
  const uint8_t* panel = nullptr;  // packed for R rows
  const float* bias = nullptr;     // [num_outputs] or null
  float* y = nullptr;              // [R, num_outputs]
  int64_t y_stride = 0;
  int num_outputs = 0;  // 1 to 4
  bool accumulate = false;
};

template <MatrixFormat F>
inline constexpr int kMxBlockBytes = F == MatrixFormat::kMxfp4 ? 17 : 16;
template <MatrixFormat F>
inline constexpr int kMxCodesAt = F == MatrixFormat::kMxfp4 ? 1 : 0;

// Prefetches the bytes of the next outputs that belong to a step.
template <MatrixFormat F>
TM_HD void PrefetchStep(const MxRun& run, int64_t step) {
  constexpr int kStep = kMxOutputs * kMxStepBlocks * kMxBlockBytes<F>;
#pragma GCC unroll 5
  for (int line = 0; line < kStep; line += 64) {
    __builtin_prefetch(run.next + step * kStep + line);
  }
  if constexpr (F == MatrixFormat::kMxfp4Split) {
    __builtin_prefetch(run.next_scales + step * kMxOutputs * kMxStepBlocks);
  }
}

TM_HD int64_t MxSteps(int64_t blocks) { return (blocks + kMxStepBlocks - 1) / kMxStepBlocks; }

// Pointers into one step of a row's panel; each part has kMxStepBytes.
struct MxPanelRow {
  const uint8_t* high[2];  // for low nibbles, for high nibbles
  const uint8_t* low[2];
  const uint8_t* scales;   // float[4][4]
  const uint8_t* offsets;  // int32[4][4]
};

TM_HD MxPanelRow MxRowAt(const uint8_t* panel, int64_t step, int num_rows, int row) {
  const uint8_t* at = panel + (step * num_rows + row) * kMxPanelRowBytes;
  return {{at, at + kMxStepBytes},
          {at + 2 * kMxStepBytes, at + 3 * kMxStepBytes},
          at + 4 * kMxStepBytes,
          at + 5 * kMxStepBytes};
}

}  // namespace turbomind::TM_ISA
