#pragma once

// The layout of a weight matrix in GPU memory. Pure arithmetic, shared by the packer and the
// kernels.
//
// Outputs are cut into tiles of 16 and columns into units. Positions past the end of the matrix are
// zero. A tile of a quantized matrix is a run of units. Each unit has:
//   512 bytes of codes, 16 per lane of a warp. Lane 4 g + t has columns 8 t .. 8 t + 7 of each
//   block of 32 (kQ6_K: see SplitsColumns), for the outputs g and g + 8:
//     4 bits: word 2 block + half, eight codes (weight_fragments.cuh)
//     K-quants: the same for the lower four bits, then UpperBytes of each lane
//     kQ8_0: words 2 half and 2 half + 1, four codes each
//   then, for g = 0..7, the scales of the outputs g + 8 half: FP16 d (kQ4_1: all d, then all m) or
//   E8M0 as [block][half]; kNvfp4: E4M3 as [t / 2][half][block]; kQ4_K and kQ5_K: bytes, all
//   scales, then all minima; kQ6_K: int8 + 128 as [16 columns][block][half]
// After the four units of a super-block of a K-quant come its FP16 factors, for g = 0..7: d [half],
// and then min [half] of kQ4_K and kQ5_K. That is 4.625 and 5.625 bits per weight. Scales and
// minima of six bits would save 0.125, for about 16 more instructions beside the 160 of a unit of
// kQ4_K. A warp thus reads a unit in one coalesced access of 16 bytes per lane, as an operand of
// the tensor cores. kBF16, kF32 and FP8 are row-major; their rows are padded to whole units, so
// that libraries can read them. A row of FP8 ends with its FP32 scales in reverse order: scale i is
// 4 (i + 1) bytes before the end. Padding between the codes and the scales makes the row a multiple
// of kFp8RowAlignment bytes.

#include <cstdint>

#include "turbomind/core/host_device.h"
#include "turbomind/ops/matrix_source.h"

namespace turbomind::cuda {

// Limits of a launch: matrices that are stacked along the outputs, and slices of the columns.
inline constexpr int kMaxSegments = 4;
inline constexpr int kMaxSlices = 8;

inline constexpr int kTileOutputs = 16;
inline constexpr int kUnitsOfSuperBlock = 4;
inline constexpr int kUnitCodeBytes = 512;
inline constexpr int kFp8RowAlignment = 32;  // a sector of memory

// Return the format as stored on the GPU, where both forms of MXFP4 are one.
TM_HD constexpr MatrixFormat StoredFormat(MatrixFormat format) {
  return IsMxfp4(format) ? MatrixFormat::kMxfp4 : format;
}

TM_HD constexpr bool HasBlocks(MatrixFormat format) { return !IsFloat(format) && !IsFp8(format); }

// Returns whether all values of a matrix have a factor that is not 1.
TM_HD constexpr bool HasFactor(MatrixFormat format) { return format == MatrixFormat::kNvfp4; }

TM_HD constexpr int UnitCols(MatrixFormat format) {
  const int bits = InfoOf(format).bits;
  return bits == 32 ? 4 : bits >= 8 && !IsFp8(format) ? 32 : 64;
}

// Bytes of a lane's bits of codes above the lowest four.
TM_HD constexpr int UpperBytes(MatrixFormat format) {
  return IsKQuant(format) ? 4 * (InfoOf(format).bits - 4) : 0;
}

// Returns whether lane 4 g + t has columns 4 t .. 4 t + 3 and 16 + 4 t .. 19 + 4 t of a block. Each
// product of 16 columns then has those that share a scale.
TM_HD constexpr bool SplitsColumns(MatrixFormat format) { return format == MatrixFormat::kQ6_K; }

// The distance of a lane's last four columns of a block from its first four.
TM_HD constexpr int SecondCols(MatrixFormat format) { return SplitsColumns(format) ? 16 : 4; }

// Bytes of the factors of a super-block, for all outputs of a tile.
TM_HD constexpr int SuperBlockBytes(MatrixFormat format) {
  return IsKQuant(format) ? kTileOutputs * (HasMinimum(format) ? 4 : 2) : 0;
}

// Bytes of the scales and minima of one output in a unit.
TM_HD constexpr int UnitScaleBytes(MatrixFormat format) {
  if (IsKQuant(format)) {
    return 4;
  }
  const MatrixFormatInfo info = InfoOf(StoredFormat(format));
  return HasBlocks(format) ? UnitCols(format) / info.block_cols *
                                 (info.block_bytes - info.block_cols * info.bits / 8)
                           : 0;
}

// Bytes of a unit, for all outputs of a tile; for FP8 without scales.
TM_HD constexpr int UnitBytes(MatrixFormat format) {
  if (HasBlocks(format)) {
    return kUnitCodeBytes + 32 * UpperBytes(format) + kTileOutputs * UnitScaleBytes(format);
  }
  return kTileOutputs * UnitCols(format) * InfoOf(format).bits / 8;
}

TM_HD constexpr int NumUnits(MatrixFormat format, int64_t cols) {
  return static_cast<int>((cols + UnitCols(format) - 1) / UnitCols(format));
}

TM_HD constexpr int64_t NumTiles(int64_t outputs) {
  return (outputs + kTileOutputs - 1) / kTileOutputs;
}

// Where a unit begins in its tile. REQUIRES: HasBlocks(format).
TM_HD constexpr int64_t UnitOffset(MatrixFormat format, int unit) {
  const auto super_block = static_cast<unsigned>(unit) / kUnitsOfSuperBlock;
  return int64_t{unit} * UnitBytes(format) + int64_t{super_block} * SuperBlockBytes(format);
}

// Bytes of the scales at the end of a row of FP8, with the padding before them.
TM_HD constexpr int64_t Fp8ScaleBytes(MatrixFormat format, int64_t cols) {
  const int64_t bytes = NumFp8Scales(format, cols) * 4;
  const int64_t end = int64_t{NumUnits(format, cols)} * UnitCols(format) + bytes;
  return bytes + (-end & (kFp8RowAlignment - 1));
}

TM_HD constexpr int64_t TileBytes(MatrixFormat format, int64_t cols) {
  if (HasBlocks(format)) {
    return UnitOffset(format, NumUnits(format, cols));
  }
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
static_assert(kUnitsOfSuperBlock * UnitCols(MatrixFormat::kQ4_K) == kSuperBlock);
static_assert(TileBytes(MatrixFormat::kQ4_K, 4096) == 16 * (4 * 576 + 64));
static_assert(TileBytes(MatrixFormat::kQ6_K, 4096) ==
              16 * SourceBlockBytes(MatrixFormat::kQ6_K) * 16);
static_assert(RowBytes(MatrixFormat::kBF16, 100) == 256);
static_assert(RowBytes(MatrixFormat::kFp8, 4096) == 4096 + 32);
static_assert(RowBytes(MatrixFormat::kFp8Block, 4096) == 4096 + 32 * 4);
static_assert(RowBytes(MatrixFormat::kFp8Block, 576) == 576 + 32);
static_assert(UnitBytes(MatrixFormat::kQ8_0) % 32 == 0);

}  // namespace turbomind::cuda
