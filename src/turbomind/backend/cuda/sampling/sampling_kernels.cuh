#pragma once

// ⑧ Tokens drawn from rows of logits: ops/sampling_math.h, every number with the host's bits.
//
// One pass over a row finds the highest logit of every chunk of 128. So many chunks that reach a
// logit hold at least as many tokens that do: the tokens of at least the kMostListed-th highest of
// these maxima are listed, by their weights, and lie in few chunks. A draw from more than the list
// is left to the host. Sums over a whole row take a second pass.

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "turbomind/backend/cuda/dense/elementwise.cuh"
#include "turbomind/ops/sampling_math.h"

namespace turbomind::cuda {

inline constexpr int kChunk = 128;       // logits that a warp reads at once, 16 bytes in each lane
inline constexpr int kChunksOfWarp = 8;  // in flight together
inline constexpr int kChunkWarps = 4;    // of a block
inline constexpr int kSumWarps = 4;      // likewise
inline constexpr int kSumBlocksOfWarp = 4;  // side by side, kSumLanes lanes each
inline constexpr int kDrawWarps = 8;
inline constexpr int kMostListed = 256;       // chunks whose maximum is the least logit of a list
inline constexpr int kMostCandidates = 1024;  // in a list
inline constexpr int kDrawHeadBytes = 128;    // of shared memory: what the threads of a block share

struct DrawTask {
  DrawRowsParams op;  // with draws on the GPU
  // [num_draws, num_chunks] OrderedBits of the highest of each chunk; kRefusedBits: NaN or
  // +infinity
  uint32_t* highest = nullptr;
  double* sums =
      nullptr;  // [num_draws, num_sums] of blocks of kSumBlock, where the draw needs them
  int num_chunks = 0;
  int num_sums = 0;
};

inline constexpr uint32_t kRefusedBits = ~0u;
inline constexpr uint32_t kLowestBits = 0x007FFFFFu;  // of -infinity

TM_DEVICE RowDraw LoadDraw(const DrawTask& task, int draw) {
  return LoadGlobal(task.op.draws + draw);
}
TM_DEVICE const float* RowOf(const DrawTask& task, const RowDraw& draw) {
  return task.op.logits + static_cast<int64_t>(draw.row) * task.op.vocab_size;
}

// A lane's four values of a chunk, in the order of ids for kWidth 4.
template <int kWidth>
struct ChunkValues {
  Floats<kWidth> v[4 / kWidth];
};

// The id of value i.
template <int kWidth>
TM_DEVICE int IdInChunk(int chunk, int lane, int i) {
  return chunk * kChunk + (i / kWidth * 32 + lane) * kWidth + i % kWidth;
}

// -infinity behind the last.
template <int kWidth>
TM_DEVICE ChunkValues<kWidth> LoadChunk(const float* row, int chunk, int vocab_size) {
  ChunkValues<kWidth> values;
#pragma unroll
  for (int i = 0; i < 4 / kWidth; ++i) {
    const int id = IdInChunk<kWidth>(chunk, ThreadIndexX() & 31, i * kWidth);
    if (id < vocab_size) {
      values.v[i] = LoadFloats<kWidth>(row + id);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        values.v[i].v[j] = -INFINITY;
      }
    }
  }
  return values;
}

// Grid: chunks / (kChunkWarps kChunksOfWarp) × draws.
template <int kWidth>
__global__ void __launch_bounds__(32 * kChunkWarps) ChunkMaximaKernel(DrawTask task) {
  constexpr float kHighest = FLT_MAX;
  const int lane = ThreadIndexX() & 31;
  const int first = (BlockIndexX() * kChunkWarps + WarpIndex()) * kChunksOfWarp;
  if (first >= task.num_chunks) {
    return;
  }
  const float* row = RowOf(task, LoadDraw(task, BlockIndexY()));
  ChunkValues<kWidth> values[kChunksOfWarp];
#pragma unroll
  for (int c = 0; c < kChunksOfWarp; ++c) {
    values[c] = LoadChunk<kWidth>(row, first + c, task.op.vocab_size);
  }
  uint32_t mine = 0;
#pragma unroll
  for (int c = 0; c < kChunksOfWarp; ++c) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = values[c].v[i / kWidth].v[i % kWidth];
      const uint32_t bits = x <= kHighest ? OrderedBits(x) : kRefusedBits;
      most = bits > most ? bits : most;
    }
    most = MaxInWarp(most);
    mine = lane == c ? most : mine;
  }
  if (lane < kChunksOfWarp && first + lane < task.num_chunks) {
    StoreGlobal(task.highest + static_cast<int64_t>(BlockIndexY()) * task.num_chunks + first + lane,
                mine);
  }
}

// Of a row's chunks; uses the first 4 kWarps bytes of shared memory.
template <int kWarps>
TM_DEVICE uint32_t HighestOfRow(const DrawTask& task) {
  const uint32_t* highest = task.highest + static_cast<int64_t>(BlockIndexY()) * task.num_chunks;
  uint32_t most = 0;
#pragma unroll 4
  for (int i = ThreadIndexX(); i < task.num_chunks; i += 32 * kWarps) {
    const uint32_t bits = LoadGlobal(highest + i);
    most = bits > most ? bits : most;
  }
  most = MaxInWarp(most);
  const int lane = ThreadIndexX() & 31;
  char* const of_warp = SharedMemory() + 4 * WarpIndex();
  if (lane == 0) {
    StoreShared(of_warp, most);
  }
  SyncBlock();
  return MaxInWarp(lane < kWarps ? LoadShared<uint32_t>(SharedMemory() + 4 * lane) : 0u);
}

// Whether the sampler draws from a row with this maximum.
TM_DEVICE bool MayDraw(uint32_t highest) {
  return highest > kLowestBits && highest != kRefusedBits;
}

// Logits → weights of a row.
struct Weights {
  float highest;
  float inverse_temperature;
  TM_DEVICE float Of(float logit) const {
    return WeightOf((logit - highest) * inverse_temperature);
  }
};

TM_DEVICE float AtLeast(float weight, float least) { return weight >= least ? weight : 0.f; }

// Grid: sums / (kSumWarps kSumBlocksOfWarp) × draws. Shared memory: kDrawHeadBytes, eight bytes for
// every thread.
__global__ void __launch_bounds__(32 * kSumWarps) WeightSumsKernel(DrawTask task) {
  const RowDraw draw = LoadDraw(task, BlockIndexY());
  if (LimitsCount(draw, task.op.vocab_size)) {
    return;
  }
  const uint32_t highest = HighestOfRow<kSumWarps>(task);
  if (!MayDraw(highest)) {
    return;
  }
  const Weights weights = {FloatOfOrdered(highest), draw.inverse_temperature};
  const float least = DrawsFromAll(draw, task.op.vocab_size) ? draw.min_p : 0.f;
  const int lane = ThreadIndexX() & 31;
  const int block = (BlockIndexX() * kSumWarps + WarpIndex()) * kSumBlocksOfWarp + lane / kSumLanes;
  const int left = task.op.vocab_size - block * kSumBlock;
  const int size = block >= task.num_sums ? 0 : left < kSumBlock ? left : kSumBlock;
  const float* logits = RowOf(task, draw) + static_cast<int64_t>(block) * kSumBlock;
  const auto weight = [&](int i) { return AtLeast(weights.Of(LoadGlobal(logits + i)), least); };
  double sum = 0;
#pragma unroll 8
  for (int i = lane % kSumLanes; i < size / kSumLanes * kSumLanes; i += kSumLanes) {
    sum += weight(i);
  }
  char* const of_warp = SharedMemory() + kDrawHeadBytes + 8 * 32 * WarpIndex();
  StoreShared(of_warp + 8 * lane, sum);
  SyncWarp();
  if (lane % kSumLanes == 0 && size > 0) {
    sum = SumOfBlock(
        size, [&](int i) { return LoadShared<double>(of_warp + 8 * (lane + i)); }, weight);
    StoreGlobal(task.sums + static_cast<int64_t>(BlockIndexY()) * task.num_sums + block, sum);
  }
}

// --- One draw, by a block
// -------------------------------------------------------------------------

// The shared memory of a draw from all tokens.
struct AllShared {
  char* sums;     // [num_sums] double
  char* weights;  // [kSumBlock] float
};

// All threads: the sums of the draw's row → shared memory.
TM_DEVICE void CopySums(const DrawTask& task, char* to) {
  const double* sums = task.sums + static_cast<int64_t>(BlockIndexY()) * task.num_sums;
  for (int i = ThreadIndexX(); i < task.num_sums; i += 32 * kDrawWarps) {
    StoreShared(to + 8 * i, LoadGlobal(sums + i));
  }
}

TM_DEVICE double SumOfSums(const char* sums, int num_sums) {
  double total = 0;
#pragma unroll 8
  for (int i = 0; i < num_sums; ++i) {
    total += LoadShared<double>(sums + 8 * i);
  }
  return total;
}

// The block of sums in which the sum exceeds `left`, and what of `left` is behind those before it.
struct PlaceInRow {
  int block;
  double left;
};

TM_DEVICE PlaceInRow FindBlock(const AllShared& shared, int num_sums, double uniform) {
  const auto sum = [&](int i) { return LoadShared<double>(shared.sums + 8 * i); };
  PlaceInRow place = {0, uniform * SumOfSums(shared.sums, num_sums)};
  while (place.block + 1 < num_sums && place.left >= sum(place.block)) {
    place.left -= sum(place.block);
    ++place.block;
  }
  return place;
}

// The token, in thread 0; -1 where rounding took the last step of a block.
TM_DEVICE int DrawFromSums(const DrawTask& task, const RowDraw& draw, const Weights& weights) {
  const int thread = ThreadIndexX();
  char* const place_at = SharedMemory();
  const AllShared shared = {SharedMemory() + kDrawHeadBytes,
                            SharedMemory() + kDrawHeadBytes + 8 * task.num_sums};
  CopySums(task, shared.sums);
  SyncBlock();
  if (thread == 0) {
    StoreShared(place_at, FindBlock(shared, task.num_sums, draw.uniform));
  }
  SyncBlock();
  const auto place = LoadShared<PlaceInRow>(place_at);
  const int begin = place.block * kSumBlock;
  const int left_ids = task.op.vocab_size - begin;
  const int size = left_ids < kSumBlock ? left_ids : kSumBlock;
  const float* row = RowOf(task, draw);
  for (int i = thread; i < size; i += 32 * kDrawWarps) {
    StoreShared(shared.weights + 4 * i,
                AtLeast(weights.Of(LoadGlobal(row + begin + i)), draw.min_p));
  }
  SyncBlock();
  double left = place.left;
  for (int i = 0; thread == 0 && i < size; ++i) {
    const double weight = LoadShared<float>(shared.weights + 4 * i);
    if (left < weight) {
      return begin + i;
    }
    left -= weight;
  }
  return -1;
}

// The shared memory of a draw from listed candidates.
struct ListShared {
  char* highest;     // [num_chunks] as DrawTask's; then [num_sums], the sums
  char* candidates;  // [kMostCandidates] keys: bits of the weight, then of ~id
  char* sorted;      // the same, the largest first
};

// How many chunks reach `least`; `turn` is one more with each call.
TM_DEVICE int CountChunks(const ListShared& shared, int num_chunks, uint32_t least, int turn) {
  int count = 0;
#pragma unroll 4
  for (int i = ThreadIndexX(); i < num_chunks; i += 32 * kDrawWarps) {
    count += LoadShared<uint32_t>(shared.highest + 4 * i) >= least ? 1 : 0;
  }
  count = SumInWarp(count);
  const int lane = ThreadIndexX() & 31;
  char* const counts = SharedMemory() + 4 * kDrawWarps * (1 + turn % 2);
  char* const of_warp = counts + 4 * WarpIndex();
  if (lane == 0) {
    StoreShared(of_warp, count);
  }
  SyncBlock();  // those of the turn before last have been read
  return SumInWarp(lane < kDrawWarps ? LoadShared<int>(counts + 4 * lane) : 0);
}

// Bits that at least `wanted` chunks reach and not many more, unless maxima are equal.
TM_DEVICE uint32_t LeastListed(const ListShared& shared, int num_chunks, int wanted,
                               uint32_t highest) {
  uint32_t low = 0;
  uint32_t high = highest + 1;  // reached by none
  int reached = num_chunks;
#pragma unroll 1
  for (int turn = 0; high - low > 1 && reached > wanted + wanted / 4; ++turn) {
    const uint32_t middle = low + (high - low) / 2;
    const int count = CountChunks(shared, num_chunks, middle, turn);
    low = count >= wanted ? middle : low;
    reached = count >= wanted ? count : reached;
    high = count >= wanted ? high : middle;
  }
  return low;
}

// The tokens with a weight whose bits reach `least`; `count` in shared memory counts them, those
// that are not stored included.
template <int kWidth>
TM_DEVICE void ListCandidates(const DrawTask& task, const RowDraw& draw, const Weights& weights,
                              const ListShared& shared, uint32_t least, char* count) {
  constexpr int kAhead = 4;
  const int lane = ThreadIndexX() & 31;
  const float* row = RowOf(task, draw);
#pragma unroll 1
  for (int base = 32 * WarpIndex(); base < task.num_chunks; base += 32 * kDrawWarps) {
    uint32_t chunks =
        BallotInWarp(base + lane < task.num_chunks &&
                     LoadShared<uint32_t>(shared.highest + 4 * (base + lane)) >= least);
    while (chunks != 0) {
      ChunkValues<kWidth> values[kAhead];
      int index[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        // With none left a chunk of no ids.
        index[a] = chunks != 0 ? base + CountZeros(static_cast<int>(chunks)) : task.num_chunks;
        chunks &= chunks - 1;
        values[a] = LoadChunk<kWidth>(row, index[a], task.op.vocab_size);
      }
#pragma unroll
      for (int i = 0; i < 4 * kAhead; ++i) {
        const float x = values[i / 4].v[i % 4 / kWidth].v[i % kWidth];
        const int id = IdInChunk<kWidth>(index[i / 4], lane, i % 4);
        if (id >= task.op.vocab_size || OrderedBits(x) < least) {
          continue;
        }
        const uint32_t weight = FloatBits(weights.Of(x));
        const int at = weight > 0 ? AddShared(count, 1) : kMostCandidates;
        if (at < kMostCandidates) {
          StoreShared(shared.candidates + 8 * at,
                      uint64_t{weight} << 32 | ~static_cast<uint32_t>(id));
        }
      }
    }
  }
}

TM_DEVICE void SortCandidates(const ListShared& shared, int count) {
  for (int i = ThreadIndexX(); i < count; i += 32 * kDrawWarps) {
    const auto mine = LoadShared<uint64_t>(shared.candidates + 8 * i);
    int rank = 0;
#pragma unroll 8
    for (int j = 0; j < count; ++j) {
      rank += LoadShared<uint64_t>(shared.candidates + 8 * j) > mine ? 1 : 0;
    }
    StoreShared(shared.sorted + 8 * rank, mine);
  }
}

// The token, by one thread. Tokens that are not listed weigh at most `unlisted`. -1: the list is
// too short.
TM_DEVICE int DrawFromSorted(const DrawTask& task, const RowDraw& draw, const ListShared& shared,
                             int count, float unlisted) {
  const auto key = [&](int i) { return LoadShared<uint64_t>(shared.sorted + 8 * i); };
  const auto weight = [&](int i) { return BitsFloat(static_cast<uint32_t>(key(i) >> 32)); };
  while (count > 0 && weight(count - 1) <= unlisted) {
    --count;  // another may come before it
  }
  const bool is_whole = unlisted == 0.f;
  const bool is_limited = LimitsCount(draw, task.op.vocab_size);
  if (count < (is_whole || !is_limited ? 1 : draw.top_k)) {
    return -1;
  }
  double total = 0;
  if (is_limited) {
    count = count < draw.top_k ? count : draw.top_k;
    for (int i = 0; i < count; ++i) {
      total += weight(i);
    }
  } else {
    total = SumOfSums(shared.highest, task.num_sums);
  }
  const Kept kept = KeepByMass(count, total, draw, weight);
  if (!is_whole && !is_limited && kept.count == count && kept.sum < draw.top_p * total) {
    return -1;
  }
  return IdOfKey(key(DrawKept(kept, draw.uniform, weight)));
}

// The token, in thread 0; -1: left to the host.
template <int kWidth>
TM_DEVICE int DrawFromList(const DrawTask& task, const RowDraw& draw, const Weights& weights,
                           uint32_t highest) {
  // A weight is at most so much more than that of a higher logit, by the error of WeightOf.
  constexpr float kMonotone = 1.000001f;
  const int thread = ThreadIndexX();
  char* const count_at = SharedMemory();
  const int chunk_bytes = (4 * task.num_chunks + 7) / 8 * 8;
  char* const begin = SharedMemory() + kDrawHeadBytes;
  const ListShared shared = {begin, begin + chunk_bytes, begin + chunk_bytes + 8 * kMostCandidates};
  const uint32_t* from = task.highest + static_cast<int64_t>(BlockIndexY()) * task.num_chunks;
  for (int i = thread; i < task.num_chunks; i += 32 * kDrawWarps) {
    StoreShared(shared.highest + 4 * i, LoadGlobal(from + i));
  }
  SyncBlock();
  if (thread == 0) {
    StoreShared(count_at, 0);
  }
  uint32_t least = 0;
  if (task.op.vocab_size > kMostCandidates) {
    const int most = task.num_chunks * 3 / 4;  // of nearly all, a list would be too long
    least = LeastListed(shared, task.num_chunks, most < kMostListed ? most : kMostListed, highest);
  }
  SyncBlock();
  ListCandidates<kWidth>(task, draw, weights, shared, least, count_at);
  SyncBlock();
  const int count = LoadShared<int>(count_at);
  if (count > kMostCandidates) {
    return -1;
  }
  SortCandidates(shared, count);
  if (!LimitsCount(draw, task.op.vocab_size)) {
    CopySums(task, shared.highest);
  }
  SyncBlock();
  const float unlisted = least <= kLowestBits ? 0.f : weights.Of(FloatOfOrdered(least)) * kMonotone;
  return thread == 0 ? DrawFromSorted(task, draw, shared, count, unlisted) : -1;
}

// Grid: 1 × draws. DrawSharedBytes. One block per SM will do; without the 1 sm_120 spills.
template <int kWidth>
__global__ void __launch_bounds__(32 * kDrawWarps, 1) DrawKernel(DrawTask task) {
  const RowDraw draw = LoadDraw(task, BlockIndexY());
  const uint32_t highest = HighestOfRow<kDrawWarps>(task);
  int id = -1;
  if (MayDraw(highest)) {
    const Weights weights = {FloatOfOrdered(highest), draw.inverse_temperature};
    SyncBlock();  // all have read what HighestOfRow keeps
    id = DrawsFromAll(draw, task.op.vocab_size)
             ? DrawFromSums(task, draw, weights)
             : DrawFromList<kWidth>(task, draw, weights, highest);
  }
  if (ThreadIndexX() == 0) {
    StoreGlobal(task.op.ids + BlockIndexY(), id);
  }
}

inline size_t DrawSharedBytes(int num_chunks, int num_sums) {
  const size_t list = (4 * static_cast<size_t>(num_chunks) + 7) / 8 * 8 + 16 * kMostCandidates;
  const size_t all = 8 * static_cast<size_t>(num_sums) + 4 * kSumBlock;
  return kDrawHeadBytes + (list > all ? list : all);
}

}  // namespace turbomind::cuda
