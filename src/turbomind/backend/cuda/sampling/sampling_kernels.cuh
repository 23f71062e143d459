#pragma once

// ⑧ Samples tokens from rows of logits with the math of ops/sampling_math.h. Every number has the
// same bits as on the host.
//
// One pass over a row finds the highest logit of every chunk of 128. A logit that n of these maxima
// reach is reached by at least n tokens. The tokens that reach the kMaxListed-th highest maximum
// are listed with their weights; they are in few chunks. If sampling needs more tokens than the
// list holds, it is left to the host. Sums over a whole row need a second pass.

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "turbomind/backend/cuda/dense/elementwise.cuh"
#include "turbomind/ops/sampling_math.h"

namespace turbomind::cuda {

inline constexpr int kChunk = 128;          // logits that a warp reads at once, 16 bytes per lane
inline constexpr int kChunksOfWarp = 8;     // in flight together
inline constexpr int kChunkWarps = 4;       // per block
inline constexpr int kSumWarps = 4;         // per block
inline constexpr int kSumBlocksOfWarp = 4;  // in parallel, kSumLanes lanes each
inline constexpr int kSamplingWarps = 8;
inline constexpr int kMaxListed = 256;          // rank of the chunk maximum that limits a list
inline constexpr int kMaxCandidates = 1024;     // per list
inline constexpr int kSamplingHeadBytes = 128;  // shared memory for values of the whole block

struct SamplingTask {
  SampleRowsParams op;  // with samples on the GPU
  // [num_samplings, num_chunks] OrderedBits of the highest logit of each chunk; kRefusedBits for
  // NaN or +infinity
  uint32_t* highest = nullptr;
  // [num_samplings, num_sums] sums of blocks of kSumBlock, for the samples that need them
  double* sums = nullptr;
  int num_chunks = 0;
  int num_sums = 0;
};

inline constexpr uint32_t kRefusedBits = ~0u;
inline constexpr uint32_t kLowestBits = 0x007FFFFFu;  // of -infinity

TM_DEVICE RowSampling LoadSampling(const SamplingTask& task, int sampling) {
  return LoadGlobal(task.op.samplings + sampling);
}
TM_DEVICE const float* RowOf(const SamplingTask& task, const RowSampling& sampling) {
  return task.op.logits + static_cast<int64_t>(sampling.row) * task.op.vocab_size;
}

// A lane's four values of a chunk, in the order of ids if kWidth is 4.
template <int kWidth>
struct ChunkValues {
  Floats<kWidth> v[4 / kWidth];
};

// Return the id of value i.
template <int kWidth>
TM_DEVICE int IdInChunk(int chunk, int lane, int i) {
  return chunk * kChunk + (i / kWidth * 32 + lane) * kWidth + i % kWidth;
}

// Load a chunk, with -infinity past the last id.
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

// Grid: chunks / (kChunkWarps kChunksOfWarp) × samplings.
template <int kWidth>
__global__ void __launch_bounds__(32 * kChunkWarps) ChunkMaximaKernel(SamplingTask task) {
  BeginKernel();
  constexpr float kHighest = FLT_MAX;
  const int lane = ThreadIndexX() & 31;
  const int first = (BlockIndexX() * kChunkWarps + WarpIndex()) * kChunksOfWarp;
  if (first >= task.num_chunks) {
    return;
  }
  const float* row = RowOf(task, LoadSampling(task, BlockIndexY()));
  ChunkValues<kWidth> values[kChunksOfWarp];
#pragma unroll
  for (int c = 0; c < kChunksOfWarp; ++c) {
    values[c] = LoadChunk<kWidth>(row, first + c, task.op.vocab_size);
  }
  uint32_t mine = 0;
#pragma unroll
  for (int c = 0; c < kChunksOfWarp; ++c) {
    uint32_t max_bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = values[c].v[i / kWidth].v[i % kWidth];
      const uint32_t bits = x <= kHighest ? OrderedBits(x) : kRefusedBits;
      max_bits = bits > max_bits ? bits : max_bits;
    }
    max_bits = MaxInWarp(max_bits);
    mine = lane == c ? max_bits : mine;
  }
  if (lane < kChunksOfWarp && first + lane < task.num_chunks) {
    StoreGlobal(task.highest + static_cast<int64_t>(BlockIndexY()) * task.num_chunks + first + lane,
                mine);
  }
}

// Return the highest of a row's chunk maxima. Uses the first 4 kWarps bytes of shared memory.
template <int kWarps>
TM_DEVICE uint32_t HighestOfRow(const SamplingTask& task) {
  const uint32_t* highest = task.highest + static_cast<int64_t>(BlockIndexY()) * task.num_chunks;
  uint32_t max_bits = 0;
#pragma unroll 4
  for (int i = ThreadIndexX(); i < task.num_chunks; i += 32 * kWarps) {
    const uint32_t bits = LoadGlobal(highest + i);
    max_bits = bits > max_bits ? bits : max_bits;
  }
  max_bits = MaxInWarp(max_bits);
  const int lane = ThreadIndexX() & 31;
  char* const of_warp = SharedMemory() + 4 * WarpIndex();
  if (lane == 0) {
    StoreShared(of_warp, max_bits);
  }
  SyncBlock();
  return MaxInWarp(lane < kWarps ? LoadShared<uint32_t>(SharedMemory() + 4 * lane) : 0u);
}

// Return whether the sampler samples from a row with this maximum.
TM_DEVICE bool MaySample(uint32_t highest) {
  return highest > kLowestBits && highest != kRefusedBits;
}

// Converts the logits of a row to weights.
struct Weights {
  float highest;
  float inverse_temperature;
  TM_DEVICE float Of(float logit) const {
    return WeightOf((logit - highest) * inverse_temperature);
  }
};

TM_DEVICE float ZeroBelow(float weight, float min_weight) {
  return weight >= min_weight ? weight : 0.f;
}

// Grid: sums / (kSumWarps kSumBlocksOfWarp) × samplings. Shared memory: kSamplingHeadBytes and
// eight bytes per thread.
__global__ void __launch_bounds__(32 * kSumWarps) WeightSumsKernel(SamplingTask task) {
  BeginKernel();
  const RowSampling sampling = LoadSampling(task, BlockIndexY());
  if (LimitsCount(sampling, task.op.vocab_size)) {
    return;
  }
  const uint32_t highest = HighestOfRow<kSumWarps>(task);
  if (!MaySample(highest)) {
    return;
  }
  const Weights weights = {FloatOfOrdered(highest), sampling.inverse_temperature};
  const float min_weight = SamplesFromAll(sampling, task.op.vocab_size) ? sampling.min_p : 0.f;
  const int lane = ThreadIndexX() & 31;
  const int block = (BlockIndexX() * kSumWarps + WarpIndex()) * kSumBlocksOfWarp + lane / kSumLanes;
  const int left = task.op.vocab_size - block * kSumBlock;
  const int size = block >= task.num_sums ? 0 : left < kSumBlock ? left : kSumBlock;
  const float* logits = RowOf(task, sampling) + static_cast<int64_t>(block) * kSumBlock;
  const auto weight = [&](int i) {
    return ZeroBelow(weights.Of(LoadGlobal(logits + i)), min_weight);
  };
  double sum = 0;
#pragma unroll 8
  for (int i = lane % kSumLanes; i < size / kSumLanes * kSumLanes; i += kSumLanes) {
    sum += weight(i);
  }
  char* const of_warp = SharedMemory() + kSamplingHeadBytes + 8 * 32 * WarpIndex();
  StoreShared(of_warp + 8 * lane, sum);
  SyncWarp();
  if (lane % kSumLanes == 0 && size > 0) {
    sum = SumOfBlock(
        size, [&](int i) { return LoadShared<double>(of_warp + 8 * (lane + i)); }, weight);
    StoreGlobal(task.sums + static_cast<int64_t>(BlockIndexY()) * task.num_sums + block, sum);
  }
}

// The shared memory for sampling from all tokens.
struct AllShared {
  char* sums;     // [num_sums] double
  char* weights;  // [kSumBlock] float
};

// Copy the sums of the sample's row to shared memory, with all threads.
TM_DEVICE void CopySums(const SamplingTask& task, char* to) {
  const double* sums = task.sums + static_cast<int64_t>(BlockIndexY()) * task.num_sums;
  for (int i = ThreadIndexX(); i < task.num_sums; i += 32 * kSamplingWarps) {
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

// The block of sums that contains the sampled value, and the value's remainder within that block.
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

// Return the token, in thread 0, or -1 if rounding moved the value past the end of a block.
TM_DEVICE int SampleFromSums(const SamplingTask& task, const RowSampling& sampling,
                             const Weights& weights) {
  const int thread = ThreadIndexX();
  char* const place_at = SharedMemory();
  const AllShared shared = {SharedMemory() + kSamplingHeadBytes,
                            SharedMemory() + kSamplingHeadBytes + 8 * task.num_sums};
  CopySums(task, shared.sums);
  SyncBlock();
  if (thread == 0) {
    StoreShared(place_at, FindBlock(shared, task.num_sums, sampling.uniform));
  }
  SyncBlock();
  const auto place = LoadShared<PlaceInRow>(place_at);
  const int begin = place.block * kSumBlock;
  const int left_ids = task.op.vocab_size - begin;
  const int size = left_ids < kSumBlock ? left_ids : kSumBlock;
  const float* row = RowOf(task, sampling);
  for (int i = thread; i < size; i += 32 * kSamplingWarps) {
    StoreShared(shared.weights + 4 * i,
                ZeroBelow(weights.Of(LoadGlobal(row + begin + i)), sampling.min_p));
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

// The shared memory for sampling from listed candidates.
struct ListShared {
  char* highest;     // [num_chunks] as in SamplingTask; later the [num_sums] sums
  char* candidates;  // [kMaxCandidates] keys: bits of the weight, then of ~id
  char* sorted;      // the same, in descending order
};

// Count the chunks that reach `least`. `turn` must increase by one with each call.
TM_DEVICE int CountChunks(const ListShared& shared, int num_chunks, uint32_t min_bits, int turn) {
  int count = 0;
#pragma unroll 4
  for (int i = ThreadIndexX(); i < num_chunks; i += 32 * kSamplingWarps) {
    count += LoadShared<uint32_t>(shared.highest + 4 * i) >= min_bits ? 1 : 0;
  }
  count = SumInWarp(count);
  const int lane = ThreadIndexX() & 31;
  char* const counts = SharedMemory() + 4 * kSamplingWarps * (1 + turn % 2);
  char* const of_warp = counts + 4 * WarpIndex();
  if (lane == 0) {
    StoreShared(of_warp, count);
  }
  SyncBlock();  // the counts of the turn before last have been read
  return SumInWarp(lane < kSamplingWarps ? LoadShared<int>(counts + 4 * lane) : 0);
}

// Return bits that at least `wanted` chunks reach, and not many more unless maxima are equal.
TM_DEVICE uint32_t MinListed(const ListShared& shared, int num_chunks, int wanted,
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

// List the tokens whose logits reach `least` and whose weights are positive. `count` in shared
// memory counts them, including those that no longer fit.
template <int kWidth>
TM_DEVICE void ListCandidates(const SamplingTask& task, const RowSampling& sampling,
                              const Weights& weights, const ListShared& shared, uint32_t min_bits,
                              char* count) {
  constexpr int kAhead = 4;
  const int lane = ThreadIndexX() & 31;
  const float* row = RowOf(task, sampling);
#pragma unroll 1
  for (int base = 32 * WarpIndex(); base < task.num_chunks; base += 32 * kSamplingWarps) {
    uint32_t chunks =
        BallotInWarp(base + lane < task.num_chunks &&
                     LoadShared<uint32_t>(shared.highest + 4 * (base + lane)) >= min_bits);
    while (chunks != 0) {
      ChunkValues<kWidth> values[kAhead];
      int index[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        // Once no chunk is left, load one without ids.
        index[a] = chunks != 0 ? base + CountZeros(static_cast<int>(chunks)) : task.num_chunks;
        chunks &= chunks - 1;
        values[a] = LoadChunk<kWidth>(row, index[a], task.op.vocab_size);
      }
#pragma unroll
      for (int i = 0; i < 4 * kAhead; ++i) {
        const float x = values[i / 4].v[i % 4 / kWidth].v[i % kWidth];
        const int id = IdInChunk<kWidth>(index[i / 4], lane, i % 4);
        if (id >= task.op.vocab_size || OrderedBits(x) < min_bits) {
          continue;
        }
        const uint32_t weight = FloatBits(weights.Of(x));
        const int at = weight > 0 ? AddShared(count, 1) : kMaxCandidates;
        if (at < kMaxCandidates) {
          StoreShared(shared.candidates + 8 * at,
                      uint64_t{weight} << 32 | ~static_cast<uint32_t>(id));
        }
      }
    }
  }
}

TM_DEVICE void SortCandidates(const ListShared& shared, int count) {
  for (int i = ThreadIndexX(); i < count; i += 32 * kSamplingWarps) {
    const auto mine = LoadShared<uint64_t>(shared.candidates + 8 * i);
    int rank = 0;
#pragma unroll 8
    for (int j = 0; j < count; ++j) {
      rank += LoadShared<uint64_t>(shared.candidates + 8 * j) > mine ? 1 : 0;
    }
    StoreShared(shared.sorted + 8 * rank, mine);
  }
}

// Return the token, in one thread, or -1 if the list is too short. Unlisted tokens weigh at most
// `unlisted`.
TM_DEVICE int SampleFromSorted(const SamplingTask& task, const RowSampling& sampling,
                               const ListShared& shared, int count, float unlisted) {
  const auto key = [&](int i) { return LoadShared<uint64_t>(shared.sorted + 8 * i); };
  const auto weight = [&](int i) { return BitsFloat(static_cast<uint32_t>(key(i) >> 32)); };
  while (count > 0 && weight(count - 1) <= unlisted) {
    --count;  // an unlisted token may precede it
  }
  const bool is_whole = unlisted == 0.f;
  const bool is_limited = LimitsCount(sampling, task.op.vocab_size);
  if (count < (is_whole || !is_limited ? 1 : sampling.top_k)) {
    return -1;
  }
  double total = 0;
  if (is_limited) {
    count = count < sampling.top_k ? count : sampling.top_k;
    for (int i = 0; i < count; ++i) {
      total += weight(i);
    }
  } else {
    total = SumOfSums(shared.highest, task.num_sums);
  }
  const Kept kept = KeepByMass(count, total, sampling, weight);
  if (!is_whole && !is_limited && kept.count == count && kept.sum < sampling.top_p * total) {
    return -1;
  }
  return IdOfKey(key(SampleKept(kept, sampling.uniform, weight)));
}

// Return the token, in thread 0, or -1 if it is left to the host.
template <int kWidth>
TM_DEVICE int SampleFromList(const SamplingTask& task, const RowSampling& sampling,
                             const Weights& weights, uint32_t highest) {
  // Because of the error of WeightOf, a weight can exceed that of a higher logit by at most this
  // factor.
  constexpr float kMonotone = 1.000001f;
  const int thread = ThreadIndexX();
  char* const count_at = SharedMemory();
  const int chunk_bytes = (4 * task.num_chunks + 7) / 8 * 8;
  char* const begin = SharedMemory() + kSamplingHeadBytes;
  const ListShared shared = {begin, begin + chunk_bytes, begin + chunk_bytes + 8 * kMaxCandidates};
  const uint32_t* from = task.highest + static_cast<int64_t>(BlockIndexY()) * task.num_chunks;
  for (int i = thread; i < task.num_chunks; i += 32 * kSamplingWarps) {
    StoreShared(shared.highest + 4 * i, LoadGlobal(from + i));
  }
  SyncBlock();
  if (thread == 0) {
    StoreShared(count_at, 0);
  }
  uint32_t min_bits = 0;
  if (task.op.vocab_size > kMaxCandidates) {
    const int max_listed =
        task.num_chunks * 3 / 4;  // a list from nearly all chunks would be too long
    min_bits = MinListed(shared, task.num_chunks, max_listed < kMaxListed ? max_listed : kMaxListed,
                         highest);
  }
  SyncBlock();
  ListCandidates<kWidth>(task, sampling, weights, shared, min_bits, count_at);
  SyncBlock();
  const int count = LoadShared<int>(count_at);
  if (count > kMaxCandidates) {
    return -1;
  }
  SortCandidates(shared, count);
  if (!LimitsCount(sampling, task.op.vocab_size)) {
    CopySums(task, shared.highest);
  }
  SyncBlock();
  const float unlisted =
      min_bits <= kLowestBits ? 0.f : weights.Of(FloatOfOrdered(min_bits)) * kMonotone;
  return thread == 0 ? SampleFromSorted(task, sampling, shared, count, unlisted) : -1;
}

// Grid: 1 × samplings. SamplingSharedBytes. One block per SM suffices; without the 1, sm_120 spills
// registers.
template <int kWidth>
__global__ void __launch_bounds__(32 * kSamplingWarps, 1) SamplingKernel(SamplingTask task) {
  BeginKernel();
  const RowSampling sampling = LoadSampling(task, BlockIndexY());
  const uint32_t highest = HighestOfRow<kSamplingWarps>(task);
  int id = -1;
  if (MaySample(highest)) {
    const Weights weights = {FloatOfOrdered(highest), sampling.inverse_temperature};
    SyncBlock();  // all threads have read the memory of HighestOfRow
    id = SamplesFromAll(sampling, task.op.vocab_size)
             ? SampleFromSums(task, sampling, weights)
             : SampleFromList<kWidth>(task, sampling, weights, highest);
  }
  if (ThreadIndexX() == 0) {
    StoreGlobal(task.op.ids + BlockIndexY(), id);
  }
}

inline size_t SamplingSharedBytes(int num_chunks, int num_sums) {
  const size_t list = (4 * static_cast<size_t>(num_chunks) + 7) / 8 * 8 + 16 * kMaxCandidates;
  const size_t all = 8 * static_cast<size_t>(num_sums) + 4 * kSumBlock;
  return kSamplingHeadBytes + (list > all ? list : all);
}

}  // namespace turbomind::cuda
