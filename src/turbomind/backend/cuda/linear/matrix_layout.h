#pragma once

// The layout of a weight matrix in GPU memory. Pure arithmetic, shared by the packer and the
// kernels.
//
// Outputs are cut into tiles of 16 and columns into units. Positions past the end of the matrix are
// zero. A tile of a quantized matrix is a run of units. Each unit has:
//   512 bytes of codes, 16 per lane of a warp. Lane 4 g + t has columns 8 t .. 8 t + 7 of each
//   block of 32, for the outputs g and g + 8:
//     kQ4_0, kQ4_1, MXFP4, NVFP4: word 2 block + half, eight codes (weight_fragments.cuh)
//     kQ8_0: words 2 half and 2 half + 1, four codes each
//   then, for g = 0..7, the scales of the outputs g + 8 half: FP16 d (kQ4_1: all d, then all m) or
//   E8M0 as [block][half]; kNvfp4: E4M3 as [t / 2][half][block]
// A warp thus reads a unit in one coalesced access of 16 bytes per lane, as an operand of the
// tensor cores. kBF16, kF32 and FP8 are row-major; their rows are padded to whole
// units, so that libraries can read them. A row of FP8 ends with its FP32 scales in reverse order:
// scale i is 4 (i + 1) bytes before the end. Padding between the codes and the scales makes the row
// a multiple of kFp8RowAlignment bytes.

#include <cstdint>

#include "turbomind/core/host_device.h"
#include "turbomind/ops/matrix_source.h"

namespace turbomind::cuda {

// Limits of a launch: matrices that are stacked along the outputs, and slices of the columns.
inline constexpr int kMaxSegments = 4;
inline constexpr int kMaxSlices = 8;

inline constexpr int kTileOutputs = 16;
inline constexpr int kUnitCodeBytes = 512;
inline constexpr int kFp8RowAlignment = 32;  // a sector of memory

// Return the format as stored on the GPU, where both forms of MXFP4 are one.
TM_HD constexpr MatrixFormat StoredFormat(MatrixFormat format) {
  return IsMxfp4(format) ? MatrixFormat::kMxfp4 : format;
}

// Returns whether there are kernels for the format as it is. K-quants have none.
TM_HD constexpr bool HasKernels(MatrixFormat format) { return !IsKQuant(format); }

TM_HD constexpr bool HasBlocks(MatrixFormat format) { return !IsFloat(format) && !IsFp8(format); }

// Returns whether all values of a matrix have a factor that is not 1.
TM_HD constexpr bool HasFactor(MatrixFormat format) { return format == MatrixFormat::kNvfp4; }

TM_HD constexpr int UnitCols(MatrixFormat format) {
  const int bits = InfoOf(format).bits;
  return bits == 32 ? 4 : bits >= 8 && !IsFp8(format) ? 32 : 64;
}

// Bytes of the scales and minima of one output in a unit.
TM_HD constexpr int UnitScaleBytes(MatrixFormat format) {
  const MatrixFormatInfo info = InfoOf(StoredFormat(format));
  return HasBlocks(format) ? UnitCols(format) / info.block_cols *
                                 (info.block_bytes - info.block_cols * info.bits / 8)
                           : 0;
}

// Bytes of a unit, for all outputs of a tile; for FP8 without scales.
TM_HD constexpr int UnitBytes(MatrixFormat format) {
  if (HasBlocks(format)) {
    return kUnitCodeBytes + kTileOutputs * UnitScaleBytes(format);
  }
  return kTileOutputs * UnitCols(format) * InfoOf(format).bits / 8;
}

TM_HD constexpr int NumUnits(MatrixFormat format, int64_t cols) {
  return static_cast<int>((cols + UnitCols(format) - 1) / UnitCols(format));
}

TM_HD constexpr int64_t NumTiles(int64_t outputs) {
  return (outputs + kTileOutputs - 1) / kTileOutputs;
}

// Bytes of the scales at the end of a row of FP8, with the padding before them.
TM_HD constexpr int64_t Fp8ScaleBytes(MatrixFormat format, int64_t cols) {
  const int64_t bytes = NumFp8Scales(format, cols) * 4;
  const int64_t end = int64_t{NumUnits(format, cols)} * UnitCols(format) + bytes;
  return bytes + (-end & (kFp8RowAlignment - 1));
}

TM_HD constexpr int64_t TileBytes(MatrixFormat format, int64_t cols) {
  const int64_t scales = IsFp8(format) ? kTileOutputs * Fp8ScaleBytes(format, cols) : 0;
  return int64_t{NumUnits(format, cols)} * UnitBytes(format) + scales;
}

// Bytes of a row of a row-major matrix.
TM_HD constexpr int64_t RowBytes(MatrixFormat format, int64_t cols) {
  return TileBytes(format, cols) / kTileOutputs;
}

static_assert(TileBytes(MatrixFormat::kMxfp4, 2880) == 45 * 544);
static_assert(TileBytes(MatrixFormat::kQ4_1, 4096) == 64 * 640);
static_assert(TileBytes(MatrixFormat::kNvfp4, 4096) == 64 * 576);
static_assert(RowBytes(MatrixFormat::kBF16, 100) == 256);
static_assert(RowBytes(MatrixFormat::kFp8, 4096) == 4096 + 32);
static_assert(RowBytes(MatrixFormat::kFp8Block, 4096) == 4096 + 32 * 4);
static_assert(RowBytes(MatrixFormat::kFp8Block, 576) == 576 + 32);
static_assert(UnitBytes(MatrixFormat::kQ8_0) % 32 == 0);

}  // namespace turbomind::cuda
