// ⑥⑦ Linear layers with quantized weights on AMX tiles, for panels of several rows. Everything else
// is left to AVX-512. The sum of a block of 32 columns is an exact integer. It is scaled and added
// as in linear_avx512.h and mxfp4_tiles_avx512.h, in the same order, so the bits are the same.
//
// 4-bit codes are widened to BF16, and the high halves of the activations are stored times 256. One
// tile of FP32 sums then takes both halves, because |Σ| < 2^24. Codes of 5 and 8 bits exceed that
// bound, so they are multiplied as bytes, with one tile of sums for each half. The sums of 16
// columns of kQ6_K are below it, but each half of the columns has a scale and a tile of sums of its
// own; its high and low activations are side by side, times the same codes twice. The same holds
// for NVFP4. Codes are widened once for all panels.
//
// Activations of 8 bits take one tile of activations instead of two, and one tile of sums.
//
// Per block, two neighboring tiles of weights and 12 rows: 4 products of 32 columns. Tile registers
// have no arithmetic of their own, so their sums go through memory. AVX-512 scales the sums of one
// block while the tiles work on the next two. The products take 58 cycles, storing the sums 35 and
// scaling them 50 to 60; these overlap in part.

#include "turbomind/backend/cpu/isa/amx/linear.h"

#include <cstdint>

#include "turbomind/backend/cpu/isa/amx/tiles.h"
#include "turbomind/backend/cpu/isa/amx/widen_codes.h"
#include "turbomind/backend/cpu/isa/amx/write_row.h"
#include "turbomind/backend/cpu/isa/linear/k_quants_avx512.h"
#include "turbomind/backend/cpu/isa/linear/linear_avx512.h"
#include "turbomind/backend/cpu/isa/linear/nvfp4_avx512.h"
#include "turbomind/backend/cpu/isa/mxfp4/mxfp4_avx512.h"
#include "turbomind/backend/cpu/isa/mxfp4/mxfp4_tiles_avx512.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::avx512 {
void Multiply(const MultiplyArgs& args);
int64_t MultiplyScratchBytes(MatrixFormat format, int64_t cols);
PanelPlan PlanInt8Panels(MatrixFormat format, int64_t cols, int all_rows);
void MultiplyInt8(const MultiplyArgs& args);
}  // namespace turbomind::avx512

namespace turbomind::TM_ISA {
namespace {

constexpr int kPair = 2;  // adjacent tiles of weights per call
constexpr int64_t kRowBlockBytes = 1 << 20;

// Tile registers: the sums of a block and of the next one (or two sums of a block), activations,
// codes.
constexpr int kSumTiles = 0;
constexpr int kHighTile = 4;
constexpr int kLowTile = 5;
constexpr int kCodeTiles = 6;

// A kernel: a format of weights, and whether activations have 8 bits instead of 16.
struct Kernel {
  MatrixFormat format;
  bool int8 = false;

  // Returns whether the halves of the activations, or those of the columns, have sums of their own.
  constexpr bool has_two_sums() const {
    return (InBytes(format) || HasHalfScales(format)) && !int8;
  }
  constexpr int64_t panel_step() const { return TilePanelStep(format, int8); }
};

TileShape ShapeFor(MatrixFormat format) {
  TileShape shape;
  const int width = InBytes(format) ? kQuantBlock : 2 * kQuantBlock;
  for (int i = kSumTiles; i < kHighTile; ++i) {
    shape.Set(i, kPanelRows, 4 * kTileRows);
  }
  shape.Set(kHighTile, kPanelRows, width);
  shape.Set(kLowTile, kPanelRows, width);
  for (int i = 0; i < kPair; ++i) {
    shape.Set(kCodeTiles + i, width / 4, 4 * kTileRows);
  }
  return shape;
}

// Returns the scales of a block of a tile: before its codes, after them for transposed MXFP4. Those
// of a K-quant are at the start of the super-block.
template <MatrixFormat F>
TM_HD const uint8_t* MetaAt(const uint8_t* tile, int64_t block) {
  if constexpr (IsKQuant(F)) {
    return tile + block / kKSteps * TileSuperBlockBytes(F);
  } else {
    return tile + TileHeaderBytes(F) + block * (IsMxfp4(F) ? kMxTileBlockBytes : TileStepBytes(F)) +
           (IsMxfp4(F) ? kMxTileCodes : 0);
  }
}

template <MatrixFormat F>
TM_HD const uint8_t* CodesAt(const uint8_t* tile, int64_t block) {
  const uint8_t* meta = MetaAt<F>(tile, block);
  if constexpr (IsKQuant(F)) {
    return meta + KCodesAt(F) + block % kKSteps * TileStepBytes(F);
  } else {
    return IsMxfp4(F) ? meta - kMxTileCodes : meta + TileMetaBytes(F);
  }
}

// The operands of a pair of tiles times one panel.
struct PairRun {
  const uint8_t* tile[kPair] = {};   // scales are read from here
  const uint8_t* codes[kPair] = {};  // [blocks, CodeBytes]
  int64_t blocks = 0;
  const uint8_t* next = nullptr;  // prefetched, as many bytes as the pair has; or null
  const uint8_t* panel = nullptr;
  int rows = 0;  // rows of the panel that exist
  OutputRun out;
};

// Sums of one block: FP32 (if HasHalfScales, of both halves of the columns), or int32 of the high
// halves followed by those of the low ones.
struct BlockSums {
  alignas(64) int32_t of[kPair][2][kPanelRows * kTileRows];
};

// C += A · B for a format's codes.
template <MatrixFormat F, int C, int A, int B>
TM_HD void Dot() {
  if constexpr (InBytes(F)) {
    DotBytes<C, A, B>();
  } else {
    DotBf16<C, A, B>();
  }
}

// Computes the sums of block `block` in the tiles of sums from S on.
template <Kernel K, int S>
TM_HD void SumBlock(const PairRun& run, int64_t block) {
  constexpr MatrixFormat F = K.format;
  const uint8_t* x = run.panel + block * K.panel_step();
  const uint8_t* codes0 = run.codes[0] + block * CodeBytes(F);
  const uint8_t* codes1 = run.codes[1] + block * CodeBytes(F);
  constexpr int64_t kStride = K.int8 ? TileRowBytes(F) : kQuantRowBytes;
  LoadTile<kHighTile>(x, kStride);
  LoadTile<kCodeTiles>(codes0, 64);
  if constexpr (HasHalfScales(F)) {
    constexpr int kHalf = CodeBytes(F) / 2;
    ZeroTile<0>();
    DotBf16<0, kHighTile, kCodeTiles>();
    LoadTile<kCodeTiles + 1>(codes1, 64);
    ZeroTile<2>();
    DotBf16<2, kHighTile, kCodeTiles + 1>();
    LoadTile<kLowTile>(x + kPanelRows * kQuantRowBytes, kStride);
    LoadTile<kCodeTiles>(codes0 + kHalf, 64);
    ZeroTile<1>();
    DotBf16<1, kLowTile, kCodeTiles>();
    LoadTile<kCodeTiles + 1>(codes1 + kHalf, 64);
    ZeroTile<3>();
    DotBf16<3, kLowTile, kCodeTiles + 1>();
  } else if constexpr (K.has_two_sums()) {
    ZeroTile<0>();
    DotBytes<0, kHighTile, kCodeTiles>();
    LoadTile<kCodeTiles + 1>(codes1, 64);
    ZeroTile<2>();
    DotBytes<2, kHighTile, kCodeTiles + 1>();
    LoadTile<kLowTile>(x + kQuantBlock, kStride);
    ZeroTile<1>();
    DotBytes<1, kLowTile, kCodeTiles>();
    ZeroTile<3>();
    DotBytes<3, kLowTile, kCodeTiles + 1>();
  } else {
    ZeroTile<S>();
    Dot<F, S, kHighTile, kCodeTiles>();
    LoadTile<kCodeTiles + 1>(codes1, 64);
    ZeroTile<S + 1>();
    Dot<F, S + 1, kHighTile, kCodeTiles + 1>();
    if constexpr (!K.int8) {
      LoadTile<kLowTile>(x + kPanelRows * kQuantRowBytes, kStride);
      Dot<F, S, kLowTile, kCodeTiles>();
      Dot<F, S + 1, kLowTile, kCodeTiles + 1>();
    }
  }
}

template <Kernel K, int S>
TM_HD void StoreSums(BlockSums& sums) {
  if constexpr (K.has_two_sums()) {
    StoreTile<0>(sums.of[0][0], 64);
    StoreTile<1>(sums.of[0][1], 64);
    StoreTile<2>(sums.of[1][0], 64);
    StoreTile<3>(sums.of[1][1], 64);
  } else {
    StoreTile<S>(sums.of[0][0], 64);
    StoreTile<S + 1>(sums.of[1][0], 64);
  }
}

// Returns Σ code * activation of row r, rounded to FP32.
template <Kernel K>
TM_HD __m512 ReadSum(const BlockSums& sums, int tile, int r) {
  const int32_t* first = sums.of[tile][0] + r * kTileRows;
  if constexpr (InBytes(K.format) && !K.int8) {
    const __m512i high = _mm512_slli_epi32(_mm512_load_si512(first), 8);
    const __m512i low = _mm512_load_si512(sums.of[tile][1] + r * kTileRows);
    return _mm512_maskz_cvtepi32_ps(0xffff, _mm512_add_epi32(high, low));
  } else if constexpr (InBytes(K.format)) {
    return _mm512_maskz_cvtepi32_ps(0xffff, _mm512_load_si512(first));
  } else {
    return _mm512_load_ps(reinterpret_cast<const float*>(first));
  }
}

// Loads the scales of a block. `second` is the minimum of Q4_1, which is added instead of
// subtracted, or unused if the format has one scale.
template <MatrixFormat F>
TM_HD KScales LoadScales(const uint8_t* tile, int64_t block) {
  const uint8_t* meta = MetaAt<F>(tile, block);
  if constexpr (IsKQuant(F)) {
    return LoadKScales<F>(meta, static_cast<int>(block % kKSteps));
  } else if constexpr (F == MatrixFormat::kNvfp4) {
    return {LoadNvScale(meta), LoadNvScale(meta + kTileRows)};
  } else if constexpr (IsMxfp4(F)) {
    const __m512 d = _mm512_loadu_ps(meta);
    return {d, d};
  } else {
    return {LoadHalf16(meta), LoadHalf16(F == MatrixFormat::kQ4_1 ? meta + 32 : meta)};
  }
}

// Adds the scaled sums of row r to acc. `scales` is the row's place in float d[16] of the panel.
template <Kernel K>
TM_HD __m512 AddRow(const BlockSums& sums, int tile, int r, const KScales& own,
                    const uint8_t* scales, __m512 acc) {
  constexpr MatrixFormat F = K.format;
  const __m512 scale = BroadcastFloat(scales);
  const __m512 sum = ReadSum<K>(sums, tile, r);
  if constexpr (IsMxfp4(F)) {
    return _mm512_fmadd_ps(_mm512_mul_ps(sum, scale), own.scale, acc);
  } else if constexpr (HasHalfScales(F)) {
    const auto* second = reinterpret_cast<const float*>(sums.of[tile][1] + r * kTileRows);
    const __m512 first = _mm512_mul_ps(sum, own.scale);
    return _mm512_fmadd_ps(_mm512_fmadd_ps(_mm512_load_ps(second), own.second, first), scale, acc);
  } else {
    acc = _mm512_fmadd_ps(sum, _mm512_mul_ps(own.scale, scale), acc);
    if constexpr (HasMinimum(F)) {
      const __m512 offset = BroadcastFloat(scales + kTileStepMeta / 2);
      acc = F == MatrixFormat::kQ4_1 ? _mm512_fmadd_ps(own.second, offset, acc)
                                     : _mm512_fnmadd_ps(own.second, offset, acc);
    }
    return acc;
  }
}

template <Kernel K>
TM_HD void ScaleBlock(const PairRun& run, int64_t block, const BlockSums& sums,
                      __m512 (&acc)[kPair][kPanelRows]) {
  constexpr MatrixFormat F = K.format;
  const uint8_t* scales = run.panel + block * K.panel_step() + TileStepCodes(F, K.int8);
  const KScales own[kPair] = {LoadScales<F>(run.tile[0], block), LoadScales<F>(run.tile[1], block)};
#pragma GCC unroll 12
  for (int r = 0; r < kPanelRows; ++r) {
#pragma GCC unroll 2
    for (int t = 0; t < kPair; ++t) {
      acc[t][r] = AddRow<K>(sums, t, r, own[t], scales + 4 * r, acc[t][r]);
    }
  }
}

template <MatrixFormat F>
TM_HD void Fetch(const PairRun& run, int64_t block) {
  constexpr int kBytes = kPair * (IsMxfp4(F)    ? kTileRows * kMxBlockBytes<F>
                                  : IsKQuant(F) ? TileSuperBlockBytes(F) / kKSteps
                                                : TileStepBytes(F));
  if (run.next != nullptr) {
#pragma GCC unroll 17
    for (int line = 0; line < kBytes; line += 64) {
      _mm_prefetch(run.next + block * kBytes + line, _MM_HINT_T1);
    }
  }
}

// Adds every `step`-th block, from `first` on, to acc. The block sums and the scaling are
// pipelined.
template <Kernel K>
class BlockPipe {
 public:
  BlockPipe(const PairRun& run, int64_t first, int64_t step)
      : run_(run), first_(first), step_(step), count_((run.blocks - first + step - 1) / step) {}

  TM_HD void Run(__m512 (&acc)[kPair][kPanelRows]) {
    if (count_ <= 0) {
      return;
    }
    SumBlock<K, 0>(run_, first_);
    int64_t i = 0;
    for (; i + 2 <= count_; i += 2) {
      Step<0>(i, acc);
      Step<1>(i + 1, acc);
    }
    if (i < count_) {
      Step<0>(i, acc);
      ScaleBlock<K>(run_, first_ + i * step_, sums_[0], acc);
    } else {
      ScaleBlock<K>(run_, first_ + (i - 1) * step_, sums_[1], acc);
    }
  }

 private:
  // Runs one stage: stores the sums of block i, starts those of block i + 1 and scales block i - 1.
  template <int P>
  TM_HD void Step(int64_t i, __m512 (&acc)[kPair][kPanelRows]) {
    const int64_t block = first_ + i * step_;
    Fetch<K.format>(run_, block);
    if constexpr (K.has_two_sums()) {  // all four tiles of sums are in use
      StoreSums<K, 0>(sums_[P]);
    }
    if (i + 1 < count_) {
      SumBlock<K, 2 - 2 * P>(run_, block + step_);
    }
    if constexpr (!K.has_two_sums()) {
      StoreSums<K, 2 * P>(sums_[P]);
    }
    if (i > 0) {
      ScaleBlock<K>(run_, block - step_, sums_[1 - P], acc);
    }
  }

  const PairRun& run_;
  int64_t first_;
  int64_t step_;
  int64_t count_;
  BlockSums sums_[2];
};

template <Kernel K>
void MultiplyPair(const PairRun& run) {
  constexpr MatrixFormat F = K.format;
  constexpr int kPhases = IsMxfp4(F) ? kMxStepBlocks : 1;  // sums per output
  __m512 sums[kPhases][kPair][kPanelRows];
  for (int phase = 0; phase < kPhases; ++phase) {
    __m512 acc[kPair][kPanelRows];
#pragma GCC unroll 24
    for (int i = 0; i < kPair * kPanelRows; ++i) {
      acc[i / kPanelRows][i % kPanelRows] = _mm512_setzero_ps();
    }
    BlockPipe<K>(run, phase, kPhases).Run(acc);
#pragma GCC unroll 24
    for (int i = 0; i < kPair * kPanelRows; ++i) {
      sums[phase][i / kPanelRows][i % kPanelRows] = acc[i / kPanelRows][i % kPanelRows];
    }
  }
  const int64_t lacking = kPhases == 1 ? 0 : -run.blocks & (kPhases - 1);
  for (int r = 0; r < run.rows; ++r) {
    for (int t = 0; t < kPair; ++t) {
      if constexpr (F == MatrixFormat::kNvfp4) {
        const __m512 factor = _mm512_loadu_ps(run.tile[t]);
        WriteRow(run.out, r, t, _mm512_mul_ps(sums[0][t][r], factor));
      } else if constexpr (kPhases == 1) {
        WriteRow(run.out, r, t, sums[0][t][r]);
      } else {
        for (int64_t phase = kPhases - lacking; phase < kPhases; ++phase) {
          // Missing blocks count as zeros, which turns a sum of -0 into 0.
          sums[phase][t][r] = _mm512_add_ps(sums[phase][t][r], _mm512_setzero_ps());
        }
        WriteRow(run.out, r, t,
                 _mm512_add_ps(_mm512_add_ps(sums[0][t][r], sums[1][t][r]),
                               _mm512_add_ps(sums[2][t][r], sums[3][t][r])));
      }
    }
  }
}

// Widens the codes of the tiles [first, first + 2), or of the last one alone.
template <MatrixFormat F>
PairRun OpenPair(const MultiplyArgs& a, int first) {
  PairRun run;
  run.blocks = a.cols / kQuantBlock;
  run.out = OutputsOf(a, first);
  run.next = a.tiles + (first + kPair) * TileBytes(F, a.cols);
  uint8_t* free = a.scratch;
  for (int t = 0; t < kPair; ++t) {
    if (first + t == a.num_tiles) {
      run.tile[t] = run.tile[0];
      run.codes[t] = run.codes[0];
      break;
    }
    if constexpr (IsMxfp4(F)) {
      MultiplyArgs of_tile = a;
      of_tile.scratch = free;
      TransposeTile<F>(of_tile, (first + t) * kTileRows);
      run.tile[t] = free;
      free += run.blocks * kMxTileBlockBytes;
    } else {
      run.tile[t] = a.tiles + (first + t) * TileBytes(F, a.cols);
    }
    for (int64_t b = 0; b < run.blocks; ++b) {
      WidenBlock<F>(CodesAt<F>(run.tile[t], b), free + b * CodeBytes(F));
    }
    run.codes[t] = free;
    free += run.blocks * CodeBytes(F);
  }
  return run;
}

// Multiplies all tiles with panels that are packed for AMX tiles. The last panel may have fewer
// rows.
template <Kernel K>
void MultiplyPanels(const MultiplyArgs& a, int64_t panel_bytes) {
  const TileConfig config(ShapeFor(K.format));
  for (int tile = 0; tile < a.num_tiles; tile += kPair) {
    PairRun run = OpenPair<K.format>(a, tile);
    for (int row = 0; row < a.num_rows; row += kPanelRows) {
      run.panel = a.panels + row / kPanelRows * panel_bytes;
      run.rows = a.num_rows - row < kPanelRows ? a.num_rows - row : kPanelRows;
      run.out.y = a.y + row * a.y_stride + tile * kTileRows;
      MultiplyPair<K>(run);
      run.next = nullptr;
    }
  }
}

// Returns the bytes of a full panel.
int64_t FullPanelBytes(MatrixFormat format, int64_t cols) {
  if (!OnTiles(format, kPanelRows, kPanelRows)) {
    return PanelBytes(format, cols, kPanelRows);
  }
  // The last panel may be packed for AVX-512, and MXFP4 panels are padded to four blocks there.
  const int64_t on_tiles = cols / kQuantBlock * TilePanelStep(format, false);
  const int64_t rest = PanelBytes(format, cols, kMinTileRows - 1);
  return on_tiles > rest ? on_tiles : (rest + 63) / 64 * 64;
}

// No panel for AVX-512 is larger than a full one for tiles.
static_assert(TilePanelStep(MatrixFormat::kQ8_0, true) >= kPanelRows * (kQuantBlock + 8));

// Returns the same for activations of 8 bits.
int64_t FullInt8PanelBytes(MatrixFormat format, int64_t cols) {
  return OnInt8Tiles(format, kPanelRows, kPanelRows)
             ? cols / kQuantBlock * TilePanelStep(format, true)
             : avx512::PlanInt8Panels(format, cols, kPanelRows).bytes;
}

template <Kernel K>
void MultiplyFormat(const MultiplyArgs& a) {
  const int64_t panel_bytes =
      K.int8 ? FullInt8PanelBytes(K.format, a.cols) : FullPanelBytes(K.format, a.cols);
  const int rest = a.num_rows % kPanelRows;
  MultiplyArgs on_tiles = a;
  on_tiles.num_rows -= OnTiles(K.format, rest, a.all_rows) ? 0 : rest;
  if (on_tiles.num_rows > 0) {
    MultiplyPanels<K>(on_tiles, panel_bytes);
  }
  if (on_tiles.num_rows < a.num_rows) {
    MultiplyArgs last = a;
    last.panels += on_tiles.num_rows / kPanelRows * panel_bytes;
    last.y += on_tiles.num_rows * a.y_stride;
    last.num_rows = rest;
    (K.int8 ? avx512::MultiplyInt8 : avx512::Multiply)(last);
  }
}

}  // namespace

PanelPlan PlanPanels(MatrixFormat format, int64_t cols, int /*all_rows*/) {
  return PlanOf(FullPanelBytes(format, cols), kRowBlockBytes);
}

PanelPlan PlanInt8Panels(MatrixFormat format, int64_t cols, int /*all_rows*/) {
  return PlanOf(FullInt8PanelBytes(format, cols), kRowBlockBytes);
}

int64_t ScratchBytes(MatrixFormat format, int64_t cols) {
  if (!OnTiles(format, kPanelRows, kPanelRows)) {
    return avx512::MultiplyScratchBytes(format, cols);
  }
  return kPair * (cols / kQuantBlock) *
         (CodeBytes(format) + (IsMxfp4(format) ? kMxTileBlockBytes : 0));
}

void Multiply(const MultiplyArgs& args) {
  DispatchMatrix(args.format, [&]<MatrixFormat F>() {
    if constexpr (HasTiles(F)) {
      MultiplyFormat<Kernel{F}>(args);
    } else {
      avx512::Multiply(args);
    }
  });
}

void MultiplyInt8(const MultiplyArgs& args) {
  DispatchMatrix(args.format, [&]<MatrixFormat F>() {
    if constexpr (OnInt8Tiles(F, kPanelRows, kPanelRows)) {
      MultiplyFormat<Kernel{F, true}>(args);
    } else {
      avx512::MultiplyInt8(args);
    }
  });
}

}  // namespace turbomind::TM_ISA
