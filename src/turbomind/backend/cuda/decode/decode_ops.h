#pragma once

// ⑤⑦ Decode attention of a step on a GPU: its plans, and the op.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "turbomind/backend/cuda/decode/decode_plan.h"
#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/backend/cuda/runtime/pinned_buffer.h"
#include "turbomind/ops/params.h"

namespace turbomind::cuda {

// The plans of a step's layer groups (decode_plan.h), on the GPU.
//
// What a recorded graph holds of a plan, its addresses and the sizes of grids, follows from the
// GPU, the number of decode sequences, the heads and the rules of the groups alone: a graph of a
// step is right for every later step with the same of these, once that step has been uploaded, as
// long as generation() is the same. Grids have room for the longest of contexts; items that a plan
// does not need are empty.
class DecodePlanner {
 public:
  // The context stays where it is, as long as the planner is there.
  explicit DecodePlanner(const Context& context);
  DecodePlanner(const DecodePlanner&) = delete;
  DecodePlanner& operator=(const DecodePlanner&) = delete;

  // Makes the plans of a step from its arrays on the host and copies them in the order of the
  // stream. Before the step's ops or the replay of their record; never while one is recorded. Waits
  // until the last step's have been copied. Throws std::bad_alloc.
  void Upload(const StepParams& step);
  // Changes whenever addresses do: recorded graphs are void then.
  int generation() const { return bytes_.generation(); }

  // One group's plan, on the GPU.
  struct Plan {
    LayerRule rule;
    int q_heads = 0;
    int kv_heads = 0;
    int num_slots = 1;
    int64_t num_quantized = 0;  // items, empty ones included
    int64_t num_window16 = 0;
    const int32_t* first_partial = nullptr;  // [num_seqs + 1]
    const DecodeItem* quantized = nullptr;   // [num_quantized]
    const DecodeItem* window16 = nullptr;    // [num_window16]
    int warps_per_row = 1;                   // of CombineKernel
  };
  // REQUIRES: a layer of a group of the last Upload.
  const Plan& Find(const AttentionParams& layer) const;

 private:
  Plan Measure(const StepGroup& group, int q_heads) const;
  // Writes a plan at this offset of both buffers; the offset behind it.
  size_t Write(const StepGroup& group, size_t begin, Plan* plan);

  const Context& context_;
  MirroredBytes bytes_;
  int num_seqs_ = 0;
  std::vector<Plan> plans_;  // by group
  AttentionPlan plan_;       // the one that is being made
};

// Attention of sequences [0, num_decode) of the batch: Device::DecodeAttention. All addresses are
// on the GPU; q, out and q_dot_mean at multiples of 16 bytes. REQUIRES: the planner has the step.
//
// A block of a kernel reads one item for up to 8 or 16 query heads of a KV head; the items of
// 16-bit blocks go through the kernel of mode none with the 16-bit pool. Their results are merged
// by CombineKernel. Products are of 16-bit operands, summed in FP32, whatever params.exact says.
// How positions are cut, and with it a row's bits, depends on the batch: a device that is to be
// deterministic takes CudaPrefillAttention for all sequences.
//
// Throws InvalidArgument for a layer that there is no kernel for (decode_variants.h).
void CudaDecodeAttention(const Context& context, const DecodePlanner& planner,
                         const AttentionParams& params);

}  // namespace turbomind::cuda
