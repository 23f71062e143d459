#pragma once

// The layout of matrices in a checkpoint, for the devices that pack them.

#include <cstdint>

#include "turbomind/ops/fp8.h"
#include "turbomind/ops/k_quants.h"
#include "turbomind/ops/matrix_format.h"
#include "turbomind/ops/nvfp4.h"
#include "turbomind/ops/params.h"

namespace turbomind {

inline constexpr int kQuantBlock = 32;  // columns that share one scale, in weights and activations

// Throws InvalidArgument for sources that no checkpoint can contain: no rows or columns, quantized
// columns that are not whole blocks, separate scales that do not match the format, scales of FP8
// that are not above 0 or that make values infinite, and a factor that the format does not have or
// that makes values infinite.
void CheckMatrixSource(const MatrixSource& source);

// Returns the first byte of a row. REQUIRES: a checked source that is not packed, row in [0, rows).
const uint8_t* SourceRow(const MatrixSource& source, int64_t row);

// Dequantizes one block into [kQuantBlock]. REQUIRES: IsQuantized(format).
void DequantizeBlock(MatrixFormat format, const uint8_t* block, float* out);

// Dequantizes one row into FP32 [cols]. REQUIRES: like SourceRow.
void DequantizeMatrixRow(const MatrixSource& source, int64_t row, float* out);

}  // namespace turbomind
