#pragma once

// The definition of FP8 weights: E4M3 codes [rows, cols] and FP32 scales [rows, scales of a row].
// A row of kFp8 has one scale. A row of kFp8Block has one for each 128 columns. A value is in FP32
//   E4M3(code) * scale
// The codes 127 and 255, which are NaN in E4M3, count as 480 and -480 in kernels; the loader
// refuses them.

#include <cstdint>

#include "turbomind/core/host_device.h"
#include "turbomind/ops/matrix_format.h"

namespace turbomind {

inline constexpr int kFp8ScaleCols = 128;
inline constexpr float kLargestE4m3 = 448.f;

// Returns the number of scales of a row. REQUIRES: IsFp8(format).
TM_HD constexpr int64_t NumFp8Scales(MatrixFormat format, int64_t cols) {
  return format == MatrixFormat::kFp8 ? 1 : (cols + kFp8ScaleCols - 1) / kFp8ScaleCols;
}

}  // namespace turbomind
