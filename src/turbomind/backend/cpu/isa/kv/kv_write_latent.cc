// ⑥ Processes one token of WriteLatents: rotates its queries and the rotary part of its row in
// place, and stores the row.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/kv_rotate.h"
#include "turbomind/backend/cpu/isa/kv/kv_rows.h"
#include "turbomind/backend/cpu/kv_kernels.h"

namespace turbomind::TM_ISA {
namespace {

struct Angles {
  const float* cos;
  const float* sin;
  int half;
  bool interleaved;
};

void Rotate(const Angles& angles, float* x) {
  const int step = angles.interleaved ? 2 : 1;
  const int other = angles.interleaved ? 1 : angles.half;
  for (int i = 0; i < angles.half; ++i) {
    float* a = x + i * step;
    const float first = a[0];
    const float second = a[other];
    a[0] = first * angles.cos[i] - second * angles.sin[i];
    a[other] = second * angles.cos[i] + first * angles.sin[i];
  }
}

RowCounts StoreRow(const WriteLatentArgs& args, KvSide side, const float* row) {
  const WriteLatentsParams& p = *args.params;
  const KvLayerView& kv = p.window16.data != nullptr ? p.window16 : p.kv;
  const int s = static_cast<int>(side);
  const KvRow to = kv.Row(side, args.block, 0, args.slot);
  const float scale = kv.global_scale[s] != nullptr ? *kv.global_scale[s] : 1.f;
  return EncodeRow({kv.format[s], kv.Dim(side), kv.dtype, scale, p.search_scales}, row, to.payload,
                   to.metadata);
}

}  // namespace

RowCounts WriteLatent(const WriteLatentArgs& args) {
  const WriteLatentsParams& p = *args.params;
  const int half = p.kv.rotary_dim / 2;
  const int64_t token = args.token;
  const Angles angles = {p.rope_cos + token * half, p.rope_sin + token * half, half, p.interleaved};
  const int width = p.nope_dim + p.kv.rotary_dim;
  float* q = p.q + token * p.q_heads * width + p.nope_dim;
  for (int head = 0; head < p.q_heads; ++head, q += width) {
    Rotate(angles, q);
  }
  float* row = p.rows + token * (p.kv.head_dim + p.kv.rotary_dim);
  Rotate(angles, row + p.kv.head_dim);
  const RowCounts rotary = StoreRow(args, KvSide::kK, row + p.kv.head_dim);
  if (p.rotate) {
    HadamardRow(row, p.kv.head_dim, RotationSize(p.kv.head_dim));
  }
  const RowCounts latent = StoreRow(args, KvSide::kV, row);
  return {rotary.nonfinite + latent.nonfinite, rotary.clipped + latent.clipped};
}

}  // namespace turbomind::TM_ISA
