#pragma once

// Rows of K-quants in tiles: super-blocks of the checkpoint become lanes of the super-blocks of a
// tile (packed_layout.h) without a change of their bits, and back.

#include <cstdint>

#include "turbomind/ops/matrix_source.h"

namespace turbomind {

// Writes one row of the source to lane `lane` of a tile, which is zero there.
// REQUIRES: a checked source with IsKQuant(source.format).
void PackKQuantRow(const MatrixSource& source, int64_t row, int lane, uint8_t* tile);

// Dequantizes lane `lane` of a tile into [cols]. REQUIRES: IsKQuant(format).
void ReadKQuantRow(MatrixFormat format, const uint8_t* tile, int lane, int64_t cols, float* out);

}  // namespace turbomind
