#include "turbomind/backend/cpu/cpu_linear.h"

#include <algorithm>

#include "turbomind/backend/cpu/for_rows.h"
#include "turbomind/backend/cpu/packed_layout.h"
#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"

namespace turbomind {
namespace {

constexpr int64_t kRowBlockBytes = 256 << 10;  // packed activations that stay in L2 (1 MiB, Zen 4)
constexpr int64_t kMxRowBlockBytes = 640 << 10;  // more, so that a transposed tile serves more rows
constexpr int64_t kMinTilesPerItem = 4;          // what one row multiplies at once
constexpr int64_t kMaxTilesPerItem = 64;

// One call: the groups' rows of y, each with its row of x.
struct LinearCall {
  GroupedLinearParams params;
  bool accumulate = false;
};

const CpuMatrix& Packed(const PackedMatrix* matrix) {
  const auto* packed = dynamic_cast<const CpuMatrix*>(matrix);
  Check(packed != nullptr, "the matrix was packed by this device");
  return *packed;
}

int64_t NumPanels(const CpuLinearPlan& plan) { return CeilDiv(plan.num_rows, kPanelRows); }

int64_t FullPanelBytes(const CpuLinearPlan& plan) {
  return PanelBytes(plan.weight->format, plan.weight->cols, kPanelRows);
}

// Bytes of a group's panels; the last one is packed for the rows that it has.
int64_t GroupPanelBytes(const CpuLinearPlan& plan) {
  const int rest = plan.num_rows % kPanelRows;
  return plan.num_rows / kPanelRows * FullPanelBytes(plan) +
         (rest == 0 ? 0 : PanelBytes(plan.weight->format, plan.weight->cols, rest));
}

// What a kernel may write for itself.
int64_t TileScratchBytes(const CpuMatrix& weight) {
  return IsMxfp4(weight.format) ? weight.cols / kQuantBlock * kMxTileBlockBytes : 0;
}

CpuLinearPlan PlanRows(const GroupedLinearParams& params, const LinearGroup& group) {
  CpuLinearPlan plan;
  plan.weight = &Packed(group.weight);
  Check(params.x_stride >= plan.weight->cols && params.y_stride >= plan.weight->rows,
        "row strides of a linear layer cover its columns");
  plan.bias = group.bias;
  plan.first_row = group.first_row;
  plan.num_rows = group.num_rows;
  const int64_t block_bytes = IsMxfp4(plan.weight->format) ? kMxRowBlockBytes : kRowBlockBytes;
  plan.panels_per_block =
      std::clamp<int64_t>(block_bytes / FullPanelBytes(plan), 1, NumPanels(plan));
  plan.num_row_blocks = CeilDiv(NumPanels(plan), plan.panels_per_block);
  return plan;
}

// Where the parts of all groups lie in one list of panels, and one of items.
struct Totals {
  int64_t panel_bytes = 0;
  int64_t panels = 0;
  int64_t items = 0;
  int64_t rows = 0;
};

Totals PlanCall(const GroupedLinearParams& params, int num_threads,
                std::vector<CpuLinearPlan>& plans) {
  plans.clear();
  int64_t row_blocks = 0;
  for (int i = 0; i < params.num_groups; ++i) {
    if (params.groups[i].num_rows > 0) {
      plans.push_back(PlanRows(params, params.groups[i]));
      row_blocks += plans.back().num_row_blocks;
    }
  }
  const int64_t groups = CeilDiv(num_threads * kItemsPerThread, std::max<int64_t>(row_blocks, 1));
  Totals totals;
  for (CpuLinearPlan& plan : plans) {
    const int64_t num_tiles = plan.weight->num_tiles();
    plan.tiles_per_item =
        std::clamp(CeilDiv(num_tiles / groups, kMinTilesPerItem) * kMinTilesPerItem,
                   kMinTilesPerItem, kMaxTilesPerItem);
    plan.num_tile_groups = CeilDiv(num_tiles, plan.tiles_per_item);
    plan.panels = totals.panel_bytes;
    plan.first_panel = totals.panels;
    plan.first_item = totals.items;
    totals.panel_bytes += CeilDiv(GroupPanelBytes(plan), 64) * 64;
    totals.panels += NumPanels(plan);
    totals.items += plan.num_row_blocks * plan.num_tile_groups;
    totals.rows += plan.num_rows;
  }
  return totals;
}

// The plan with the highest `first` (a member of it) that is at most `index`.
const CpuLinearPlan& FindPlan(const std::vector<CpuLinearPlan>& plans,
                              int64_t CpuLinearPlan::*first, int64_t index) {
  const auto after = std::upper_bound(
      plans.begin(), plans.end(), index,
      [first](int64_t value, const CpuLinearPlan& plan) { return value < plan.*first; });
  return *(after - 1);
}

void PackOne(const CpuDenseKernels& kernels, const GroupedLinearParams& params,
             CpuLinearScratch& scratch, int64_t index) {
  const CpuLinearPlan& plan = FindPlan(scratch.plans, &CpuLinearPlan::first_panel, index);
  const int64_t panel = index - plan.first_panel;
  const int64_t first_row = plan.first_row + panel * kPanelRows;
  PackPanelArgs args;
  args.format = plan.weight->format;
  args.x = params.x_rows == nullptr ? params.x + first_row * params.x_stride : params.x;
  args.x_stride = params.x_stride;
  args.x_rows = params.x_rows == nullptr ? nullptr : params.x_rows + first_row;
  args.num_rows =
      static_cast<int>(std::min<int64_t>(kPanelRows, plan.num_rows - panel * kPanelRows));
  args.cols = plan.weight->cols;
  args.panel = scratch.panels.data() + plan.panels + panel * FullPanelBytes(plan);
  kernels.pack_panel(args);
}

void MultiplyOne(const CpuDenseKernels& kernels, const LinearCall& call, CpuLinearScratch& scratch,
                 int64_t index, int worker) {
  const CpuLinearPlan& plan = FindPlan(scratch.plans, &CpuLinearPlan::first_item, index);
  const CpuMatrix& weight = *plan.weight;
  const int64_t item = index - plan.first_item;
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
  args.scratch = scratch.tiles.data() + worker * TileScratchBytes(weight);
  args.panels = scratch.panels.data() + plan.panels + first_panel * FullPanelBytes(plan);
  args.num_rows =
      static_cast<int>(std::min(plan.panels_per_block * kPanelRows, plan.num_rows - first_row));
  args.bias = plan.bias == nullptr ? nullptr : plan.bias + first_output;
  args.y = call.params.y + (plan.first_row + first_row) * call.params.y_stride + first_output;
  args.y_stride = call.params.y_stride;
  args.accumulate = call.accumulate;
  kernels.multiply(args);
}

void Run(const CpuDenseKernels& kernels, ThreadPool& pool, CpuLinearScratch& scratch,
         const LinearCall& call) {
  const GroupedLinearParams& params = call.params;
  const Totals totals = PlanCall(params, pool.num_threads(), scratch.plans);
  if (totals.items == 0) {
    return;
  }
  const CpuMatrix& first = *scratch.plans.front().weight;
  scratch.panels.Grow(totals.panel_bytes);
  scratch.tiles.Grow(pool.num_threads() * TileScratchBytes(first));
  const int64_t values = totals.rows * first.cols;
  ForRows(pool, static_cast<int>(totals.panels), values / totals.panels, [&](int begin, int end) {
    for (int panel = begin; panel < end; ++panel) {
      PackOne(kernels, params, scratch, panel);
    }
  });
  const auto run = [&](int64_t item, int worker) {
    MultiplyOne(kernels, call, scratch, item, worker);
  };
  if (totals.items == 1) {
    run(0, 0);
  } else {
    pool.ParallelFor(totals.items, run);
  }
}

}  // namespace

void CpuLinear(const CpuDenseKernels& kernels, ThreadPool& pool, CpuLinearScratch& scratch,
               const LinearParams& params) {
  const LinearGroup group{params.weight, params.bias, 0, params.num_rows};
  LinearCall call;
  call.params = {.x = params.x,
                 .x_stride = params.x_stride,
                 .y = params.y,
                 .y_stride = params.y_stride,
                 .groups = &group,
                 .num_groups = 1};
  call.accumulate = params.accumulate;
  Run(kernels, pool, scratch, call);
}

void CpuGroupedLinear(const CpuDenseKernels& kernels, ThreadPool& pool, CpuLinearScratch& scratch,
                      const GroupedLinearParams& params) {
  for (int i = 1; i < params.num_groups; ++i) {
    const PackedMatrix& weight = *params.groups[i].weight;
    const PackedMatrix& first = *params.groups[0].weight;
    Check(weight.rows == first.rows && weight.cols == first.cols && weight.format == first.format,
          "the weights of a grouped layer have one shape and format");
  }
  Run(kernels, pool, scratch, {params, false});
}

}  // namespace turbomind
