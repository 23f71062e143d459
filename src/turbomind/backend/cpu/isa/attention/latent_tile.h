#pragma once

// ⑦ A tile of a layer with latents, expanded to FP32 rows of keys: [kTileTokens, rank +
// rotary_dim]. The first part of a row is also the value.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention_load.h"
#include "turbomind/backend/cpu/isa/attention/attention_views.h"
#include "turbomind/backend/cpu/isa/simd/simd.h"

namespace turbomind::TM_ISA {

// A tile's rows of one side, found in the cache.
struct LatentSide {
  KvSide side;
  int dim;
  float factor;  // of every value: the global scale
  TileSide tile;
};

inline LatentSide OpenLatentSide(const KvHead& kv, KvSide side, float* meta) {
  const float* scale = kv.layer->global_scale[static_cast<int>(side)];
  LatentSide found = {side, kv.layer->Dim(side), scale != nullptr ? *scale : 1.f, {}};
  found.tile.meta = meta;
  return found;
}

// Finds the positions [tile + seen.begin, tile + seen.end) and the next tile, up to `end`.
inline void FindRows(const KvHead& kv, int tile, const Seen& seen, int end, LatentSide* side) {
  OpenTile(kv, side->side, tile, seen.begin, seen.end, &side->tile);
  OpenNext(kv, side->side, tile + kTileTokens, end, &side->tile);
}

// Prefetches row `token` of the next tile.
TM_HD void PrefetchRow(const TileSide& tile, int token) {
  const uint8_t* next = tile.next[token / 16];
  for (int64_t at = 0; next != nullptr && at < tile.stride; at += 64) {
    __builtin_prefetch(next + token % 16 * tile.stride + at);
  }
}

// Expands the seen rows of a side to `out`, whose rows are `stride` floats apart.
template <Stored S>
void ExpandRows(const LatentSide& side, const Seen& seen, float* out, int stride) {
  const ValueReader<S> reader;
  const F32x16 factor = Set1(side.factor);
  for (int token = seen.begin; token < seen.end; ++token) {
    PrefetchRow(side.tile, token);
    const uint8_t* row = side.tile.rows[token / 16] + token % 16 * side.tile.stride;
    float* to = out + static_cast<int64_t>(token) * stride;
    for (int group = 0; group < side.dim / kLanes; ++group) {
      F32x16 values = reader.Read(row, group, side.tile.meta, token);
      if constexpr (IsInterleaved(S)) {
        values = Deinterleave(values);
      }
      Store(to + kLanes * group, Mul(values, factor));
    }
  }
}

inline void ExpandLatentSide(const KvHead& kv, const LatentSide& side, const Seen& seen, float* out,
                             int stride) {
  const KvCacheMode format = kv.layer->format[static_cast<int>(side.side)];
  DispatchStored(StoredAs(format, kv.layer->dtype),
                 [&]<Stored S>() { ExpandRows<S>(side, seen, out, stride); });
}

}  // namespace turbomind::TM_ISA
