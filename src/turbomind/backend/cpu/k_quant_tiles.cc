#include "turbomind/backend/cpu/k_quant_tiles.h"

#include <cstring>

#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind {
namespace {

// A byte of a lane in a step for the columns `[16 half, 16 half + 16)` of kQ6_K.
constexpr int SixBitsAt(int half, int group, int i) { return (3 * half + group) * 64 + i; }

void PackSixBits(const uint8_t* codes, uint8_t* to) {
  for (int half = 0; half < 2; ++half, codes += 16) {
    for (int i = 0; i < 4; ++i) {
      for (int g = 0; g < 3; ++g) {
        const int shared = codes[12 + i] >> (2 * g) & 3;
        to[SixBitsAt(half, g, i)] = static_cast<uint8_t>(codes[4 * g + i] | shared << 6);
      }
    }
  }
}

void ReadSixBits(const uint8_t* from, uint8_t* codes) {
  for (int half = 0; half < 2; ++half, codes += 16) {
    for (int i = 0; i < 4; ++i) {
      for (int g = 0; g < 3; ++g) {
        const uint8_t byte = from[SixBitsAt(half, g, i)];
        codes[4 * g + i] = byte & 63;
        codes[12 + i] |= static_cast<uint8_t>(byte >> 6 << (2 * g));
      }
    }
  }
}

// `to` is the first byte of a lane in a step.
void PackCodes(MatrixFormat format, const uint8_t* codes, uint8_t* to) {
  if (format == MatrixFormat::kQ6_K) {
    return PackSixBits(codes, to);
  }
  for (int i = 0; i < 16; ++i) {
    to[i / 4 * 64 + i % 4] = static_cast<uint8_t>((codes[i] & 15) | codes[16 + i] << 4);
  }
  for (int c = 0; format == MatrixFormat::kQ5_K && c < kQuantBlock; ++c) {
    to[kFifthBitsAt + c % 4] |= static_cast<uint8_t>(codes[c] >> 4 << c / 4);
  }
}

// `codes` are zero.
void ReadCodes(MatrixFormat format, const uint8_t* from, uint8_t* codes) {
  if (format == MatrixFormat::kQ6_K) {
    return ReadSixBits(from, codes);
  }
  for (int i = 0; i < 16; ++i) {
    const uint8_t pair = from[i / 4 * 64 + i % 4];
    codes[i] = pair & 15;
    codes[16 + i] = pair >> 4;
  }
  for (int c = 0; format == MatrixFormat::kQ5_K && c < kQuantBlock; ++c) {
    codes[c] |= static_cast<uint8_t>((from[kFifthBitsAt + c % 4] >> c / 4 & 1) << 4);
  }
}

void PackScales(MatrixFormat format, const SuperBlock& block, int lane, uint8_t* to) {
  std::memcpy(to + 2 * lane, &block.d, 2);
  if (format == MatrixFormat::kQ6_K) {
    for (int i = 0; i < 2 * kKSteps; ++i) {
      to[kQ6ScalesAt + i * kTileRows + lane] = static_cast<uint8_t>(block.scales[i]);
    }
    return;
  }
  std::memcpy(to + kKMinAt + 2 * lane, &block.min, 2);
  for (int i = 0; i < kKSteps; ++i) {
    const uint8_t minimum = block.minima[i];
    to[kKScalesAt + i * kTileRows + lane] =
        static_cast<uint8_t>(block.scales[i] | minimum >> 4 << 6);
    to[kKMinimaAt + i * kTileRows / 2 + lane % 8] |=
        static_cast<uint8_t>((minimum & 15) << (lane / 8 * 4));
  }
}

void ReadScales(MatrixFormat format, const uint8_t* from, int lane, SuperBlock& block) {
  std::memcpy(&block.d, from + 2 * lane, 2);
  if (format == MatrixFormat::kQ6_K) {
    for (int i = 0; i < 2 * kKSteps; ++i) {
      block.scales[i] = static_cast<int8_t>(from[kQ6ScalesAt + i * kTileRows + lane]);
    }
    return;
  }
  std::memcpy(&block.min, from + kKMinAt + 2 * lane, 2);
  for (int i = 0; i < kKSteps; ++i) {
    const uint8_t packed = from[kKScalesAt + i * kTileRows + lane];
    const uint8_t nibbles = from[kKMinimaAt + i * kTileRows / 2 + lane % 8];
    block.scales[i] = static_cast<int8_t>(packed & 63);
    block.minima[i] = static_cast<uint8_t>(packed >> 6 << 4 | (nibbles >> (lane / 8 * 4) & 15));
  }
}

}  // namespace

void PackKQuantRow(const MatrixSource& source, int64_t row, int lane, uint8_t* tile) {
  const MatrixFormat format = source.format;
  const uint8_t* bytes = SourceRow(source, row);
  for (int64_t c = 0; c < source.cols; c += kSuperBlock) {
    const SuperBlock block = UnpackSuperBlock(format, bytes);
    PackScales(format, block, lane, tile);
    for (int step = 0; step < kKSteps; ++step) {
      PackCodes(format, block.codes + step * kQuantBlock,
                tile + KCodesAt(format) + step * TileStepBytes(format) + 4 * lane);
    }
    bytes += SourceBlockBytes(format);
    tile += TileSuperBlockBytes(format);
  }
}

void ReadKQuantRow(MatrixFormat format, const uint8_t* tile, int lane, int64_t cols, float* out) {
  for (int64_t c = 0; c < cols; c += kSuperBlock) {
    SuperBlock block;
    ReadScales(format, tile, lane, block);
    for (int step = 0; step < kKSteps; ++step) {
      ReadCodes(format, tile + KCodesAt(format) + step * TileStepBytes(format) + 4 * lane,
                block.codes + step * kQuantBlock);
    }
    DequantizeSuperBlock(format, block, out + c);
    tile += TileSuperBlockBytes(format);
  }
}

}  // namespace turbomind
