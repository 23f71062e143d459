#pragma once

// ⑥ QuantizeBlocks on a GPU. As in WriteKv, a run of lanes keeps one row in registers. With
// offsets (kv/k_offset.h), one kernel stores the offset of every block and head, and the next one
// quantizes what remains of the keys or latents.

#include <cstdint>

#include "turbomind/backend/cuda/kv/kv_write.cuh"
#include "turbomind/backend/cuda/kv/row_reader.cuh"
#include "turbomind/ops/params.h"

namespace turbomind::cuda {

// Call fn.operator()<M>() for the format of a window's rows.
template <class F>
TM_DEVICE void DispatchWindow(KvCacheMode format, const F& fn) {
  if (format == KvCacheMode::kInt8) {
    fn.template operator()<KvCacheMode::kInt8>();
  } else {
    fn.template operator()<KvCacheMode::kNone>();
  }
}

// Return entry `pending` of the blocks to quantize, or one without blocks past the last.
TM_DEVICE PendingQuantization PendingOf(const QuantizeBlocksParams& op, int pending) {
  return pending < op.num_to_quantize ? LoadGlobal(op.blocks_to_quantize + pending)
                                      : PendingQuantization{};
}

// Load a lane's part of a block's offset in FP32, or zeros if the view has none.
template <DataType T>
TM_DEVICE void ReadOffset(const KvLayerView& kv, int64_t block, int head, int lane,
                          float (&offset)[kLaneValues]) {
  OffsetLane stored = {};
  if (kv.HasKOffset()) {
    stored = LoadOffset(kv, block, head, lane);
  }
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) {
    offset[i] = IntValue<T>(stored, i);
  }
}

// Rows of lanes that share the keys of one block and head: each adds every fourth run of
// kOffsetRun slots.
inline constexpr int kOffsetSharers = 4;
inline constexpr int kMaxOffsetRuns = 128 / kOffsetRun;  // IsPagedBlockSeqLen
// Shared memory for the sums.
TM_HD constexpr size_t OffsetBytes(int row_lanes) {
  return kWriteThreads / kOffsetSharers * kMaxOffsetRuns * RowPieces(row_lanes) * kLaneValues *
         sizeof(float);
}

// Return the number of K offsets that a block of threads stores.
TM_HD constexpr int OffsetsOfBlock(int row_lanes) {
  return RowsOfBlock(row_lanes) / kOffsetSharers;
}

// Add the keys, or latents, of a run of slots, from `first` on, to the lane's sums in the order of
// slots.
template <DataType T>
TM_DEVICE void SumRun(const QuantizeBlocksParams& op, const PendingQuantization& ids, int head,
                      int first, int lane, float (&sums)[kLaneValues]) {
  float base[kLaneValues];  // the offset of the window's block
  ReadOffset<T>(op.window16, ids.window16, head, lane, base);
  const KvSide side = op.kv.OffsetSide();
  const auto row_of = [&](int slot) {
    return TargetOf(op.window16, side, ids.window16, head, first + slot);
  };
  DispatchWindow(row_of(0).format, [&]<KvCacheMode M>() {
    StoredLane<M> stored[kOffsetRun];
#pragma unroll
    for (int slot = 0; slot < kOffsetRun; ++slot) {
      stored[slot] = LoadLane<M>(row_of(slot), lane);
    }
#pragma unroll
    for (int slot = 0; slot < kOffsetRun; ++slot) {
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) {
        sums[i] += FiniteValue(DecodeValue<T>(stored[slot], i, 1.f) + base[i], T);
      }
    }
  });
}

// kOffsetSharers rows of lanes store the K offset of one block and head. The first one adds the
// sums of the runs in their order. Grid: num_to_quantize * kv_heads / OffsetsOfBlock.
template <int kRowLanes, DataType T>
__global__ void __launch_bounds__(kWriteThreads) StoreKOffsetsKernel(QuantizeBlocksParams op) {
  BeginKernel();
  constexpr int kPieces = RowPieces(kRowLanes);
  constexpr int kThreads = RowThreads(kRowLanes);
  const int row = ThreadIndexX() / kThreads;
  const int sharer = row % kOffsetSharers;
  const int index = BlockIndexX() * OffsetsOfBlock(kRowLanes) + row / kOffsetSharers;
  const int head = index % op.kv.kv_heads;
  const PendingQuantization ids = PendingOf(op, index / op.kv.kv_heads);
  const RowLane at = {ThreadIndexX() % kThreads, ids.quantized >= 0 ? op.kv.head_dim : 0};
  const int num_runs = op.kv.block_seq_len / kOffsetRun;
  float* const shared = reinterpret_cast<float*>(SharedMemory()) +
                        row / kOffsetSharers * kMaxOffsetRuns * kRowLanes * kLaneValues;
  for (int i = sharer; i < num_runs * kPieces; i += kOffsetSharers) {
    const RowLane of = at.Piece(i % kPieces);
    const int run = i / kPieces;
    if (of.active()) {
      float sums[kLaneValues] = {};
      SumRun<T>(op, ids, head, run * kOffsetRun, of.lane, sums);
#pragma unroll
      for (int j = 0; j < kLaneValues; ++j) {
        StoreShared(shared + (run * kRowLanes + of.lane) * kLaneValues + j, sums[j]);
      }
    }
  }
  SyncBlock();
  const bool stores = at.active() && sharer == 0;
  RowTarget to = {KvCacheMode::kInt8, nullptr, nullptr, 1.f};
  if (stores) {
    to = OffsetTarget(op.kv, ids.quantized, head);
  }
  const float share = 1.f / static_cast<float>(op.kv.block_seq_len);
  float mean[kPieces][kLaneValues] = {};
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const RowLane of = at.Piece(piece);
    for (int run = 0; stores && of.active() && run < num_runs; ++run) {
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) {
        mean[piece][i] += LoadShared<float>(shared + (run * kRowLanes + of.lane) * kLaneValues + i);
      }
    }
#pragma unroll
    for (float& value : mean[piece]) {
      value *= share;
    }
  }
  LaneValues values[kPieces];
  RoundPieces<T>(mean, values);
  WriteRowAs<kRowLanes, T, KvCacheMode::kInt8>(to, {at.lane, stores ? op.kv.head_dim : 0}, values,
                                               false);
}

// Load a lane's values of a row of the window, minus the offset of the block if there is one.
template <DataType T>
TM_DEVICE LaneValues LoadWindowLane(const QuantizeBlocksParams& op, KvSide side,
                                    const PendingQuantization& ids, int head, int slot, int lane) {
  const RowTarget from = TargetOf(op.window16, side, ids.window16, head, slot);
  const bool has_base = op.window16.HasOffset(side);
  const bool has_offset = op.kv.HasOffset(side);
  LaneValues values = {};
  if (from.format == KvCacheMode::kNone && !has_base && !has_offset) {  // keeps the bits of NaN
    const auto words =
        LoadGlobal(reinterpret_cast<const Words<16>*>(from.payload + lane * sizeof(Words<16>)));
#pragma unroll
    for (int i = 0; i < kLaneValues / 2; ++i) {
      values.pairs[i] = words.v[i];
    }
    Unpack<T>(values);
    return values;
  }
  float x[kLaneValues];
  DispatchWindow(from.format, [&]<KvCacheMode M>() {
    const StoredLane<M> stored = LoadLane<M>(from, lane);
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      x[i] = DecodeValue<T>(stored, i, 1.f);
    }
  });
  if (has_base) {
    float base[kLaneValues];
    ReadOffset<T>(op.window16, ids.window16, head, lane, base);
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      x[i] = AddToNumber(x[i], base[i]);
    }
  }
  if (has_offset) {
    float offset[kLaneValues];
    ReadOffset<T>(op.kv, ids.quantized, head, lane, offset);
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      x[i] = AddToNumber(x[i], -offset[i]);
    }
  }
  return RoundLane<T>(x);
}

struct QuantizeLaunch {
  QuantizeBlocksParams op;
  int side_blocks = 0;  // for K, followed by as many for V
};

template <int kRowLanes, DataType T>
__global__ void __launch_bounds__(kWriteThreads) QuantizeBlocksKernel(QuantizeLaunch p) {
  BeginKernel();
  const KvLayerView& kv = p.op.kv;
  const bool is_k = BlockIndexX() < p.side_blocks;
  const KvSide side = is_k ? KvSide::kK : KvSide::kV;
  const int index = (BlockIndexX() - (is_k ? 0 : p.side_blocks)) * RowsOfBlock(kRowLanes) +
                    ThreadIndexX() / RowThreads(kRowLanes);
  const int shift = CountZeros(kv.block_seq_len);
  const int slot = index & (kv.block_seq_len - 1);
  const int head = (index >> shift) % kv.kv_heads;
  const int pending = (index >> shift) / kv.kv_heads;
  const PendingQuantization ids = PendingOf(p.op, pending);
  const bool valid = ids.quantized >= 0;
  const RowLane at = {ThreadIndexX() % RowThreads(kRowLanes), valid ? kv.head_dim : 0};
  RowTarget to = {is_k ? kv.format[0] : kv.format[1], nullptr, nullptr, 1.f};
  LaneValues values[RowPieces(kRowLanes)] = {};
  if (valid) {
    to = TargetOf(kv, side, ids.quantized, head, slot);
  }
#pragma unroll
  for (int piece = 0; piece < RowPieces(kRowLanes); ++piece) {
    const RowLane of = at.Piece(piece);
    if (of.active()) {
      values[piece] = LoadWindowLane<T>(p.op, side, ids, head, slot, of.lane);
    }
    AddClipped(values[piece], to.format, to.global_scale, p.op.num_clipped);
  }
  WriteRow<kRowLanes, T>(to, at, values, p.op.search_scales);
}

}  // namespace turbomind::cuda
