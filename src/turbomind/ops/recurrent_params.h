#pragma once

// ⑥⑦ Arguments of the ops of recurrent layers. A recurrent layer keeps a *state* of fixed size per
// sequence instead of K and V per token: the last inputs of a short convolution, and a matrix per
// head. States are FP32 and lie in slots of a pool (kv/kv_cache.h).
//
// Every op computes token by token, so a token's result does not depend on how its prompt was cut
// into steps. The state before the first position of a sequence is zero, whatever its slot holds.

#include <cstdint>

#include "turbomind/kv/state_view.h"
#include "turbomind/ops/params.h"

namespace turbomind {

// A copy of a sequence's state after the first `num_tokens` of its new tokens.
struct StateSave {
  int32_t sequence = 0;    // index in the batch
  int32_t num_tokens = 0;  // 1 to the sequence's new tokens - 1
  int32_t slot = 0;        // where it is written; no slot is used twice in a step
};

// The states of a step. All layers share it. The arrays are on the host, as those of BatchView.
// StepParams has them, too. The StateView of an op is one array of a layer's state: it is read from
// the sequence's slot, and its new value is written there and to the slots of its saves.
struct StateBatch {
  const int32_t* slots = nullptr;    // [num_seqs]
  const StateSave* saves = nullptr;  // [num_saves], ascending by sequence, then by num_tokens
  int num_saves = 0;
};

// Convolves every channel with the last `kernel` inputs of its sequence, its own included:
//   in[t, c] = x[t, c] * in_gate[t, c]
//   sum[t, c] = bias[c] + sum over j of weight[j, c] * in[t - (kernel - 1) + j, c]
//   out[t, c] = f(sum[t, c]) * out_gate[t, c]
// where f is SiLU, or the identity. Inputs before the first position are zero. `out` must not
// overlap what is read. The state holds the last kernel - 1 of `in`, the oldest first.
struct ShortConvolutionParams {
  const float* x = nullptr;         // [num_tokens, channels], rows x_stride floats apart
  const float* in_gate = nullptr;   // same, or null: no factor
  const float* out_gate = nullptr;  // same
  int64_t x_stride = 0;
  const float* weight = nullptr;  // [kernel, channels]
  const float* bias = nullptr;    // [channels] or null
  float* out = nullptr;           // [num_tokens, channels]
  int channels = 0;               // a multiple of 16
  int kernel = 0;                 // 2 to kMaxConvolutionKernel
  bool silu = true;
  StateView state;  // [kernel - 1, channels]
  StateBatch states;
  BatchView batch;  // block tables are not read
};

inline constexpr int kMaxConvolutionKernel = 8;
inline constexpr int kMaxStateDim = 256;  // of the matrix of a head

// What a step needs of the matrix states of heads, whatever the rule that updates them. A value
// head has a state S of [key_dim, value_dim]. It reads q and k of key head KeyHead(h), and a factor
// of the old state for each token.
struct StateHeads {
  const float* q = nullptr;  // [num_tokens, key_heads, key_dim], rows qkv_stride floats apart
  const float* k = nullptr;  // same
  const float* v = nullptr;  // [num_tokens, value_heads, value_dim], rows qkv_stride floats apart
  int64_t qkv_stride = 0;
  const float* a = nullptr;  // [num_tokens, value_heads], rows gate_stride floats apart
  int64_t gate_stride = 0;
  const float* decay = nullptr;    // [value_heads] exp(A_log)
  const float* dt_bias = nullptr;  // [value_heads]
  float* out = nullptr;            // [num_tokens, value_heads, value_dim]
  int key_heads = 0;
  int value_heads = 0;  // a multiple of key_heads
  int key_dim = 0;      // a multiple of 16, at most kMaxStateDim
  int value_dim = 0;    // same
  bool tiled = false;   // the value heads of a key head are not adjacent: GGUF
  StateView state;      // [value_heads, key_dim, value_dim]
  StateBatch states;
  BatchView batch;  // block tables are not read

  TM_HD int KeyHead(int value_head) const {
    return tiled ? value_head % key_heads : value_head / (value_heads / key_heads);
  }
};

// Gated delta rule (Qwen3-Next, Qwen3.5). For each token:
//   q' = q / sqrt(|q|² + 1e-6) / sqrt(key_dim),  k' = k / sqrt(|k|² + 1e-6)
//   S = exp(-decay[h] * softplus(a[h] + dt_bias[h])) * S
//   S += k' ⊗ (sigmoid(b[h]) * (v[h] - Sᵀ k'))
//   out[h] = Sᵀ q'
struct GatedDeltaParams {
  StateHeads heads;
  const float* b = nullptr;  // [num_tokens, value_heads], rows gate_stride floats apart
};

// Selective scan of Mamba-2, whose C, B and x are q, k and v. For each token:
//   dt = softplus(a[h] + dt_bias[h])
//   S = exp(-decay[h] * dt) * S + k ⊗ (dt * v[h])
//   out[h] = Sᵀ q + skip[h] * v[h]
struct SelectiveScanParams {
  StateHeads heads;
  const float* skip = nullptr;  // [value_heads]
};

// Normalizes runs of `group` values and multiplies with a gate:
//   out = norm(x) * silu(z), or norm(x * silu(z)) if the gate is first
// where norm(x) = x / sqrt(mean(x²) + eps) * weight, or x without a weight. `out` may be `x`.
struct GatedNormParams {
  const float* x = nullptr;  // [num_rows, dim]
  const float* z = nullptr;  // [num_rows, dim], rows z_stride floats apart
  int64_t z_stride = 0;
  const float* weight = nullptr;  // [dim] or null
  float* out = nullptr;           // [num_rows, dim]
  int num_rows = 0;
  int dim = 0;
  int group = 0;  // divides dim
  float eps = 1e-6f;
  bool gate_first = false;
};

// Computes x = x * sigmoid(gate).
struct SigmoidGateParams {
  float* x = nullptr;           // [count]
  const float* gate = nullptr;  // [count]
  int64_t count = 0;
};

}  // namespace turbomind
