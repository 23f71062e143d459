#pragma once

// ⑦ The rows and positions of a block, and the expansion of stored rows to 16 bits in shared memory
// (tile_shape.cuh).

#include <cstdint>

#include "turbomind/backend/cuda/kv/kv_flatten.cuh"
#include "turbomind/backend/cuda/prefill/prefill_shape.cuh"
#include "turbomind/backend/cuda/tile/tile_shape.cuh"

namespace turbomind::cuda {

// The sequences of a launch. Each has its own blocks of rows.
struct TiledSequences {
  const int32_t* cu_seqlens;  // of the batch
  int first_seq;
  int end_seq;
  int first_token;  // of first_seq
  int num_tiles;    // blocks of rows of all sequences
};

// The sequence of a block of rows.
struct TileRows {
  int sequence;
  int first_token;
  int num_tokens;
  int first_row;  // of the block
};

// Return the rows of a block. Rows are (token, head) pairs of one sequence, in this order. Grid:
// num_tiles blocks in x.
TM_DEVICE TileRows FindTileRows(const TiledSequences& all, int heads, int rows_of_block) {
  int tile = all.num_tiles - 1 - BlockIndexX();  // a sequence's longest tiles first
  int sequence = all.first_seq;
  int token = all.first_token;
  int next = LoadGlobal(all.cu_seqlens + sequence + 1);
  const auto tiles = [&] { return ((next - token) * heads + rows_of_block - 1) / rows_of_block; };
  while (sequence + 1 < all.end_seq && tile >= tiles()) {
    tile -= tiles();
    token = next;
    next = LoadGlobal(all.cu_seqlens + ++sequence + 1);
  }
  return {sequence, token, next - token, tile * rows_of_block};
}

// Cut positions into parts, and return one of them.
TM_DEVICE SeenPositions PartOf(const SeenPositions& all, int part, int num_parts) {
  const int first = all.begin / kPartUnit * kPartUnit;
  const int units = (all.end - first + kPartUnit - 1) / kPartUnit;
  const int length = (units + num_parts - 1) / num_parts * kPartUnit;
  const int begin = first + part * length;
  const int end = begin + length;
  return {begin > all.begin ? begin : all.begin, end < all.end ? end : all.end};
}

// Round eight values to 16 bits.
template <bool kBFloat>
TM_DEVICE Words<16> RoundQuery(const float* from) {
  Words<16> out;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto x = LoadGlobal(reinterpret_cast<const Words<16>*>(from) + half);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const float low = BitsFloat(x.v[2 * pair]);
      const float high = BitsFloat(x.v[2 * pair + 1]);
      out.v[2 * half + pair] = kBFloat ? PackBFloat2(low, high) : PackFiniteHalf2(low, high);
    }
  }
  return out;
}

// The stored rows of a side of a tile, in shared memory.
struct RawSide {
  KvCacheMode format;
  const char* payload;
  const char* meta;
  int row_bytes;
  int meta_bytes;
  int values;  // of a row
  int column;  // in the tile, of the first value
  // The offset of each run of tokens in FP16, in the unit of expanded values, or null.
  const char* offsets = nullptr;
  int offset_bytes = 0;
};

// Expand eight FP4 codes with their scale to raw FP16 values, in order (Fragments::kUnit).
template <KvCacheMode M>
TM_DEVICE Words<16> ExpandCodes(uint32_t codes, uint32_t scale) {
  using F = Fragments<M, DataType::kFloat16>;
  uint32_t pairs[4];
  F::Expand(codes, pairs);
#pragma unroll
  for (uint32_t& pair : pairs) {
    pair = MulHalf2(pair, scale);
  }
  Words<16> out;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    out.v[p] = F::kHardware
                   ? pairs[p]
                   : SelectBytes(pairs[p % 2 * 2], pairs[p % 2 * 2 + 1], p < 2 ? 0x5410 : 0x7632);
  }
  return out;
}

// Expand eight codes of an integer format: code * scale + zero in FP32, rounded to FP16. A code
// becomes the low bits of 2^23 + code, which is faster than a conversion.
template <int kBits>
TM_DEVICE Words<16> ExpandIntegers(const Words<kBits>& codes, const IntParam& param) {
  constexpr uint32_t kBits2To23 = 0x4b000000u;
  constexpr float kLevels = (1 << kBits) - 1;
  constexpr float kMaxHalf = 65504.f;
  float value[kLaneValues];
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) {
    const uint32_t bits = kBits == 8 ? SelectBytes(codes.v[i / 4], kBits2To23, 0x7440u + i % 4)
                                     : AndOr(codes.v[0] >> (4 * i), 0xfu, kBits2To23);
    value[i] = fmaf(BitsFloat(bits) - 0x1p23f, param.scale, param.zero);
  }
  if (fabsf(param.zero) + kLevels * param.scale > kMaxHalf) {
#pragma unroll
    for (float& x : value) {
      x = fminf(fmaxf(x, -kMaxHalf), kMaxHalf);
    }
  }
  Words<16> out;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    out.v[p] = PackHalf2(value[2 * p], value[2 * p + 1]);
  }
  return out;
}

// Expand a run of a token's values.
template <class C, DataType T, KvCacheMode M, int kValues>
TM_DEVICE void ExpandRun(const char* payload, const char* meta, Words<16> (&out)[kValues / 8]) {
  if constexpr (IsFp4(M)) {
    static_assert(kValues == kFp4Group);
    const auto codes = LoadShared<Words<8>>(payload);
    const uint32_t byte = LoadShared<uint8_t>(meta);
    const uint32_t scale = ScalePair<M, Fragments<M, T>::kHardware>(byte, byte);
    out[0] = ExpandCodes<M>(codes.v[0], scale);
    out[1] = ExpandCodes<M>(codes.v[1], scale);
  } else if constexpr (IsInteger(M)) {
    constexpr int kBits = Codec<M>::kBits;
    out[0] = ExpandIntegers<kBits>(LoadShared<Words<kBits>>(payload),
                                   IntParamOf<T>(LoadShared<uint32_t>(meta)));
  } else {
    const StoredLane<M> stored = {LoadShared<Words<StoredLane<M>::kBits>>(payload), 0};
    out[0] = DecodeHalves<T>(stored, !C::kBFloat);
  }
}

// Add eight values of an offset. Latents come from a norm, so that no sum exceeds FP16.
TM_DEVICE void AddTileOffset(const char* offset, Words<16>* values) {
  const auto added = LoadShared<Words<16>>(offset);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values->v[i] = FmaHalf2(values->v[i], kHalfOne, added.v[i]);
  }
}

// Expand the tokens [begin, end) of a side to 16 bits, and clear the others. FP4 values are raw
// (Fragments::kUnit), all others as DecodeHalves gives them.
template <class C, DataType T, KvCacheMode M>
TM_DEVICE void ExpandSide(const RawSide& side, int begin, int end) {
  constexpr int kValues = IsFp4(M) ? kFp4Group : kLaneValues;
  const int token = ThreadIndexX() / C::kExpandThreads;
  const int lane = ThreadIndexX() % C::kExpandThreads;
  const bool seen = token >= begin && token < end;
  char* const to = SharedMemory() + C::kTileAt + token * C::kStride + 2 * side.column;
  const char* const payload = side.payload + token * side.row_bytes;
  const char* const meta = side.meta + token * side.meta_bytes;
  const bool has_offset = !C::kBFloat && seen && side.offsets != nullptr;
  const char* const offset =
      has_offset ? side.offsets + token / kRunTokens * side.offset_bytes : nullptr;
#pragma unroll 4
  for (int run = lane; run < side.values / kValues; run += C::kExpandThreads) {
    Words<16> out[kValues / 8] = {};
    if (seen) {
      ExpandRun<C, T, M, kValues>(payload + run * (kValues * Codec<M>::kBits / 8),
                                  IsFp4(M) ? meta + run : meta, out);
    }
#pragma unroll
    for (int i = 0; i < kValues / 8; ++i) {
      if (has_offset) {
        AddTileOffset(offset + 2 * kValues * run + 16 * i, &out[i]);
      }
      StoreShared(to + 2 * kValues * run + 16 * i, out[i]);
    }
  }
}

// Expand the tokens [begin, end) of a side, whatever its format is.
template <class C>
TM_DEVICE void ExpandStored(const RawSide& side, DataType dtype, int begin, int end) {
  if constexpr (C::kBFloat) {
    ExpandSide<C, DataType::kBFloat16, KvCacheMode::kNone>(side, begin, end);
  } else {
    DispatchFormat(side.format, [&]<KvCacheMode M>() {
      if (dtype == DataType::kBFloat16) {
        ExpandSide<C, DataType::kBFloat16, M>(side, begin, end);
      } else {
        ExpandSide<C, DataType::kFloat16, M>(side, begin, end);
      }
    });
  }
}

// Return the factor from an expanded value to the value, without the global scale.
TM_DEVICE float ExpandedUnit(KvCacheMode format) {
  return format == KvCacheMode::kFp4Mx   ? Fragments<KvCacheMode::kFp4Mx, DataType::kFloat16>::kUnit
         : format == KvCacheMode::kFp4Nv ? Fragments<KvCacheMode::kFp4Nv, DataType::kFloat16>::kUnit
                                         : 1.f;
}

}  // namespace turbomind::cuda
