#pragma once

// Linear layers with quantized weights on AMX tiles; see dense_kernels.h for the arguments.
//
// Panels for quantized weights are packed for tiles; missing rows of the last panel are zero. A
// last panel of few rows, and all panels of FP32 and BF16, use the layout of packed_layout.h. A
// step of 32 columns, R = kPanelRows:
//   kQ8_0, kQ5_K  int8[R][2][32] (high halves of a row, then low ones)
//   4-bit codes   bf16[2][R][32]: 256 * high, then low, in the order of pack_panel.cc
//   kQ6_K, kNvfp4 bf16[2][R][2][16]: for each half of the columns 256 * high, then low of a row
//   then float d[16] and, for formats with minima, float d*sum[16].
// Activations of 8 bits are int8[R][32] or bf16[R][32] instead.

#include "turbomind/backend/cpu/dense_kernels.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::amx {

inline constexpr int64_t kTileStepMeta = 128;  // bytes of the scales and sums in a step of a panel

// Returns whether there are kernels for the family of the format. AVX-512 multiplies the others.
constexpr bool HasTiles(MatrixFormat format) {
  return IsQuantized(format) || IsMxfp4(format) || IsKQuant(format) ||
         format == MatrixFormat::kNvfp4;
}

// Returns true if a panel of `rows` is packed for tiles. A single panel pays for widening the codes
// only if it is full. The last of several panels pays for it with half of its rows.
inline constexpr int kMinTileRows = kPanelRows / 2;
constexpr bool OnTiles(MatrixFormat format, int rows, int all_rows) {
  return HasTiles(format) && all_rows >= kPanelRows && rows >= kMinTileRows;
}

// Returns the same for activations of 8 bits. AVX-512 multiplies K-quants with them.
constexpr bool OnInt8Tiles(MatrixFormat format, int rows, int all_rows) {
  return IsQuantized(format) && OnTiles(format, rows, all_rows);
}

// Returns whether codes are multiplied as int8 instead of BF16.
constexpr bool InBytes(MatrixFormat format) {
  return format == MatrixFormat::kQ8_0 || format == MatrixFormat::kQ5_K;
}

// Bytes of a row of activations in a tile.
constexpr int64_t TileRowBytes(MatrixFormat format) {
  return InBytes(format) ? kQuantBlock : 2 * kQuantBlock;
}

// Bytes of the activations in a step of a panel.
constexpr int64_t TileStepCodes(MatrixFormat format, bool int8) {
  return kPanelRows * TileRowBytes(format) * (int8 ? 1 : 2);
}

constexpr int64_t TilePanelStep(MatrixFormat format, bool int8) {
  return TileStepCodes(format, int8) + kTileStepMeta;
}

PanelPlan PlanPanels(MatrixFormat format, int64_t cols, int all_rows);
int64_t ScratchBytes(MatrixFormat format, int64_t cols);
void PackPanel(const PackPanelArgs& args);
void Multiply(const MultiplyArgs& args);

// The same with activations of 8 bits. REQUIRES: HasInt8Panels(format).
PanelPlan PlanInt8Panels(MatrixFormat format, int64_t cols, int all_rows);
void PackInt8Panel(const PackPanelArgs& args);
void MultiplyInt8(const MultiplyArgs& args);

}  // namespace turbomind::amx
