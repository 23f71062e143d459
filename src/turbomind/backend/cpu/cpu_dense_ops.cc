#include "turbomind/backend/cpu/cpu_dense_ops.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "turbomind/backend/cpu/packed_layout.h"
#include "turbomind/backend/cpu/packed_matrix.h"
#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"

namespace turbomind {
namespace {

constexpr int64_t kRowBlockBytes = 256 << 10;  // packed activations that stay in L2 (1 MiB, Zen 4)
constexpr int64_t kItemsPerThread = 8;         // work items, so that a slow core costs little
constexpr int64_t kMinTilesPerItem = 4;        // what one row multiplies at once
constexpr int64_t kMaxTilesPerItem = 64;
constexpr int64_t kMinParallelValues = 16384;  // below, waking a worker costs more than the work

// fn(begin, end) over chunks of rows; one call when there is little to do.
void ForRows(ThreadPool& pool, int num_rows, int64_t values_per_row,
             const std::function<void(int begin, int end)>& fn) {
  if (num_rows * values_per_row < kMinParallelValues || num_rows < 2) {
    fn(0, num_rows);
    return;
  }
  const int chunk =
      static_cast<int>(std::max<int64_t>(1, num_rows / (pool.num_threads() * kItemsPerThread)));
  pool.ParallelFor(CeilDiv(num_rows, chunk), [&](int64_t item, int) {
    const int begin = static_cast<int>(item) * chunk;
    fn(begin, std::min(num_rows, begin + chunk));
  });
}

const CpuMatrix& Packed(const PackedMatrix* matrix) {
  const auto* packed = dynamic_cast<const CpuMatrix*>(matrix);
  Check(packed != nullptr, "the matrix was packed by this device");
  return *packed;
}

// How one call is cut: row blocks that stay in L2 times groups of tiles.
struct LinearPlan {
  int64_t panel_bytes = 0;
  int64_t num_panels = 0;
  int64_t panels_per_block = 0;
  int64_t num_row_blocks = 0;
  int64_t tiles_per_item = 0;
  int64_t num_tile_groups = 0;
};

LinearPlan Plan(const CpuMatrix& weight, int num_rows, int num_threads) {
  LinearPlan plan;
  plan.panel_bytes = PanelBytes(weight.format, weight.cols, kPanelRows);
  plan.num_panels = CeilDiv(num_rows, kPanelRows);
  plan.panels_per_block =
      std::clamp<int64_t>(kRowBlockBytes / plan.panel_bytes, 1, plan.num_panels);
  plan.num_row_blocks = CeilDiv(plan.num_panels, plan.panels_per_block);
  const int64_t groups = CeilDiv(num_threads * kItemsPerThread, plan.num_row_blocks);
  const int64_t tiles = CeilDiv(weight.num_tiles() / groups, kMinTilesPerItem) * kMinTilesPerItem;
  plan.tiles_per_item = std::clamp(tiles, kMinTilesPerItem, kMaxTilesPerItem);
  plan.num_tile_groups = CeilDiv(weight.num_tiles(), plan.tiles_per_item);
  return plan;
}

void PackActivations(const CpuDenseKernels& kernels, ThreadPool& pool, const LinearPlan& plan,
                     const LinearParams& params, uint8_t* panels) {
  const PackedMatrix& weight = *params.weight;
  ForRows(pool, static_cast<int>(plan.num_panels), kPanelRows * weight.cols,
          [&](int begin, int end) {
            for (int p = begin; p < end; ++p) {
              PackPanelArgs args;
              args.format = weight.format;
              args.x = params.x + p * kPanelRows * params.x_stride;
              args.x_stride = params.x_stride;
              args.num_rows = std::min(kPanelRows, params.num_rows - p * kPanelRows);
              args.cols = weight.cols;
              args.panel = panels + p * plan.panel_bytes;
              kernels.pack_panel(args);
            }
          });
}

MultiplyArgs ItemArgs(const CpuMatrix& weight, const LinearPlan& plan, const LinearParams& params,
                      int64_t item) {
  const int64_t first_tile = item % plan.num_tile_groups * plan.tiles_per_item;
  const int64_t first_panel = item / plan.num_tile_groups * plan.panels_per_block;
  const int64_t first_output = first_tile * kTileRows;
  const int64_t first_row = first_panel * kPanelRows;
  MultiplyArgs args;
  args.format = weight.format;
  args.cols = weight.cols;
  args.tiles = weight.tile(first_tile);
  args.scales = weight.tile_scales(first_tile);
  args.num_tiles = static_cast<int>(std::min(plan.tiles_per_item, weight.num_tiles() - first_tile));
  args.num_outputs = std::min(args.num_tiles * int64_t{kTileRows}, weight.rows - first_output);
  args.num_rows =
      static_cast<int>(std::min(plan.panels_per_block * kPanelRows, params.num_rows - first_row));
  args.bias = params.bias == nullptr ? nullptr : params.bias + first_output;
  args.y = params.y + first_row * params.y_stride + first_output;
  args.y_stride = params.y_stride;
  args.accumulate = params.accumulate;
  return args;
}

// NaN counts as the lowest logit: an index is found whatever the logits hold.
float RouteKey(float logit) {
  return std::isnan(logit) ? -std::numeric_limits<float>::infinity() : logit;
}

// The expert that follows `last` in order of falling logits, then rising ids; -1: the first one.
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

void RouteToken(const RouteExpertsParams& params, int64_t token) {
  const float* logits = params.logits + token * params.num_experts;
  int32_t* ids = params.ids + token * params.top_k;
  float* weights = params.weights + token * params.top_k;
  int32_t last = -1;
  for (int rank = 0; rank < params.top_k; ++rank) {
    last = NextExpert(logits, params.num_experts, last);
    ids[rank] = last;
  }
  const float highest = logits[ids[0]];
  std::sort(ids, ids + params.top_k);
  double sum = 0;
  for (int rank = 0; rank < params.top_k; ++rank) {
    weights[rank] = std::exp(logits[ids[rank]] - highest);
    sum += weights[rank];
  }
  if (!params.normalise) {
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
      for (int64_t i = 0; i < lanes; ++i) {
        sums[i] += params.weights[rank] * y[i];
      }
    }
    float* out = params.out + token * params.dim + first;
    for (int64_t i = 0; i < lanes; ++i) {
      out[i] += sums[i];
    }
  }
}

}  // namespace

void CpuLinear(const CpuDenseKernels& kernels, ThreadPool& pool, CpuLinearScratch& scratch,
               const LinearParams& params) {
  if (params.num_rows <= 0) {
    return;
  }
  const CpuMatrix& weight = Packed(params.weight);
  Check(params.x_stride >= weight.cols && params.y_stride >= weight.rows,
        "row strides of a linear layer cover its columns");
  const LinearPlan plan = Plan(weight, params.num_rows, pool.num_threads());
  const auto bytes = static_cast<size_t>(plan.num_panels * plan.panel_bytes);
  if (scratch.panels.size() < bytes) {
    scratch.panels.resize(bytes);
  }
  PackActivations(kernels, pool, plan, params, scratch.panels.data());
  const auto run = [&](int64_t item, int) {
    MultiplyArgs args = ItemArgs(weight, plan, params, item);
    const int64_t first_panel = item / plan.num_tile_groups * plan.panels_per_block;
    args.panels = scratch.panels.data() + first_panel * plan.panel_bytes;
    kernels.multiply(args);
  };
  const int64_t items = plan.num_row_blocks * plan.num_tile_groups;
  if (items == 1) {
    run(0, 0);
  } else {
    pool.ParallelFor(items, run);
  }
}

void CpuGroupedLinear(const CpuDenseKernels& kernels, ThreadPool& pool, CpuLinearScratch& scratch,
                      const GroupedLinearParams& params) {
  for (int i = 0; i < params.num_groups; ++i) {
    const LinearGroup& group = params.groups[i];
    const int64_t cols = group.weight->cols;
    LinearParams linear;
    linear.x = params.x + group.first_row * params.x_stride;
    linear.x_stride = params.x_stride;
    if (params.x_rows != nullptr) {
      scratch.gathered.resize(static_cast<size_t>(group.num_rows * cols));
      for (int row = 0; row < group.num_rows; ++row) {
        const float* from = params.x + params.x_rows[group.first_row + row] * params.x_stride;
        std::copy_n(from, cols, scratch.gathered.data() + row * cols);
      }
      linear.x = scratch.gathered.data();
      linear.x_stride = cols;
    }
    linear.weight = group.weight;
    linear.bias = group.bias;
    linear.y = params.y + group.first_row * params.y_stride;
    linear.y_stride = params.y_stride;
    linear.num_rows = group.num_rows;
    CpuLinear(kernels, pool, scratch, linear);
  }
}

void CpuEmbed(ThreadPool& pool, const EmbedParams& params) {
  const CpuMatrix& table = Packed(params.table);
  for (int i = 0; i < params.num_tokens; ++i) {
    if (params.ids[i] < 0 || params.ids[i] >= table.rows) {
      throw InvalidArgument("token id: got " + std::to_string(params.ids[i]) + ", want 0 to " +
                            std::to_string(table.rows - 1));
    }
  }
  ForRows(pool, params.num_tokens, table.cols, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      table.ReadRow(params.ids[i], params.out + i * table.cols);
    }
  });
}

void CpuRmsNorm(const CpuDenseKernels& kernels, ThreadPool& pool, const RmsNormParams& params) {
  const int64_t dim = params.dim;
  ForRows(pool, params.num_rows, dim, [&](int begin, int end) {
    for (int64_t i = begin; i < end; ++i) {
      kernels.rms_norm(params.x + i * dim, params.weight, params.eps, params.dim,
                       params.out + i * dim);
    }
  });
}

void CpuGatedActivation(const CpuDenseKernels& kernels, ThreadPool& pool,
                        const GatedActivationParams& params) {
  ForRows(pool, params.num_rows, params.dim, [&](int begin, int end) {
    for (int64_t i = begin; i < end; ++i) {
      kernels.gated_activation(params, i);
    }
  });
}

void CpuRouteExperts(ThreadPool& pool, const RouteExpertsParams& params) {
  ForRows(pool, params.num_tokens, int64_t{params.num_experts} * params.top_k,
          [&](int begin, int end) {
            for (int64_t t = begin; t < end; ++t) {
              RouteToken(params, t);
            }
          });
}

void CpuCombineExperts(ThreadPool& pool, const CombineExpertsParams& params) {
  ForRows(pool, params.num_tokens, int64_t{params.dim} * params.top_k, [&](int begin, int end) {
    for (int64_t t = begin; t < end; ++t) {
      CombineToken(params, t);
    }
  });
}

}  // namespace turbomind
