#pragma once

// The kernels of one head_dim. Only for the files instances/head_dim_*.cu, among which the
// compiler's work is shared.

#include "turbomind/backend/cuda/decode/decode_attention.cuh"
#include "turbomind/backend/cuda/decode/decode_variants.h"

namespace turbomind::cuda {

// Positions of a tile, stages of a ring, and warps of a block.
struct TileShape {
  int tokens;
  int stages;
  int warps = kDecodeWarps;
};

// Of positions that take `bytes`, metadata included: with it an SM of 228 KiB holds four blocks or
// two, never three, of which plans would fill a wave and a third (kSlotsPerSm).
constexpr TileShape ChooseTile(int bytes, int head_dim) {
  const auto fits = [&](TileShape shape, int limit) {
    return shape.warps * shape.stages * shape.tokens * bytes <= limit;
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

// Whether a block reads four-bit values for two head tiles where there are as many: expanding them
// for each would take longer than reading them. Wider ones have the time.
template <KvCacheMode K, KvCacheMode V, DataType T, int D>
inline constexpr bool kPairsHeadTiles =
    (D == 64 || D == 128) && Fragments<K, T>::kBits == 4 && Fragments<V, T>::kBits == 4;

template <KvCacheMode K, KvCacheMode V, DataType T, int D>
DecodeVariant MakeVariant(const DecodeFormat& format) {
  using One = DecodeConfig<K, V, T, D, 16, 1>;
  constexpr TileShape kTile = ChooseTile(One::kStageBytes / 16, D);
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

// Whether the dtype decides what the stored bytes are.
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
