#pragma once

// ⑤⑦ The plans of a step's decode attention on a GPU, and the op.

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "turbomind/backend/cuda/decode/decode_plan.h"
#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/backend/cuda/runtime/pinned_buffer.h"
#include "turbomind/ops/params.h"

namespace turbomind::cuda {

// How decode attention uses a GPU. The results differ by rounding.
struct DecodeSchedule {
  int slots_per_sm = 4;      // blocks that an SM runs at once
  int waves = 1;             // items per slot. Shorter items begin in the places of those that end.
  bool last_merges = false;  // the block that ends last merges the results, not CombineKernel

  bool operator==(const DecodeSchedule&) const = default;
};

// The layers and steps for which a schedule is meant.
struct DecodeUse {
  LayerRule rule;
  int q_heads = 0;
  int kv_heads = 0;
  int min_seqs = 1;  // and at most those of the next use of the same layers

  bool operator==(const DecodeUse&) const = default;
};

// The plans of a step's layer groups (decode_plan.h), on the GPU.
//
// A recorded graph contains a plan's addresses and grid sizes. They depend only on the GPU, the
// number of decode sequences, the heads and the rules of the groups. A graph is therefore valid for
// every later step in which these are the same, after that step's Upload and while generation()
// does not change. Grids have room for the longest contexts; items that a plan does not need are
// empty.
class DecodePlanner {
 public:
  // REQUIRES: the context outlives the planner at the same address.
  explicit DecodePlanner(const Context& context);
  DecodePlanner(const DecodePlanner&) = delete;
  DecodePlanner& operator=(const DecodePlanner&) = delete;

  // Use a schedule from the next Upload on. Recorded graphs are then invalid.
  void Use(const DecodeUse& use, const DecodeSchedule& schedule);

  // Make a step's plans from its arrays on the host and copy them in the order of the stream. Call
  // it before the step's ops or the replay of their graph, never during a recording. Waits until
  // the previous step's copy is done. Throws std::bad_alloc.
  void Upload(const StepParams& step);
  // Changes whenever addresses change. Recorded graphs are then invalid.
  int generation() const { return bytes_.generation() + num_changes_; }

  // One group's plan, on the GPU.
  struct Plan {
    LayerRule rule;
    int q_heads = 0;
    int kv_heads = 0;
    DecodeSchedule schedule;
    int num_slots = 1;
    int64_t num_quantized = 0;  // items, including empty ones
    int64_t num_window16 = 0;
    const int32_t* first_partial = nullptr;  // [num_seqs + 1]
    const DecodeItem* quantized = nullptr;   // [num_quantized]
    const DecodeItem* window16 = nullptr;    // [num_window16]
    int32_t* arrivals = nullptr;             // DecodeParams; null if CombineKernel merges
    int warps_per_row = 1;                   // for CombineKernel
  };
  // REQUIRES: the layer belongs to a group of the last Upload.
  const Plan& Find(const AttentionParams& layer) const;

 private:
  DecodeSchedule ScheduleOf(const StepGroup& group, int q_heads) const;
  Plan Measure(const StepGroup& group, int q_heads) const;
  // Write a plan at this offset of both buffers and return the offset after it.
  size_t Write(const StepGroup& group, size_t begin, Plan* plan);

  const Context& context_;
  MirroredBytes bytes_;
  int num_seqs_ = 0;
  std::vector<std::pair<DecodeUse, DecodeSchedule>> schedules_;
  int num_changes_ = 0;      // of schedules
  std::vector<Plan> plans_;  // by group
  AttentionPlan plan_;       // reused for every group
};

// Attention of sequences [0, num_decode) of the batch, of which there is one, in the items of a
// plan. All addresses are on the GPU; q, out and q_dot_mean are 16-byte aligned. REQUIRES: the
// planner has uploaded the step.
//
// A block of a kernel reads one item for up to 8 or 16 query heads of a KV head. The items of the
// window use the kernel of the window's format with its pool. CombineKernel or the blocks that end
// last merge the results (DecodeSchedule). Matrix products have 16-bit operands and FP32 sums,
// whatever params.exact says. The split of positions depends on the batch, and so do a row's bits.
// A deterministic device uses RunPrefillSequences for all sequences instead.
//
// Throws InvalidArgument if no kernel exists for the layer (decode_variants.h).
void RunDecodeItems(const Context& context, const DecodePlanner::Plan& plan,
                    const AttentionParams& params);

}  // namespace turbomind::cuda
