#pragma once

// ⑦ Reads the cache back as dense rows on a GPU: FlattenKV in FP32, with the codec's own
// arithmetic, and one view of the cache in 16 bits for prefill. Each lane holds eight consecutive
// values, as in the writers.

#include <cstdint>

#include "turbomind/backend/cuda/kv/kv_ops.h"
#include "turbomind/backend/cuda/kv/kv_write.cuh"

namespace turbomind::cuda {

// A lane's eight values as stored, and the row's metadata.
template <KvCacheMode M>
struct StoredLane {
  static constexpr int kBits = Codec<M>::kBits;
  Words<kBits> payload;
  uint32_t meta;  // the group's scale byte, or (scale, zero)
};

template <KvCacheMode M>
TM_DEVICE StoredLane<M> LoadLane(const RowTarget& from, int lane) {
  StoredLane<M> out;
  out.payload = LoadGlobal(reinterpret_cast<const Words<StoredLane<M>::kBits>*>(
      from.payload + lane * StoredLane<M>::kBits));
  out.meta = 0;
  if constexpr (IsFp4(M)) {
    out.meta = LoadGlobal(reinterpret_cast<const uint8_t*>(from.meta) + lane / 2);
  } else if constexpr (IsInteger(M)) {
    out.meta = LoadGlobal(reinterpret_cast<const uint32_t*>(from.meta));
  }
  return out;
}

template <KvCacheMode M>
TM_DEVICE uint32_t CodeOf(const StoredLane<M>& x, int i) {
  constexpr int kBits = StoredLane<M>::kBits;
  return x.payload.v[i * kBits / 32] >> (i * kBits % 32) & ((1u << kBits) - 1);
}

// Return code * scale + zero.
template <DataType T, KvCacheMode M>
TM_DEVICE float IntValue(const StoredLane<M>& x, int i) {
  const IntParam param = IntParamOf<T>(x.meta);
  return MulRounded(static_cast<float>(CodeOf(x, i)), param.scale) + param.zero;
}

// Codec<M>::DecodeRow for one value.
template <DataType T, KvCacheMode M>
TM_DEVICE float DecodeValue(const StoredLane<M>& x, int i, float global_scale) {
  if constexpr (IsInteger(M)) {
    return IntValue<T>(x, i);
  } else {
    const auto code = static_cast<uint16_t>(CodeOf(x, i));
    if constexpr (M == KvCacheMode::kNone) {
      return ToFloat<T>(code);
    } else {
      return Codec<M>::Value(static_cast<uint8_t>(code), static_cast<uint8_t>(x.meta),
                             global_scale);
    }
  }
}

// Decode to 16-bit pairs, as FlattenHalfParams specifies.
template <DataType T, KvCacheMode M>
TM_DEVICE Words<16> DecodeHalves(const StoredLane<M>& x, bool all_half) {
  Words<16> out;
  if constexpr (IsFp4(M)) {
    constexpr uint32_t k256 = 0x5c005c00u;
    const uint32_t scale = ScalePair<M>(x.meta, x.meta);
    uint32_t apart[4];  // (n_k, n_{k + 4})
    ExpandE2m1(x.payload.v[0], apart);
#pragma unroll
    for (uint32_t& pair : apart) {
      pair = MulHalf2(MulHalf2(pair, scale), k256);
    }
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      out.v[p] = SelectBytes(apart[p % 2 * 2], apart[p % 2 * 2 + 1], p < 2 ? 0x5410 : 0x7632);
    }
  } else if constexpr (IsInteger(M)) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      out.v[p] = PackFiniteHalf2(IntValue<T>(x, 2 * p), IntValue<T>(x, 2 * p + 1));
    }
  } else if constexpr (M == KvCacheMode::kNone) {
    out = x.payload;
    if (T == DataType::kBFloat16 && all_half) {
#pragma unroll
      for (uint32_t& pair : out.v) {
        pair = PackFiniteHalf2(BitsFloat(pair << 16), BitsFloat(pair & 0xffff0000u));
      }
    }
  } else {
    using Stored = Fragments<M, T>;
    static_assert(Stored::kDims == 4 && Stored::Low(1) == 2 && Stored::High(1) == 3);
    uint32_t pairs[2];
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      Stored::Expand(x.payload.v[word], pairs);
      out.v[2 * word] = pairs[0];
      out.v[2 * word + 1] = pairs[1];
    }
  }
  return out;
}

// Grid: (rows of [num_seqs, kv_heads, max_len] / rows per block, side).
template <int kRowLanes, DataType T>
__global__ void __launch_bounds__(kWriteThreads) FlattenKernel(FlattenKVParams p) {
  const int64_t row =
      static_cast<int64_t>(BlockIndexX()) * RowsOfBlock(kRowLanes) + ThreadIndexX() / kRowLanes;
  const KvSide side = BlockIndexY() == 0 ? KvSide::kK : KvSide::kV;
  const int position = static_cast<int>(row % p.max_len);
  const int head = static_cast<int>(row / p.max_len % p.kv.kv_heads);
  const int64_t sequence = row / p.max_len / p.kv.kv_heads;
  const RowLane at = {ThreadIndexX() % kRowLanes, p.kv.head_dim};
  if (sequence >= p.batch.num_seqs || !at.active()) {
    return;
  }
  const int context = LoadGlobal(p.batch.context_lens + sequence);
  if (position >= context) {
    return;
  }
  const int shift = CountZeros(p.kv.block_seq_len);
  const int index = position >> shift;
  const bool window16 = p.window16.data != nullptr && p.rule.IsInWindow16(index, context - 1);
  const int32_t block = LoadGlobal((window16 ? p.batch.window16_tables : p.batch.block_tables) +
                                   sequence * p.batch.block_table_stride + index);
  float x[kLaneValues] = {};
  if (block >= 0) {
    const int slot = position - (index << shift);
    const RowTarget from = TargetOf(window16 ? p.window16 : p.kv, side, block, head, slot);
    DispatchFormat(from.format, [&]<KvCacheMode M>() {
      const StoredLane<M> stored = LoadLane<M>(from, at.lane);
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) {
        x[i] = DecodeValue<T>(stored, i, from.global_scale);
      }
    });
  }
  StoreFloats((side == KvSide::kK ? p.k : p.v) + row * p.kv.head_dim + at.first(), x);
}

inline constexpr int kFlattenRows = 4;  // per run of lanes, in flight together

TM_HD constexpr int FlattenRowsOfBlock(int row_lanes) {
  return RowsOfBlock(row_lanes) * kFlattenRows;
}

// Return the span of an output row: the last one that begins at or before it.
TM_DEVICE int SpanOf(const FlattenHalfParams& p, int64_t row) {
  int low = 0;
  int high = p.num_spans;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (p.spans[middle].row <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Find the rows [first, first + kFlattenRows) of a side. A row without a block gets a null payload.
TM_DEVICE void FindRows(const FlattenHalfParams& p, KvSide side, int64_t first,
                        RowTarget (&from)[kFlattenRows]) {
  const int shift = CountZeros(p.kv.block_seq_len);
  const int head = BlockIndexY() >> 1;
  int span = first < p.num_rows ? SpanOf(p, first) : 0;
#pragma unroll
  for (int i = 0; i < kFlattenRows; ++i) {
    const int64_t row = first + i;
    from[i] = {side == KvSide::kK ? p.kv.format[0] : p.kv.format[1], nullptr, nullptr, 1.f};
    if (row >= p.num_rows) {
      continue;
    }
    if (span + 1 < p.num_spans && p.spans[span + 1].row <= row) {
      ++span;
    }
    const FlattenSpan& at = p.spans[span];
    const int position = at.begin + static_cast<int>(row - at.row);
    const int32_t block =
        LoadGlobal(p.block_tables + at.sequence * p.block_table_stride + (position >> shift));
    if (block >= 0) {
      from[i] = TargetOf(p.kv, side, block, head, position - (position >> shift << shift));
    }
  }
}

// Grid: (num_rows / FlattenRowsOfBlock, 2 * kv_heads). The two sides of a head are adjacent.
template <int kRowLanes, DataType T>
__global__ void __launch_bounds__(kWriteThreads, kFlattenBlocks)
    FlattenHalfKernel(FlattenHalfParams p) {
  const KvSide side = (BlockIndexY() & 1) == 0 ? KvSide::kK : KvSide::kV;
  const RowLane at = {ThreadIndexX() % kRowLanes, p.kv.head_dim};
  if (!at.active()) {
    return;
  }
  const int64_t first = static_cast<int64_t>(BlockIndexX()) * FlattenRowsOfBlock(kRowLanes) +
                        ThreadIndexX() / kRowLanes * kFlattenRows;
  RowTarget from[kFlattenRows];
  FindRows(p, side, first, from);
  Words<16> out[kFlattenRows];
  DispatchFormat(from[0].format, [&]<KvCacheMode M>() {
    StoredLane<M> stored[kFlattenRows];
#pragma unroll
    for (int i = 0; i < kFlattenRows; ++i) {
      if (from[i].payload != nullptr) {
        stored[i] = LoadLane<M>(from[i], at.lane);
      }
    }
#pragma unroll
    for (int i = 0; i < kFlattenRows; ++i) {
      out[i] = from[i].payload != nullptr ? DecodeHalves<T>(stored[i], p.all_half) : Words<16>{};
    }
  });
  const int64_t head = BlockIndexY() >> 1;
  uint16_t* to =
      (side == KvSide::kK ? p.k : p.v) + (head * p.num_rows + first) * p.kv.head_dim + at.first();
#pragma unroll
  for (int i = 0; i < kFlattenRows; ++i) {
    if (first + i < p.num_rows) {
      StoreGlobal(reinterpret_cast<Words<16>*>(to + static_cast<int64_t>(i) * p.kv.head_dim),
                  out[i]);
    }
  }
}

}  // namespace turbomind::cuda
