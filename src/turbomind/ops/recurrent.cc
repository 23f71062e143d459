#include "turbomind/ops/recurrent.h"

#include <cstdint>

#include "turbomind/core/check.h"
#include "turbomind/ops/kv_checks.h"

namespace turbomind {
namespace {

void CheckView(const StateView& view, int64_t num_values) {
  const auto bytes = num_values * static_cast<int64_t>(sizeof(float));
  Check(view.data != nullptr, "the pools of states must be set");
  Check(view.slot_bytes >= bytes && view.slot_bytes % 64 == 0,
        "slot_bytes must cover the state and be a multiple of 64");
}

// Checks the slots of a step, and where a layer's state of `num_values` values lies in them.
void CheckStates(const BatchView& batch, const StateBatch& states, const StateView& view,
                 int64_t num_values) {
  CheckView(view, num_values);
  Check(states.slots != nullptr, "the slots must be set");
  for (int seq = 0; seq < batch.num_seqs; ++seq) {
    Check(states.slots[seq] >= 0, "every sequence must have a slot");
  }
  Check(states.num_saves == 0 || (states.num_saves > 0 && states.saves != nullptr),
        "the saves must be set");
  for (int i = 0; i < states.num_saves; ++i) {
    const StateSave& save = states.saves[i];
    Check(save.sequence >= 0 && save.sequence < batch.num_seqs && save.slot >= 0,
          "a save must name a sequence and a slot");
    const int32_t* first = batch.cu_seqlens + save.sequence;
    Check(save.num_tokens > 0 && save.num_tokens <= first[1] - first[0],
          "a save must follow a new token of its sequence");
    if (i > 0) {
      const StateSave& before = states.saves[i - 1];
      Check(before.sequence < save.sequence ||
                (before.sequence == save.sequence && before.num_tokens < save.num_tokens),
            "saves must ascend by sequence, then by num_tokens");
    }
  }
}

bool Overlap(const float* a, int64_t size_a, const float* b, int64_t size_b) {
  const auto begin_a = reinterpret_cast<uintptr_t>(a);
  const auto begin_b = reinterpret_cast<uintptr_t>(b);
  const auto bytes = [](int64_t size) { return static_cast<uintptr_t>(size) * sizeof(float); };
  return begin_a < begin_b + bytes(size_b) && begin_b < begin_a + bytes(size_a);
}

bool IsStateDim(int dim) { return dim > 0 && dim % 16 == 0 && dim <= kMaxStateDim; }

void CheckHeads(const StateHeads& p) {
  CheckBatch(p.batch);
  Check(p.q != nullptr && p.k != nullptr && p.v != nullptr && p.out != nullptr,
        "q, k, v and out must be set");
  Check(p.a != nullptr && p.decay != nullptr && p.dt_bias != nullptr,
        "a, decay and dt_bias must be set");
  Check(p.key_heads > 0 && p.value_heads > 0 && p.value_heads % p.key_heads == 0,
        "value_heads must be a multiple of key_heads");
  Check(IsStateDim(p.key_dim) && IsStateDim(p.value_dim),
        "key_dim and value_dim must be multiples of 16 and at most 256");
  Check(p.qkv_stride >= int64_t{p.key_heads} * p.key_dim &&
            p.qkv_stride >= int64_t{p.value_heads} * p.value_dim,
        "qkv_stride must cover the heads");
  Check(p.gate_stride >= p.value_heads, "gate_stride must be at least value_heads");
  CheckStates(p.batch, p.states, p.state, int64_t{p.value_heads} * p.key_dim * p.value_dim);
}

}  // namespace

void invokeShortConvolution(Device& device, const ShortConvolutionParams& params) {
  const ShortConvolutionParams& p = params;
  CheckBatch(p.batch);
  Check(p.x != nullptr && p.weight != nullptr && p.out != nullptr, "x, weight and out must be set");
  Check(p.channels > 0 && p.channels % 16 == 0, "channels must be a positive multiple of 16");
  Check(p.x_stride >= p.channels, "x_stride must be at least channels");
  Check(p.kernel >= 2 && p.kernel <= kMaxConvolutionKernel, "kernel must be from 2 to 8");
  const int64_t last = p.batch.num_tokens - 1;
  for (const float* in : {p.x, p.in_gate, p.out_gate}) {
    Check(in == nullptr ||
              !Overlap(in, last * p.x_stride + p.channels, p.out, (last + 1) * p.channels),
          "out must not overlap x or a gate");
  }
  CheckStates(p.batch, p.states, p.state, int64_t{p.kernel - 1} * p.channels);
  device.ShortConvolution(p);
}

void invokeGatedDelta(Device& device, const GatedDeltaParams& params) {
  CheckHeads(params.heads);
  Check(params.b != nullptr, "b must be set");
  device.GatedDelta(params);
}

void invokeSelectiveScan(Device& device, const SelectiveScanParams& params) {
  CheckHeads(params.heads);
  Check(params.skip != nullptr, "skip must be set");
  device.SelectiveScan(params);
}

}  // namespace turbomind
