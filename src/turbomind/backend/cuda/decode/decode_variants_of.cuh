#pragma once

// The kernels of one head_dim. Only the files instances/head_dim_*.cu include this, so that the
// compiler's work is split among them.

#include "turbomind/backend/cuda/decode/decode_attention.cuh"
#include "turbomind/backend/cuda/decode/decode_variants.h"

namespace turbomind::cuda {

// Positions per tile, stages per ring and warps per block.
struct TileShape {
  int tokens;
  int stages;
  int warps = kDecodeWarps;
};

// Choose the tile for positions of `bytes` each, metadata included, and `shift_bytes` per warp. An
// SM of 228 KiB then holds four or two blocks, never three: with three, plans would fill one and a
// third waves (kSlotsPerSm).
constexpr TileShape ChooseTile(int bytes, int shift_bytes, int head_dim) {
  const auto fits = [&](TileShape shape, int limit) {
    return shape.warps * (shape.stages * shape.tokens * bytes + shift_bytes) <= limit;
  };
  for (const TileShape shape : {TileShape{32, 3}, TileShape{16, 3}}) {
    if (head_dim <= 128 && fits(shape, kQuarterOfSm)) {
      return shape;
    }
  }
  for (const TileShape shape :
       {TileShape{32, 3}, TileShape{32, 2}, TileShape{16, 3}, TileShape{16, 2}}) {
    if (fits(shape, kMaxShared)) {
      return shape;
    }
  }
  return {16, 3, 2};
}

template <class Config>
DecodeVariant VariantOf() {
  static_assert(Config::kBlocksPerSm != 3);
  static_assert(Config::kSharedBytes <= kMaxShared);
  return {&DecodeKernel<Config>, Config::kSharedBytes, 32 * Config::kWarps, Config::kHeads};
}

// Whether a block reads 4-bit values for two head tiles, if the group has that many heads.
// Expanding these values once per head tile would take longer than reading them. Wider values leave
// enough time for that.
template <KvCacheMode K, KvCacheMode V, DataType T, int D>
inline constexpr bool kPairsHeadTiles =
    (D == 64 || D == 128) && Fragments<K, T>::kBits == 4 && Fragments<V, T>::kBits == 4;

template <KvCacheMode K, KvCacheMode V, DataType T, int D>
DecodeVariant MakeVariant(const DecodeFormat& format) {
  using One = DecodeConfig<K, V, T, D, 16, 1>;
  constexpr TileShape kTile = ChooseTile(One::kStageBytes / 16, One::kShiftBytes, D);
  constexpr int kSmallStages = kTile.tokens == 16 ? kTile.stages : 3;
  const auto with_heads = [&]<int kHeadTiles>() {
    if (format.small_blocks) {
      return VariantOf<DecodeConfig<K, V, T, D, 16, kSmallStages, kTile.warps, kHeadTiles>>();
    }
    return VariantOf<
        DecodeConfig<K, V, T, D, kTile.tokens, kTile.stages, kTile.warps, kHeadTiles>>();
  };
  if constexpr (kPairsHeadTiles<K, V, T, D>) {
    if (format.many_heads) {
      return with_heads.template operator()<2>();
    }
  }
  return with_heads.template operator()<1>();
}

// Return whether the dtype determines the stored bytes.
constexpr bool DependsOnType(KvCacheMode format) {
  return format == KvCacheMode::kNone || IsInteger(format);
}

template <int D, bool kMixed>
DecodeVariant FindVariant(const DecodeFormat& format) {
  return DispatchFormat(format.k, [&]<KvCacheMode K>() {
    return DispatchFormat(format.v, [&]<KvCacheMode V>() -> DecodeVariant {
      if constexpr (!IsListedPair(K, V) || kMixed != (K != V)) {
        return {};
      } else {
        if constexpr (DependsOnType(K) || DependsOnType(V)) {
          if (format.dtype == DataType::kBFloat16) {
            return MakeVariant<K, V, DataType::kBFloat16, D>(format);
          }
        }
        return MakeVariant<K, V, DataType::kFloat16, D>(format);
      }
    });
  });
}

}  // namespace turbomind::cuda
