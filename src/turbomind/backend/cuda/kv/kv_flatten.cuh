#pragma once

// ⑦ Reads the cache back as dense rows on a GPU: FlattenKV in FP32, with the codec's own
// arithmetic, and one view of the cache in 16 bits for prefill. Each lane holds eight consecutive
// values, as in the writers.

#include <cstdint>

#include "turbomind/backend/cuda/kv/kv_ops.h"
#include "turbomind/backend/cuda/kv/kv_write.cuh"
#include "turbomind/backend/cuda/kv/row_reader.cuh"

namespace turbomind::cuda {

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

// Add `added` to the values of a row and round the sums to FP16 pairs.
template <DataType T, KvCacheMode M>
TM_DEVICE Words<16> DecodeHalvesPlus(const StoredLane<M>& x, float global_scale,
                                     const float (&added)[kLaneValues]) {
  float sum[kLaneValues];
  if constexpr (IsInteger(M)) {
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      sum[i] = IntValue<T>(x, i);
    }
  } else {
    const Words<16> halves = DecodeHalves<T>(x, true);  // exact for FP4 and FP8
#pragma unroll
    for (int p = 0; p < kLaneValues / 2; ++p) {
      sum[2 * p] = LowHalf(halves.v[p]) * global_scale;
      sum[2 * p + 1] = HighHalf(halves.v[p]) * global_scale;
    }
  }
  Words<16> out;
#pragma unroll
  for (int p = 0; p < kLaneValues / 2; ++p) {
    out.v[p] = PackFiniteHalf2(sum[2 * p] + added[2 * p], sum[2 * p + 1] + added[2 * p + 1]);
  }
  return out;
}

// Add the fast bias of a head at a position to a lane's values.
TM_DEVICE void AddFastBias(const FastBias& bias, const RowLane& at, int head, int position,
                           float (&values)[kLaneValues]) {
#pragma unroll 1
  for (int pair = 0; pair < bias.num_pairs; ++pair) {
    const int64_t index = int64_t{head} * bias.num_pairs + pair;
    const int wave = LoadGlobal(bias.waves_of + index);
    const float* cos = bias.waves + 2 * wave * bias.num_positions + position;
    const float c = LoadGlobal(cos);
    const float s = LoadGlobal(cos + bias.num_positions);
    const float* u = bias.directions + 2 * index * at.n + at.first();
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      values[i] += c * LoadGlobal(u + i) + s * LoadGlobal(u + at.n + i);
    }
  }
}

// A row in the cache.
struct StoredRow {
  KvSide side;
  int64_t block;
  int head;
  int position;
};

// Decode a lane's values of a row, with the offset of its block.
template <DataType T>
TM_DEVICE void FlattenLane(const KvLayerView& kv, const StoredRow& row, int lane,
                           float (&x)[kLaneValues]) {
  const RowTarget from =
      TargetOf(kv, row.side, row.block, row.head, row.position & (kv.block_seq_len - 1));
  DispatchFormat(from.format, [&]<KvCacheMode M>() {
    const StoredLane<M> stored = LoadLane<M>(from, lane);
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      x[i] = DecodeValue<T>(stored, i, from.global_scale);
    }
  });
  if (kv.HasOffset(row.side)) {
    const OffsetLane offset = LoadOffset(kv, row.block, row.head, lane);
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      x[i] += IntValue<T>(offset, i);
    }
  }
}

// Grid: (rows of [num_seqs, kv_heads, max_len] / rows per block, side).
template <int kRowLanes, DataType T>
__global__ void __launch_bounds__(kWriteThreads) FlattenKernel(FlattenKVParams p) {
  BeginKernel();
  const int64_t row = static_cast<int64_t>(BlockIndexX()) * RowsOfBlock(kRowLanes) +
                      ThreadIndexX() / RowThreads(kRowLanes);
  const KvSide side = BlockIndexY() == 0 ? KvSide::kK : KvSide::kV;
  const int position = static_cast<int>(row % p.max_len);
  const int head = static_cast<int>(row / p.max_len % p.kv.kv_heads);
  const int64_t sequence = row / p.max_len / p.kv.kv_heads;
  const RowLane first = {ThreadIndexX() % RowThreads(kRowLanes), p.kv.head_dim};
  if (sequence >= p.batch.num_seqs) {
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
#pragma unroll 1
  for (int piece = 0; piece < RowPieces(kRowLanes); ++piece) {
    const RowLane at = first.Piece(piece);
    if (!at.active()) {
      return;
    }
    float x[kLaneValues] = {};
    if (block >= 0) {
      FlattenLane<T>(window16 ? p.window16 : p.kv, {side, block, head, position}, at.lane, x);
    }
    StoreFloats((side == KvSide::kK ? p.k : p.v) + row * p.kv.head_dim + at.first(), x);
  }
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

// Find the rows [first, first + kFlattenRows) of a side, their blocks and positions. A row without
// a block gets a null payload.
TM_DEVICE void FindRows(const FlattenHalfParams& p, KvSide side, int64_t first,
                        RowTarget (&from)[kFlattenRows], int32_t (&blocks)[kFlattenRows],
                        int (&positions)[kFlattenRows]) {
  const int shift = CountZeros(p.kv.block_seq_len);
  const int head = BlockIndexY() >> 1;
  int span = first < p.num_rows ? SpanOf(p, first) : 0;
#pragma unroll
  for (int i = 0; i < kFlattenRows; ++i) {
    const int64_t row = first + i;
    from[i] = {side == KvSide::kK ? p.kv.format[0] : p.kv.format[1], nullptr, nullptr, 1.f};
    blocks[i] = -1;
    positions[i] = 0;
    if (row >= p.num_rows) {
      continue;
    }
    if (span + 1 < p.num_spans && p.spans[span + 1].row <= row) {
      ++span;
    }
    const FlattenSpan& at = p.spans[span];
    const int position = at.begin + static_cast<int>(row - at.row);
    positions[i] = position;
    blocks[i] =
        LoadGlobal(p.block_tables + at.sequence * p.block_table_stride + (position >> shift));
    if (blocks[i] >= 0) {
      from[i] = TargetOf(p.kv, side, blocks[i], head, position - (position >> shift << shift));
    }
  }
}

// Grid: (num_rows / FlattenRowsOfBlock, 2 * kv_heads). The two sides of a head are adjacent.
template <int kRowLanes, DataType T>
__global__ void __launch_bounds__(kWriteThreads, kFlattenBlocks)
    FlattenHalfKernel(FlattenHalfParams p) {
  BeginKernel();
  const KvSide side = (BlockIndexY() & 1) == 0 ? KvSide::kK : KvSide::kV;
  const RowLane at = {ThreadIndexX() % kRowLanes, p.kv.head_dim};
  if (!at.active()) {
    return;
  }
  const int64_t first = static_cast<int64_t>(BlockIndexX()) * FlattenRowsOfBlock(kRowLanes) +
                        ThreadIndexX() / kRowLanes * kFlattenRows;
  RowTarget from[kFlattenRows];
  int32_t blocks[kFlattenRows];
  int positions[kFlattenRows];
  FindRows(p, side, first, from, blocks, positions);
  const int head = BlockIndexY() >> 1;
  Words<16> out[kFlattenRows];
  DispatchFormat(from[0].format, [&]<KvCacheMode M>() {
    StoredLane<M> stored[kFlattenRows];
#pragma unroll
    for (int i = 0; i < kFlattenRows; ++i) {
      if (from[i].payload != nullptr) {
        stored[i] = LoadLane<M>(from[i], at.lane);
      }
    }
    const bool has_offset = p.kv.HasOffset(side);
    const bool has_fast_bias = side == KvSide::kK && p.fast_bias.num_pairs > 0;
#pragma unroll
    for (int i = 0; i < kFlattenRows; ++i) {
      if (from[i].payload == nullptr) {
        out[i] = {};
      } else if (has_offset || has_fast_bias) {
        float added[kLaneValues] = {};
        if (has_offset) {
          const OffsetLane offset = LoadOffset(p.kv, blocks[i], head, at.lane);
#pragma unroll
          for (int j = 0; j < kLaneValues; ++j) {
            added[j] = IntValue<T>(offset, j);
          }
        }
        AddFastBias(p.fast_bias, at, head, positions[i], added);
        out[i] = DecodeHalvesPlus<T>(stored[i], from[i].global_scale, added);
      } else {
        out[i] = DecodeHalves<T>(stored[i], p.all_half);
      }
    }
  });
  uint16_t* to = (side == KvSide::kK ? p.k : p.v) +
                 (int64_t{head} * p.num_rows + first) * p.kv.head_dim + at.first();
#pragma unroll
  for (int i = 0; i < kFlattenRows; ++i) {
    if (first + i < p.num_rows) {
      StoreGlobal(reinterpret_cast<Words<16>*>(to + static_cast<int64_t>(i) * p.kv.head_dim),
                  out[i]);
    }
  }
}

}  // namespace turbomind::cuda
