#pragma once

// Rows of NVFP4 in tiles: blocks of the checkpoint become lanes of a tile's steps
// (packed_layout.h) without a change of their bits, and back.

#include <cstdint>

#include "turbomind/ops/matrix_source.h"

namespace turbomind {

// Writes one row of the source to lane `lane` of a tile, which is zero there.
// REQUIRES: a checked source of kNvfp4.
void PackNvRow(const MatrixSource& source, int64_t row, int lane, uint8_t* tile);

// Dequantizes lane `lane` of a tile into [cols], with the values of DequantizeNvBlock.
void ReadNvRow(const uint8_t* tile, int lane, int64_t cols, float* out);

}  // namespace turbomind
