#pragma once

// ⑥⑦ The gated delta rule on the GPU. A block owns 32 columns of the state of one value head of a
// sequence and computes the new tokens in order; a lane owns a column, and a warp some adjacent
// rows, which stay in registers. A token needs one barrier: both products read the state before the
// token, as on the CPU (isa/recurrent/gated_delta.cc). Bytes: the state is read once and written
// once. Decoding is bound by them, prompts by the barrier of each token.

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "turbomind/backend/cuda/dense/elementwise.cuh"
#include "turbomind/backend/cuda/recurrent/sequence_step.cuh"
#include "turbomind/backend/cuda/runtime/intrinsics.cuh"

namespace turbomind::cuda {

inline constexpr int kDeltaRows = 16;  // at most, of a warp
inline constexpr int kDeltaWarps = 8;  // of a block, for key_dim up to 128; twice as many above
static_assert(2 * kDeltaWarps * kDeltaRows == kMaxStateDim);

// The sums of each warp's rows for one token. Those without columns are the same in every lane.
template <int kWarps>
struct DeltaSums {
  float state_k[kWarps][32];
  float state_q[kWarps][32];
  float kk[kWarps];
  float qq[kWarps];
  float qk[kWarps];
};

TM_DEVICE float Softplus(float x) { return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))); }

// Grid: sequences × value heads × ⌈value_dim / 32⌉. Shared memory: DeltaSums of even and of odd
// tokens.
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps, 2 * kDeltaWarps / kWarps)
    GatedDeltaKernel(GatedDeltaParams p) {
  using Sums = DeltaSums<kWarps>;
  const int lane = ThreadIndexX() & 31;
  const int warp = ThreadIndexX() / 32;
  const int runs = (p.value_dim + 31) / 32;
  const int head = BlockIndexX() / runs % p.value_heads;
  const int seq = BlockIndexX() / runs / p.value_heads;
  SequenceStep step(p.batch, p.states, seq);
  const int column = BlockIndexX() % runs * 32 + lane;
  const bool has_column = column < p.value_dim;
  const int num_rows = p.key_dim / kWarps;
  const int first_row = warp * num_rows;
  const int64_t key_offset = int64_t{p.KeyHead(head)} * p.key_dim + first_row;
  const int64_t state_offset =
      (int64_t{head} * p.key_dim + first_row) * p.value_dim + (has_column ? column : 0);

  float state[kDeltaRows];
  const float* from = p.state.working.At(step.slot) + state_offset;
#pragma unroll
  for (int j = 0; j < kDeltaRows; ++j) {
    state[j] = !step.is_first && has_column && j < num_rows
                   ? LoadGlobal(from + int64_t{j} * p.value_dim)
                   : 0.f;
  }
  const auto store = [&](float* to) {
    to += state_offset;
#pragma unroll
    for (int j = 0; j < kDeltaRows; ++j) {
      if (has_column && j < num_rows) {
        StoreGlobal(to, state[j]);
      }
      to += p.value_dim;
    }
  };

  const float decay_rate = LoadGlobal(p.decay + head);
  const float dt_bias = LoadGlobal(p.dt_bias + head);
  const float root = sqrtf(static_cast<float>(p.key_dim));
  for (int t = 0; t < step.num_tokens; ++t) {
    const int64_t row = step.first_token + t;
    const float* k_row = p.k + row * p.qkv_stride + key_offset;
    const float* q_row = p.q + row * p.qkv_stride + key_offset;
    float k[kDeltaRows];
    float state_k = 0.f;
    float state_q = 0.f;
    float kk = 0.f;
    float qq = 0.f;
    float qk = 0.f;
#pragma unroll
    for (int j = 0; j < kDeltaRows; ++j) {
      const bool has_row = j < num_rows;
      k[j] = has_row ? LoadGlobal(k_row + j) : 0.f;
      const float q = has_row ? LoadGlobal(q_row + j) : 0.f;
      state_k += state[j] * k[j];
      state_q += state[j] * q;
      kk += k[j] * k[j];
      qq += q * q;
      qk += q * k[j];
    }
    // A warp writes the sums of token t + 2 after the barrier of t + 1, when all have read these.
    char* shared = SharedMemory() + t % 2 * sizeof(Sums);
    const auto own = [&](size_t member, int size) {
      return shared + member + warp * size * sizeof(float);
    };
    StoreShared(own(offsetof(Sums, state_k), 32) + lane * sizeof(float), state_k);
    StoreShared(own(offsetof(Sums, state_q), 32) + lane * sizeof(float), state_q);
    if (lane == 0) {
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
      state_k += of(offsetof(Sums, state_k), w * 32 + lane);
      state_q += of(offsetof(Sums, state_q), w * 32 + lane);
      kk += of(offsetof(Sums, kk), w);
      qq += of(offsetof(Sums, qq), w);
      qk += of(offsetof(Sums, qk), w);
    }

    const float a = LoadGlobal(p.a + row * p.gate_stride + head);
    const float b = LoadGlobal(p.b + row * p.gate_stride + head);
    const float decay = expf(-decay_rate * Softplus(a + dt_bias));
    const float k_scale = 1.f / sqrtf(kk + 1e-6f);
    const float q_scale = 1.f / (sqrtf(qq + 1e-6f) * root);
    const int64_t value = (int64_t{head} * p.value_dim) + (has_column ? column : 0);
    const float v = LoadGlobal(p.v + row * p.qkv_stride + value);
    const float delta = Sigmoid(b) * (v - decay * k_scale * state_k);
    if (warp == 0 && has_column) {
      StoreGlobal(p.out + row * p.value_heads * p.value_dim + value,
                  decay * q_scale * state_q + qk * q_scale * k_scale * delta);
    }
    const float scaled = k_scale * delta;
#pragma unroll
    for (int j = 0; j < kDeltaRows; ++j) {
      state[j] = decay * state[j] + k[j] * scaled;
    }
    if (step.save_tokens == t + 1) {
      store(p.state.checkpoints.At(step.checkpoint));
      step.FindSave(seq);
    }
  }
  store(p.state.working.At(step.slot));
}

}  // namespace turbomind::cuda
