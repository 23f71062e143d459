#pragma once

// The definition of NVFP4 weights, in GGUF's blocks of 64 columns: four scales, one for each 16
// columns, and 32 bytes of codes. Byte 8 g + j of the codes has column 16 g + j in its low nibble
// and column 16 g + 8 + j in its high one. A value is in FP32
//   E2M1(code) * (E4M3(scale) * factor)
// with one factor for the matrix. Scales have no sign: bit 7 is ignored. The byte 127, which is NaN
// in E4M3, counts as 480; the loader refuses it.

#include <cstdint>

#include "turbomind/core/float_convert.h"
#include "turbomind/core/host_device.h"

namespace turbomind {

inline constexpr int kNvBlock = 64;
inline constexpr int kNvGroup = 16;  // columns that share a scale
inline constexpr int kNvBlockBytes = kNvBlock / kNvGroup + kNvBlock / 2;

// Returns a scale exactly. FP16 has the bits of E4M3 with another bias.
TM_HD float NvScaleToFloat(uint8_t scale) {
  return HalfToFloat(static_cast<uint16_t>((scale & 0x7f) << 7)) * 256.f;
}

// Returns the code of a column of a block.
TM_HD uint8_t NvCode(const uint8_t* block, int column) {
  const int within = column % kNvGroup;
  const uint8_t pair = block[kNvBlock / kNvGroup + column / kNvGroup * 8 + within % 8];
  return within < 8 ? pair & 15 : pair >> 4;
}

// Writes the values [kNvBlock] of a block.
void DequantizeNvBlock(const uint8_t* block, float factor, float* out);

}  // namespace turbomind
