#pragma once

// Linear layers of many rows on AMX tiles in BF16; see dense_kernels.h for the arguments. Weights
// are rounded to BF16 with their scales and minima inside, activations are rounded to BF16, and the
// sums over all columns are FP32 numbers that stay in a tile. Only for weights with at least
// kMinBf16Rows rows in a step, and not for F32.
//
// 1. A row of y depends on the row of x alone. It has the same bits at every place in every batch
//    of at least kMinBf16Rows rows, and with every split of the work.
// 2. A weight is rounded to nearest even from the FP32 value that its format defines, and so is an
//    activation. Subnormal numbers become zero.
// 3. A row with NaN or an infinity, also after rounding, has outputs that are not finite.
//
// A panel has 32 rows, of which missing ones are zero. A step of 32 columns is bf16[32 rows][32] in
// the order of ColumnAt. Columns past the end of the matrix are zero.

#include <cstdint>

#include "turbomind/backend/cpu/dense_kernels.h"
#include "turbomind/backend/cpu/isa/amx/linear.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::amx {

inline constexpr int kMinBf16Rows = 32;  // rows in a step that pay for unpacking the weights
inline constexpr int kBf16PanelRows = 32;
inline constexpr int kBf16StepCols = 32;
inline constexpr int kBf16TileBytes = 1024;                // 16 rows of a register
inline constexpr int kBf16PanelStep = 2 * kBf16TileBytes;  // bytes of a step of a panel

constexpr bool HasBf16Tiles(MatrixFormat format) {
  return HasTiles(format) || format == MatrixFormat::kBF16;
}

constexpr int64_t Bf16Steps(int64_t cols) { return (cols + kBf16StepCols - 1) / kBf16StepCols; }

// Returns the bytes of a panel. Panels whose distance is a multiple of 64 KiB would share few sets
// of L2 in a column block of 512 columns.
constexpr int64_t Bf16PanelBytes(int64_t cols) {
  const int64_t steps = Bf16Steps(cols);
  return (steps + (steps % 32 == 0 ? 16 : 0)) * kBf16PanelStep;
}

// Returns the column of a step at place `place` of its rows. A register of unpacked weights holds
// two columns of 16 outputs: those that one shift of the packed codes gives (bf16_weights.h).
constexpr int ColumnAt(MatrixFormat format, int place) {
  switch (format) {
    case MatrixFormat::kBF16:
      return place;
    case MatrixFormat::kMxfp4Split:
      return place / 8 * 8 + place % 2 * 4 + place % 8 / 2;
    default:
      return place / 4 * 4 + place % 2 * 2 + place % 4 / 2;
  }
}

PanelPlan PlanBf16Panels(MatrixFormat format, int64_t cols, int all_rows);
int64_t Bf16ScratchBytes(MatrixFormat format, int64_t cols);
void PackBf16Panel(const PackPanelArgs& args);
void MultiplyBf16(const MultiplyArgs& args);

}  // namespace turbomind::amx
