#pragma once

// ⑦ Loads rows of the cache into lanes, for each storage format. For keys, lanes are 16 tokens; for
// values, lanes are 16 dimensions. Keys are not scaled here: the caller folds the scales into
// partial sums. Values are returned as stored, without the global scale of the head.

#include <cstdint>

#include "turbomind/backend/cpu/isa/simd/simd.h"
#include "turbomind/backend/cpu/kv_kernels.h"

namespace turbomind::TM_ISA {

// The storage of one side of a layer: KV format and cache dtype combined.
enum class Stored : uint8_t { kF32, kF16, kBF16, kInt8, kInt4, kE4m3, kE5m2, kFp4 };

inline Stored StoredAs(KvCacheMode format, DataType dtype) {
  switch (format) {
    case KvCacheMode::kNone:
      return dtype == DataType::kFloat32   ? Stored::kF32
             : dtype == DataType::kFloat16 ? Stored::kF16
                                           : Stored::kBF16;
    case KvCacheMode::kInt8:
      return Stored::kInt8;
    case KvCacheMode::kInt4:
      return Stored::kInt4;
    case KvCacheMode::kFp8E4m3:
      return Stored::kE4m3;
    case KvCacheMode::kFp8E5m2:
      return Stored::kE5m2;
    case KvCacheMode::kFp4Mx:
    case KvCacheMode::kFp4Nv:
      return Stored::kFp4;
  }
  __builtin_unreachable();
}

constexpr int BitsOf(Stored s) {
  return s == Stored::kF32                         ? 32
         : s == Stored::kF16 || s == Stored::kBF16 ? 16
         : s == Stored::kInt4 || s == Stored::kFp4 ? 4
                                                   : 8;
}
constexpr bool IsAffine(Stored s) { return s == Stored::kInt8 || s == Stored::kInt4; }
constexpr bool IsGrouped(Stored s) { return s == Stored::kFp4; }

// Calls fn<S>() for storage `s`.
template <class F>
decltype(auto) DispatchStored(Stored s, F fn) {
  switch (s) {
    case Stored::kF32:
      return fn.template operator()<Stored::kF32>();
    case Stored::kF16:
      return fn.template operator()<Stored::kF16>();
    case Stored::kBF16:
      return fn.template operator()<Stored::kBF16>();
    case Stored::kInt8:
      return fn.template operator()<Stored::kInt8>();
    case Stored::kInt4:
      return fn.template operator()<Stored::kInt4>();
    case Stored::kE4m3:
      return fn.template operator()<Stored::kE4m3>();
    case Stored::kE5m2:
      return fn.template operator()<Stored::kE5m2>();
    case Stored::kFp4:
      return fn.template operator()<Stored::kFp4>();
  }
  __builtin_unreachable();
}

alignas(64) inline constexpr float kE2m1Values[16] = {
    0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};
alignas(64) inline constexpr float kUint4Values[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                       8, 9, 10, 11, 12, 13, 14, 15};

template <Stored S>
TM_HD Table16 NibbleTable() {
  return LoadTable(S == Stored::kFp4 ? kE2m1Values : kUint4Values);
}

// Converts the bytes 0..255 in the lanes to E4M3 values, NaN for 0x7f and 0xff.
TM_HD F32x16 FromE4m3(I32x16 code) {
  const I32x16 sign = ShiftLeft<24>(And(code, Set1Int(0x80)));
  const I32x16 low = And(code, Set1Int(0x7f));
  const I32x16 bits = ShiftLeft<20>(low);
  const F32x16 normal = FromBits(Add(bits, Set1Int(120 << 23)));
  const F32x16 subnormal = Sub(FromBits(Add(bits, Set1Int(121 << 23))), Set1(0x1p-6f));
  const F32x16 finite = Select(Less(low, Set1Int(8)), subnormal, normal);
  const F32x16 value = Select(Equal(low, Set1Int(0x7f)), FromBits(Set1Int(0x7fc00000)), finite);
  return FromBits(Or(Bits(value), sign));
}
TM_HD F32x16 FromE5m2(I32x16 code) { return HalfToFloat(ShiftLeft<8>(code)); }

// Dimensions in the 16 bytes of one transposed load, and in one step of the key loop.
constexpr int PieceDims(Stored s) { return 128 / BitsOf(s); }
constexpr int StepDims(Stored s) { return PieceDims(s) > 16 ? PieceDims(s) : 16; }

// Returns dimension j of a piece. `words` is the result of LoadTransposed.
template <Stored S>
TM_HD F32x16 KeyLane(const I32x16 (&words)[4], int j, const Table16& table) {
  const I32x16 word = words[j * BitsOf(S) / 32];
  const int shift = j * BitsOf(S) % 32;
  if constexpr (S == Stored::kF32) {
    return FromBits(word);
  } else if constexpr (S == Stored::kBF16) {
    return FromBits(shift ? And(word, Set1Int(static_cast<int32_t>(0xffff0000u)))
                          : ShiftLeft<16>(word));
  } else if constexpr (S == Stored::kF16) {
    return HalfToFloat(shift ? ShiftRight<16>(word) : word);
  } else if constexpr (BitsOf(S) == 4) {
    return Lookup(table, ShiftRight(word, Set1Int(shift)));
  } else {
    const I32x16 code = And(ShiftRight(word, Set1Int(shift)), Set1Int(0xff));
    if constexpr (S == Stored::kInt8) {
      return ToFloat(code);
    } else if constexpr (S == Stored::kE4m3) {
      return FromE4m3(code);
    } else {
      static_assert(S == Stored::kE5m2);
      return FromE5m2(code);
    }
  }
}

// True if the lanes of 4-bit values are in the order of Interleave: lane 2k is dimension k, lane 2k
// + 1 is dimension 8 + k.
constexpr bool IsInterleaved(Stored s) { return BitsOf(s) == 4; }

alignas(64) inline constexpr int32_t kNibbleShifts[16] = {0,  0,  4,  4,  8,  8,  12, 12,
                                                          16, 16, 20, 20, 24, 24, 28, 28};

// Reads the value lanes of one row. `meta` holds the scale and zero of the row's token.
template <Stored S>
struct ValueReader {
  Table16 table = NibbleTable < BitsOf(S) == 4 ? S : Stored::kFp4 > ();
  I32x16 shifts = LoadInt(kNibbleShifts);

  TM_HD F32x16 Read(const uint8_t* row, int group, const float* meta, int token) const {
    if constexpr (S == Stored::kF32) {
      return FromBits(LoadInt(row + 64 * group));
    } else if constexpr (S == Stored::kF16) {
      return LoadHalf(row + 32 * group);
    } else if constexpr (S == Stored::kBF16) {
      return FromBits(ShiftLeft<16>(LoadShorts(row + 32 * group)));
    } else if constexpr (S == Stored::kE4m3) {
      return FromE4m3(LoadBytes(row + 16 * group));
    } else if constexpr (S == Stored::kE5m2) {
      return FromE5m2(LoadBytes(row + 16 * group));
    } else if constexpr (S == Stored::kInt8) {
      return Fma(ToFloat(LoadBytes(row + 16 * group)), Set1(meta[token]),
                 Set1(meta[kTileTokens + token]));
    } else {
      const F32x16 code = Lookup(table, ShiftRight(Broadcast8(row + 8 * group), shifts));
      if constexpr (S == Stored::kInt4) {
        return Fma(code, Set1(meta[token]), Set1(meta[kTileTokens + token]));
      } else {
        static_assert(S == Stored::kFp4);
        return Mul(code, Set1(meta[group * kTileTokens + token]));
      }
    }
  }
};

// Returns true if o must be interleaved: the FP32 kernels read 4-bit values in that order, and the
// integer kernels have an order of their own.
inline bool HasInterleavedValues(const KvHead& kv, bool exact) {
  return exact && IsInterleaved(StoredAs(kv.layer->format[1], kv.layer->dtype));
}

// Convert a row in place from the order of dimensions to the order of 4-bit codes, and back.
TM_HD void InterleaveRow(float* row, int head_dim) {
  for (int d = 0; d < head_dim; d += kLanes) {
    Store(row + d, Interleave(Load(row + d)));
  }
}
TM_HD void DeinterleaveRow(float* row, int head_dim) {
  for (int d = 0; d < head_dim; d += kLanes) {
    Store(row + d, Deinterleave(Load(row + d)));
  }
}

// Converts byte I of each lane, a legal scale, to FP32. E8M0: 112..136; E4M3: 0..0x7e.
template <KvCacheMode M, int I>
TM_HD F32x16 ScaleValue(I32x16 words) {
  constexpr int kBit = M == KvCacheMode::kFp4Mx ? 23 : 20;  // the lowest bit of the exponent
  I32x16 bits;
  if constexpr (8 * I <= kBit) {
    bits = ShiftLeft<kBit - 8 * I>(words);
  } else {
    bits = ShiftRight<8 * I - kBit>(words);
  }
  if constexpr (M == KvCacheMode::kFp4Mx) {
    return FromBits(And(bits, Set1Int(0xff << 23)));
  } else {
    bits = And(bits, Set1Int(0x7f << 20));
    const F32x16 twice = FromBits(Add(bits, Set1Int(121 << 23)));
    return Select(Less(bits, Set1Int(8 << 20)), Sub(twice, Set1(0x1p-6f)), Mul(twice, Set1(0.5f)));
  }
}

// Stores the scales of groups [first, first + 4) of 16 tokens, one byte each in `words`, to meta.
template <KvCacheMode M>
TM_HD void StoreScales(I32x16 words, float* meta) {
  Unroll<4>([&](auto i) __attribute__((always_inline)) {
    Store(meta + decltype(i)::value * kTileTokens, ScaleValue<M, decltype(i)::value>(words));
  });
}

// Loads the scales of 16 tokens to meta[group][kTileTokens]. `rows` are the tokens' scale rows,
// `stride` bytes each; this side's bytes begin at `offset`. The common shapes avoid the slow
// gather.
template <KvCacheMode M>
void LoadScales(const uint8_t* rows, int stride, int offset, int num_groups, float* meta) {
  if (stride == 8 && num_groups == 4) {
    StoreScales<M>(offset == 0 ? LoadEverySecond<0>(rows) : LoadEverySecond<1>(rows), meta);
    return;
  }
  if (stride == 16 && num_groups == 8) {
    I32x16 words[4];
    LoadTransposed(rows, stride, words);
    StoreScales<M>(offset == 0 ? words[0] : words[2], meta);
    StoreScales<M>(offset == 0 ? words[1] : words[3], meta + 4 * kTileTokens);
    return;
  }
  if (num_groups < 4) {  // head_dim below 64: a dword would reach past the row
    for (int group = 0; group < num_groups; ++group) {
      int32_t bytes[16];
      for (int i = 0; i < 16; ++i) {
        bytes[i] = rows[i * stride + offset + group];
      }
      Store(meta + group * kTileTokens, ScaleValue<M, 0>(LoadInt(bytes)));
    }
    return;
  }
  for (int group = 0; group < num_groups; group += 4) {
    const int first = group + 4 <= num_groups ? group : num_groups - 4;  // never reads past the row
    StoreScales<M>(GatherDwords(rows + offset + first, stride), meta + first * kTileTokens);
  }
}

// Loads (scale, zero) of 16 tokens to meta[2][kTileTokens] at column `column`.
inline void LoadAffine(DataType dtype, const uint8_t* params, float* meta, int column) {
  float* scale = meta + column;
  float* zero = meta + kTileTokens + column;
  if (dtype == DataType::kFloat32) {
    for (int i = 0; i < 16; ++i) {
      __builtin_memcpy(scale + i, params + 8 * i, 4);
      __builtin_memcpy(zero + i, params + 8 * i + 4, 4);
    }
    return;
  }
  const I32x16 words = LoadInt(params);
  const I32x16 high = ShiftRight<16>(words);
  if (dtype == DataType::kFloat16) {
    Store(scale, HalfToFloat(words));
    Store(zero, HalfToFloat(high));
  } else {
    Store(scale, FromBits(ShiftLeft<16>(words)));
    Store(zero, FromBits(ShiftLeft<16>(high)));
  }
}

// One side of a tile of kTileTokens positions, in runs of 16 tokens.
struct TileSide {
  const uint8_t* rows[4] = {nullptr, nullptr, nullptr, nullptr};  // null if the run is not read
  int64_t stride = 0;
  // kFp4: scales [head_dim / 16][kTileTokens]; int8, int4: scale[kTileTokens], zero[kTileTokens].
  float* meta = nullptr;
  // The rows of the next tile, or `rows` if there are none. The kernels prefetch them as they go:
  // all at once would exceed the loads that a core can have in flight, and it would stall.
  const uint8_t* next[4] = {nullptr, nullptr, nullptr, nullptr};
};

inline void PrefetchBytes(const std::byte* from, int64_t size) {
  for (int64_t at = 0; at < size; at += 64) {
    __builtin_prefetch(from + at);
  }
}

// Prefetches line `line` of a 16-token run of the next tile.
TM_HD void PrefetchLine(const uint8_t* run, int line) { __builtin_prefetch(run + 64 * line); }

// Lines of such a run that hold as many bytes as its values of 16 dimensions.
constexpr int LinesPerGroup(Stored s) { return BitsOf(s) / 2; }

// Fills `next` for the positions [tile, end) and prefetches their metadata. Blocks are not
// contiguous, so the hardware prefetcher restarts with each block. Call it after OpenTile.
inline void OpenNext(const KvHead& kv, KvSide side, int tile, int end, TileSide* out) {
  const KvLayerView& layer = *kv.layer;
  const int s = static_cast<int>(side);
  const int block_shift = __builtin_ctz(static_cast<unsigned>(layer.block_seq_len));
  for (int i = 0; i < 4; ++i) {
    out->next[i] = out->rows[i];
    const int position = tile + 16 * i;
    const int64_t block = position < end ? kv.blocks[position >> block_shift] : -1;
    if (block < 0) {
      continue;
    }
    const int slot = position & (layer.block_seq_len - 1);
    out->next[i] =
        reinterpret_cast<const uint8_t*>(layer.Payload(side, block, kv.head)) + slot * out->stride;
    if (layer.scale_bytes[s] > 0 && side == KvSide::kK) {  // the scales of V are stored with them
      const int64_t stride = layer.ScaleStride();
      PrefetchBytes(layer.Scales(side, block, kv.head) + slot * stride, 16 * stride);
    } else if (layer.param_bytes[s] > 0) {
      const int64_t stride = layer.param_bytes[s];
      PrefetchBytes(layer.Params(side, block, kv.head) + slot * stride, 16 * stride);
    }
  }
}

// Finds the rows of the positions [tile + begin, tile + end) and loads their metadata.
inline void OpenTile(const KvHead& kv, KvSide side, int tile, int begin, int end, TileSide* out) {
  const KvLayerView& layer = *kv.layer;
  const int s = static_cast<int>(side);
  const auto load_scales = layer.format[s] == KvCacheMode::kFp4Mx ? LoadScales<KvCacheMode::kFp4Mx>
                                                                  : LoadScales<KvCacheMode::kFp4Nv>;
  const int block_shift = __builtin_ctz(static_cast<unsigned>(layer.block_seq_len));
  out->stride = layer.row_bytes[s];
  for (int i = 0; i < 4; ++i) {
    out->rows[i] = nullptr;
    const int position = tile + 16 * i;
    if (16 * i >= end || 16 * i + 16 <= begin) {
      continue;
    }
    const int64_t block = kv.blocks[position >> block_shift];
    if (block < 0) {
      continue;
    }
    const int slot = position & (layer.block_seq_len - 1);
    out->rows[i] =
        reinterpret_cast<const uint8_t*>(layer.Payload(side, block, kv.head)) + slot * out->stride;
    if (layer.scale_bytes[s] > 0) {
      const int stride = layer.ScaleStride();
      load_scales(reinterpret_cast<const uint8_t*>(layer.Scales(KvSide::kK, block, kv.head)) +
                      static_cast<int64_t>(slot) * stride,
                  stride, s == 1 ? layer.scale_bytes[0] : 0, layer.scale_bytes[s],
                  out->meta + 16 * i);
    } else if (layer.param_bytes[s] > 0) {
      LoadAffine(layer.dtype,
                 reinterpret_cast<const uint8_t*>(layer.Params(side, block, kv.head)) +
                     static_cast<int64_t>(slot) * layer.param_bytes[s],
                 out->meta, 16 * i);
    }
  }
}

}  // namespace turbomind::TM_ISA
