#pragma once

// ⑦ The kernels of dense_ops.h for mixture-of-experts layers.

#include <cmath>
#include <cstdint>

#include "turbomind/backend/cuda/dense/elementwise.cuh"
#include "turbomind/ops/params.h"

namespace turbomind::cuda {

inline constexpr int kRouteWarps = 4;

// Return a key that ranks experts by descending logits, then ascending ids. NaN ranks as -infinity.
TM_DEVICE uint64_t ExpertKey(float logit, int expert) {
  return RankKey(IsNan(logit) ? -INFINITY : logit, expert);
}

// The highest logit of a token and the sum of exp(logit - highest).
struct SoftmaxParts {
  float highest = 0.f;
  float sum = 1.f;
};

TM_DEVICE SoftmaxParts SoftmaxOf(const float* logits, int num_experts) {
  const int lane = ThreadIndexX() & 31;
  uint64_t key = 0;
  for (int expert = lane; expert < num_experts; expert += 32) {
    const uint64_t other = ExpertKey(LoadGlobal(logits + expert), expert);
    key = other > key ? other : key;
  }
  SoftmaxParts parts;
  parts.highest = LoadGlobal(logits + IdOfKey(MaxKeyInWarp(key)));
  float sum = 0.f;
  for (int expert = lane; expert < num_experts; expert += 32) {
    sum += expf(LoadGlobal(logits + expert) - parts.highest);
  }
  parts.sum = AddInWarp(sum);
  return parts;
}

// What a token's experts are selected by.
struct RouteChoice {
  SoftmaxParts softmax = {};
  uint32_t groups = ~0u;  // a bit for every group to select from

  TM_DEVICE static bool ByScores(const RouteExpertsParams& p) {
    return p.bias != nullptr || p.num_groups > 1;
  }
  // Return the value of an expert. Without a bias and groups the order of the logits is enough.
  TM_DEVICE float Of(const RouteExpertsParams& p, float logit, int expert) const {
    if (!ByScores(p)) {
      return logit;
    }
    if (p.num_groups > 1 && (groups >> expert / (p.num_experts / p.num_groups) & 1) == 0) {
      return -INFINITY;
    }
    const float score = p.sigmoid ? Sigmoid(logit) : expf(logit - softmax.highest) / softmax.sum;
    return p.bias != nullptr ? score + LoadGlobal(p.bias + expert) : score;
  }
};

// Return a bit for every group to select from. Each lane has one group.
TM_DEVICE uint32_t SelectGroups(const RouteExpertsParams& p, const RouteChoice& all,
                                const float* logits) {
  const int lane = ThreadIndexX() & 31;
  const int size = p.num_experts / p.num_groups;
  float first = -INFINITY;
  float second = -INFINITY;
  for (int i = 0; i < size && lane < p.num_groups; ++i) {
    const int expert = lane * size + i;
    const float value = all.Of(p, LoadGlobal(logits + expert), expert);
    const float key = IsNan(value) ? -INFINITY : value;
    second = key > first ? first : key > second ? key : second;
    first = key > first ? key : first;
  }
  const uint64_t key =
      lane < p.num_groups ? ExpertKey(p.best_of_group ? first : first + second, lane) : 0;
  uint32_t groups = 0;
  for (int rank = 0; rank < p.top_groups; ++rank) {
    const bool taken = (groups >> lane & 1) != 0;
    groups |= 1u << IdOfKey(MaxKeyInWarp(taken ? 0 : key));
  }
  return groups;
}

// Route a token with one warp. It first finds the key of the token's last expert. It then writes
// the experts with that key or a larger one, in the order of their ids.
TM_DEVICE void RouteToken(const RouteExpertsParams& p, int64_t token) {
  const int lane = ThreadIndexX() & 31;
  const float* logits = p.logits + token * p.num_experts;
  RouteChoice choice;
  if (RouteChoice::ByScores(p) && !p.sigmoid) {
    choice.softmax = SoftmaxOf(logits, p.num_experts);
  }
  if (p.num_groups > 1) {
    choice.groups = SelectGroups(p, choice, logits);
  }
  uint64_t first = 0;
  uint64_t last = ~uint64_t{0};
  for (int rank = 0; rank < p.top_k; ++rank) {
    uint64_t next = 0;
#pragma unroll 4
    for (int expert = lane; expert < p.num_experts; expert += 32) {
      const float logit = LoadGlobal(logits + expert);
      const uint64_t key = ExpertKey(choice.Of(p, logit, expert), expert);
      next = key < last && key > next ? key : next;
    }
    last = MaxKeyInWarp(next);
    first = rank == 0 ? last : first;
  }
  const float highest =
      RouteChoice::ByScores(p) ? choice.softmax.highest : LoadGlobal(logits + IdOfKey(first));
  float sum = 0.f;
  for (int expert = lane; expert < p.num_experts; expert += 32) {
    const float logit = LoadGlobal(logits + expert);
    if (!p.normalize || ExpertKey(choice.Of(p, logit, expert), expert) >= last) {
      sum += p.sigmoid ? Sigmoid(logit) : expf(logit - highest);
    }
  }
  sum = p.sigmoid && !p.normalize ? 1.f : AddInWarp(sum);
  int64_t out = token * p.top_k;
  for (int start = 0; start < p.num_experts; start += 32) {
    const int expert = start + lane;
    const float logit = expert < p.num_experts ? LoadGlobal(logits + expert) : 0.f;
    const bool chosen =
        expert < p.num_experts && ExpertKey(choice.Of(p, logit, expert), expert) >= last;
    const uint32_t all = BallotInWarp(chosen);
    if (chosen) {
      const int64_t at = out + CountOnes(all & ((1u << lane) - 1));
      StoreGlobal(p.ids + at, expert);
      const float weight = (p.sigmoid ? Sigmoid(logit) : expf(logit - highest)) / sum;
      const float factor = p.expert_scale != nullptr ? LoadGlobal(p.expert_scale + expert) : 1.f;
      StoreGlobal(p.weights + at, MulRounded(weight, factor));
    }
    out += CountOnes(all);
  }
}

// One warp per token.
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps, 8) RouteExpertsKernel(RouteExpertsParams p) {
  BeginKernel();
  const int64_t token = static_cast<int64_t>(BlockIndexX()) * kWarps + ThreadIndexX() / 32;
  if (token < p.num_tokens) {
    RouteToken(p, token);
  }
}

inline constexpr int kGroupWarps = 8;
inline constexpr int kGroupAhead = 4;  // ids that a lane loads at once
inline constexpr int kGroupSharedBytes = 2 * kGroupWarps * sizeof(int);

// Call fn(id, pair) in all lanes for 32 pairs of [begin, end) at a time, in order. id is -1 for
// pairs from `end` on.
template <class Fn>
TM_DEVICE void ForPairs(const int32_t* ids, int begin, int end, Fn fn) {
  const int lane = ThreadIndexX() & 31;
  for (int start = begin; start < end; start += 32 * kGroupAhead) {
    int32_t id[kGroupAhead];
#pragma unroll
    for (int i = 0; i < kGroupAhead; ++i) {
      const int pair = start + 32 * i + lane;
      id[i] = pair < end ? LoadGlobal(ids + pair) : -1;
    }
#pragma unroll
    for (int i = 0; i < kGroupAhead; ++i) {
      fn(id[i], start + 32 * i + lane);
    }
  }
}

// Pairs of lower experts and of an expert.
struct PairCounts {
  int lower = 0;
  int equal = 0;
};

// Count the pairs of [begin, end) with one warp.
TM_DEVICE PairCounts CountPairs(const int32_t* ids, int begin, int end, int expert) {
  PairCounts counts;
  ForPairs(ids, begin, end, [&](int32_t id, int) {
    counts.lower += id >= 0 && id < expert ? 1 : 0;
    counts.equal += id == expert ? 1 : 0;
  });
  return {SumInWarp(counts.lower), SumInWarp(counts.equal)};
}

// Write the slots of the expert's pairs in [begin, end), from `slot` on, with one warp. Return the
// slot after them.
TM_DEVICE int WriteSlots(const GroupRowsParams& p, int begin, int end, int expert, int slot) {
  const int lane = ThreadIndexX() & 31;
  ForPairs(p.ids, begin, end, [&](int32_t id, int pair) {
    const uint32_t all = BallotInWarp(id == expert);
    if (id == expert) {
      const int at = slot + CountOnes(all & ((1u << lane) - 1));
      StoreGlobal(p.slots + pair, at);
      StoreGlobal(p.x_rows + at, pair / p.top_k);
      if (p.slot_weights != nullptr) {
        StoreGlobal(p.slot_weights + at, LoadGlobal(p.weights + pair));
      }
    }
    slot += CountOnes(all);
  });
  return slot;
}

// One block per expert, which reads all ids. Each warp counts the pairs of lower experts and of
// this expert in its own run. From these counts it computes the slot of its first pair.
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps) GroupRowsKernel(GroupRowsParams p) {
  BeginKernel();
  const int expert = BlockIndexX();
  const int lane = ThreadIndexX() & 31;
  const int warp = ThreadIndexX() / 32;
  const int num_pairs = p.num_tokens * p.top_k;
  const int run = (num_pairs + 32 * kWarps - 1) / (32 * kWarps) * 32;
  const int begin = warp * run;
  const int end = begin + run < num_pairs ? begin + run : num_pairs;
  const PairCounts own = CountPairs(p.ids, begin, end, expert);
  int* counts = reinterpret_cast<int*>(SharedMemory());
  if (lane == 0) {
    StoreShared(counts + warp, own.lower);
    StoreShared(counts + kWarps + warp, own.equal);
  }
  SyncBlock();
  int before = lane < kWarps ? LoadShared<int>(counts + lane) : 0;
  before += lane < warp ? LoadShared<int>(counts + kWarps + lane) : 0;
  const int slot = WriteSlots(p, begin, end, expert, SumInWarp(before));
  if (lane == 0 && warp == kWarps - 1) {
    StoreGlobal(p.offsets + expert + 1, slot);
  }
  if (expert == 0 && ThreadIndexX() == 0) {
    StoreGlobal(p.offsets, 0);
  }
}

inline constexpr int kAssignWarps = 8;
inline constexpr int kMaxAssignedTokens = 16;  // two for each warp

// Both of the kernels above for few tokens, in one block. A warp has some tokens and then some
// experts, and reads all ids for each expert.
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps) AssignExpertsKernel(AssignExpertsParams p) {
  BeginKernel();
  const int warp = ThreadIndexX() / 32;
  for (int token = warp; token < p.route.num_tokens; token += kWarps) {
    RouteToken(p.route, token);
  }
  SyncBlock();  // the ids and weights of all tokens are visible to the block
  const int num_pairs = p.rows.num_tokens * p.rows.top_k;
  for (int expert = warp; expert < p.rows.num_experts; expert += kWarps) {
    const int first = CountPairs(p.rows.ids, 0, num_pairs, expert).lower;
    const int end = WriteSlots(p.rows, 0, num_pairs, expert, first);
    if (ThreadIndexX() % 32 == 0) {
      StoreGlobal(p.rows.offsets + expert + 1, end);
    }
  }
  if (ThreadIndexX() == 0) {
    StoreGlobal(p.rows.offsets, 0);
  }
}

inline constexpr int kCombineThreads = 128;

// Grid: tokens × ⌈dim / (kCombineThreads kWidth)⌉. kWidth is 4 if every row is 16-byte aligned.
template <int kWidth>
__global__ void __launch_bounds__(kCombineThreads) CombineExpertsKernel(CombineExpertsParams p) {
  BeginKernel();
  const int at = (BlockIndexY() * kCombineThreads + ThreadIndexX()) * kWidth;
  if (at >= p.dim) {
    return;
  }
  const int64_t first = static_cast<int64_t>(BlockIndexX()) * p.top_k;
  Floats<kWidth> sum = {};
#pragma unroll 4
  for (int64_t rank = first; rank < first + p.top_k; ++rank) {
    const int64_t slot = p.slots == nullptr ? rank : LoadGlobal(p.slots + rank);
    const auto y = LoadFloats<kWidth>(p.y + slot * p.dim + at);
    const float given = p.weights != nullptr ? LoadGlobal(p.weights + rank) : 1.f;
    const float weight = p.sigmoid ? Sigmoid(given) : given;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      sum.v[j] += weight * y.v[j];
    }
  }
  float* to = p.out + static_cast<int64_t>(BlockIndexX()) * p.dim + at;
  Floats<kWidth> out = {};
  if (p.accumulate) {
    out = LoadFloats<kWidth>(to);
  }
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    out.v[j] += MulRounded(p.scale, sum.v[j]);
  }
  StoreFloats(to, out);
}

}  // namespace turbomind::cuda
