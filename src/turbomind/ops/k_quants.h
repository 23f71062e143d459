#pragma once

// The definition of GGUF's K-quants (ggml-common.h in https://github.com/ggml-org/ggml): formats
// whose super-blocks of 256 columns hold scales for smaller blocks. A value of column c is in FP32
//   kQ4_K, kQ5_K  (d * scales[c / 32]) * codes[c] - min * minima[c / 32], codes of 4 or 5 bits
//   kQ6_K         (d * scales[c / 16]) * (codes[c] - 32), codes of 6 bits
// The products of d and a scale and of min and a minimum are exact.

#include <cstdint>

#include "turbomind/ops/matrix_format.h"

namespace turbomind {

inline constexpr int kSuperBlock = 256;

// One super-block, unpacked.
struct SuperBlock {
  uint16_t d = 0;          // FP16
  uint16_t min = 0;        // FP16; 0 in kQ6_K
  int8_t scales[16] = {};  // 0 to 63, the first 8 alone; kQ6_K: any int8
  uint8_t minima[8] = {};  // 0 to 63
  uint8_t codes[kSuperBlock] = {};
};

// Unpacks a super-block of a checkpoint. REQUIRES: IsKQuant(format).
SuperBlock UnpackSuperBlock(MatrixFormat format, const uint8_t* bytes);

// Writes the values [kSuperBlock]. REQUIRES: IsKQuant(format).
void DequantizeSuperBlock(MatrixFormat format, const SuperBlock& block, float* out);

}  // namespace turbomind
