#pragma once

// The layout of matrices in a checkpoint, for the devices that pack them.

#include <cstdint>

#include "turbomind/core/host_device.h"
#include "turbomind/ops/k_quants.h"
#include "turbomind/ops/nvfp4.h"
#include "turbomind/ops/params.h"

namespace turbomind {

inline constexpr int kQuantBlock = 32;  // columns that share one scale, in weights and activations

TM_HD constexpr bool IsQuantized(MatrixFormat format) {
  return format == MatrixFormat::kQ4_0 || format == MatrixFormat::kQ4_1 ||
         format == MatrixFormat::kQ8_0;
}

// Returns whether a block has a minimum, which the kernels add apart from the codes.
TM_HD constexpr bool HasMinimum(MatrixFormat format) {
  return format == MatrixFormat::kQ4_1 || format == MatrixFormat::kQ4_K ||
         format == MatrixFormat::kQ5_K;
}

// Returns the number that is subtracted from unsigned weight codes.
TM_HD constexpr int ZeroPoint(MatrixFormat format) {
  return format == MatrixFormat::kQ4_0    ? 8
         : format == MatrixFormat::kQ8_0  ? 128
         : format == MatrixFormat::kQ6_K  ? 32
         : format == MatrixFormat::kNvfp4 ? 12  // codes are looked up: 2 * E2M1 + 12
                                          : 0;
}

// Throws InvalidArgument for sources that no checkpoint can contain: no rows or columns, quantized
// columns that are not whole blocks, separate scales that do not match the format, and a factor
// that the format does not have or that makes values infinite.
void CheckMatrixSource(const MatrixSource& source);

// Returns the columns of a block of the source.
TM_HD constexpr int SourceBlockCols(MatrixFormat format) {
  return IsKQuant(format) ? kSuperBlock : format == MatrixFormat::kNvfp4 ? kNvBlock : kQuantBlock;
}

// Returns the bytes of SourceBlockCols values of a row. GGUF's blocks of 32 hold fp16 d, for kQ4_1
// also fp16 m, then the codes.
int64_t SourceBlockBytes(MatrixFormat format);

// Returns the first byte of a row. REQUIRES: a checked source that is not packed, row in [0, rows).
const uint8_t* SourceRow(const MatrixSource& source, int64_t row);

// Dequantizes one block of kQ4_0, kQ4_1 or kQ8_0 into [kQuantBlock].
void DequantizeBlock(MatrixFormat format, const uint8_t* block, float* out);

// Dequantizes one row into FP32 [cols]. REQUIRES: like SourceRow.
void DequantizeMatrixRow(const MatrixSource& source, int64_t row, float* out);

}  // namespace turbomind
