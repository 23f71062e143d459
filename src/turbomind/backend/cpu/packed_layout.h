#pragma once

// The position of each byte in a packed weight matrix and in packed activations. Arithmetic only,
// shared by the packer and the kernels of every instruction set.
//
// Weights are split into tiles of 16 outputs, which are read from the first byte to the last. A
// tile is a run of steps. One 512-bit register holds the same columns of all 16 outputs:
//   kF32   one column:  float[16]
//   kBF16  2 columns:   bf16[16][2]
//   kQ8_0  32 columns:  fp16 d[16], then 8 groups of uint8[16][4] (value + 128)
//   kQ4_0  32 columns:  fp16 d[16], then 4 groups of uint8[16][4], low nibbles columns 4g.., high
//          nibbles 16 + 4g..
//   kQ4_1  like kQ4_0, with fp16 m[16] after d
//   kNvfp4 32 columns:  uint8[2][16], a scale for each 16 columns, then the codes of kQ4_0. Before
//          its steps, a tile has float[16], the factor of each output times 128, because kernels
//          read scales divided by 256 and doubled codes
// A tile of a K-quant is a run of super-blocks of 256 columns, which have the bits of 16
// super-blocks of the checkpoint. Their scales come first, then 8 steps:
//   kQ4_K  fp16 d[16], fp16 min[16], uint8[8][16] (scale + 64 * the upper 2 bits of the minimum),
//          uint8[8][8] (the lower 4 bits of the minima of the outputs i and 8 + i). A step has the
//          codes of kQ4_0.
//   kQ5_K  like kQ4_K; a step then has uint8[16][4]: bit g of byte i is the fifth bit of column
//          4g + i
//   kQ6_K  fp16 d[16], int8[16][16], the scales of 16 columns. A step has uint8[2][3][16][4]: for
//          each half of the columns, byte i of part g has the code of column 4g + i in its lower 6
//          bits, and above them the bits 2g and 2g + 1 of the code of column 12 + i.
// Outputs and columns past the end of the matrix are zero.
//
// MXFP4 keeps its stored layout (ops/params.h). Its tiles are 16 rows of the matrix; the last tile
// holds the remaining rows.
//
// Activations are split into panels of kPanelRows rows. The last panel is packed for its R
// remaining rows. Headers in isa/amx define the panels for AMX tiles. A step of a panel:
//   kF32   float[R]
//   kBF16  bf16[R][2]
//   quantized  int8[R][2][32], float d[R], then int32 -zero_point * sum[R] or, for formats with
//              minima, float d*sum[R]. kQ6_K and kNvfp4 have int32[2][R], one for each 16 columns.
//              An activation is (256 * high + low) * d; a row stores its high bytes, then its low
//              bytes (AVX2 and AVX-512: kQ5_K and kQ6_K as int16 pairs, AVX2 also kQ8_0:
//              isa/linear/arrange_shorts.h)
//   quantized, activations of 8 bits: int8[R][32] (with AVX2 and kQ8_0 int16[R][32]), then the same
//              scales, sums and minima. An activation is its code times d
//   quantized, activations of 12 bits (isa/linear/packed_activations.h): int8[R][32 + 16], the
//              coarse codes of the columns and the residuals of 16 pairs of columns, then the same
//              scales, sums and minima. An activation of column k < 16 is (256 * coarse + residual)
//              * d, that of column 16 + k is (256 * coarse + 16 * residual) * d
//   MXFP4      128 columns, 4 blocks, for each row: int8 high[2][4][16], low[2][4][16] (block b,
//              byte j: the factor of the low nibble of the stored byte j, then of the high one),
//              float d[4][4], int32 -zero_point * sum[4][4]: each block's value 4 times. Columns
//              past the end of the matrix are zero, and so is their d. A kernel that transposes
//              weights (isa/mxfp4/mxfp4_tiles_avx512.h) uses kQ4_0's form for panels of many rows,
//              in the same space and with the columns in the order of the nibbles.

#include <cstdint>

#include "turbomind/core/host_device.h"
#include "turbomind/ops/matrix_source.h"

namespace turbomind {

// Increment with every change of the tile layout. Files of packed weights store this number.
inline constexpr int kPackedLayoutId = 1;

inline constexpr int kTileRows = 16;
inline constexpr int kQuantRowBytes = 2 * kQuantBlock;      // one row in a step of a panel
inline constexpr int kInt12RowBytes = 3 * kQuantBlock / 2;  // the same for activations of 12 bits
inline constexpr int kMxStepBlocks = 4;  // MXFP4 blocks whose codes fill one 512-bit register
inline constexpr int kMxStepBytes = 16 * kMxStepBlocks;          // their codes, one nibble each
inline constexpr int kMxPanelRowBytes = 4 * kMxStepBytes + 128;  // one row in a step of a panel
inline constexpr int kMxTileBlockBytes = 320;  // 16 outputs, if a kernel transposes them
inline constexpr int kMxZeroPoint = 12;        // the lookup table holds 2 * E2M1 + 12, 0 to 24
// The values of the codes of MXFP4 and NVFP4 times 2.
inline constexpr int8_t kDoubledE2m1[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                            0, -1, -2, -3, -4, -6, -8, -12};
inline constexpr int kPanelRows = 12;  // 12 sums and 12 accumulators fit in 32 registers

// Returns whether the activations are quantized in blocks of 32 columns. With half scales, panels
// have offsets for each 16 columns.
TM_HD constexpr bool HasQuantPanels(MatrixFormat format) {
  return !IsFloat(format) && !IsMxfp4(format) && !IsFp8(format);
}

TM_HD constexpr int StepCols(MatrixFormat format) {
  return IsMxfp4(format)                 ? kMxStepBlocks * kQuantBlock
         : HasQuantPanels(format)        ? kQuantBlock
         : format == MatrixFormat::kBF16 ? 2
                                         : 1;
}

TM_HD constexpr int64_t NumSteps(MatrixFormat format, int64_t cols) {
  return (cols + StepCols(format) - 1) / StepCols(format);
}

// Bytes of the scales (and minima) at the start of each step of a tile. Those of a K-quant are at
// the start of a super-block.
TM_HD constexpr int TileMetaBytes(MatrixFormat format) {
  return format == MatrixFormat::kQ4_1                           ? 64
         : IsQuantized(format) || format == MatrixFormat::kNvfp4 ? 32
                                                                 : 0;
}

TM_HD constexpr int TileStepBytes(MatrixFormat format) {
  return HasQuantPanels(format)
             ? TileMetaBytes(format) + kTileRows * kQuantBlock * InfoOf(format).bits / 8
         : IsFloat(format) ? 64
                           : 0;
}

// The offsets in a super-block of a tile.
inline constexpr int kKSteps = kSuperBlock / kQuantBlock;
inline constexpr int kKMinAt = 2 * kTileRows;
inline constexpr int kKScalesAt = 4 * kTileRows;
inline constexpr int kKMinimaAt = kKScalesAt + kKSteps * kTileRows;
inline constexpr int kQ6ScalesAt = 2 * kTileRows;
inline constexpr int kFifthBitsAt = 256;  // in a step of kQ5_K
TM_HD constexpr int KCodesAt(MatrixFormat format) {
  return format == MatrixFormat::kQ6_K ? kQ6ScalesAt + 2 * kKSteps * kTileRows
                                       : kKMinimaAt + kKSteps * kTileRows / 2;
}
TM_HD constexpr int TileSuperBlockBytes(MatrixFormat format) {
  return KCodesAt(format) + kKSteps * TileStepBytes(format);
}

// NVFP4: the bytes before the first step, the offset of the codes in a step, and what the factor of
// a tile is multiplied with.
inline constexpr int kNvHeaderBytes = 4 * kTileRows;
inline constexpr int kNvCodesAt = 2 * kTileRows;
inline constexpr float kNvTileFactor = 128.f;

// Bytes of one MXFP4 row without separate scales.
TM_HD constexpr int64_t MxRowBytes(MatrixFormat format, int64_t cols) {
  return cols / kQuantBlock * SourceBlockBytes(format);
}

// Bytes of a tile before its first step.
TM_HD constexpr int TileHeaderBytes(MatrixFormat format) {
  return format == MatrixFormat::kNvfp4 ? kNvHeaderBytes : 0;
}

TM_HD constexpr int64_t TileBytes(MatrixFormat format, int64_t cols) {
  if (IsMxfp4(format)) {
    return kTileRows * MxRowBytes(format, cols);
  }
  if (IsKQuant(format)) {
    return cols / kSuperBlock * TileSuperBlockBytes(format);
  }
  return TileHeaderBytes(format) + NumSteps(format, cols) * TileStepBytes(format);
}

// Bytes of a whole matrix in tiles; 0 for MXFP4, which is not repacked, and for FP8, which has no
// kernels.
TM_HD constexpr int64_t PackedBytes(MatrixFormat format, int64_t rows, int64_t cols) {
  return IsMxfp4(format) ? 0 : (rows + kTileRows - 1) / kTileRows * TileBytes(format, cols);
}

TM_HD constexpr int PanelStepBytes(MatrixFormat format, int rows) {
  return rows * (IsMxfp4(format)          ? kMxPanelRowBytes
                 : HasHalfScales(format)  ? kQuantRowBytes + 12
                 : HasQuantPanels(format) ? kQuantRowBytes + 8
                                          : 4);
}

TM_HD constexpr int64_t PanelBytes(MatrixFormat format, int64_t cols, int rows) {
  return NumSteps(format, cols) * PanelStepBytes(format, rows);
}

// Returns whether there are kernels for activations of 8 bits. Others keep their form.
TM_HD constexpr bool HasInt8Panels(MatrixFormat format) {
  return IsQuantized(format) || IsKQuant(format);
}

// Bytes of a step of a panel of 8-bit activations, whose rows take `row_bytes`.
TM_HD constexpr int Int8PanelStepBytes(MatrixFormat format, int rows, int row_bytes) {
  return rows * (row_bytes + (format == MatrixFormat::kQ6_K ? 12 : 8));
}

// Returns whether there are kernels for activations of 12 bits. A byte of a tile must hold the
// codes of two columns.
TM_HD constexpr bool HasInt12Panels(MatrixFormat format) {
  return HasInt8Panels(format) && InfoOf(format).bits == 4;
}

TM_HD constexpr int Int12PanelStepBytes(int rows) { return rows * (kInt12RowBytes + 8); }

static_assert(TileBytes(MatrixFormat::kQ4_0, 576) == 18 * (256 + 32));
static_assert(TileBytes(MatrixFormat::kQ4_1, 576) == 18 * (256 + 64));
static_assert(TileBytes(MatrixFormat::kQ8_0, 32) == 512 + 32);
static_assert(TileBytes(MatrixFormat::kBF16, 5) == 3 * 64);
static_assert(TileBytes(MatrixFormat::kQ4_K, 512) == 2 * kTileRows * 144);
static_assert(TileBytes(MatrixFormat::kQ5_K, 512) == 2 * kTileRows * 176);
static_assert(TileBytes(MatrixFormat::kQ6_K, 512) == 2 * kTileRows * 210);
static_assert(TileBytes(MatrixFormat::kNvfp4, 512) == kTileRows * (8 * kNvBlockBytes + 4));
// No load of 32 bytes crosses a cache line.
static_assert(KCodesAt(MatrixFormat::kQ5_K) % 32 == 0 && KCodesAt(MatrixFormat::kQ6_K) % 32 == 0);
static_assert(TileSuperBlockBytes(MatrixFormat::kQ6_K) % 32 == 0);
static_assert((kNvHeaderBytes + kNvCodesAt) % 32 == 0);
static_assert(TileStepBytes(MatrixFormat::kNvfp4) % 32 == 0);
static_assert(TileBytes(MatrixFormat::kMxfp4, 2880) == 16 * 90 * 17);
static_assert(PanelBytes(MatrixFormat::kMxfp4Split, 2880, 1) == 23 * 384);

}  // namespace turbomind
