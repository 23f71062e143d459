#pragma once

// ⑥ y = x · wᵀ for few rows, bound by the bytes of the weights.
//
// A block owns 16 kTiles outputs of up to 8 kRowTiles rows. Its warps split the columns into
// slices, one per warp. The sums of the slices are added in order. Bytes moved: every byte of the
// weights once per row tile, through the warp's ring (weight_ring.cuh), kStages - 1 units ahead of
// their use. x comes from L1 and L2, in FP32.
//
// Matrix products: 16 outputs × 16 columns of weights (operand A, expanded in registers) times 8
// rows of x, rounded to BF16 (mma.m16n8k16), with FP32 sums. With block scales, the sum of each
// block of 32 columns (kQ6_K: 16) starts at zero and is multiplied by its scale when it is added.
// The codes are exact in BF16, and so are NVFP4's products with scales, so only x is rounded. That
// costs 1.7e-3 of the output's norm, a third of the cost of storing weights as kQ8_0, the finest
// quantized format. A second operand with the rounding error of x would reach 1e-5. It would take
// twice the products and six times the conversions, and kernels for many rows would have to pay the
// same to keep equal bits.
//
// An output's sum depends only on its row of x, its weights and the slices, never on the other
// rows.
//
// Two ops may be fused with it: a norm before it (FusedNorm), and the activation after it, if a
// block has the gates and the ups of its outputs. Either they alternate, or the second tile is that
// of another matrix.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "turbomind/backend/cuda/dense/activation.cuh"
#include "turbomind/backend/cuda/linear/linear_shape.cuh"
#include "turbomind/backend/cuda/linear/weight_fragments.cuh"
#include "turbomind/backend/cuda/linear/weight_ring.cuh"

namespace turbomind::cuda {

struct StreamParams {
  LinearKernelParams linear;
  int slices = 1;  // warps per block
  // If `out` is set, only the activation of the outputs is stored.
  GatedActivationParams gate = {};
  LinearSegment up =
      {};               // of a gate without alternating outputs; `linear` then has the gates alone
  FusedNorm norm = {};  // with StreamConfig::kNormed

  TM_DEVICE bool has_two_matrices() const { return up.weight != nullptr; }
};

template <MatrixFormat F, int kTileCount, int kRowTileCount, bool kWithNorm = false>
struct StreamConfig {
  static constexpr MatrixFormat kFormat = F;
  static constexpr int kTiles = kTileCount;        // of 16 outputs
  static constexpr int kRowTiles = kRowTileCount;  // of 8 rows
  static constexpr bool kNormed = kWithNorm;
  static constexpr int kOutputs = kTileOutputs * kTiles;
  static constexpr int kRows = 8 * kRowTiles;
  // Stages of a ring of about 4.5 KiB. 8 warps of an SM then have 32 KiB in flight, and 24 have 96.
  static constexpr int kStages =
      std::clamp(4608 / (kTiles * WeightFragments<F>::kStagedBytes), 3, 8);
  using Ring = WeightRing<F, kTiles, kStages>;
  // Blocks of kMaxSlices warps per SM; 0 leaves the choice to the compiler. On some architectures
  // it would choose more for these kernels and spill registers.
  static constexpr int Blocks() {
    if (kNormed) {
      return 2;
    }
    if (IsKQuant(F)) {
      return kTiles == 1 ? 3 : kRowTiles == 1 || F == MatrixFormat::kQ4_K ? 2 : 0;
    }
    if (kRowTiles == 2) {
      return F == MatrixFormat::kNvfp4 ? 2 : 0;
    }
    if (kTiles == 2) {
      return F == MatrixFormat::kBF16 || F == MatrixFormat::kMxfp4 ? 3 : 0;
    }
    return F == MatrixFormat::kMxfp4 ? 4 : F == MatrixFormat::kQ4_1 || IsFp8(F) ? 3 : 0;
  }
  static constexpr int kBlocks = Blocks();
  // Shared memory of a warp: its ring, and then its sums, followed by those of the squares.
  static constexpr int kSums = kOutputs * kRows;
  static constexpr int kWarpBytes = std::max(Ring::kBytes, (kSums + (kNormed ? kRows : 0)) * 4);
  static constexpr int SharedBytes(int slices) { return slices * kWarpBytes; }
};

// The lane's 8 columns of a block of 32, for one row.
struct RowValues {
  Words<16> low;
  Words<16> high;
};
template <MatrixFormat F>
TM_DEVICE RowValues LoadRow(const float* row) {
  return {LoadGlobal(reinterpret_cast<const Words<16>*>(row)),
          LoadGlobal(reinterpret_cast<const Words<16>*>(row + SecondCols(F)))};
}

// Multiply the values by the norm's weights, and add their squares to `squares`.
TM_DEVICE void Weigh(const RowValues& weight, RowValues* x, float* squares) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = BitsFloat(x->low.v[i]);
    const float high = BitsFloat(x->high.v[i]);
    *squares = fmaf(low, low, *squares);
    *squares = fmaf(high, high, *squares);
    x->low.v[i] = FloatBits(low * BitsFloat(weight.low.v[i]));
    x->high.v[i] = FloatBits(high * BitsFloat(weight.high.v[i]));
  }
}

// The same values as operand B of two products.
struct RowFragment {
  uint32_t v[4];
};
TM_DEVICE RowFragment RoundRow(const RowValues& x) {
  RowFragment out;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    out.v[i] = PackBFloat2(BitsFloat(x.low.v[2 * i]), BitsFloat(x.low.v[2 * i + 1]));
    out.v[2 + i] = PackBFloat2(BitsFloat(x.high.v[2 * i]), BitsFloat(x.high.v[2 * i + 1]));
  }
  return out;
}

// sum += 16 outputs × one part of 32 columns of weights times 8 rows.
TM_DEVICE void MultiplyPart(const uint32_t (&pairs)[2][4], const RowFragment& x, int part,
                            float (&sum)[4]) {
  const int p = 2 * part;
  const uint32_t weights[4] = {pairs[0][p], pairs[1][p], pairs[0][p + 1], pairs[1][p + 1]};
  MmaBFloat(sum, weights, x.v[p], x.v[p + 1]);
}

// The same with both parts.
TM_DEVICE void MultiplyBlock(const uint32_t (&pairs)[2][4], const RowFragment& x, float (&sum)[4]) {
  MultiplyPart(pairs, x, 0, sum);
  MultiplyPart(pairs, x, 1, sum);
}

// Sum the 32 columns of each of 8 rows, in the layout of MultiplyBlock's products.
TM_DEVICE void SumBlock(const RowFragment& x, float (&sum)[4]) {
  constexpr uint32_t kOnes[4] = {kBFloatOne, kBFloatOne, kBFloatOne, kBFloatOne};
  sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
  MmaBFloat(sum, kOnes, x.v[0], x.v[1]);
  MmaBFloat(sum, kOnes, x.v[2], x.v[3]);
}

// A block of a unit, expanded for products.
template <MatrixFormat F>
struct ExpandedBlock {
  uint32_t pairs[2][4];
  static constexpr int kScales = SplitsColumns(F) ? 2 : 1;
  float scale[kScales][2];  // for the outputs g and g + 8
  float minimum[2];
};

template <MatrixFormat F>
TM_DEVICE ExpandedBlock<F> ExpandBlock(const typename WeightFragments<F>::Unit& unit, int block) {
  using W = WeightFragments<F>;
  ExpandedBlock<F> out;
  W::Expand(unit, block, out.pairs);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (SplitsColumns(F)) {
      out.scale[0][half] = W::Scale(unit, block, half, 0);
      out.scale[1][half] = W::Scale(unit, block, half, 1);
    } else if constexpr (W::kScaled) {
      out.scale[0][half] = W::Scale(unit, block, half);
    }
    if constexpr (W::kMinimum) {
      out.minimum[half] = W::Minimum(unit, block, half);
    }
  }
  return out;
}

// sums += a block times 8 rows.
template <MatrixFormat F>
TM_DEVICE void AddBlock(const ExpandedBlock<F>& weights, const RowFragment& x,
                        const float (&x_sums)[4], float (&sums)[4]) {
  using W = WeightFragments<F>;
  if constexpr (!W::kScaled) {
    MultiplyBlock(weights.pairs, x, sums);
  } else if constexpr (SplitsColumns(F)) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      float product[4] = {0.f, 0.f, 0.f, 0.f};
      MultiplyPart(weights.pairs, x, part, product);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[i] = fmaf(weights.scale[part][i / 2], product[i], sums[i]);
      }
    }
  } else {
    float product[4] = {0.f, 0.f, 0.f, 0.f};
    MultiplyBlock(weights.pairs, x, product);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i] = fmaf(weights.scale[0][i / 2], product[i], sums[i]);
      if constexpr (W::kMinimum) {
        sums[i] = fmaf(weights.minimum[i / 2], x_sums[i], sums[i]);
      }
    }
  }
}

// A warp's reads of x: kRowTiles rows per lane, one block of columns ahead of their use.
template <class C>
struct RowReader {
  const float* rows[C::kRowTiles];  // at the lane's columns of the first block
  int last_col;                     // of lane 0: the last block in the warp's slice
  RowValues next[C::kRowTiles];
  // With a norm.
  const float* weights = nullptr;  // like `rows`
  RowValues next_weight;
  float squares[C::kRowTiles] = {};  // of the lane's columns so far

  TM_DEVICE void Compute(int col) {
    const int at = col < last_col ? col : last_col;
#pragma unroll
    for (int n = 0; n < C::kRowTiles; ++n) {
      next[n] = LoadRow<C::kFormat>(rows[n] + at);
    }
    if constexpr (C::kNormed) {
      next_weight = LoadRow<C::kFormat>(weights + at);
    }
  }

  // Return operand B of the values that Compute has read.
  TM_DEVICE RowFragment Round(int n) {
    if constexpr (C::kNormed) {
      Weigh(next_weight, &next[n], &squares[n]);
    }
    return RoundRow(next[n]);
  }
};

// Add one unit of all tiles.
template <class C>
TM_DEVICE void AddUnit(const typename WeightFragments<C::kFormat>::Unit (&units)[C::kTiles],
                       int first_col, RowReader<C>* reader,
                       float (&sums)[C::kTiles][C::kRowTiles][4]) {
  using W = WeightFragments<C::kFormat>;
#pragma unroll
  for (int block = 0; block < W::kBlocks; ++block) {
    RowFragment x[C::kRowTiles];
    float x_sums[C::kRowTiles][4] = {};
#pragma unroll
    for (int n = 0; n < C::kRowTiles; ++n) {
      x[n] = reader->Round(n);
      if constexpr (W::kMinimum) {
        SumBlock(x[n], x_sums[n]);
      }
    }
    const bool is_last = block + 1 == W::kBlocks;
    reader->Compute(first_col +
                    (is_last ? UnitCols(C::kFormat) : FirstCol<C::kFormat>(block + 1, 0)));
#pragma unroll
    for (int m = 0; m < C::kTiles; ++m) {
      const auto weights = ExpandBlock<C::kFormat>(units[m], block);
#pragma unroll
      for (int n = 0; n < C::kRowTiles; ++n) {
        AddBlock(weights, x[n], x_sums[n], sums[m][n]);
      }
    }
  }
}

// Sum the warp's slice of the columns, and the squares of the lane's columns in it.
template <class C>
TM_DEVICE void SumSlice(const StreamParams& params, const LinearBlock& block,
                        float (&sums)[C::kTiles][C::kRowTiles][4], float (&squares)[C::kRowTiles]) {
  using W = WeightFragments<C::kFormat>;
  constexpr int kCols = UnitCols(C::kFormat);
  const LinearKernelParams& p = params.linear;
  const int lane = ThreadIndexX() & 31;
  const int slice = ThreadIndexX() >> 5;
  const int units = p.cols / kCols;
  const int begin = units * slice / params.slices;
  const int end = units * (slice + 1) / params.slices;
  typename C::Ring ring(block, block.first_output / kTileOutputs, TileBytes(C::kFormat, p.cols),
                        SharedMemory() + slice * C::kWarpBytes);
  if constexpr (C::kTiles == 2) {
    if (params.has_two_matrices()) {
      ring.template SetTile<1>(params.up.weight +
                               block.first_output / kTileOutputs * TileBytes(C::kFormat, p.cols));
    }
  }
  const auto copy = [&](int unit, int stage) {
    if (unit < end) {
      ring.Copy(unit, stage);
    }
    CommitCopies();
  };
#pragma unroll
  for (int i = 0; i < C::kStages - 1; ++i) {
    copy(begin + i, i);
  }
  WaitForPrevious();  // for x; the weights never change
  RowReader<C> reader;
  reader.last_col = (end - 1) * kCols + FirstCol<C::kFormat>(W::kBlocks - 1, 0);
#pragma unroll
  for (int n = 0; n < C::kRowTiles; ++n) {
    reader.rows[n] = RowOfX(p, block, 8 * n + (lane >> 2)) + FirstCol<C::kFormat>(0, lane & 3);
  }
  reader.weights = params.norm.weight + FirstCol<C::kFormat>(0, lane & 3);
  reader.Compute(begin * kCols);
  int stage = 0;
#pragma unroll 1
  for (int unit = begin; unit < end; ++unit) {
    WaitForCopies<C::kStages - 2>();
    SyncWarp();  // the stage has arrived for all lanes, and none reads the one filled next
    copy(unit + C::kStages - 1, stage == 0 ? C::kStages - 1 : stage - 1);
    typename W::Unit weights[C::kTiles];
    ring.Load(stage, weights);
    AddUnit<C>(weights, unit * kCols, &reader, sums);
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
  }
  WaitForCopies<0>();
  SyncWarp();  // the sums take the place of the ring
#pragma unroll
  for (int n = 0; n < C::kRowTiles; ++n) {
    squares[n] = reader.squares[n];
  }
}

// Sums of all slices, in shared memory. They are added in order.
template <class C>
struct SliceSums {
  static constexpr int kWarpFloats = C::kWarpBytes / 4;
  const StreamParams& params;
  const float* shared = reinterpret_cast<const float*>(SharedMemory());

  TM_DEVICE float At(int place) const {
    float sum = LoadShared<float>(shared + place);
    for (int slice = 1; slice < params.slices; ++slice) {
      sum += LoadShared<float>(shared + slice * kWarpFloats + place);
    }
    return sum;
  }

  // Return what the norm multiplies a row by.
  TM_DEVICE float ScaleOf(int row) const {
    const auto cols = static_cast<float>(params.linear.cols);
    return 1.f / sqrtf(At(C::kSums + row) / cols + params.norm.eps);
  }

  // Return the sum of an output of the block. The lane that computes it has the outputs 16 m + g +
  // (0, 8) of the rows 8 n + 2 t + (0, 1).
  TM_DEVICE float Of(int row, int output) const {
    const float sum = At((output / 16 * C::kRowTiles + row / 8) * 128 + output % 8 * 16 +
                         row % 8 / 2 * 4 + output % 16 / 8 * 2 + row % 2);
    return C::kNormed ? sum * ScaleOf(row) : sum;
  }
};

// Store the activations of the block's gates and ups.
template <class C>
TM_DEVICE void StoreActivations(const StreamParams& params, const LinearBlock& block,
                                const SliceSums<C>& sums) {
  constexpr int kPairs = C::kOutputs / 2;
  constexpr bool kFactor = HasFactor(C::kFormat);
  const GatedActivationParams& gate = params.gate;
  const bool alternate = !params.has_two_matrices();
  const LinearSegment& up = params.up;
  const float* up_bias = alternate ? block.bias : up.bias;
  const float up_factor = alternate ? block.factor : up.factor;
  for (int i = ThreadIndexX(); i < kPairs * C::kRows; i += 32 * params.slices) {
    const int row = i / kPairs;
    const int pair = i % kPairs;
    const int first = alternate ? 2 * pair : pair;
    const int second = alternate ? first + 1 : kPairs + pair;
    const int column = (alternate ? block.first_output / 2 : block.first_output) + pair;
    if (row >= block.num_rows || column >= gate.dim) {
      continue;
    }
    const float a = FinishSum<kFactor>(sums.Of(row, first), block.factor, block.bias,
                                       block.first_output + first);
    const float b = FinishSum<kFactor>(sums.Of(row, second), up_factor, up_bias,
                                       alternate ? block.first_output + second : column);
    StoreGlobal(gate.out + int64_t{block.first_row + row} * gate.dim + column,
                ActivateGate(gate, a, b));
  }
}

// Add the warps' sums and store the results.
template <class C>
TM_DEVICE void AddSlices(const StreamParams& params, const LinearBlock& block,
                         const float (&sums)[C::kTiles][C::kRowTiles][4],
                         const float (&squares)[C::kRowTiles]) {
  constexpr int kWarpFloats = C::kWarpBytes / 4;
  const int thread = ThreadIndexX();
  float* shared = reinterpret_cast<float*>(SharedMemory());
  if constexpr (C::kNormed) {
#pragma unroll
    for (int n = 0; n < C::kRowTiles; ++n) {  // the four lanes of a row
      float sum = squares[n];
      sum += ShuffleXor(sum, 1);
      sum += ShuffleXor(sum, 2);
      if (thread % 4 == 0) {
        StoreShared(shared + (thread >> 5) * kWarpFloats + C::kSums + 8 * n + thread % 32 / 4, sum);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < C::kTiles; ++m) {
#pragma unroll
    for (int n = 0; n < C::kRowTiles; ++n) {
      Words<16> words;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words.v[i] = FloatBits(sums[m][n][i]);
      }
      const int at = (thread >> 5) * kWarpFloats + (m * C::kRowTiles + n) * 128 + (thread & 31) * 4;
      StoreShared(shared + at, words);
    }
  }
  SyncBlock();
  const SliceSums<C> all = {params};
  if (params.gate.out != nullptr) {
    StoreActivations<C>(params, block, all);
  } else {
    for (int i = thread; i < C::kSums; i += 32 * params.slices) {
      const int row = i / C::kOutputs;
      const int output = i % C::kOutputs;
      StoreOutput<HasFactor(C::kFormat)>(params.linear, block, row, block.first_output + output,
                                         all.Of(row, output));
    }
  }
  if constexpr (C::kNormed) {
    if (params.norm.out != nullptr && BlockIndexY() == 0) {
      StoreNormed(params.linear, block, params.norm, 32 * params.slices,
                  [&](int row) { return all.ScaleOf(row); });
    }
  }
}

// Grid: slots of C::kRows rows × blocks of C::kOutputs outputs; `slices` warps; C::SharedBytes.
template <class C>
__global__ void __launch_bounds__(32 * kMaxSlices, C::kBlocks) StreamKernel(StreamParams params) {
  LetNextBegin();
  if (params.linear.experts != nullptr) {
    WaitForPrevious();  // for the rows of each expert
  }
  const int outputs = params.has_two_matrices() ? kTileOutputs : C::kOutputs;
  LinearBlock block;
  if (!FindBlock(params.linear, BlockIndexX(), C::kRows, outputs, &block)) {
    return;
  }
  float sums[C::kTiles][C::kRowTiles][4] = {};
  float squares[C::kRowTiles] = {};
  SumSlice<C>(params, block, sums, squares);
  AddSlices<C>(params, block, sums, squares);
}

}  // namespace turbomind::cuda
