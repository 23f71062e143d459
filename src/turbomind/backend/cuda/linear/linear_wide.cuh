#pragma once

// ⑥ y = x · wᵀ for many rows, by products of warp groups (warp_group.cuh).
//
// A warp expands its weights into registers as operand a: its tile of 16 outputs × 64 columns, with
// scales, rounded to BF16 as ExpandKernel does. Rows of x are operand b, in shared memory. The
// expanded weights thus never leave registers, and each serves all rows of the block. The products
// of 32 columns run while the next 32 columns are expanded.
//
// The grid has as many blocks as fit into the GPU. Each computes whole items (rows of a block ×
// outputs of a block) while there are enough of them. Blocks share the columns of the last items,
// so that they end together. Parts of an item are added in the order of their columns by the block
// that finishes last.

#include <algorithm>
#include <cstdint>

#include "turbomind/backend/cuda/dense/activation.cuh"
#include "turbomind/backend/cuda/linear/linear_copy.cuh"
#include "turbomind/backend/cuda/linear/linear_shape.cuh"
#include "turbomind/backend/cuda/linear/weight_fragments.cuh"
#include "turbomind/backend/cuda/linear/weight_ring.cuh"
#include "turbomind/backend/cuda/linear/wide_schedule.h"

namespace turbomind::cuda {

struct WideParams {
  LinearKernelParams linear;  // x and x_rows are not used; first_block of its segments is
  const uint16_t* x_bfloat =
      nullptr;  // [num_rows, x_cols] in the order of y's rows, RowOrder::kWide
  int x_cols = 0;
  int output_blocks = 0;  // of all segments
  int num_blocks = 0;     // of the grid
  // If `out` is set, the outputs are gate0, up0, gate1, up1, …, and only their activation is
  // stored. Other members but the activation and dim are not used.
  GatedActivationParams gate;
  char* parts = nullptr;  // 2 num_blocks slots of C::kSlotBytes
  // [num_blocks] zeros, which the kernel leaves: how many parts of an item are complete.
  int32_t* arrivals = nullptr;
};

template <MatrixFormat F, int kRowCount>
struct WideConfig {
  using W = WeightFragments<F>;
  static constexpr MatrixFormat kFormat = F;
  static constexpr int kRows = kRowCount;
  static constexpr int kWarps = 8;  // two groups
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kTiles = kRows == 128 ? 2 : 1;  // per warp
  static constexpr int kOutputs = kWarps * kTiles * kTileOutputs;
  static constexpr int kUnits = kWideCols / UnitCols(F);  // per step
  static constexpr int kBlocksPerSm = kRows == 128 ? 1 : 2;
  static constexpr int kRowBytes = kWideCols * 2;  // in a stage
  static constexpr int kStageBytes = kRows * kRowBytes;
  static constexpr int kStepBytes = kStageBytes + kWarps * kTiles * kUnits * W::kStagedBytes;
  // Of 227 KiB. The rest is for small arrays.
  static constexpr int kMaxBytes = (kBlocksPerSm == 1 ? 216 : 104) << 10;
  static constexpr int kStages = std::clamp(kMaxBytes / kStepBytes, 4, 8);
  static constexpr int kAhead = kStages - 2;  // the products of the last step read another stage
  using Ring = WeightRing<F, kTiles, kStages * kUnits>;
  static constexpr int kSums = kRows / 2;  // of a lane, per tile
  // Four sums of a lane, whose index is m kRows / 8 + n: sums[m][4 n .. 4 n + 3].
  static constexpr int kNumQuads = kTiles * kRows / 8;
  static constexpr int kSlotBytes = kOutputs * kRows * 4;
  static constexpr int kUnrolledQuads = kRows == 128 ? 2 : 1;  // of 32, or of at most 8
  static_assert(W::kBlocks * kUnits == 2);
  static_assert(kStages * kStepBytes <= kMaxBytes && kSlotBytes <= kStages * kStepBytes);

  // Shared memory: stages of x, rings, a flag, and the first row tiles of experts.
  static constexpr int kFlagAt = kStages * kStepBytes;
  static constexpr int kExpertsAt = kFlagAt + 16;
  static constexpr int SharedBytes(int num_experts) {
    return kExpertsAt + (num_experts > 0 ? (num_experts + 1) * 4 : 0);
  }
};

// Write the number of row tiles before each expert, and before the end, to shared memory. Returns
// their total. All threads of the block must call it.
template <class C>
TM_DEVICE int FindExpertTiles(const LinearKernelParams& p) {
  char* firsts = SharedMemory() + C::kExpertsAt;
  if (ThreadIndexX() < 32) {
    const int lane = ThreadIndexX();
    int before = 0;
    for (int e = lane; e - lane < p.num_experts; e += 32) {
      const int at = e < p.num_experts ? e : p.num_experts - 1;
      const int rows = LoadGlobal(p.offsets + at + 1) - LoadGlobal(p.offsets + at);
      int sum = e < p.num_experts ? (rows + C::kRows - 1) / C::kRows : 0;
      const int own = sum;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = ShuffleTo(sum, (lane - distance) & 31);
        sum += lane >= distance ? other : 0;
      }
      if (e < p.num_experts) {
        StoreShared(firsts + 4 * e, before + sum - own);
      }
      before += ShuffleTo(sum, 31);
    }
    if (lane == 0) {
      StoreShared(firsts + 4 * p.num_experts, before);
    }
  }
  SyncBlock();
  return LoadShared<int>(firsts + 4 * p.num_experts);
}

// Tiles of rows whose items are adjacent. With 128 rows of 8,192 columns, 32 MiB of x stay in L2
// while all weights pass by.
inline constexpr int kGroupedRowTiles = 16;

// Find the rows and outputs of an item. In a group of row tiles, items of one block of outputs are
// adjacent, so that blocks that run at the same time read the same weights.
template <class C>
TM_DEVICE LinearBlock FindItem(const WideParams& params, int item) {
  const LinearKernelParams& p = params.linear;
  LinearBlock block;
  int first_row = 0;
  int end_row = p.num_rows;
  int row_tiles = (p.num_rows + C::kRows - 1) / C::kRows;
  int expert = 0;
  if (p.experts != nullptr) {
    // The last expert whose first item is not after this one. Experts without rows have no items.
    const char* firsts = SharedMemory() + C::kExpertsAt;
    const auto first_item = [&](int e) {
      return LoadShared<int>(firsts + 4 * e) * params.output_blocks;
    };
    int end = p.num_experts;
    while (end - expert > 1) {
      const int middle = (expert + end) / 2;
      (first_item(middle) <= item ? expert : end) = middle;
    }
    item -= first_item(expert);
    row_tiles = LoadShared<int>(firsts + 4 * expert + 4) - LoadShared<int>(firsts + 4 * expert);
    first_row = LoadGlobal(p.offsets + expert);
    end_row = LoadGlobal(p.offsets + expert + 1);
  }
  const int group = item / (kGroupedRowTiles * params.output_blocks) * kGroupedRowTiles;
  const int in_group = row_tiles - group < kGroupedRowTiles ? row_tiles - group : kGroupedRowTiles;
  item -= group * params.output_blocks;
  FindOutputs(p, item / in_group, C::kOutputs, &block);
  if (p.experts != nullptr) {
    UseExpert(p, expert, &block);
  }
  block.first_row = first_row + (group + item % in_group) * C::kRows;
  block.num_rows = end_row - block.first_row < C::kRows ? end_row - block.first_row : C::kRows;
  return block;
}

// A thread's copies of rows of x: 16 bytes of every 32nd row.
template <class C>
struct WideCopier {
  static constexpr int kPieces = C::kRowBytes / 16;
  static constexpr int kStep = C::kThreads / kPieces;
  static_assert(kStep % 8 == 0 && C::kRows % kStep == 0);

  const char* from;
  int64_t step_bytes;
  int to;
  int rows;  // from the thread's first row on

  TM_DEVICE WideCopier(const WideParams& params, const LinearBlock& block) {
    const int row = ThreadIndexX() / kPieces;
    const int piece = ThreadIndexX() % kPieces;
    const int64_t row_bytes = int64_t{params.x_cols} * 2;
    from = reinterpret_cast<const char*>(params.x_bfloat) + (block.first_row + row) * row_bytes +
           piece * 16;
    step_bytes = kStep * row_bytes;
    to = row * C::kRowBytes + (piece ^ row % 8) * 16;
    rows = block.num_rows - row;
  }
  TM_DEVICE void Copy(int step, char* stage) const {
    const char* at = from + int64_t{step} * C::kRowBytes;
#pragma unroll
    for (int i = 0; i < C::kRows / kStep; ++i) {
      if (i * kStep < rows) {
        CopyAsync(stage + to + i * kStep * C::kRowBytes, at + i * step_bytes, 16);
      }
    }
  }
};

// Expand a block of 32 columns, with scales, to two factors of products of 16 columns.
template <MatrixFormat F>
TM_DEVICE void ExpandFactors(const typename WeightFragments<F>::Unit& unit, int block,
                             uint32_t (&factors)[2][4]) {
  using W = WeightFragments<F>;
  uint32_t pairs[2][4];
  W::Expand(unit, block, pairs);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    ScalePairs<F>(unit, block, half, pairs[half]);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      factors[p / 2][half + p % 2 * 2] = pairs[half][p];
    }
  }
}

// Sum the steps [begin, end) of a block, at least one. The thread's quads replace the stages: quad
// q is at stored[q C::kThreads].
template <class C>
TM_DEVICE void SumSteps(const WideParams& params, const LinearBlock& block, int begin, int end,
                        Words<16>* stored) {
  using W = WeightFragments<C::kFormat>;
  const int warp = WarpIndex();
  char* stages = SharedMemory();
  typename C::Ring ring(block, block.first_output / kTileOutputs + warp * C::kTiles,
                        TileBytes(C::kFormat, params.linear.cols),
                        stages + C::kStages * C::kStageBytes + warp * C::Ring::kBytes);
  const WideCopier<C> copier(params, block);
  const int last_unit = NumUnits(C::kFormat, params.linear.cols) - 1;
  const auto copy = [&](int step, int stage) {
    if (step < end) {
#pragma unroll
      for (int u = 0; u < C::kUnits; ++u) {
        const int unit = step * C::kUnits + u;  // past the end, x is zero
        ring.Copy(unit < last_unit ? unit : last_unit, stage * C::kUnits + u);
      }
      copier.Copy(step, stages + stage * C::kStageBytes);
    }
    CommitCopies();
  };
#pragma unroll 1
  for (int i = 0; i < C::kAhead; ++i) {
    copy(begin + i, i);
  }
  float sums[C::kTiles][C::kSums] = {};
  uint32_t factors[2][C::kTiles][2][4];
#pragma unroll
  for (int m = 0; m < C::kTiles; ++m) {
    KeepSums(sums[m]);
  }
  int stage = 0;
  int step = begin;
#pragma unroll 1
  do {  // a path around the loop would need registers for its own sums
    WaitForCopies<C::kAhead - 1>();
    FenceSharedForProducts();
    SyncBlock();  // the stage has arrived, and the products of the last step but one have ended
    copy(step + C::kAhead, (stage + C::kAhead) % C::kStages);
    typename W::Unit units[C::kTiles];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half % W::kBlocks == 0) {
        ring.Load(stage * C::kUnits + half / W::kBlocks, units);
      }
#pragma unroll
      for (int m = 0; m < C::kTiles; ++m) {
        ExpandFactors<C::kFormat>(units[m], half % W::kBlocks, factors[half][m]);
      }
      FenceRegisters();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int m = 0; m < C::kTiles; ++m) {
          MultiplyGroup<C::kRows>(sums[m], factors[half][m][i],
                                  stages + stage * C::kStageBytes + 64 * half + 32 * i);
        }
      }
      CommitProducts();
      WaitForProducts<1>();  // the other half's factors are free
    }
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
  } while (++step < end);
  WaitForProducts<0>();
#pragma unroll
  for (int m = 0; m < C::kTiles; ++m) {
    KeepSums(sums[m]);
  }
  WaitForCopies<0>();
  SyncBlock();  // all products have read the stages
#pragma unroll
  for (int quad = 0; quad < C::kNumQuads; ++quad) {
    const float* from = sums[quad / (C::kRows / 8)] + quad % (C::kRows / 8) * 4;
    StoreShared(stored + quad * C::kThreads, Words<16>{{FloatBits(from[0]), FloatBits(from[1]),
                                                        FloatBits(from[2]), FloatBits(from[3])}});
  }
}

// Store the activation of a quad's gates and ups. Even lanes of outputs have gates, odd ones have
// ups. They exchange one of two rows. All lanes of a warp must call it.
TM_DEVICE void StoreGates(const WideParams& params, const LinearBlock& block, int row, int output,
                          const float (&sums)[4]) {
  const int lane = ThreadIndexX() & 31;
  const bool is_up = (lane & 4) != 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = output + 8 * half;
    const bool exists = own < block.num_outputs;
    const float bias = block.bias != nullptr && exists ? LoadGlobal(block.bias + own) : 0.f;
    const float first = sums[2 * half] + bias;
    const float second = sums[2 * half + 1] + bias;
    const float other = ShuffleXor(is_up ? first : second, 4);
    const int kept = row + is_up;
    if (exists && kept < block.num_rows) {
      const float value = is_up ? ActivateGate(params.gate, other, second)
                                : ActivateGate(params.gate, first, other);
      StoreGlobal(params.gate.out + int64_t{block.first_row + kept} * params.gate.dim + own / 2,
                  value);
    }
  }
}

// Store a quad in y, or its activation. The sums have the factor of the matrix.
template <class C>
TM_DEVICE void StoreQuad(const WideParams& params, const LinearBlock& block, int quad,
                         const float (&sums)[4]) {
  const int lane = ThreadIndexX() & 31;
  const int tile = (ThreadIndexX() >> 5) * C::kTiles + quad / (C::kRows / 8);
  const int row = quad % (C::kRows / 8) * 8 + 2 * (lane & 3);
  const int output = block.first_output + tile * kTileOutputs + (lane >> 2);
  if (params.gate.out != nullptr) {
    StoreGates(params, block, row, output, sums);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    StoreOutput<false>(params.linear, block, row + i % 2, output + i / 2 * 8, sums[i]);
  }
}

// The thread's quads of a part in memory. A block begins at most one item that it does not finish,
// and finishes or continues one.
template <class C>
TM_DEVICE Words<16>* PartOf(const WideParams& params, int worker, bool begins) {
  char* slot = params.parts + (2 * int64_t{worker} + begins) * C::kSlotBytes;
  return reinterpret_cast<Words<16>*>(slot) + ThreadIndexX();
}

// Note that a part of an item is stored. Return whether it is the last of `count` parts, and all
// others can be read.
template <class C>
TM_DEVICE bool IsLastPart(int32_t* arrivals, int count) {
  char* flag = SharedMemory() + C::kFlagAt;
  SyncBlock();  // the stores of all threads are before the fence
  if (ThreadIndexX() == 0) {
    FenceGlobal();
    const bool is_last = AddGlobal(arrivals, 1) == count - 1;
    FenceGlobal();
    if (is_last) {
      StoreGlobal(arrivals, 0);
    }
    StoreShared(flag, static_cast<int>(is_last));
  }
  SyncBlock();
  return LoadShared<int>(flag) != 0;
}

// Copy a part of an item from shared memory to memory. Return whether all `count` parts are there.
template <class C>
TM_DEVICE bool StorePart(const WideParams& params, const Words<16>* stored, bool begins,
                         int32_t* arrivals, int count) {
  Words<16>* own = PartOf<C>(params, BlockIndexX(), begins);
#pragma unroll 4
  for (int quad = 0; quad < C::kNumQuads; ++quad) {
    const int at = quad * C::kThreads;
    StoreGlobal(own + at, LoadShared<Words<16>>(stored + at));
  }
  return IsLastPart<C>(arrivals, count);
}

// Compute the steps [begin, end) of an item. If other blocks compute the others, the one that
// finishes last adds the parts.
template <class C>
TM_DEVICE void ComputeItem(const WideParams& params, const WideSchedule& schedule, int item,
                           int begin, int end) {
  // A loop over sums in registers would be as long as its unrolled code, so they take the place of
  // the stages.
  auto* stored = reinterpret_cast<Words<16>*>(SharedMemory()) + ThreadIndexX();
  const LinearBlock block = FindItem<C>(params, item);
  SumSteps<C>(params, block, begin, end, stored);
  const bool is_part = end - begin < schedule.steps;
  int first = 0;
  int last = 0;
  if (is_part) {
    const int index = item - schedule.num_whole;
    first = schedule.WorkerOf(index * schedule.steps);
    last = schedule.WorkerOf((index + 1) * schedule.steps - 1);
    if (!StorePart<C>(params, stored, begin == 0, params.arrivals + index, last - first + 1)) {
      return;
    }
  }
#pragma unroll C::kUnrolledQuads
  for (int quad = 0; quad < C::kNumQuads; ++quad) {
    float total[4] = {0.f, 0.f, 0.f, 0.f};
    for (int worker = first; worker <= last; ++worker) {
      const int at = quad * C::kThreads;
      const Words<16>* part = PartOf<C>(params, worker, worker == first);
      const auto words = is_part ? LoadGlobal(part + at) : LoadShared<Words<16>>(stored + at);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total[i] += BitsFloat(words.v[i]);
      }
    }
    if constexpr (HasFactor(C::kFormat)) {
#pragma unroll
      for (float& sum : total) {
        sum *= block.factor;
      }
    }
    StoreQuad<C>(params, block, quad, total);
  }
  SyncBlock();  // the next item's copies may overwrite the stages
}

// Compute the block's items: whole ones, and then its steps of shared ones.
template <class C>
TM_DEVICE void ComputeItems(const WideParams& params) {
  const LinearKernelParams& p = params.linear;
  const int row_tiles =
      p.experts != nullptr ? FindExpertTiles<C>(p) : (p.num_rows + C::kRows - 1) / C::kRows;
  const WideSchedule schedule(row_tiles * params.output_blocks, params.x_cols / kWideCols,
                              params.num_blocks);
  const int worker = BlockIndexX();
  const bool shares = worker < schedule.workers;
  int shared = shares ? schedule.Begin(worker) : 0;
  const int shared_end = shares ? schedule.Begin(worker + 1) : 0;
#pragma unroll 1
  for (int item = worker; item < schedule.num_whole || shared < shared_end;
       item += params.num_blocks) {
    int at = item;
    int begin = 0;
    int end = schedule.steps;
    if (item >= schedule.num_whole) {
      at = schedule.num_whole + shared / schedule.steps;
      begin = shared % schedule.steps;
      end = end - begin < shared_end - shared ? end : begin + shared_end - shared;
      shared += end - begin;
    }
    ComputeItem<C>(params, schedule, at, begin, end);
  }
}

// Grid: params.num_blocks; C::kThreads; C::SharedBytes.
template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm) WideKernel(WideParams params) {
  BeginKernel();
  if constexpr (kHasWarpGroups) {
    ComputeItems<C>(params);
  } else {
    Trap();
  }
}

}  // namespace turbomind::cuda
