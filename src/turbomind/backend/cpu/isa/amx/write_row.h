#pragma once

// Writes sums of a pair of weight tiles to y.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/backend/cpu/dense_kernels.h"
#include "turbomind/backend/cpu/packed_layout.h"
#include "turbomind/core/host_device.h"

namespace turbomind::TM_ISA {

// Where the sums of a panel's rows and of up to 32 outputs go.
struct OutputRun {
  const float* bias = nullptr;  // [num_outputs] or null
  float* y = nullptr;           // [rows, num_outputs]
  int64_t y_stride = 0;
  int64_t num_outputs = 0;  // of this run and those after it
  bool accumulate = false;
};

// Returns the outputs of row 0 from tile `tile` on.
TM_HD OutputRun OutputsOf(const MultiplyArgs& a, int tile) {
  return {.bias = a.bias == nullptr ? nullptr : a.bias + tile * kTileRows,
          .y = a.y + tile * kTileRows,
          .y_stride = a.y_stride,
          .num_outputs = a.num_outputs - tile * kTileRows,
          .accumulate = a.accumulate};
}

// Writes the sums of row r and the 16 outputs of tile `tile` of the pair.
TM_HD void WriteRow(const OutputRun& run, int r, int tile, __m512 out) {
  const int64_t left = run.num_outputs - tile * kTileRows;
  if (left <= 0) {
    return;
  }
  const auto lanes = static_cast<__mmask16>(left >= kTileRows ? 0xffff : (1 << left) - 1);
  float* y = run.y + r * run.y_stride + tile * kTileRows;
  if (run.bias != nullptr) {
    out = _mm512_add_ps(out, _mm512_maskz_loadu_ps(lanes, run.bias + tile * kTileRows));
  }
  if (run.accumulate) {
    out = _mm512_add_ps(out, _mm512_maskz_loadu_ps(lanes, y));
  }
  _mm512_mask_storeu_ps(y, lanes, out);
}

}  // namespace turbomind::TM_ISA
