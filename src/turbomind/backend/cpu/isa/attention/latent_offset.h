#pragma once

// ⑦ The offsets of latents (kv/k_offset.h) in a tile. In FP32 they are added to the expanded
// latents. In 8 bits (latent_bytes.h) they stay apart: q · offset is the same for all tokens of a
// block, and so is the offset in their values, which adds the sum of their weights times the
// offset. Work per block of the cache and of 16 rows: rank / 4 products of bytes and rank of
// floats, one twentieth of what 64 tokens take.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention_load.h"
#include "turbomind/backend/cpu/isa/attention/attention_offset.h"
#include "turbomind/backend/cpu/isa/attention/attention_views.h"
#include "turbomind/backend/cpu/isa/attention/latent_bytes.h"
#include "turbomind/backend/cpu/isa/simd/simd.h"
#include "turbomind/core/float_convert.h"
#include "turbomind/kv/k_offset.h"

namespace turbomind::TM_ISA {

// The offset of the tokens `seen` of a tile.
struct LatentOffset {
  Seen seen;
  alignas(64) float values[kMaxLatentDim];
  // In 8 bits, where a value is scale * code + zero.
  alignas(64) int8_t codes[kMaxLatentDim];
  float scale;
  float zero;
  int32_t correction;  // -128 times the sum of the codes, as of a token in ByteTile::offsets
};

struct LatentOffsets {
  int count = 0;
  LatentOffset of[kTileRuns];
};

// Decodes an offset to FP32, and centers its unsigned codes, as DotBytes needs them.
inline void LoadOffset(const KvRow& from, const KvLayerView& layer, LatentOffset* to) {
  const float scale = LoadAs(from.metadata, layer.dtype, 0);
  const float zero = LoadAs(from.metadata, layer.dtype, 1);
  I32x16 sum = Set1Int(0);
  for (int d = 0; d < layer.head_dim; d += kLanes) {
    const I32x16 code = LoadBytes(from.payload + d);
    sum = Add(sum, Add(code, Set1Int(-128)));
    Store(to->values + d, Add(Mul(ToFloat(code), Set1(scale)), Set1(zero)));
    uint64_t bytes[2];
    __builtin_memcpy(bytes, from.payload + d, sizeof(bytes));
    for (uint64_t& eight : bytes) {
      eight ^= 0x8080808080808080u;
    }
    __builtin_memcpy(to->codes + d, bytes, sizeof(bytes));
  }
  to->scale = scale;
  to->zero = zero + 128.f * scale;
  to->correction = -128 * SumLanes(sum);
}

// Finds the offsets of the positions [tile + seen.begin, tile + seen.end), and prefetches those of
// the next tile, up to `end`. REQUIRES: all of the positions have a block.
inline void FindOffsets(const KvHead& kv, int tile, const Seen& seen, int end,
                        LatentOffsets* found) {
  const KvLayerView& layer = *kv.layer;
  found->count = 0;
  if (!layer.HasKOffset()) {
    return;
  }
  const int shift = __builtin_ctz(static_cast<unsigned>(layer.block_seq_len));
  for (int token = seen.begin; token < seen.end;) {
    const int block = (tile + token) >> shift;
    LatentOffset& one = found->of[found->count++];
    one.seen = {token, MinOf(((block + 1) << shift) - tile, seen.end)};
    LoadOffset(layer.KOffset(kv.blocks[block], kv.head), layer, &one);
    token = one.seen.end;
  }
  PrefetchOffsets(kv, tile + kTileTokens, MinOf(tile + 2 * kTileTokens, end));
}

// Adds the offsets to the expanded latents of a tile, whose rows are `stride` floats apart.
inline void AddOffsets(const LatentOffsets& offsets, int rank, float* latents, int64_t stride) {
  for (const LatentOffset* one = offsets.of; one < offsets.of + offsets.count; ++one) {
    for (int token = one->seen.begin; token < one->seen.end; ++token) {
      float* row = latents + token * stride;
      for (int d = 0; d < rank; d += kLanes) {
        Store(row + d, Add(Load(row + d), Load(one->values + d)));
      }
    }
  }
}

// Writes q · offset of the rows of a block, for each run of kOffsetRun tokens: [kTileRuns, lanes].
// Runs without an offset get zeros.
inline void ShiftScores(const LatentOffsets& offsets, const ByteQueries& q, int rank,
                        float* shifts) {
  for (int run = 0; run < kTileRuns; ++run) {
    Store(shifts + run * kLanes, Zero());
  }
  for (const LatentOffset* one = offsets.of; one < offsets.of + offsets.count; ++one) {
    constexpr int kSums = 4;  // one alone waits for its additions
    I32x16 sum[kSums] = {Set1Int(one->correction), Set1Int(0), Set1Int(0), Set1Int(0)};
    for (int d = 0; d < rank; d += 4 * kSums) {
      Unroll<kSums>([&](auto i) __attribute__((always_inline)) {
        constexpr int at = decltype(i)::value;
        sum[at] =
            DotBytes(sum[at], LoadInt(q.codes + (d / 4 + at) * kLanes), one->codes + d + 4 * at);
      });
    }
    const F32x16 dot = ToFloat(Add(Add(sum[0], sum[1]), Add(sum[2], sum[3])));
    const F32x16 of_zero = Mul(ToFloat(LoadInt(q.sums)), Set1(one->zero));
    const F32x16 shift = Mul(Load(q.scales), Fma(dot, Set1(one->scale), of_zero));
    for (int run = one->seen.begin / kOffsetRun; run * kOffsetRun < one->seen.end; ++run) {
      Store(shifts + run * kLanes, shift);
    }
  }
}

// Returns the sum of the weights, [kTileTokens, lanes], of the tokens `seen`.
TM_HD F32x16 SumWeights(const float* weights, const Seen& seen) {
  F32x16 sum[4] = {Zero(), Zero(), Zero(), Zero()};
  for (int first = seen.begin / 4 * 4; first < seen.end; first += 4) {
    Unroll<4>([&](auto i) __attribute__((always_inline)) {
      constexpr int at = decltype(i)::value;
      if (first + at >= seen.begin && first + at < seen.end) {
        sum[at] = Add(sum[at], Load(weights + (first + at) * kLanes));
      }
    });
  }
  return Add(Add(sum[0], sum[1]), Add(sum[2], sum[3]));
}

// Adds an offset to o [rank, lanes], each value `weight` times. o is first multiplied with
// `correction`.
inline void AddOffsetOfValues(const LatentOffset& offset, int rank, F32x16 correction,
                              F32x16 weight, float* o) {
  for (int d = 0; d < rank; ++d) {
    float* to = o + d * kLanes;
    Store(to, Fma(weight, Set1(offset.values[d]), Mul(Load(to), correction)));
  }
}

}  // namespace turbomind::TM_ISA
