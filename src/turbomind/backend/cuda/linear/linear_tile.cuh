#pragma once

// ⑥ y = x · wᵀ for many rows, bound by the tensor cores.
//
// A block owns 128 outputs of up to 8 kRowTiles rows, and each of its four warps 32 outputs of all
// rows. A weight is therefore expanded once per block, and a row read from shared memory serves two
// products. Bytes moved: weights as in linear_stream.cuh, through rings of the warps. Rows of x are
// rounded to BF16 beforehand and copied by cp.async through a ring of the block, in the same
// groups.
//
// The sums are bit-identical to those of StreamKernel: they have the same slices, each summed in
// the same order. A block adds all slices in shared memory. If there are few blocks, each computes
// only one slice, and AddPartsKernel adds the slices.

#include <cstdint>

#include "turbomind/backend/cuda/linear/linear_stream.cuh"

namespace turbomind::cuda {

struct TileParams {
  LinearKernelParams linear;  // x and x_rows are not used
  // [num_rows, linear.cols] in the order of y's rows. C::kRows more rows must be readable.
  const uint16_t* x_bfloat = nullptr;
  int slices = 1;
  int64_t slots = 1;
  float* parts = nullptr;  // [slices, num_rows, part_stride] or null: all slices in one block
  int64_t part_stride = 0;
};

template <MatrixFormat F, int kRowTileCount>
struct TileConfig {
  static constexpr MatrixFormat kFormat = F;
  static constexpr int kWarps = 4;
  static constexpr int kTiles = 2;  // per warp
  static constexpr int kRowTiles = kRowTileCount;
  static constexpr int kOutputs = kWarps * kTiles * kTileOutputs;
  static constexpr int kRows = 8 * kRowTiles;
  static constexpr int kStages = 4;  // of weights and of x
  using Ring = WeightRing<F, kTiles, kStages>;
  static constexpr int kRowBytes = UnitCols(F) * 2;  // in a stage
  static constexpr int kStageBytes = kRows * kRowBytes;
  static constexpr int kTotalBytes = kRows * kOutputs * 4;
  static constexpr int SharedBytes(bool totals) {
    return kWarps * Ring::kBytes + kStages * kStageBytes + (totals ? kTotalBytes : 0);
  }
};

// Return the offset of 16 bytes of a row in a stage. Two rows that are read at once are in
// different banks.
template <class C>
TM_DEVICE int StageOffset(int row, int chunk) {
  constexpr int kSwap = IsFp8(C::kFormat) ? 1 : C::kRowBytes == 128 ? 4 : 0;
  constexpr int kOther = SplitsColumns(C::kFormat) ? 2 : 0;  // of 8 bytes, four rows are read
  return row * C::kRowBytes + (chunk ^ ((row & 1) * kSwap | (row & kOther))) * 16;
}

// A thread's copies of the block's rows: 16 bytes of every kStep-th row.
template <class C>
struct StageCopier {
  static constexpr int kChunks = C::kRowBytes / 16;
  static constexpr int kStep = 32 * C::kWarps / kChunks;
  static_assert(C::kRows % kStep == 0 && kStep % (SplitsColumns(C::kFormat) ? 4 : 2) == 0);

  const char* from;  // in the first unit
  int64_t step_bytes;
  int to;

  TM_DEVICE StageCopier(const TileParams& params, const LinearBlock& block) {
    const int row = ThreadIndexX() / kChunks;
    const int chunk = ThreadIndexX() % kChunks;
    const int64_t row_bytes = int64_t{params.linear.cols} * 2;
    from = reinterpret_cast<const char*>(params.x_bfloat) + (block.first_row + row) * row_bytes +
           chunk * 16;
    step_bytes = kStep * row_bytes;
    to = StageOffset<C>(row, chunk);
  }

  // Commits a group even if the unit does not exist.
  TM_DEVICE void Copy(int unit, int end, char* stage) const {
    if (unit < end) {
      const char* at = from + static_cast<int64_t>(unit) * C::kRowBytes;
#pragma unroll
      for (int i = 0; i < C::kRows / kStep; ++i) {
        CopyAsync(stage + to + i * kStep * C::kRowBytes, at + i * step_bytes, 16);
      }
    }
    CommitCopies();
  }
};

// Read the lane's 8 columns of a block, for one row.
template <class C>
TM_DEVICE RowFragment LoadStagedRow(const char* stage, int row, int block) {
  const int col = FirstCol<C::kFormat>(block, ThreadIndexX() & 3);
  RowFragment x;
  if constexpr (SplitsColumns(C::kFormat)) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int chunk = col / 8 + part * SecondCols(C::kFormat) / 8;
      const auto words = LoadShared<Words<8>>(stage + StageOffset<C>(row, chunk) + col % 8 * 2);
      x.v[2 * part] = words.v[0];
      x.v[2 * part + 1] = words.v[1];
    }
  } else {
    const auto words = LoadShared<Words<16>>(stage + StageOffset<C>(row, col / 8));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x.v[i] = words.v[i];
    }
  }
  return x;
}

// Add one unit for all rows.
template <class C>
TM_DEVICE void AddTileUnit(const typename WeightFragments<C::kFormat>::Unit (&units)[C::kTiles],
                           const char* stage, float (&sums)[C::kTiles][C::kRowTiles][4]) {
  using W = WeightFragments<C::kFormat>;
  const int lane = ThreadIndexX() & 31;
#pragma unroll
  for (int block = 0; block < W::kBlocks; ++block) {
    const ExpandedBlock<C::kFormat> weights[C::kTiles] = {ExpandBlock<C::kFormat>(units[0], block),
                                                          ExpandBlock<C::kFormat>(units[1], block)};
#pragma unroll
    for (int n = 0; n < C::kRowTiles; ++n) {
      const RowFragment x = LoadStagedRow<C>(stage, 8 * n + (lane >> 2), block);
      float x_sums[4] = {};
      if constexpr (W::kMinimum) {
        SumBlock(x, x_sums);
      }
#pragma unroll
      for (int m = 0; m < C::kTiles; ++m) {
        AddBlock(weights[m], x, x_sums, sums[m][n]);
      }
    }
  }
}

// Call fn(m, n, i, row, output) for every sum of the lane. Rows are relative to the block, outputs
// to the weight.
template <class C, class Fn>
TM_DEVICE void ForEachSum(const LinearBlock& block, Fn fn) {
  const int lane = ThreadIndexX() & 31;
  const int first = block.first_output + (ThreadIndexX() >> 5) * C::kTiles * kTileOutputs;
#pragma unroll
  for (int m = 0; m < C::kTiles; ++m) {
#pragma unroll
    for (int n = 0; n < C::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        fn(m, n, i, 8 * n + 2 * (lane & 3) + i % 2,
           first + m * kTileOutputs + (lane >> 2) + i / 2 * 8);
      }
    }
  }
}

// Add the totals of the previous slices, if any, to the sums. Unless this slice is the last, keep
// the result for the next.
template <class C>
TM_DEVICE void AddTotals(bool first, bool last, char* totals,
                         float (&sums)[C::kTiles][C::kRowTiles][4]) {
#pragma unroll
  for (int m = 0; m < C::kTiles; ++m) {
#pragma unroll
    for (int n = 0; n < C::kRowTiles; ++n) {
      char* at = totals + ((m * C::kRowTiles + n) * 32 * C::kWarps + ThreadIndexX()) * 16;
      if (!first) {
        const auto before = LoadShared<Words<16>>(at);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[m][n][i] = BitsFloat(before.v[i]) + sums[m][n][i];
        }
      }
      if (!last) {
        Words<16> words;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          words.v[i] = FloatBits(sums[m][n][i]);
          sums[m][n][i] = 0.f;
        }
        StoreShared(at, words);
      }
    }
  }
}

// Sum the slices [first_slice, end_slice) of the columns.
template <class C>
TM_DEVICE void SumSlices(const TileParams& params, const LinearBlock& block, int first_slice,
                         int end_slice, float (&sums)[C::kTiles][C::kRowTiles][4]) {
  using W = WeightFragments<C::kFormat>;
  const int units = params.linear.cols / UnitCols(C::kFormat);
  const int begin = units * first_slice / params.slices;
  const int end = units * end_slice / params.slices;
  const int warp = ThreadIndexX() >> 5;
  char* stages = SharedMemory() + C::kWarps * C::Ring::kBytes;
  char* totals = stages + C::kStages * C::kStageBytes;
  typename C::Ring ring(block, block.first_output / kTileOutputs + warp * C::kTiles,
                        TileBytes(C::kFormat, params.linear.cols),
                        SharedMemory() + warp * C::Ring::kBytes);
  const StageCopier<C> copier(params, block);
  const auto copy = [&](int unit, int stage) {
    if (unit < end) {
      ring.Copy(unit, stage);
    }
    copier.Copy(unit, end, stages + stage * C::kStageBytes);  // commits both
  };
#pragma unroll
  for (int i = 0; i < C::kStages - 1; ++i) {
    copy(begin + i, i);
  }
  int slice = first_slice;
  int slice_end = units * (slice + 1) / params.slices;
#pragma unroll 1
  for (int unit = begin; unit < end; ++unit) {
    WaitForCopies<C::kStages - 2>();
    SyncBlock();  // the stage has arrived in all threads, and none reads the one filled next
    const int stage = (unit - begin) % C::kStages;
    copy(unit + C::kStages - 1, (stage + C::kStages - 1) % C::kStages);
    typename W::Unit weights[C::kTiles];
    ring.Load(stage, weights);
    AddTileUnit<C>(weights, stages + stage * C::kStageBytes, sums);
    if (unit + 1 == slice_end && end_slice - first_slice > 1) {
      AddTotals<C>(slice == first_slice, slice == end_slice - 1, totals, sums);
      ++slice;
      slice_end = units * (slice + 1) / params.slices;
    }
  }
  WaitForCopies<0>();
}

// Grid: (slots of C::kRows rows, times slices if there are parts) × blocks of C::kOutputs outputs;
// C::kWarps warps; C::SharedBytes.
template <class C>
__global__ void __launch_bounds__(32 * C::kWarps, 2) TileKernel(TileParams params) {
  BeginKernel();
  const bool in_parts = params.parts != nullptr;
  const auto slots = static_cast<int>(params.slots);
  const int slice = BlockIndexX() / slots;
  LinearBlock block;
  if (!FindBlock(params.linear, BlockIndexX() % slots, C::kRows, C::kOutputs, &block)) {
    return;
  }
  float sums[C::kTiles][C::kRowTiles][4] = {};
  SumSlices<C>(params, block, slice, in_parts ? slice + 1 : params.slices, sums);
  if (!in_parts) {
    ForEachSum<C>(block, [&](int m, int n, int i, int row, int output) {
      StoreOutput<HasFactor(C::kFormat)>(params.linear, block, row, output, sums[m][n][i]);
    });
    return;
  }
  const int64_t first_row = static_cast<int64_t>(slice) * params.linear.num_rows + block.first_row;
  float* part = params.parts + first_row * params.part_stride + block.y_column -
                params.linear.segments[0].first_output;
  ForEachSum<C>(block, [&](int m, int n, int i, int row, int output) {
    if (row < block.num_rows && output < block.num_outputs) {
      StoreGlobal(part + row * params.part_stride + output, sums[m][n][i]);
    }
  });
}

inline constexpr int kAddThreads = 128;

// Add the parts of TileKernel and store them in y. Grid: slots of one row × blocks of kThreads
// outputs.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) AddPartsKernel(TileParams params) {
  BeginKernel();
  LinearBlock block;
  if (!FindBlock(params.linear, BlockIndexX(), 1, kThreads, &block)) {
    return;
  }
  const int output = block.first_output + ThreadIndexX();
  if (output >= block.num_outputs) {
    return;
  }
  const float* part = params.parts + block.first_row * params.part_stride + block.y_column -
                      params.linear.segments[0].first_output + output;
  const int64_t stride = params.linear.num_rows * params.part_stride;
  float sum = LoadGlobal(part);
  for (int slice = 1; slice < params.slices; ++slice) {
    sum += LoadGlobal(part + slice * stride);
  }
  StoreOutput<true>(params.linear, block, 0, output, sum);
}

}  // namespace turbomind::cuda
