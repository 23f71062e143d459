#include "turbomind/ops/k_quants.h"

#include <cstring>

#include "turbomind/core/float_convert.h"

namespace turbomind {
namespace {

// Unpacks the 12 bytes of 8 scales and 8 minima. The first four of each have their 6 bits in one
// byte, whose upper 2 bits belong to the last four.
void UnpackScales(const uint8_t* packed, SuperBlock& block) {
  for (int i = 0; i < 4; ++i) {
    const uint8_t scale = packed[i];
    const uint8_t minimum = packed[4 + i];
    const uint8_t nibbles = packed[8 + i];
    block.scales[i] = static_cast<int8_t>(scale & 63);
    block.minima[i] = minimum & 63;
    block.scales[4 + i] = static_cast<int8_t>((nibbles & 15) | scale >> 6 << 4);
    block.minima[4 + i] = static_cast<uint8_t>(nibbles >> 4 | minimum >> 6 << 4);
  }
}

// 32 bytes hold the nibbles of 32 columns and, in their upper halves, those of the next 32. A byte
// c of `fifths` holds the fifth bits of the columns 32 i + c. Null: there are none.
void UnpackWithMinima(const uint8_t* nibbles, const uint8_t* fifths, SuperBlock& block) {
  for (int c = 0; c < kSuperBlock; ++c) {
    const uint8_t pair = nibbles[c / 64 * 32 + c % 32];
    const int nibble = c % 64 < 32 ? pair & 15 : pair >> 4;
    const int fifth = fifths == nullptr ? 0 : fifths[c % 32] >> (c / 32) & 1;
    block.codes[c] = static_cast<uint8_t>(nibble | fifth << 4);
  }
}

// Unpacks kQ6_K: 128 bytes of nibbles, 64 bytes of upper bits, 16 scales and d. Of 128 columns, 64
// bytes hold the nibbles of the first 64 in their lower halves, and 32 bytes hold the upper bits of
// the columns 32 i + c.
SuperBlock UnpackSixBits(const uint8_t* bytes) {
  SuperBlock block;
  const uint8_t* uppers = bytes + 128;
  for (int c = 0; c < kSuperBlock; ++c) {
    const int part = c / 128;
    const uint8_t pair = bytes[part * 64 + c % 64];
    const int nibble = c % 128 < 64 ? pair & 15 : pair >> 4;
    const int upper = uppers[part * 32 + c % 32] >> (c % 128 / 32 * 2) & 3;
    block.codes[c] = static_cast<uint8_t>(nibble | upper << 4);
  }
  std::memcpy(block.scales, bytes + 192, sizeof(block.scales));
  std::memcpy(&block.d, bytes + 208, 2);
  return block;
}

}  // namespace

SuperBlock UnpackSuperBlock(MatrixFormat format, const uint8_t* bytes) {
  if (format == MatrixFormat::kQ6_K) {
    return UnpackSixBits(bytes);
  }
  SuperBlock block;
  std::memcpy(&block.d, bytes, 2);
  std::memcpy(&block.min, bytes + 2, 2);
  UnpackScales(bytes + 4, block);
  const bool has_fifths = format == MatrixFormat::kQ5_K;
  UnpackWithMinima(bytes + (has_fifths ? 48 : 16), has_fifths ? bytes + 16 : nullptr, block);
  return block;
}

void DequantizeSuperBlock(MatrixFormat format, const SuperBlock& block, float* out) {
  const float d = HalfToFloat(block.d);
  const float min = HalfToFloat(block.min);
  for (int c = 0; c < kSuperBlock; ++c) {
    if (format == MatrixFormat::kQ6_K) {
      const float scale = d * static_cast<float>(block.scales[c / 16]);
      out[c] = scale * static_cast<float>(block.codes[c] - 32);
    } else {
      const float scale = d * static_cast<float>(block.scales[c / 32]);
      const float minimum = min * static_cast<float>(block.minima[c / 32]);
      out[c] = scale * static_cast<float>(block.codes[c]) - minimum;
    }
  }
}

}  // namespace turbomind
