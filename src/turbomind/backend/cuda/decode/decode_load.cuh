#pragma once

// ⑦ Loads tiles of rows into a warp's stages of shared memory for decode attention.

#include <cstdint>

#include "turbomind/backend/cuda/decode/decode_shape.cuh"
#include "turbomind/kv/codec.h"

namespace turbomind::cuda {

// Base addresses of tiles: a lane's first 16 bytes of the rows in block 0.
struct TileSources {
  const char* keys;
  const char* values;
  const char* scales;
  const char* key_params;
  const char* value_params;
  int32_t block_bytes;
  int32_t scale_block_bytes;
};

// Return the addresses for the rows of a KV head from `slot` on.
template <class C>
TM_DEVICE TileSources FindSources(const KvLayerView& kv, int kv_head, int slot, int lane) {
  const auto rows = [&](const std::byte* head, int row_bytes) {
    return KeepGlobal(reinterpret_cast<const char*>(head) + slot * row_bytes + 16 * lane);
  };
  TileSources from = {};
  from.keys = rows(kv.Payload(KvSide::kK, 0, kv_head), C::KeyShape::kRowBytes);
  from.values = rows(kv.Payload(KvSide::kV, 0, kv_head), C::ValueShape::kRowBytes);
  if constexpr (C::kScaleStride > 0) {
    from.scales = rows(kv.Scales(KvSide::kK, 0, kv_head), C::kScaleStride);
  }
  if constexpr (C::KeyShape::kParamBytes > 0) {
    from.key_params = rows(kv.Params(KvSide::kK, 0, kv_head), 4);
  }
  if constexpr (C::ValueShape::kParamBytes > 0) {
    from.value_params = rows(kv.Params(KvSide::kV, 0, kv_head), 4);
  }
  from.block_bytes = static_cast<int32_t>(kv.block_bytes);
  from.scale_block_bytes = static_cast<int32_t>(kv.scale_block_bytes);
  return from;
}

// Return the offset in shared memory of the 16 bytes of a tile's values that have offset `byte` in
// the pool.
template <class Shape>
TM_DEVICE constexpr int ValuePlace(int byte) {
  if constexpr (Shape::kScattered) {
    const int slot = Shape::Slot(byte / Shape::kRowBytes);
    return slot * Shape::kRowBytes + (byte % Shape::kRowBytes ^ Shape::Swizzle(slot));
  } else {
    return byte;
  }
}

// The addresses that a lane uses in a stage, given for the first stage of the ring.
struct StageView {
  char* fill;         // destination of the lane's copies: 16 bytes of every 512
  char* fill_values;  // the same for values
  char* key;          // its first piece of row g
  char* key_meta;     // scales or parameters of that piece
  char* value;        // its first piece of row 2 t; that of row 2 t + 1 follows at kOddRow
  char* value_meta;
  char* shift;  // the shifts of its heads in row 0 (decode_query.cuh)
};

template <class C>
TM_DEVICE StageView ViewStages(const Lane& at, char* ring, char* shifts) {
  using KeyShape = typename C::KeyShape;
  using ValueShape = typename C::ValueShape;
  StageView view = {};
  view.fill = KeepShared(ring + 16 * at.lane);
  view.fill_values = KeepShared(ring + C::kValuesAt + ValuePlace<ValueShape>(16 * at.lane));
  view.key = KeepShared(ring + at.g * KeyShape::kRowBytes + 4 * KeyShape::KeyWord(at.t, 0));
  const int slot = ValueShape::Slot(2 * at.t);
  const int byte = ValueShape::ValueWordDim(at.g, 0) * ValueShape::F::kBits / 8;
  view.value = KeepShared(ring + C::kValuesAt + slot * ValueShape::kRowBytes +
                          (byte ^ ValueShape::Swizzle(slot)));
  if constexpr (KeyShape::kScaleBytes > 0) {
    view.key_meta =
        KeepShared(ring + C::kScalesAt + at.g * C::kScaleStride + KeyShape::KeyWord(at.t, 0) / 2);
  } else if constexpr (KeyShape::kParamBytes > 0) {
    view.key_meta = KeepShared(ring + C::kKeyParamsAt + 4 * at.g);
  }
  if constexpr (ValueShape::kScaleBytes > 0) {
    view.value_meta = KeepShared(ring + C::kScalesAt + 2 * at.t * C::kScaleStride +
                                 KeyShape::kScaleBytes + ValueShape::ValueWordDim(at.g, 0) / 16);
  } else if constexpr (ValueShape::kParamBytes > 0) {
    view.value_meta = KeepShared(ring + C::kValueParamsAt + 8 * at.t);
  }
  if constexpr (C::kHasShifts) {
    view.shift = KeepShared(shifts + 4 * C::kShiftValues * at.t);
  }
  return view;
}

// Start copies of kBytes contiguous bytes. `to` and `from` are the addresses of the lane's first 16
// bytes.
template <int kBytes>
TM_DEVICE void CopyRows(int lane, char* to, const char* from) {
  static_assert(kBytes % 16 == 0);
#pragma unroll
  for (int first = 0; first < kBytes; first += 512) {
    if (first + 512 <= kBytes || first + 16 * lane < kBytes) {
      CopyAsync(to + first, from + first, 16);
    }
  }
}

template <class C>
TM_DEVICE void CopyValues(int lane, char* to, const char* from) {
  using Shape = typename C::ValueShape;
  if constexpr (Shape::kScattered) {
    constexpr int kBytes = C::kTileTokens * Shape::kRowBytes;
    static_assert(kBytes % 512 == 0);
#pragma unroll
    for (int first = 0; first < kBytes; first += 512) {
      const int ahead = Shape::kRowBytes <= 64  // then ValuePlace is additive
                            ? ValuePlace<Shape>(first)
                            : ValuePlace<Shape>(first + 16 * lane) - ValuePlace<Shape>(16 * lane);
      CopyAsync(to + ahead, from + first, 16);
    }
  } else {
    CopyRows<C::kTileTokens * Shape::kRowBytes>(lane, to, from);
  }
}

// Location of a tile: a block, and its first slot relative to that of the sources.
struct TilePlace {
  int32_t block;
  int slot;
};

// Copy a whole tile into the stage at `stage` of the ring, including rows outside the item.
template <class C>
TM_DEVICE void LoadTile(const TileSources& from, int lane, TilePlace place, const StageView& view,
                        int stage) {
  using KeyShape = typename C::KeyShape;
  using ValueShape = typename C::ValueShape;
  constexpr int kRows = C::kTileTokens;
  const auto rows = [&](const char* head, int32_t block_bytes, int row_bytes) {
    const char* block = AddProduct(head, place.block, block_bytes);
    return C::kWholeBlocks ? block : block + place.slot * row_bytes;
  };
  char* to = view.fill + stage;
  CopyRows<kRows * KeyShape::kRowBytes>(lane, to,
                                        rows(from.keys, from.block_bytes, KeyShape::kRowBytes));
  CopyValues<C>(lane, view.fill_values + stage,
                rows(from.values, from.block_bytes, ValueShape::kRowBytes));
  if constexpr (C::kScaleStride > 0) {
    CopyRows<kRows * C::kScaleStride>(lane, to + C::kScalesAt,
                                      rows(from.scales, from.scale_block_bytes, C::kScaleStride));
  }
  if constexpr (KeyShape::kParamBytes > 0) {
    CopyRows<kRows * 4>(lane, to + C::kKeyParamsAt, rows(from.key_params, from.block_bytes, 4));
  }
  if constexpr (ValueShape::kParamBytes > 0) {
    CopyRows<kRows * 4>(lane, to + C::kValueParamsAt, rows(from.value_params, from.block_bytes, 4));
  }
}

// Make the values of row `row` of a stage finite. The row may never have been written, and 0 times
// NaN is NaN. 4-bit codes are finite under any finite scale.
template <class C>
TM_DEVICE void ClearValues(char* stage, int row) {
  using Shape = typename C::ValueShape;
  if constexpr (IsFp4(C::kValueFormat)) {
    constexpr uint8_t kFinite = C::kValueFormat == KvCacheMode::kFp4Mx ? kMxMinByte : 0;
    char* scales = stage + C::kScalesAt + row * C::kScaleStride + C::KeyShape::kScaleBytes;
#pragma unroll 1
    for (int i = 0; i < Shape::kScaleBytes; ++i) {
      StoreShared(scales + i, kFinite);
    }
  } else if constexpr (Shape::kParamBytes > 0) {
    StoreShared(stage + C::kValueParamsAt + 4 * row, uint32_t{0});
  } else {
#pragma unroll 1
    for (int i = 0; i < Shape::kRowBytes; i += 16) {
      StoreShared(stage + C::kValuesAt + Shape::Slot(row) * Shape::kRowBytes + i, Words<16>{});
    }
  }
}

}  // namespace turbomind::cuda
