#pragma once

// How a matrix lies in a checkpoint, for the devices that pack it.

#include <cstdint>

#include "turbomind/core/host_device.h"
#include "turbomind/ops/params.h"

namespace turbomind {

inline constexpr int kQuantBlock = 32;  // columns that share one scale, weights and activations

TM_HD constexpr bool IsQuantized(MatrixFormat format) {
  return format == MatrixFormat::kQ4_0 || format == MatrixFormat::kQ4_1 ||
         format == MatrixFormat::kQ8_0;
}

// What unsigned weight codes subtract to become signed. kQ4_1 has a minimum instead.
TM_HD constexpr int ZeroPoint(MatrixFormat format) {
  return format == MatrixFormat::kQ4_0 ? 8 : format == MatrixFormat::kQ8_0 ? 128 : 0;
}

// Throws InvalidArgument for what no checkpoint can hold: no rows or columns, quantized columns
// that are not a multiple of 32, scales apart where the format has none or none where it has.
void CheckMatrixSource(const MatrixSource& source);

// Of kQuantBlock values of a row; GGUF's blocks hold fp16 d, for kQ4_1 fp16 m, then the codes.
int64_t SourceBlockBytes(MatrixFormat format);

// REQUIRES: a checked source that is not packed, row in [0, rows).
const uint8_t* SourceRow(const MatrixSource& source, int64_t row);

// One block of kQ4_0, kQ4_1 or kQ8_0 → [kQuantBlock].
void DequantizeBlock(MatrixFormat format, const uint8_t* block, float* out);

// One row as FP32 [cols]. REQUIRES: as SourceRow.
void DequantizeMatrixRow(const MatrixSource& source, int64_t row, float* out);

}  // namespace turbomind
