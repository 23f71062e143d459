// ⑥⑦ Linear layers on AMX tiles in BF16, for steps of many rows.
//
// Two adjacent tiles of weights, 32 outputs, are unpacked for 512 columns during the products with
// the first panel of the row block, and then multiplied with the others. They take 32 KiB of L1,
// and a panel of 32 rows streams from L2, without staying in L1: per step of 32 columns four loads
// of a register, of 1 KiB each, serve four products of 16 cycles. The sums of a panel, 4 KiB, stay
// in four registers for these columns and wait in L2 for the next ones.
//
// The column blocks of a group of pairs come one after the other, so that a column block of the
// activations is read from L2 again for each pair. The group has as many pairs as kSumBytes hold.
// Unpacking a pair takes about as long as multiplying it with two or three panels.

#include "turbomind/backend/cpu/isa/amx/bf16_linear.h"

#include <immintrin.h>

#include <cstdint>

#include "turbomind/backend/cpu/isa/amx/bf16_weights.h"
#include "turbomind/backend/cpu/isa/amx/tiles.h"
#include "turbomind/backend/cpu/isa/amx/write_row.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::TM_ISA {
namespace {

constexpr int kPair = 2;         // adjacent tiles of weights
constexpr int kBlockSteps = 16;  // steps that are unpacked together
constexpr int64_t kWeightBytes = kPair * kBlockSteps * kBf16TileBytes;
constexpr int64_t kPanelSums = 2 * kPair * kBf16TileBytes;  // of a panel and a pair
constexpr int64_t kMaxBlockPanels = 24;                     // 768 KiB of a column block in L2
constexpr int64_t kSumBytes = 4 * kMaxBlockPanels * kPanelSums;

// Tile registers: sums of (rows, outputs), activations, weights.
constexpr int kSumTiles = 0;
constexpr int kRowTiles = 4;
constexpr int kWeightTiles = 6;

// A column block: the steps [first, first + count).
struct StepRange {
  int64_t first = 0;
  int64_t count = 0;
};

constexpr int64_t NumPanels(int64_t rows) { return (rows + kBf16PanelRows - 1) / kBf16PanelRows; }

// The packed weights of a pair of tiles in a column block, which are prefetched during the products
// with those before them. Many lines at once would take the buffers for which loads of registers
// wait.
class NextWeights {
 public:
  NextWeights() = default;
  NextWeights(const uint8_t* first, int64_t stride, int64_t bytes, int num_parts)
      : at_(first), stride_(stride), lines_(bytes / 64 + 1), left_(num_parts * lines_) {}

  // Spreads the lines evenly over `slots` calls of Fetch.
  void SpreadOver(int64_t slots) { per_slot_ = (left_ + slots - 1) / slots; }

  TM_HD void Fetch() {
    for (int64_t i = 0; i < per_slot_ && left_ > 0; ++i, --left_) {
      _mm_prefetch(at_ + 64 * line_, _MM_HINT_T1);
      if (++line_ == lines_) {
        line_ = 0;
        at_ += stride_;
      }
    }
  }

 private:
  const uint8_t* at_ = nullptr;
  int64_t stride_ = 0;
  int64_t lines_ = 0;  // of a tile, or of a row of MXFP4
  int64_t line_ = 0;
  int64_t left_ = 0;
  int64_t per_slot_ = 0;
};

// Returns the weights of a pair of tiles in a column block.
template <MatrixFormat F>
NextWeights WeightsAt(const MultiplyArgs& a, int tile, StepRange steps) {
  constexpr int kParts = IsMxfp4(F) ? kPair * kTileRows : kPair;
  constexpr int kSteps = IsKQuant(F) ? kKSteps : 1;  // that `kBytes` hold
  constexpr int kBytes = IsMxfp4(F)                 ? kMxBlockBytes<F>
                         : IsKQuant(F)              ? TileSuperBlockBytes(F)
                         : F == MatrixFormat::kBF16 ? kBf16TileBytes
                                                    : TileStepBytes(F);
  const int64_t tile_bytes = TileBytes(F, a.cols);
  return NextWeights(a.tiles + tile * tile_bytes + steps.first / kSteps * kBytes,
                     kPair * tile_bytes / kParts, steps.count / kSteps * kBytes, kParts);
}

// The weights of a pair of tiles in a column block: those of MultiplyArgs, and where they are
// unpacked to, [steps][2 tiles][kBf16TileBytes]. A pair without a second tile repeats the first.
template <MatrixFormat F>
class PairWeights {
 public:
  PairWeights(const MultiplyArgs& a, int tile, StepRange steps)
      : first_step_(steps.first), to_(a.scratch), num_tiles_(a.num_tiles - tile > 1 ? 2 : 1) {
    for (int t = 0; t < num_tiles_; ++t) {
      from_[t] = a.tiles + (tile + t) * TileBytes(F, a.cols);
      if constexpr (IsMxfp4(F)) {
        TransposeBlocks<F>(RowsOfTile<F>(a, int64_t{tile + t} * kTileRows), steps.first,
                           steps.count, transposed_[t]);
      }
    }
    rows_of_bf16_ = NumSteps(F, a.cols);
  }

  // Unpacks step `s` of the column block.
  TM_HD void Unpack(int64_t s) const {
    for (int t = 0; t < num_tiles_; ++t) {
      uint8_t* to = to_ + (kPair * s + t) * kBf16TileBytes;
      const int64_t step = first_step_ + s;
      if constexpr (IsMxfp4(F)) {
        UnpackMxBlock<F>(transposed_[t] + s * kMxTileBlockBytes, to);
      } else if constexpr (F == MatrixFormat::kBF16) {
        CopyRows(from_[t] + step * kBf16TileBytes, rows_of_bf16_ - step * 16, to);
      } else {
        UnpackStep<F>(from_[t], step, to);
      }
    }
  }

  const uint8_t* step(int64_t s) const { return to_ + kPair * s * kBf16TileBytes; }
  int64_t second() const { return (num_tiles_ - 1) * kBf16TileBytes; }  // from the first tile

 private:
  const uint8_t* from_[kPair] = {};
  int64_t first_step_;
  uint8_t* to_;
  int num_tiles_;
  int64_t rows_of_bf16_ = 0;  // pairs of columns
  alignas(64) uint8_t transposed_[kPair][IsMxfp4(F) ? kBlockSteps * kMxTileBlockBytes : 1];
};

// Adds the products of a step to the registers of sums. `all`: the panel has more than 16 rows.
TM_HD void AddStep(const uint8_t* weights, int64_t second, const uint8_t* rows, bool all) {
  LoadStreamedTile<kRowTiles>(rows, 64);
  LoadTile<kWeightTiles>(weights, 64);
  DotBf16<kSumTiles, kRowTiles, kWeightTiles>();
  LoadTile<kWeightTiles + 1>(weights + second, 64);
  DotBf16<kSumTiles + 1, kRowTiles, kWeightTiles + 1>();
  if (all) {
    LoadStreamedTile<kRowTiles + 1>(rows + kBf16TileBytes, 64);
    DotBf16<kSumTiles + 2, kRowTiles + 1, kWeightTiles>();
    DotBf16<kSumTiles + 3, kRowTiles + 1, kWeightTiles + 1>();
  }
}

// Adds the products of a column block with a panel.
template <MatrixFormat F>
TM_HD void AddSteps(const PairWeights<F>& pair, const uint8_t* panel, int64_t steps, bool all,
                    NextWeights& next) {
  for (int64_t s = 0; s < steps; ++s) {
    next.Fetch();
    AddStep(pair.step(s), pair.second(), panel + s * kBf16PanelStep, all);
  }
}

// Does the same with the first panel and unpacks the weights. The products of a step run while
// AVX-512 unpacks the next one. A load of a register would wait for stores right before it.
template <MatrixFormat F>
TM_HD void UnpackAndAddSteps(const PairWeights<F>& pair, const uint8_t* panel, int64_t steps,
                             bool all, NextWeights& next) {
  pair.Unpack(0);
  for (int64_t s = 1; s < steps; ++s) {
    next.Fetch();
    pair.Unpack(s);
    AddStep(pair.step(s - 1), pair.second(), panel + (s - 1) * kBf16PanelStep, all);
  }
  AddStep(pair.step(steps - 1), pair.second(), panel + (steps - 1) * kBf16PanelStep, all);
}

TM_HD void ZeroSums() {
  ZeroTile<kSumTiles>();
  ZeroTile<kSumTiles + 1>();
  ZeroTile<kSumTiles + 2>();
  ZeroTile<kSumTiles + 3>();
}

TM_HD void LoadSums(const uint8_t* sums) {
  LoadTile<kSumTiles>(sums, 64);
  LoadTile<kSumTiles + 1>(sums + kBf16TileBytes, 64);
  LoadTile<kSumTiles + 2>(sums + 2 * kBf16TileBytes, 64);
  LoadTile<kSumTiles + 3>(sums + 3 * kBf16TileBytes, 64);
}

TM_HD void StoreSums(uint8_t* sums) {
  StoreTile<kSumTiles>(sums, 64);
  StoreTile<kSumTiles + 1>(sums + kBf16TileBytes, 64);
  StoreTile<kSumTiles + 2>(sums + 2 * kBf16TileBytes, 64);
  StoreTile<kSumTiles + 3>(sums + 3 * kBf16TileBytes, 64);
}

// Writes the sums of `num_rows` rows: float[2][2 tiles][16 rows][16 outputs].
void WriteSums(const uint8_t* sums, int num_rows, const OutputRun& out) {
  for (int r = 0; r < num_rows; ++r) {
    const uint8_t* row = sums + r / 16 * kPair * kBf16TileBytes + r % 16 * 64;
    WriteRow(out, r, 0, _mm512_load_ps(row));
    WriteRow(out, r, 1, _mm512_load_ps(row + kBf16TileBytes));
  }
}

// Multiplies a pair of tiles with all panels for one column block. `sums` are those of the pair:
// [panels, kPanelSums].
template <MatrixFormat F>
void MultiplyBlock(const MultiplyArgs& a, int tile, StepRange steps, uint8_t* sums,
                   NextWeights next) {
  const PairWeights<F> pair(a, tile, steps);
  OutputRun out = OutputsOf(a, tile);
  const int64_t all_steps = Bf16Steps(a.cols);
  const uint8_t* panel = a.panels + steps.first * kBf16PanelStep;
  next.SpreadOver(NumPanels(a.num_rows) * steps.count);
  for (int row = 0; row < a.num_rows; row += kBf16PanelRows) {
    const int left = a.num_rows - row;
    if (steps.first == 0) {
      ZeroSums();
    } else {
      LoadSums(sums);
    }
    const bool all = left > kBf16PanelRows / 2;
    if (row == 0) {
      UnpackAndAddSteps(pair, panel, steps.count, all, next);
    } else {
      AddSteps(pair, panel, steps.count, all, next);
    }
    StoreSums(sums);
    if (steps.first + steps.count == all_steps) {
      WriteSums(sums, left < kBf16PanelRows ? left : kBf16PanelRows, out);
    }
    panel += Bf16PanelBytes(a.cols);
    sums += kPanelSums;
    out.y += kBf16PanelRows * out.y_stride;
  }
}

// Multiplies the tiles [begin, end) with all panels, one column block after the other.
template <MatrixFormat F>
void MultiplyGroup(const MultiplyArgs& a, int begin, int end) {
  const int64_t all_steps = Bf16Steps(a.cols);
  const int64_t pair_sums = NumPanels(a.num_rows) * kPanelSums;
  const auto range = [&](int64_t first) -> StepRange {
    return {first, all_steps - first < kBlockSteps ? all_steps - first : kBlockSteps};
  };
  for (int64_t s = 0; s < all_steps; s += kBlockSteps) {
    uint8_t* sums = a.scratch + kWeightBytes;
    for (int tile = begin; tile < end; tile += kPair, sums += pair_sums) {
      NextWeights next;
      if (tile + kPair < end) {
        next = WeightsAt<F>(a, tile + kPair, range(s));
      } else if (s + kBlockSteps < all_steps) {
        next = WeightsAt<F>(a, begin, range(s + kBlockSteps));
      }
      MultiplyBlock<F>(a, tile, range(s), sums, next);
    }
  }
}

template <MatrixFormat F>
void MultiplyFormat(const MultiplyArgs& a) {
  const TileConfig config(FullShape());
  const int group = kPair * static_cast<int>(kSumBytes / (NumPanels(a.num_rows) * kPanelSums));
  for (int begin = 0; begin < a.num_tiles; begin += group) {
    MultiplyGroup<F>(a, begin, a.num_tiles - begin < group ? a.num_tiles : begin + group);
  }
}

}  // namespace

PanelPlan PlanBf16Panels(MatrixFormat /*format*/, int64_t cols, int all_rows) {
  // Row blocks of about the same size share the cost of unpacking evenly.
  const int64_t panels = NumPanels(all_rows);
  const int64_t blocks = (panels + kMaxBlockPanels - 1) / kMaxBlockPanels;
  return {kBf16PanelRows, Bf16PanelBytes(cols), (panels + blocks - 1) / blocks};
}

int64_t Bf16ScratchBytes(MatrixFormat /*format*/, int64_t /*cols*/) {
  return kWeightBytes + kSumBytes;
}

void MultiplyBf16(const MultiplyArgs& args) {
  DispatchMatrix(args.format, [&]<MatrixFormat F>() {
    if constexpr (HasBf16Tiles(F)) {
      MultiplyFormat<F>(args);
    }
  });
}

}  // namespace turbomind::TM_ISA
