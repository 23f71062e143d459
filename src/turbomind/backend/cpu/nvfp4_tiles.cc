#include "turbomind/backend/cpu/nvfp4_tiles.h"

#include <cstring>

#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind {
namespace {

constexpr int kStepBytes = TileStepBytes(MatrixFormat::kNvfp4);
constexpr int kStepsOfBlock = kNvBlock / kQuantBlock;

// Writes the codes of 32 columns from `first` on. `to` is the first byte of a lane in a step.
void PackCodes(const uint8_t* block, int first, uint8_t* to) {
  for (int i = 0; i < kNvGroup; ++i) {
    to[i / 4 * 64 + i % 4] =
        static_cast<uint8_t>(NvCode(block, first + i) | NvCode(block, first + kNvGroup + i) << 4);
  }
}

}  // namespace

void PackNvRow(const MatrixSource& source, int64_t row, int lane, uint8_t* tile) {
  const float factor = source.factor * kNvTileFactor;
  std::memcpy(tile + 4 * lane, &factor, sizeof(factor));
  const uint8_t* block = SourceRow(source, row);
  uint8_t* to = tile + kNvHeaderBytes;
  for (int64_t c = 0; c < source.cols; c += kNvBlock, block += kNvBlockBytes) {
    for (int step = 0; step < kStepsOfBlock; ++step, to += kStepBytes) {
      to[lane] = block[2 * step] & 0x7f;
      to[kTileRows + lane] = block[2 * step + 1] & 0x7f;
      PackCodes(block, step * kQuantBlock, to + kNvCodesAt + 4 * lane);
    }
  }
}

void ReadNvRow(const uint8_t* tile, int lane, int64_t cols, float* out) {
  float factor;
  std::memcpy(&factor, tile + 4 * lane, sizeof(factor));
  factor /= kNvTileFactor;  // exact, because it is a power of two
  const uint8_t* step = tile + kNvHeaderBytes;
  for (int64_t c = 0; c < cols; c += kQuantBlock, step += kStepBytes) {
    const float low = NvScaleToFloat(step[lane]) * factor;
    const float high = NvScaleToFloat(step[kTileRows + lane]) * factor;
    for (int i = 0; i < kNvGroup; ++i) {
      const uint8_t pair = step[kNvCodesAt + 4 * lane + i / 4 * 64 + i % 4];
      out[c + i] = E2M1ToFloat(pair & 15) * low;
      out[c + kNvGroup + i] = E2M1ToFloat(pair >> 4) * high;
    }
  }
}

}  // namespace turbomind
