#include "turbomind/backend/cpu/cpu_dense_ops.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "turbomind/backend/cpu/packed_matrix.h"
#include "turbomind/backend/cpu/parallel_rows.h"
#include "turbomind/core/check.h"

namespace turbomind {
namespace {

constexpr int kMaxExperts = 1024;  // of a layer; ModelConfig::Validate has the same limit

// NaN counts as the lowest score, so that an expert is found for any logits.
float RouteKey(float logit) {
  return std::isnan(logit) ? -std::numeric_limits<float>::infinity() : logit;
}

// Returns the expert after `last` in order of falling logits, then rising ids. -1 returns the first
// expert.
int32_t NextExpert(const float* logits, int num_experts, int32_t last) {
  int32_t best = -1;
  for (int32_t expert = 0; expert < num_experts; ++expert) {
    const float key = RouteKey(logits[expert]);
    const float last_key = last < 0 ? 0.f : RouteKey(logits[last]);
    const bool follows = last < 0 || key < last_key || (key == last_key && expert > last);
    if (follows && (best < 0 || key > RouteKey(logits[best]))) {
      best = expert;
    }
  }
  return best;
}

// Writes the top_k experts with the highest keys, from the highest on.
void SelectExperts(const RouteExpertsParams& params, const float* keys, int32_t* ids) {
  int32_t last = -1;
  for (int rank = 0; rank < params.top_k; ++rank) {
    last = NextExpert(keys, params.num_experts, last);
    ids[rank] = last;
  }
}

// Returns the highest key, or the sum of the two highest ones.
float GroupScore(const float* keys, int count, bool best) {
  const int32_t first = NextExpert(keys, count, -1);
  return best ? RouteKey(keys[first])
              : RouteKey(keys[first]) + RouteKey(keys[NextExpert(keys, count, first)]);
}

// Sets the keys of the experts outside the selected groups to -infinity.
void HideGroups(const RouteExpertsParams& params, float* keys) {
  const int size = params.num_experts / params.num_groups;
  float scores[kMaxExpertGroups];
  bool selected[kMaxExpertGroups] = {};
  for (int group = 0; group < params.num_groups; ++group) {
    scores[group] = GroupScore(keys + group * size, size, params.best_of_group);
  }
  int32_t last = -1;
  for (int rank = 0; rank < params.top_groups; ++rank) {
    last = NextExpert(scores, params.num_groups, last);
    selected[last] = true;
  }
  for (int group = 0; group < params.num_groups; ++group) {
    if (!selected[group]) {
      std::fill_n(keys + group * size, size, -std::numeric_limits<float>::infinity());
    }
  }
}

// Routes by scores that are computed for every expert, because the bias is added to them, or
// because those of a group are.
void RouteByScores(const RouteExpertsParams& params, int64_t token) {
  const int count = params.num_experts;
  const float* logits = params.logits + token * count;
  int32_t* ids = params.ids + token * params.top_k;
  float* weights = params.weights + token * params.top_k;
  float scores[kMaxExperts];
  float keys[kMaxExperts];
  const float highest = *std::max_element(logits, logits + count);
  double all = 0;
  for (int i = 0; i < count; ++i) {
    scores[i] = params.sigmoid ? 1.f / (1.f + std::exp(-logits[i])) : std::exp(logits[i] - highest);
    all += scores[i];
  }
  for (int i = 0; i < count; ++i) {
    scores[i] = params.sigmoid ? scores[i] : static_cast<float>(scores[i] / all);
    keys[i] = params.bias != nullptr ? scores[i] + params.bias[i] : scores[i];
  }
  if (params.num_groups > 1) {
    HideGroups(params, keys);
  }
  SelectExperts(params, keys, ids);
  std::sort(ids, ids + params.top_k);
  double sum = 0;
  for (int rank = 0; rank < params.top_k; ++rank) {
    weights[rank] = scores[ids[rank]];
    sum += weights[rank];
  }
  for (int rank = 0; params.normalize && rank < params.top_k; ++rank) {
    weights[rank] = static_cast<float>(weights[rank] / sum);
  }
}

void RouteToken(const RouteExpertsParams& params, int64_t token) {
  const float* logits = params.logits + token * params.num_experts;
  int32_t* ids = params.ids + token * params.top_k;
  float* weights = params.weights + token * params.top_k;
  SelectExperts(params, logits, ids);
  const float highest = logits[ids[0]];
  std::sort(ids, ids + params.top_k);
  double sum = 0;
  for (int rank = 0; rank < params.top_k; ++rank) {
    weights[rank] = std::exp(logits[ids[rank]] - highest);
    sum += weights[rank];
  }
  if (!params.normalize) {
    sum = 0;
    for (int expert = 0; expert < params.num_experts; ++expert) {
      sum += std::exp(logits[expert] - highest);
    }
  }
  for (int rank = 0; rank < params.top_k; ++rank) {
    weights[rank] = static_cast<float>(weights[rank] / sum);
  }
}

void CombineToken(const CombineExpertsParams& params, int64_t token) {
  constexpr int64_t kLanes = 64;
  for (int64_t first = 0; first < params.dim; first += kLanes) {
    const int64_t lanes = std::min(kLanes, params.dim - first);
    float sums[kLanes] = {};
    for (int64_t rank = token * params.top_k; rank < (token + 1) * params.top_k; ++rank) {
      const int64_t slot = params.slots == nullptr ? rank : params.slots[rank];
      const float* y = params.y + slot * params.dim + first;
      const float given = params.weights != nullptr ? params.weights[rank] : 1.f;
      const float weight = params.sigmoid ? 1.f / (1.f + std::exp(-given)) : given;
      for (int64_t i = 0; i < lanes; ++i) {
        sums[i] += weight * y[i];
      }
    }
    float* out = params.out + token * params.dim + first;
    for (int64_t i = 0; i < lanes; ++i) {
      const float before = params.accumulate ? out[i] : 0.f;
      out[i] = before + params.scale * sums[i];
    }
  }
}

}  // namespace

void CpuEmbed(ThreadPool& pool, const EmbedParams& params) {
  const auto* packed = dynamic_cast<const CpuMatrix*>(params.table);
  Check(packed != nullptr, "the embedding must be packed by this device");
  const CpuMatrix& table = *packed;
  for (int i = 0; i < params.num_tokens; ++i) {
    if (params.ids[i] < 0 || params.ids[i] >= table.rows) {
      throw InvalidArgument("token id is " + std::to_string(params.ids[i]) +
                            ". It must be from 0 to " + std::to_string(table.rows - 1));
    }
  }
  ForRows(pool, params.num_tokens, table.cols, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      float* out = params.out + i * table.cols;
      table.ReadRow(params.ids[i], out);
      for (int64_t col = 0; params.scale != 1.f && col < table.cols; ++col) {
        out[col] *= params.scale;
      }
    }
  });
}

void CpuNorm(const CpuDenseKernels& kernels, ThreadPool& pool, const NormParams& params) {
  ForRows(pool, params.num_rows, params.dim, [&](int begin, int end) {
    for (int64_t i = begin; i < end; ++i) {
      kernels.norm(params, i);
    }
  });
}

namespace {

// Calls fn(begin, end) for pieces of [0, count), on all threads.
template <class Fn>
void ForPieces(ThreadPool& pool, int64_t count, Fn fn) {
  constexpr int64_t kPiece = 4096;
  const auto pieces = static_cast<int>((count + kPiece - 1) / kPiece);
  ForRows(pool, pieces, kPiece,
          [&](int begin, int end) { fn(begin * kPiece, std::min(count, end * kPiece)); });
}

}  // namespace

void CpuAdd(ThreadPool& pool, const AddParams& params) {
  ForPieces(pool, params.count, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      params.out[i] += params.scale * params.x[i];
    }
  });
}

void CpuSoftCap(const CpuDenseKernels& kernels, ThreadPool& pool, const SoftCapParams& params) {
  ForPieces(pool, params.count,
            [&](int64_t begin, int64_t end) { kernels.soft_cap(params, begin, end); });
}

void CpuGatedActivation(const CpuDenseKernels& kernels, ThreadPool& pool,
                        const GatedActivationParams& params) {
  ForRows(pool, params.num_rows, params.dim, [&](int begin, int end) {
    for (int64_t i = begin; i < end; ++i) {
      kernels.gated_activation(params, i);
    }
  });
}

void CpuGatedNorm(const CpuDenseKernels& kernels, ThreadPool& pool, const GatedNormParams& params) {
  ForRows(pool, params.num_rows, params.dim, [&](int begin, int end) {
    for (int64_t i = begin; i < end; ++i) {
      kernels.gated_norm(params, i);
    }
  });
}

void CpuSigmoidGate(const CpuDenseKernels& kernels, ThreadPool& pool,
                    const SigmoidGateParams& params) {
  ForPieces(pool, params.count,
            [&](int64_t begin, int64_t end) { kernels.sigmoid_gate(params, begin, end); });
}

namespace {

void ScaleWeights(const RouteExpertsParams& params, int64_t token) {
  for (int64_t i = token * params.top_k; i < (token + 1) * params.top_k; ++i) {
    params.weights[i] *= params.expert_scale != nullptr ? params.expert_scale[params.ids[i]] : 1.f;
  }
}

}  // namespace

void CpuRouteExperts(ThreadPool& pool, const RouteExpertsParams& params) {
  Check(params.num_experts <= kMaxExperts, "a layer must have at most 1024 experts");
  const bool by_scores = params.sigmoid || params.bias != nullptr || params.num_groups > 1;
  ForRows(pool, params.num_tokens, int64_t{params.num_experts} * params.top_k,
          [&](int begin, int end) {
            for (int64_t t = begin; t < end; ++t) {
              (by_scores ? RouteByScores : RouteToken)(params, t);
              ScaleWeights(params, t);
            }
          });
}

void CpuGroupRows(const GroupRowsParams& params) {
  const int64_t num_pairs = int64_t{params.num_tokens} * params.top_k;
  int32_t* next = params.offsets + 1;  // row count of each expert, then the slot of its next row
  std::fill_n(params.offsets, params.num_experts + 1, 0);
  for (int64_t i = 0; i < num_pairs; ++i) {
    const int32_t expert = params.ids[i];
    Check(expert >= 0 && expert < params.num_experts,
          "expert ids must be from 0 to num_experts - 1");
    ++next[expert];
  }
  int32_t first = 0;
  for (int expert = 0; expert < params.num_experts; ++expert) {
    first += std::exchange(next[expert], first);
  }
  for (int64_t i = 0; i < num_pairs; ++i) {
    const int32_t slot = next[params.ids[i]]++;
    params.slots[i] = slot;
    params.x_rows[slot] = static_cast<int32_t>(i / params.top_k);
    if (params.slot_weights != nullptr) {
      params.slot_weights[slot] = params.weights[i];
    }
  }
}

void CpuCombineExperts(ThreadPool& pool, const CombineExpertsParams& params) {
  ForRows(pool, params.num_tokens, int64_t{params.dim} * params.top_k, [&](int begin, int end) {
    for (int64_t t = begin; t < end; ++t) {
      CombineToken(params, t);
    }
  });
}

}  // namespace turbomind
