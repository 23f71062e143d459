#pragma once

// MXFP4 with many rows of activations. 16 outputs are transposed once into a tile with Q4_0's
// layout. Lanes are then outputs, and no row needs a transposition of its own. The four sums of
// mxfp4.h are computed one after the other.
//
// Per block and 12 rows: 24 instructions to look codes up and 12 * 20 for the sums. The
// transposition takes 36 for all panels together.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/backend/cpu/isa/mxfp4/mxfp4.h"
#include "turbomind/backend/cpu/isa/mxfp4/mxfp4_avx512.h"
#include "turbomind/backend/cpu/isa/simd/broadcast_avx512.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::TM_ISA {

// The transposition does not pay for fewer rows.
inline constexpr int kMxTileRows = 6;

// Bytes of a block's codes in a tile: uint8[4][16][4], byte j of each output's codes. float[16]
// follows.
inline constexpr int kMxTileCodes = 256;
static_assert(kMxTileCodes + 64 == kMxTileBlockBytes);

TM_HD __m128i Load16(const uint8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

// Transposes block `block` of 16 rows.
template <MatrixFormat F>
TM_HD void TransposeBlock(const uint8_t* const (&rows)[kTileRows], int64_t block, uint8_t* to) {
  const int64_t at = block * kMxBlockBytes<F> + kMxCodesAt<F>;
  __m512i four[4];  // lane i of register k: row 4 i + k
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    four[k] = _mm512_zextsi128_si512(Load16(rows[k] + at));
    four[k] = _mm512_inserti32x4(four[k], Load16(rows[4 + k] + at), 1);
    four[k] = _mm512_inserti32x4(four[k], Load16(rows[8 + k] + at), 2);
    four[k] = _mm512_inserti32x4(four[k], Load16(rows[12 + k] + at), 3);
  }
  const __m512i low01 = _mm512_unpacklo_epi32(four[0], four[1]);
  const __m512i high01 = _mm512_unpackhi_epi32(four[0], four[1]);
  const __m512i low23 = _mm512_unpacklo_epi32(four[2], four[3]);
  const __m512i high23 = _mm512_unpackhi_epi32(four[2], four[3]);
  _mm512_storeu_si512(to, _mm512_unpacklo_epi64(low01, low23));
  _mm512_storeu_si512(to + 64, _mm512_unpackhi_epi64(low01, low23));
  _mm512_storeu_si512(to + 128, _mm512_unpacklo_epi64(high01, high23));
  _mm512_storeu_si512(to + 192, _mm512_unpackhi_epi64(high01, high23));
}

// The rows of a tile. Missing ones repeat the last one.
struct MxTileRows {
  const uint8_t* rows[kTileRows];
  const uint8_t* exponents[kTileRows];  // of the first block of each row
};

// Returns the rows of up to 16 outputs from `output` on.
template <MatrixFormat F>
TM_HD MxTileRows RowsOfTile(const MultiplyArgs& a, int64_t output) {
  const int64_t blocks = a.cols / kQuantBlock;
  const int64_t last = a.num_outputs - 1;
  MxTileRows tile;
  for (int o = 0; o < kTileRows; ++o) {
    const int64_t row = output + o < last ? output + o : last;
    tile.rows[o] = a.tiles + row * MxRowBytes(F, a.cols);
    tile.exponents[o] = F == MatrixFormat::kMxfp4 ? tile.rows[o] : a.scales + row * blocks;
  }
  return tile;
}

// Transposes `count` blocks from `first` on to [count, kMxTileBlockBytes].
template <MatrixFormat F>
TM_HD void TransposeBlocks(const MxTileRows& tile, int64_t first, int64_t count, uint8_t* to) {
  // Write the exponents first, as bytes in the place of the floats. Reading them back immediately
  // would stall.
  constexpr int kStride = F == MatrixFormat::kMxfp4 ? kMxBlockBytes<F> : 1;
  for (int o = 0; o < kTileRows; ++o) {
    uint8_t* at = to + kMxTileCodes + o;
    for (int64_t b = 0; b < count; ++b) {
      at[b * kMxTileBlockBytes] = tile.exponents[o][(first + b) * kStride];
    }
  }
  for (int64_t b = 0; b < count; ++b) {
    uint8_t* at = to + b * kMxTileBlockBytes;
    TransposeBlock<F>(tile.rows, first + b, at);
    _mm512_storeu_ps(at + kMxTileCodes, PowersOfTwo(Load16(at + kMxTileCodes)));
  }
}

// Transposes up to 16 outputs, from `output` on, to a.scratch.
template <MatrixFormat F>
void TransposeTile(const MultiplyArgs& a, int64_t output) {
  TransposeBlocks<F>(RowsOfTile<F>(a, output), 0, a.cols / kQuantBlock, a.scratch);
}

// The operands of one panel of R rows.
struct MxTileRun {
  const uint8_t* tile = nullptr;  // [blocks, kMxTileBlockBytes]
  int64_t blocks = 0;
  const uint8_t* next = nullptr;  // prefetched, as many bytes as 16 rows have; or null
  const uint8_t* panel = nullptr;
  const float* bias = nullptr;  // [num_outputs] or null
  float* y = nullptr;           // [R, num_outputs]
  int64_t y_stride = 0;
  int num_outputs = 0;  // 1 to 16
  bool accumulate = false;
};

// Adds Σ looked-up code * one half of the activations to sum[r].
template <int R>
TM_HD void DotTileBlock(const uint8_t* codes, const uint8_t* x, __m512i (&sum)[R]) {
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    const __m512i pairs = _mm512_loadu_si512(codes + 64 * k);
    const __m512i low = LookUpLow(pairs);
    const __m512i high = LookUpHigh(pairs);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      sum[r] = _mm512_dpbusd_epi32(sum[r], low, Broadcast32(x + kQuantRowBytes * r + 4 * k));
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      sum[r] = _mm512_dpbusd_epi32(sum[r], high, Broadcast32(x + kQuantRowBytes * r + 16 + 4 * k));
    }
  }
}

template <int R>
TM_HD void AddTileBlock(const uint8_t* block, const uint8_t* x, __m512 (&acc)[R]) {
  const uint8_t* scales = x + R * kQuantRowBytes;
  const uint8_t* offsets = scales + 4 * R;
  __m512i sum[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    sum[r] = _mm512_setzero_si512();
  }
  DotTileBlock<R>(block, x, sum);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    sum[r] = _mm512_add_epi32(_mm512_slli_epi32(sum[r], 8), Broadcast32(offsets + 4 * r));
  }
  DotTileBlock<R>(block, x + kQuantBlock, sum);
  const __m512 power = _mm512_loadu_ps(block + kMxTileCodes);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    const __m512 scaled =
        _mm512_mul_ps(_mm512_maskz_cvtepi32_ps(0xffff, sum[r]), BroadcastFloat(scales + 4 * r));
    acc[r] = _mm512_fmadd_ps(scaled, power, acc[r]);
  }
}

TM_HD void StoreTileRow(const MxTileRun& run, int r, __m512 out) {
  const auto lanes = static_cast<__mmask16>((1 << run.num_outputs) - 1);
  float* y = run.y + r * run.y_stride;
  if (run.bias != nullptr) {
    out = _mm512_add_ps(out, _mm512_maskz_loadu_ps(lanes, run.bias));
  }
  if (run.accumulate) {
    out = _mm512_add_ps(out, _mm512_maskz_loadu_ps(lanes, y));
  }
  _mm512_mask_storeu_ps(y, lanes, out);
}

template <int R>
void MultiplyMxTile(const MxTileRun& run) {
  constexpr int kStep = kTileRows * 17;  // prefetched for each block
  __m512 sums[kMxStepBlocks][R];
  const int64_t lacking = -run.blocks & (kMxStepBlocks - 1);
  for (int64_t j = 0; j < kMxStepBlocks; ++j) {
    __m512 acc[R];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      acc[r] = _mm512_setzero_ps();
    }
    for (int64_t b = j; b < run.blocks; b += kMxStepBlocks) {
      if (run.next != nullptr) {
#pragma GCC unroll 5
        for (int line = 0; line < kStep; line += 64) {
          _mm_prefetch(run.next + b * kStep + line, _MM_HINT_T1);
        }
      }
      AddTileBlock<R>(run.tile + b * kMxTileBlockBytes, run.panel + b * R * (kQuantRowBytes + 8),
                      acc);
    }
    const bool lacks_last = j >= kMxStepBlocks - lacking;  // a sum of -0 becomes 0, as with zeros
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      sums[j][r] = lacks_last ? _mm512_add_ps(acc[r], _mm512_setzero_ps()) : acc[r];
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    StoreTileRow(run, r,
                 _mm512_add_ps(_mm512_add_ps(sums[0][r], sums[1][r]),
                               _mm512_add_ps(sums[2][r], sums[3][r])));
  }
}

}  // namespace turbomind::TM_ISA
