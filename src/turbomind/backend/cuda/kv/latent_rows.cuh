#pragma once

// ⑥ WriteLatents, QuantizeBlocks and FlattenKV of layers with latents. A warp owns a row, in pieces
// (kv_encode.cuh).
//
// Bytes moved: the rows in FP32 and their codes. Bound: latency, with few tokens.

#include <cstdint>

#include "turbomind/backend/cuda/kv/hadamard.cuh"
#include "turbomind/backend/cuda/kv/kv_flatten.cuh"
#include "turbomind/backend/cuda/kv/kv_quantize.cuh"
#include "turbomind/backend/cuda/kv/kv_write.cuh"
#include "turbomind/ops/latent_params.h"

namespace turbomind::cuda {

inline constexpr int kLatentRows = kWriteThreads / 32;  // per block: one per warp
inline constexpr int kLatentLanes = kMaxLatentDim / kLaneValues;
inline constexpr int kPieces = RowPieces(kLatentLanes);

// Round a row of FP32 values, count what the cache counts, and store it.
template <DataType T>
TM_DEVICE void StoreLatentRow(const WriteLatentsParams& op, const RowTarget& to, int lane, int n,
                              const float (&x)[kPieces][kLaneValues]) {
  LaneValues values[kPieces];
  RoundPieces<T>(x, values);
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    if (to.payload != nullptr) {
      if (values[piece].has_nonfinite()) {
        AddGlobal(op.num_nonfinite, CountNonfinite(values[piece]));
      }
      AddClipped(values[piece], to.format, to.global_scale, op.num_clipped);
    }
  }
  WriteRow<kLatentLanes, T>(to, {lane, n}, values, op.search_scales);
}

// Rotate the lane's eight values of `x` [rotary_dim] in place, and return them.
TM_DEVICE void RotateLatent(const WriteLatentsParams& op, int token, int lane, float* x,
                            float (&out)[kLaneValues]) {
  const int half = op.kv.rotary_dim / 2;
  const float* cosines = op.rope_cos + static_cast<int64_t>(token) * half;
  const float* sines = op.rope_sin + static_cast<int64_t>(token) * half;
  const bool active = lane * kLaneValues < op.kv.rotary_dim;
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) {
    out[i] = 0.f;
    if (active) {
      const int d = lane * kLaneValues + i;
      const bool is_first = op.interleaved ? d % 2 == 0 : d < half;
      const int partner = op.interleaved ? d ^ 1 : is_first ? d + half : d - half;
      const int angle = op.interleaved ? d / 2 : is_first ? d : partner;
      const float own = MulRounded(LoadGlobal(x + d), LoadGlobal(cosines + angle));
      const float turned = MulRounded(LoadGlobal(x + partner), LoadGlobal(sines + angle));
      out[i] = is_first ? own - turned : own + turned;
    }
  }
  SyncWarp();  // all lanes have read their partners
#pragma unroll
  for (int i = 0; active && i < kLaneValues; ++i) {
    StoreGlobal(x + lane * kLaneValues + i, out[i]);
  }
}

// Return the location of a side of a token's row.
TM_DEVICE RowTarget LatentTarget(const WriteLatentsParams& op, KvSide side, int token) {
  const bool window16 = op.window16.data != nullptr;
  const KvLayerView& kv = window16 ? op.window16 : op.kv;
  const int position = LoadGlobal(op.batch.positions + token);
  const int shift = CountZeros(kv.block_seq_len);
  const int32_t block =
      LoadGlobal((window16 ? op.batch.window16_tables : op.batch.block_tables) +
                 SequenceOf(op.batch, token) * op.batch.block_table_stride + (position >> shift));
  if (block < 0) {
    return {side == KvSide::kK ? kv.format[0] : kv.format[1], nullptr, nullptr, 1.f};
  }
  return TargetOf(kv, side, block, 0, position & (kv.block_seq_len - 1));
}

// A warp stores a token's row, or rotates one of its queries. Grid: num_tokens * (1 + q_heads) /
// kLatentRows. The rows come first, because they take longer.
template <DataType T>
__global__ void __launch_bounds__(kWriteThreads) WriteLatentsKernel(WriteLatentsParams op) {
  BeginKernel();
  const int lane = ThreadIndexX() & 31;
  const int64_t index = static_cast<int64_t>(BlockIndexX()) * kLatentRows + (ThreadIndexX() >> 5);
  const int64_t num_tokens = op.batch.num_tokens;
  float rotated[kPieces][kLaneValues] = {};
  if (index >= num_tokens) {
    const int64_t query = index - num_tokens;
    if (query < num_tokens * op.q_heads) {
      float* q = op.q + query * (op.nope_dim + op.kv.rotary_dim) + op.nope_dim;
      RotateLatent(op, static_cast<int>(query / op.q_heads), lane, q, rotated[0]);
    }
    return;
  }
  const int token = static_cast<int>(index);
  const int rank = op.kv.head_dim;
  float* row = op.rows + index * (rank + op.kv.rotary_dim);
  RotateLatent(op, token, lane, row + rank, rotated[0]);
  StoreLatentRow<T>(op, LatentTarget(op, KvSide::kK, token), lane, op.kv.rotary_dim, rotated);
  float latent[kPieces][kLaneValues] = {};
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const RowLane at = RowLane{lane, rank}.Piece(piece);
    if (at.active()) {
      LoadFloats(row + at.first(), latent[piece]);
    }
  }
  if (op.rotate) {
    RotateRow(latent, lane, RotationSize(rank));
  }
  StoreLatentRow<T>(op, LatentTarget(op, KvSide::kV, token), lane, rank, latent);
}

// A row of QuantizeBlocks or FlattenKV.
struct LatentSlot {
  KvSide side;
  int64_t index;  // among the rows of its side
};

// The warps of a grid process all rows of V, then those of K.
TM_DEVICE LatentSlot SlotOfWarp(int64_t rows_of_side) {
  const int64_t row = static_cast<int64_t>(BlockIndexX()) * kLatentRows + (ThreadIndexX() >> 5);
  return row < rows_of_side ? LatentSlot{KvSide::kV, row}
                            : LatentSlot{KvSide::kK, row - rows_of_side};
}

// Grid: 2 * num_to_quantize * block_seq_len / kLatentRows.
template <DataType T>
__global__ void __launch_bounds__(kWriteThreads) QuantizeLatentsKernel(QuantizeBlocksParams op) {
  BeginKernel();
  const int lane = ThreadIndexX() & 31;
  const KvLayerView& kv = op.kv;
  const int64_t rows = int64_t{op.num_to_quantize} * kv.block_seq_len;
  const LatentSlot row = SlotOfWarp(rows);
  if (row.index >= rows) {
    return;
  }
  const PendingQuantization ids = PendingOf(op, static_cast<int>(row.index / kv.block_seq_len));
  if (ids.quantized < 0) {
    return;
  }
  const int slot = static_cast<int>(row.index % kv.block_seq_len);
  const int n = kv.Dim(row.side);
  const RowTarget to = TargetOf(kv, row.side, ids.quantized, 0, slot);
  LaneValues values[kPieces] = {};
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const RowLane at = RowLane{lane, n}.Piece(piece);
    if (at.active()) {
      values[piece] = LoadWindowLane<T>(op, row.side, ids, 0, slot, at.lane);
      AddClipped(values[piece], to.format, to.global_scale, op.num_clipped);
    }
  }
  WriteRow<kLatentLanes, T>(to, {lane, n}, values, op.search_scales);
}

// Grid: 2 * num_seqs * max_len / kLatentRows.
template <DataType T>
__global__ void __launch_bounds__(kWriteThreads) FlattenLatentsKernel(FlattenKVParams p) {
  BeginKernel();
  const int lane = ThreadIndexX() & 31;
  const int64_t rows = int64_t{p.batch.num_seqs} * p.max_len;
  const LatentSlot row = SlotOfWarp(rows);
  if (row.index >= rows) {
    return;
  }
  const int64_t sequence = row.index / p.max_len;
  const int position = static_cast<int>(row.index % p.max_len);
  const int context = LoadGlobal(p.batch.context_lens + sequence);
  if (position >= context) {
    return;
  }
  const int shift = CountZeros(p.kv.block_seq_len);
  const int index = position >> shift;
  const bool window16 = p.window16.data != nullptr && p.rule.IsInWindow16(index, context - 1);
  const int32_t block = LoadGlobal((window16 ? p.batch.window16_tables : p.batch.block_tables) +
                                   sequence * p.batch.block_table_stride + index);
  const KvLayerView& kv = window16 ? p.window16 : p.kv;
  const int n = kv.Dim(row.side);
  float* const to = (row.side == KvSide::kK ? p.k : p.v) + row.index * n;
#pragma unroll 1
  for (int piece = 0; piece < kPieces; ++piece) {
    const RowLane at = RowLane{lane, n}.Piece(piece);
    if (at.active()) {
      float x[kLaneValues] = {};
      if (block >= 0) {
        FlattenLane<T>(kv, {row.side, block, 0, position}, at.lane, x);
      }
      StoreFloats(to + at.first(), x);
    }
  }
}

}  // namespace turbomind::cuda
