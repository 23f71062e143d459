#include "turbomind/backend/cpu/cpu_linear.h"

#include <algorithm>

#include "turbomind/backend/cpu/packed_layout.h"
#include "turbomind/backend/cpu/parallel_rows.h"
#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"

namespace turbomind {
namespace {

constexpr int64_t kMinTilesPerItem = 4;  // tiles that the kernel for one row multiplies at once
constexpr int64_t kMaxTilesPerItem = 64;

// The parameters that all weights of a call share.
struct LinearCall {
  const float* x = nullptr;
  int64_t x_stride = 0;
  const int32_t* x_rows = nullptr;  // [rows of y] or null, as in GroupedLinearParams
  float* y = nullptr;
  int64_t y_stride = 0;
  bool accumulate = false;
};

const CpuMatrix& Packed(const PackedMatrix* matrix) {
  const auto* packed = dynamic_cast<const CpuMatrix*>(matrix);
  Check(packed != nullptr, "the matrix must be packed by this device");
  return *packed;
}

int64_t NumPanels(const CpuLinearPlan& plan) { return CeilDiv(plan.num_rows, plan.panel.rows); }

CpuLinearPlan PlanWeight(const LinearCall& call, const LinearPart& part, int64_t first_input = 0) {
  CpuLinearPlan plan;
  plan.weight = &Packed(part.weight);
  plan.bias = part.bias;
  plan.first_input = first_input;
  Check(call.x_stride >= first_input + plan.weight->cols,
        "x_stride must cover the columns of the weight");
  return plan;
}

const LinearKernels& KernelsFor(const CpuDenseKernels& all, MatrixFormat format, int num_rows) {
  const LinearKernels& coarse = all.coarse;
  const bool is_coarse =
      coarse.multiply != nullptr && num_rows >= coarse.min_rows && coarse.computes(format);
  return is_coarse ? coarse : all.linear;
}

void CutRows(const CpuDenseKernels& kernels, CpuLinearPlan& plan) {
  plan.kernels = &KernelsFor(kernels, plan.weight->format, plan.num_rows);
  plan.panel = plan.kernels->plan_panels(plan.weight->format, plan.weight->cols, plan.num_rows);
  plan.panel.panels_per_block = std::min(plan.panel.panels_per_block, NumPanels(plan));
  plan.num_row_blocks = CeilDiv(NumPanels(plan), plan.panel.panels_per_block);
}

// Returns true if a plan reads the panels of the previous plan.
bool SharesPanels(const std::vector<CpuLinearPlan>& plans, size_t i) {
  return i > 0 && plans[i].first_row == plans[i - 1].first_row &&
         plans[i].first_input == plans[i - 1].first_input &&
         plans[i].weight->format == plans[i - 1].weight->format;
}

// Sizes of the lists of panels and items that all weights of a call share.
struct Totals {
  int64_t panel_bytes = 0;
  int64_t panels = 0;
  int64_t items = 0;
  int64_t rows = 0;
  int64_t tile_scratch = 0;  // bytes per worker
};

Totals PlanItems(const CpuDenseKernels& kernels, const LinearCall& call, int num_threads,
                 std::vector<CpuLinearPlan>& plans) {
  int64_t row_blocks = 0;
  for (CpuLinearPlan& plan : plans) {
    Check(call.y_stride >= plan.first_output + plan.weight->rows,
          "y_stride must cover the outputs of all parts");
    CutRows(kernels, plan);
    row_blocks += plan.num_row_blocks;
  }
  const int64_t groups = CeilDiv(num_threads * kItemsPerThread, std::max<int64_t>(row_blocks, 1));
  Totals totals;
  for (size_t i = 0; i < plans.size(); ++i) {
    CpuLinearPlan& plan = plans[i];
    const int64_t num_tiles = plan.weight->num_tiles();
    plan.tiles_per_item =
        std::clamp(CeilDiv(num_tiles / groups, kMinTilesPerItem) * kMinTilesPerItem,
                   kMinTilesPerItem, kMaxTilesPerItem);
    plan.num_tile_groups = CeilDiv(num_tiles, plan.tiles_per_item);
    plan.first_item = totals.items;
    totals.items += plan.num_row_blocks * plan.num_tile_groups;
    totals.tile_scratch = std::max(
        totals.tile_scratch, plan.kernels->scratch_bytes(plan.weight->format, plan.weight->cols));
    if (SharesPanels(plans, i)) {
      plan.panels = plans[i - 1].panels;
      plan.first_panel = plans[i - 1].first_panel;
      continue;
    }
    plan.panels = totals.panel_bytes;
    plan.first_panel = totals.panels;
    totals.panel_bytes += CeilDiv(NumPanels(plan) * plan.panel.bytes, 64) * 64;
    totals.panels += NumPanels(plan);
    totals.rows += plan.num_rows;
  }
  return totals;
}

// Returns the plan with the highest value of its member `first` that is at most `index`.
const CpuLinearPlan& FindPlan(const std::vector<CpuLinearPlan>& plans,
                              int64_t CpuLinearPlan::*first, int64_t index) {
  const auto after = std::upper_bound(
      plans.begin(), plans.end(), index,
      [first](int64_t value, const CpuLinearPlan& plan) { return value < plan.*first; });
  return *(after - 1);
}

void PackOne(const LinearCall& call, CpuLinearScratch& scratch, int64_t index) {
  const CpuLinearPlan& plan = FindPlan(scratch.plans, &CpuLinearPlan::first_panel, index);
  const int64_t panel = index - plan.first_panel;
  const int64_t first_row = plan.first_row + panel * plan.panel.rows;
  PackPanelArgs args;
  args.format = plan.weight->format;
  args.x = call.x_rows == nullptr ? call.x + first_row * call.x_stride : call.x;
  args.x += plan.first_input;
  args.x_stride = call.x_stride;
  args.x_rows = call.x_rows == nullptr ? nullptr : call.x_rows + first_row;
  args.num_rows =
      static_cast<int>(std::min<int64_t>(plan.panel.rows, plan.num_rows - panel * plan.panel.rows));
  args.all_rows = plan.num_rows;
  args.cols = plan.weight->cols;
  args.panel = scratch.panels.data() + plan.panels + panel * plan.panel.bytes;
  plan.kernels->pack_panel(args);
}

void MultiplyOne(const LinearCall& call, CpuLinearScratch& scratch, int64_t index, int worker) {
  const CpuLinearPlan& plan = FindPlan(scratch.plans, &CpuLinearPlan::first_item, index);
  const CpuMatrix& weight = *plan.weight;
  const int64_t item = index - plan.first_item;
  const int64_t first_tile = item % plan.num_tile_groups * plan.tiles_per_item;
  const int64_t first_panel = item / plan.num_tile_groups * plan.panel.panels_per_block;
  const int64_t first_output = first_tile * kTileRows;
  const int64_t first_row = first_panel * plan.panel.rows;
  MultiplyArgs args;
  args.format = weight.format;
  args.cols = weight.cols;
  args.tiles = weight.tile(first_tile);
  args.scales = weight.tile_scales(first_tile);
  args.num_tiles = static_cast<int>(std::min(plan.tiles_per_item, weight.num_tiles() - first_tile));
  args.num_outputs = std::min(args.num_tiles * int64_t{kTileRows}, weight.rows - first_output);
  args.scratch = scratch.tiles.data() + worker * scratch.tile_stride;
  args.panels = scratch.panels.data() + plan.panels + first_panel * plan.panel.bytes;
  args.num_rows = static_cast<int>(
      std::min(plan.panel.panels_per_block * plan.panel.rows, plan.num_rows - first_row));
  args.all_rows = plan.num_rows;
  args.bias = plan.bias == nullptr ? nullptr : plan.bias + first_output;
  args.y = call.y + (plan.first_row + first_row) * call.y_stride + plan.first_output + first_output;
  args.y_stride = call.y_stride;
  args.accumulate = call.accumulate;
  plan.kernels->multiply(args);
}

// Computes all products of scratch.plans.
void Run(const CpuDenseKernels& kernels, ThreadPool& pool, CpuLinearScratch& scratch,
         const LinearCall& call) {
  const Totals totals = PlanItems(kernels, call, pool.num_threads(), scratch.plans);
  if (totals.items == 0) {
    return;
  }
  scratch.panels.Grow(totals.panel_bytes);
  scratch.tile_stride = totals.tile_scratch;
  scratch.tiles.Grow(pool.num_threads() * totals.tile_scratch);
  const int64_t values = totals.rows * scratch.plans.front().weight->cols;
  ForRows(pool, static_cast<int>(totals.panels), values / totals.panels, [&](int begin, int end) {
    for (int panel = begin; panel < end; ++panel) {
      PackOne(call, scratch, panel);
    }
  });
  const auto run = [&](int64_t item, int worker) { MultiplyOne(call, scratch, item, worker); };
  if (totals.items == 1) {
    run(0, 0);
  } else {
    pool.ParallelFor(totals.items, run);
  }
}

}  // namespace

void CpuLinear(const CpuDenseKernels& kernels, ThreadPool& pool, CpuLinearScratch& scratch,
               const LinearParams& params) {
  const LinearCall call = {.x = params.x,
                           .x_stride = params.x_stride,
                           .y = params.y,
                           .y_stride = params.y_stride,
                           .accumulate = params.accumulate};
  scratch.plans.clear();
  int64_t first_output = 0;
  for (int i = 0; i < params.num_parts && params.num_rows > 0; ++i) {
    CpuLinearPlan plan = PlanWeight(call, params.parts[i]);
    Check(plan.weight->cols == Packed(params.parts[0].weight).cols,
          "all parts of a linear layer must have the same number of columns");
    plan.num_rows = params.num_rows;
    plan.first_output = first_output;
    first_output += plan.weight->rows;
    scratch.plans.push_back(plan);
  }
  Run(kernels, pool, scratch, call);
}

void CpuGroupedLinear(const CpuDenseKernels& kernels, ThreadPool& pool, CpuLinearScratch& scratch,
                      const GroupedLinearParams& params) {
  const LinearCall call = {.x = params.x,
                           .x_stride = params.x_stride,
                           .x_rows = params.x_rows,
                           .y = params.y,
                           .y_stride = params.y_stride};
  scratch.plans.clear();
  for (int i = 0; i < params.num_experts; ++i) {
    const LinearPart& expert = params.experts[i];
    const PackedMatrix& first = *params.experts[0].weight;
    Check(expert.weight->rows == first.rows && expert.weight->cols == first.cols &&
              expert.weight->format == first.format,
          "the weights of a grouped layer must share one shape and format");
    const int begin = params.offsets[i];
    const int end = params.offsets[i + 1];
    Check(0 <= begin && begin <= end && end <= params.num_rows,
          "the offsets must ascend and stay within the rows of y");
    if (begin < end) {
      CpuLinearPlan plan = PlanWeight(call, expert);
      plan.first_row = begin;
      plan.num_rows = end - begin;
      scratch.plans.push_back(plan);
    }
  }
  Run(kernels, pool, scratch, call);
}

void CpuHeadLinear(const CpuDenseKernels& kernels, ThreadPool& pool, CpuLinearScratch& scratch,
                   const HeadLinearParams& params) {
  const LinearCall call = {
      .x = params.x, .x_stride = params.x_stride, .y = params.y, .y_stride = params.y_stride};
  scratch.plans.clear();
  for (int head = 0; head < params.num_heads; ++head) {
    CpuLinearPlan plan = PlanWeight(call, params.heads[head], head * params.x_head_stride);
    plan.num_rows = params.num_rows;
    plan.first_output = head * params.y_head_stride;
    scratch.plans.push_back(plan);
  }
  Run(kernels, pool, scratch, call);
}

}  // namespace turbomind
