// ⑥ One token and KV head of ProcessKV: its query heads, its key and its value, in place; then the
// key and the value are quantised and stored.

#include <cstdint>

#include "turbomind/backend/cpu/isa/kv_rows.h"
#include "turbomind/backend/cpu/isa/simd.h"

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

// Pairs (i, i + half) turn by the token's angles.
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

struct TokenRows {
  const ProcessKVParams* params;
  float* rows;  // [q_heads + 2 * kv_heads, head_dim]
  const float* cos;
  const float* sin;
};

TM_HD float* PrepareHead(const TokenRows& t, int head, const float* norm, bool rotate) {
  const ProcessKVParams& p = *t.params;
  const int n = p.kv.head_dim;
  float* x = t.rows + static_cast<int64_t>(head) * n;
  if (p.bias != nullptr) {
    AddBias(x, p.bias + static_cast<int64_t>(head) * n, n);
  }
  if (norm != nullptr) {
    NormRow(x, norm, n, p.norm_eps);
  }
  if (rotate && t.cos != nullptr) {
    RotateRow(x, t.cos, t.sin, p.rope_dim / 2);
  }
  return x;
}

int StoreRow(const ProcessHeadArgs& args, KvSide side, const float* row) {
  const KvLayerView& kv = args.params->kv;
  const int s = static_cast<int>(side);
  const auto slot = [&](std::byte* first, int64_t stride) {
    return reinterpret_cast<uint8_t*>(first + args.slot * stride);
  };
  uint8_t* metadata = nullptr;
  if (kv.scale_bytes[s] > 0) {
    metadata = slot(kv.Scales(side, args.block, args.head), kv.ScaleStride());
  } else if (kv.param_bytes[s] > 0) {
    metadata = slot(kv.Params(side, args.block, args.head), kv.param_bytes[s]);
  }
  const float g = kv.g[s] != nullptr ? kv.g[s][args.head] : 1.f;
  return EncodeRow({kv.mode[s], kv.head_dim, kv.dtype, g}, row,
                   slot(kv.Payload(side, args.block, args.head), kv.row_bytes[s]), metadata);
}

}  // namespace

int ProcessHead(const ProcessHeadArgs& args) {
  const ProcessKVParams& p = *args.params;
  const int kv_heads = p.kv.kv_heads;
  const int group = p.q_heads / kv_heads;
  const int64_t angles = static_cast<int64_t>(args.token) * (p.rope_dim / 2);
  TokenRows t;
  t.params = &p;
  t.rows = p.qkv + static_cast<int64_t>(args.token) * (p.q_heads + 2 * kv_heads) * p.kv.head_dim;
  t.cos = p.rope_cos != nullptr ? p.rope_cos + angles : nullptr;
  t.sin = p.rope_sin != nullptr ? p.rope_sin + angles : nullptr;
  for (int h = 0; h < group; ++h) {
    PrepareHead(t, args.head * group + h, p.q_norm, true);
  }
  const float* k = PrepareHead(t, p.q_heads + args.head, p.k_norm, true);
  const float* v = PrepareHead(t, p.q_heads + kv_heads + args.head, nullptr, false);
  return StoreRow(args, KvSide::kK, k) + StoreRow(args, KvSide::kV, v);
}

}  // namespace turbomind::TM_ISA
