#pragma once

// ⑥⑦ The selective scan on the GPU. Updates of the state need no sums, so a block computes as many
// tokens as it has warps between two barriers. Then each warp adds the sums of one token. Decoding
// is bound by the bytes of the state, prompts by the instructions for its rows.

#include <cmath>
#include <cstdint>

#include "turbomind/backend/cuda/recurrent/head_state.cuh"
#include "turbomind/backend/cuda/recurrent/sequence_step.cuh"
#include "turbomind/backend/cuda/runtime/intrinsics.cuh"

namespace turbomind::cuda {

// Grid: as HeadState. Shared memory: float[kWarps][kWarps][32], the sums of each token and warp.
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps, kStateBlocks<kWarps>)
    SelectiveScanKernel(SelectiveScanParams params) {
  BeginKernel();
  const StateHeads& p = params.heads;
  HeadState<kWarps> state(p);
  SequenceStep step(p.batch, p.states, state.seq);
  state.Load(p.state.At(step.slot), step.is_first);
  const float decay_rate = LoadGlobal(p.decay + state.head);
  const float dt_bias = LoadGlobal(p.dt_bias + state.head);
  const float skip = LoadGlobal(params.skip + state.head);
  const auto sum_of = [&](int token, int warp) {
    return SharedMemory() + ((token * kWarps + warp) * 32 + state.lane) * sizeof(float);
  };
  const auto v_of = [&](int64_t row) { return LoadGlobal(p.v + row * p.qkv_stride + state.value); };

  for (int first = 0; first < step.num_tokens; first += kWarps) {
    const int left = step.num_tokens - first;
    const int count = left < kWarps ? left : kWarps;
    const int64_t first_row = step.first_token + first;
    // Lane i has the factors of token i.
    const int64_t own_row = first_row + (state.lane < count ? state.lane : 0);
    const float a = LoadGlobal(p.a + own_row * p.gate_stride + state.head);
    const float dt = Softplus(a + dt_bias);
    const float decay = expf(-decay_rate * dt);
    for (int i = 0; i < count; ++i) {
      const int64_t row = first_row + i;
      const float* k = p.k + row * p.qkv_stride + state.key;
      const float* q = p.q + row * p.qkv_stride + state.key;
      const float factor = ShuffleTo(decay, i);
      const float delta = ShuffleTo(dt, i) * v_of(row);
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < kStateRows; ++j) {
        if (j < state.num_rows) {
          state.rows[j] = factor * state.rows[j] + LoadGlobal(k + j) * delta;
          sum += state.rows[j] * LoadGlobal(q + j);
        }
      }
      StoreShared(sum_of(i, state.warp), sum);
      if (step.save_tokens == first + i + 1) {
        state.Store(p.state.At(step.save_slot));
        step.FindSave(state.seq);
      }
    }
    SyncBlock();
    if (state.warp < count) {
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        sum += LoadShared<float>(sum_of(state.warp, w));
      }
      const int64_t row = first_row + state.warp;
      if (state.has_column) {
        StoreGlobal(p.out + row * p.value_heads * p.value_dim + state.value,
                    sum + skip * v_of(row));
      }
    }
    SyncBlock();  // before a warp overwrites the sums
  }
  state.Store(p.state.At(step.slot));
}

}  // namespace turbomind::cuda
