#pragma once

// ⑥⑦ The gated delta rule on the GPU. A block computes the new tokens of a head in order. A token
// needs one barrier: both products read the state before the token, as on the CPU
// (isa/recurrent/gated_delta.cc). Decoding is bound by the bytes of the state, prompts by the
// barrier of each token.

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "turbomind/backend/cuda/dense/elementwise.cuh"
#include "turbomind/backend/cuda/recurrent/head_state.cuh"
#include "turbomind/backend/cuda/recurrent/sequence_step.cuh"
#include "turbomind/backend/cuda/runtime/intrinsics.cuh"

namespace turbomind::cuda {

// The sums of each warp's rows for one token. Those without columns are the same in every lane.
template <int kWarps>
struct DeltaSums {
  float state_k[kWarps][32];
  float state_q[kWarps][32];
  float kk[kWarps];
  float qq[kWarps];
  float qk[kWarps];
};

// Grid: as HeadState. Shared memory: DeltaSums of even and of odd tokens.
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps, kStateBlocks<kWarps>)
    GatedDeltaKernel(GatedDeltaParams params) {
  BeginKernel();
  using Sums = DeltaSums<kWarps>;
  const StateHeads& p = params.heads;
  HeadState<kWarps> state(p);
  SequenceStep step(p.batch, p.states, state.seq);
  state.Load(p.state.At(step.slot), step.is_first);
  const float decay_rate = LoadGlobal(p.decay + state.head);
  const float dt_bias = LoadGlobal(p.dt_bias + state.head);
  const float root = sqrtf(static_cast<float>(p.key_dim));
  for (int t = 0; t < step.num_tokens; ++t) {
    const int64_t row = step.first_token + t;
    const float* k_row = p.k + row * p.qkv_stride + state.key;
    const float* q_row = p.q + row * p.qkv_stride + state.key;
    float k[kStateRows];
    float state_k = 0.f;
    float state_q = 0.f;
    float kk = 0.f;
    float qq = 0.f;
    float qk = 0.f;
#pragma unroll
    for (int j = 0; j < kStateRows; ++j) {
      const bool has_row = j < state.num_rows;
      k[j] = has_row ? LoadGlobal(k_row + j) : 0.f;
      const float q = has_row ? LoadGlobal(q_row + j) : 0.f;
      state_k += state.rows[j] * k[j];
      state_q += state.rows[j] * q;
      kk += k[j] * k[j];
      qq += q * q;
      qk += q * k[j];
    }
    // A warp writes the sums of token t + 2 after the barrier of t + 1, when all have read these.
    char* shared = SharedMemory() + t % 2 * sizeof(Sums);
    const auto own = [&](size_t member, int size) {
      return shared + member + state.warp * size * sizeof(float);
    };
    StoreShared(own(offsetof(Sums, state_k), 32) + state.lane * sizeof(float), state_k);
    StoreShared(own(offsetof(Sums, state_q), 32) + state.lane * sizeof(float), state_q);
    if (state.lane == 0) {
      StoreShared(own(offsetof(Sums, kk), 1), kk);
      StoreShared(own(offsetof(Sums, qq), 1), qq);
      StoreShared(own(offsetof(Sums, qk), 1), qk);
    }
    SyncBlock();
    state_k = state_q = kk = qq = qk = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const auto of = [&](size_t member, int at) {
        return LoadShared<float>(shared + member + at * sizeof(float));
      };
      state_k += of(offsetof(Sums, state_k), w * 32 + state.lane);
      state_q += of(offsetof(Sums, state_q), w * 32 + state.lane);
      kk += of(offsetof(Sums, kk), w);
      qq += of(offsetof(Sums, qq), w);
      qk += of(offsetof(Sums, qk), w);
    }

    const float a = LoadGlobal(p.a + row * p.gate_stride + state.head);
    const float b = LoadGlobal(params.b + row * p.gate_stride + state.head);
    const float decay = expf(-decay_rate * Softplus(a + dt_bias));
    const float k_scale = 1.f / sqrtf(kk + 1e-6f);
    const float q_scale = 1.f / (sqrtf(qq + 1e-6f) * root);
    const float v = LoadGlobal(p.v + row * p.qkv_stride + state.value);
    const float delta = Sigmoid(b) * (v - decay * k_scale * state_k);
    if (state.warp == 0 && state.has_column) {
      StoreGlobal(p.out + row * p.value_heads * p.value_dim + state.value,
                  decay * q_scale * state_q + qk * q_scale * k_scale * delta);
    }
    const float scaled = k_scale * delta;
#pragma unroll
    for (int j = 0; j < kStateRows; ++j) {
      state.rows[j] = decay * state.rows[j] + k[j] * scaled;
    }
    if (step.save_tokens == t + 1) {
      state.Store(p.state.At(step.save_slot));
      step.FindSave(state.seq);
    }
  }
  state.Store(p.state.At(step.slot));
}

}  // namespace turbomind::cuda
