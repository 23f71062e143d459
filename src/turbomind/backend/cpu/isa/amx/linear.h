#pragma once

// Linear layers of quantized weights on AMX tiles; see dense_kernels.cuh for the arguments.
//
// Panels of quantized weights are packed for tiles, the last one with zeros in the place of rows
// that it lacks; few rows, and all panels of FP32 and BF16, as packed_layout.h says. A step of 32
// columns, R = kPanelRows:
//   kQ8_0        int8[R][2][32] (high halves of a row, then low ones)
//   4-bit codes  bf16[2][R][32]: 256 * high, then low, in the order of pack_panel.cc
//   then float d[16] and, kQ4_1, float d*sum[16].

#include "turbomind/backend/cpu/dense_kernels.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::amx {

inline constexpr int64_t kTileStepMeta = 128;  // scales and sums of a step of a panel, bytes

// Whether a panel of `rows` is packed for tiles. A single one does not pay for widening codes
// unless it is full; a last one that takes part in it, with half of its rows.
inline constexpr int kMinTileRows = kPanelRows / 2;
constexpr bool OnTiles(MatrixFormat format, int rows, int all_rows) {
  return (IsQuantized(format) || IsMxfp4(format)) && all_rows >= kPanelRows && rows >= kMinTileRows;
}

constexpr int64_t TileStepCodes(MatrixFormat format) {  // of a step of a panel, bytes
  return kPanelRows * (format == MatrixFormat::kQ8_0 ? kQuantRowBytes : 2 * kQuantRowBytes);
}

constexpr int64_t TilePanelStep(MatrixFormat format) {
  return TileStepCodes(format) + kTileStepMeta;
}

int64_t FullPanelBytes(MatrixFormat format, int64_t cols);
int64_t ScratchBytes(MatrixFormat format, int64_t cols);
void PackPanel(const PackPanelArgs& args);
void Multiply(const MultiplyArgs& args);

}  // namespace turbomind::amx
