// ⑥ Processes one token and KV head of WriteKv in place: its query heads, its key and its value.
// The key and the value are then quantized and stored.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention_softmax.h"
#include "turbomind/backend/cpu/isa/attention/kv_rotate.h"
#include "turbomind/backend/cpu/isa/kv/kv_rows.h"
#include "turbomind/backend/cpu/isa/simd/simd.h"
#include "turbomind/backend/cpu/kv_kernels.h"

namespace turbomind::TM_ISA {
namespace {

TM_HD void AddBias(float* x, const float* bias, int n) {
  for (int d = 0; d < n; d += kLanes) {
    Store(x + d, Add(Load(x + d), Load(bias + d)));
  }
}

TM_HD void NormRow(float* x, const float* weight, int n, float eps) {
  F32x16 squares = Zero();
  for (int d = 0; d < n; d += kLanes) {
    const F32x16 v = Load(x + d);
    squares = Fma(v, v, squares);
  }
  const float mean = ReduceAdd(squares) / static_cast<float>(n);
  const float inverse = 1.f / __builtin_sqrtf(mean + eps);
  for (int d = 0; d < n; d += kLanes) {
    Store(x + d, Mul(Mul(Load(x + d), Set1(inverse)), Load(weight + d)));
  }
}

// Rotates the pairs (i, i + half) by the token's angles.
TM_HD void RotateRow(float* x, const float* cos, const float* sin, int half) {
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const F32x16 a = Load(x + i);
    const F32x16 b = Load(x + half + i);
    const F32x16 c = Load(cos + i);
    const F32x16 s = Load(sin + i);
    Store(x + i, Sub(Mul(a, c), Mul(b, s)));
    Store(x + half + i, Add(Mul(b, c), Mul(a, s)));
  }
  for (; i < half; ++i) {
    const float a = x[i];
    const float b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[i] + a * sin[i];
  }
}

TM_HD void SubtractRow(float* x, const float* mean, int n) {
  for (int d = 0; d < n; d += kLanes) {
    Store(x + d, Sub(Load(x + d), Load(mean + d)));
  }
}

TM_HD void ScaleRow(float* x, float scale, int n) {
  for (int d = 0; d < n; d += kLanes) {
    Store(x + d, Mul(Load(x + d), Set1(scale)));
  }
}

struct TokenRows {
  const WriteKvParams* params;
  float* rows;  // [q_heads + 2 * kv_heads, head_dim]
  const float* cos;
  const float* sin;
};

TM_HD float* PrepareHead(const TokenRows& t, int head, const float* norm, bool rotate) {
  const WriteKvParams& p = *t.params;
  const int n = p.kv.head_dim;
  float* x = t.rows + static_cast<int64_t>(head) * n;
  if (p.bias != nullptr) {
    AddBias(x, p.bias + static_cast<int64_t>(head) * n, n);
  }
  if (norm != nullptr && !p.norm_after_rope) {
    NormRow(x, norm, n, p.norm_eps);
  }
  if (rotate && t.cos != nullptr) {
    RotateRow(x, t.cos, t.sin, p.rope_dim / 2);
  }
  if (norm != nullptr && p.norm_after_rope) {
    NormRow(x, norm, n, p.norm_eps);
  }
  return x;
}

// Subtracts the offset of the key's block, which comes from K's bias, and stores it with the first
// slot.
void SubtractOffset(const WriteHeadArgs& args, const TokenRows& t, float* key) {
  const WriteKvParams& p = *args.params;
  const KvLayerView& kv = p.window16.data != nullptr ? p.window16 : p.kv;
  const int n = kv.head_dim;
  alignas(64) float offset[kMaxHeadDim];
  __builtin_memcpy(offset, p.k_base + static_cast<int64_t>(args.head) * n, n * sizeof(float));
  if (t.cos != nullptr) {
    const int64_t angles = static_cast<int64_t>(args.token) * (p.rope_dim / 2);
    RotateRow(offset, p.block_cos + angles, p.block_sin + angles, p.rope_dim / 2);
  }
  if (p.k_mean != nullptr) {
    SubtractRow(offset, p.k_mean + static_cast<int64_t>(args.head) * n, n);
  }
  if (p.rotate) {
    HadamardRow(offset, n, RotationSize(n));
  }
  const RowFormat format = {KvCacheMode::kInt8, n, kv.dtype, 1.f, false};
  uint8_t codes[kMaxHeadDim];
  uint8_t params[2 * sizeof(float)];
  EncodeRow(format, offset, codes, params);
  DecodeRow(format, codes, params, offset);
  SubtractRow(key, offset, n);
  if (args.slot == 0) {
    const KvRow to = kv.KOffset(args.block, args.head);
    __builtin_memcpy(to.payload, codes, static_cast<size_t>(n));
    __builtin_memcpy(to.metadata, params, static_cast<size_t>(2 * SizeOf(kv.dtype)));
  }
}

RowCounts WriteRow(const WriteHeadArgs& args, KvSide side, const float* row) {
  const KvLayerView& kv =
      args.params->window16.data != nullptr ? args.params->window16 : args.params->kv;
  const int s = static_cast<int>(side);
  const KvRow to = kv.Row(side, args.block, args.head, args.slot);
  const float global_scale = kv.global_scale[s] != nullptr ? kv.global_scale[s][args.head] : 1.f;
  return EncodeRow({kv.format[s], kv.head_dim, kv.dtype, global_scale, args.params->search_scales},
                   row, to.payload, to.metadata);
}

}  // namespace

RowCounts WriteHead(const WriteHeadArgs& args) {
  const WriteKvParams& p = *args.params;
  const int kv_heads = p.kv.kv_heads;
  const int group = p.q_heads / kv_heads;
  const int64_t angles = static_cast<int64_t>(args.token) * (p.rope_dim / 2);
  TokenRows t;
  t.params = &p;
  const int row_heads = p.q_heads + (p.only_queries ? 0 : 2 * kv_heads);
  t.rows = p.qkv + static_cast<int64_t>(args.token) * row_heads * p.kv.head_dim;
  t.cos = p.rope_cos != nullptr ? p.rope_cos + angles : nullptr;
  t.sin = p.rope_sin != nullptr ? p.rope_sin + angles : nullptr;
  const int n = p.kv.head_dim;
  const float* mean =
      p.k_mean != nullptr ? p.k_mean + static_cast<int64_t>(args.head) * n : nullptr;
  for (int h = 0; h < group; ++h) {
    const int q_head = args.head * group + h;
    float* q = PrepareHead(t, q_head, p.q_norm, true);
    if (args.q_scale != 1.f) {
      ScaleRow(q, args.q_scale, n);
    }
    if (mean != nullptr && p.q_dot_mean != nullptr) {
      p.q_dot_mean[static_cast<int64_t>(args.token) * p.q_heads + q_head] = DotRow(q, mean, n);
    }
    if (p.rotate) {
      HadamardRow(q, n, RotationSize(n));
    }
  }
  if (p.only_queries) {
    return {};
  }
  float* k = PrepareHead(t, p.q_heads + args.head, p.k_norm, true);
  if (mean != nullptr) {
    SubtractRow(k, mean, n);
  }
  if (p.rotate) {
    HadamardRow(k, n, RotationSize(n));
  }
  if (p.k_base != nullptr) {
    SubtractOffset(args, t, k);
  }
  const float* v = PrepareHead(t, p.q_heads + kv_heads + args.head, p.v_norm, false);
  const RowCounts of_k = WriteRow(args, KvSide::kK, k);
  const RowCounts of_v = WriteRow(args, KvSide::kV, v);
  return {of_k.nonfinite + of_v.nonfinite, of_k.clipped + of_v.clipped};
}

}  // namespace turbomind::TM_ISA
