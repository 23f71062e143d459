#pragma once

// ⑥ WriteKv on a GPU. A run of 8, 16 or 32 threads keeps one row (one head of one token) in
// registers from the first load to the stored codes. With 64 lanes, a thread has two of them. Sums
// are in the same order as on the CPU.

#include <cmath>
#include <cstdint>

#include "turbomind/backend/cuda/kv/hadamard.cuh"
#include "turbomind/backend/cuda/kv/row_writer.cuh"
#include "turbomind/ops/params.h"

namespace turbomind::cuda {

inline constexpr int kWriteThreads = 128;
// Blocks per SM for which the registers must suffice.
TM_HD constexpr int WriteBlocks(int row_lanes) { return RowPieces(row_lanes) == 1 ? 5 : 4; }
inline constexpr int kFlattenBlocks = kHasE2m1 ? 6 : 8;  // 8 would spill on SM 100

TM_HD constexpr int RowsOfBlock(int row_lanes) { return kWriteThreads / RowThreads(row_lanes); }

// Every block processes rows of one kind. The blocks of K and V, which do the arithmetic, are
// spread evenly among those of Q, which wait for memory.
struct WriteKvLaunch {
  WriteKvParams op;
  int q_blocks = 0;
  int kv_blocks = 0;      // for K, and as many for V
  int rotation_size = 0;  // 0: none
};

enum class RowKind { kQ, kK, kV };

using Float4 = Words<16>;

TM_DEVICE void LoadFloats(const float* from, float (&x)[kLaneValues]) {
#pragma unroll
  for (int i = 0; i < kLaneValues; i += 4) {
    const Float4 words = LoadGlobal(reinterpret_cast<const Float4*>(from + i));
    for (int j = 0; j < 4; ++j) {
      x[i + j] = BitsFloat(words.v[j]);
    }
  }
}

TM_DEVICE void StoreFloats(float* to, const float (&x)[kLaneValues]) {
#pragma unroll
  for (int i = 0; i < kLaneValues; i += 4) {
    StoreGlobal(
        reinterpret_cast<Float4*>(to + i),
        Float4{{FloatBits(x[i]), FloatBits(x[i + 1]), FloatBits(x[i + 2]), FloatBits(x[i + 3])}});
  }
}

// Round the values of a thread's lanes.
template <DataType T, int kPieces>
TM_DEVICE void RoundPieces(const float (&x)[kPieces][kLaneValues], LaneValues (&out)[kPieces]) {
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    out[piece] = RoundLane<T>(x[piece]);
  }
}

// Sum over a row in the CPU's order: value i goes to chain i % 16 in order, then the chains are
// added in halves. add(i, sum) returns the chain's next sum.
template <int kRowLanes, class Add>
TM_DEVICE float SumInChains(const RowLane& at, const Add& add) {
  float sum = 0.f;
  for (int i = at.lane & 15; i < at.n; i += 16) {
    sum = add(i, sum);
  }
  if constexpr (kRowLanes == 8) {
    float upper = 0.f;
    for (int i = at.lane + 8; i < at.n; i += 16) {
      upper = add(i, upper);
    }
    sum += upper;
  } else {
    sum += ShuffleXor(sum, 8);
  }
  sum += ShuffleXor(sum, 4);
  sum += ShuffleXor(sum, 2);
  return sum + ShuffleXor(sum, 1);
}

// One row of qkv while it is processed. Rows past the end have at.n = 0.
template <int kRowLanes>
struct ProcessRow {
  static constexpr int kPieces = RowPieces(kRowLanes);
  const WriteKvLaunch& launch;
  RowKind kind;
  RowLane at;
  int token;
  int head;    // index among the heads of its kind
  float* row;  // in qkv
  float x[kPieces][kLaneValues];

  TM_DEVICE const WriteKvParams& op() const { return launch.op; }
  TM_DEVICE int head_of_all() const {
    return head + (kind == RowKind::kQ ? 0 : op().q_heads) +
           (kind == RowKind::kV ? op().kv.kv_heads : 0);
  }
  TM_DEVICE void Load();
  TM_DEVICE void AddBias();
  // `bias` is what the row in memory still lacks, or null.
  TM_DEVICE void Norm(const float* weight, const float* bias);
  TM_DEVICE void Rotate(const float* all_cosines, const float* all_sines);  // RoPE
  TM_DEVICE void Scale();  // by the temperature of its position
  TM_DEVICE void SubtractMean();
  TM_DEVICE void DotMean();
  TM_DEVICE void Hadamard();
  template <DataType T>
  TM_DEVICE void SubtractOffset();
  TM_DEVICE void Store() {
    ForEachPiece([&](const RowLane& of, float(&values)[kLaneValues]) {
      StoreFloats(row + of.first(), values);
    });
  }
  // Call fn(lane, values) for each of the thread's lanes that holds values.
  template <class F>
  TM_DEVICE void ForEachPiece(const F& fn) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      if (at.Piece(piece).active()) {
        fn(at.Piece(piece), x[piece]);
      }
    }
  }
  TM_DEVICE void RotateInMemory(const float* cosines, const float* sines);
};

template <int kRowLanes>
TM_DEVICE void ProcessRow<kRowLanes>::Load() {
  const int all = op().q_heads + (op().only_queries ? 0 : 2 * op().kv.kv_heads);
  row = op().qkv + (static_cast<int64_t>(token) * all + head_of_all()) * op().kv.head_dim;
#pragma unroll
  for (int i = 0; i < kPieces * kLaneValues; ++i) {
    x[i / kLaneValues][i % kLaneValues] = 0.f;
  }
  ForEachPiece([&](const RowLane& of, float(&values)[kLaneValues]) {
    LoadFloats(row + of.first(), values);
  });
}

template <int kRowLanes>
TM_DEVICE void ProcessRow<kRowLanes>::AddBias() {
  if (op().bias == nullptr) {
    return;
  }
  const float* bias = op().bias + static_cast<int64_t>(head_of_all()) * op().kv.head_dim;
  ForEachPiece([&](const RowLane& of, float(&values)[kLaneValues]) {
    float b[kLaneValues];
    LoadFloats(bias + of.first(), b);
    for (int i = 0; i < kLaneValues; ++i) {
      values[i] += b[i];
    }
  });
}

template <int kRowLanes>
TM_DEVICE void ProcessRow<kRowLanes>::Norm(const float* weight, const float* bias) {
  const float squares = SumInChains<kRowLanes>(at, [&](int i, float sum) {
    const float value = LoadGlobal(row + i) + (bias != nullptr ? LoadGlobal(bias + i) : 0.f);
    return fmaf(value, value, sum);
  });
  const float mean = squares / static_cast<float>(op().kv.head_dim);
  const float inverse = 1.f / sqrtf(mean + op().norm_eps);
  ForEachPiece([&](const RowLane& of, float(&values)[kLaneValues]) {
    float w[kLaneValues];
    LoadFloats(weight + of.first(), w);
    for (int i = 0; i < kLaneValues; ++i) {
      values[i] = MulRounded(MulRounded(values[i], inverse), w[i]);
    }
  });
}

// Rotate a lane's values, given those at the other ends of their pairs, and their angles. Only the
// values at `first` + i < rope_dim turn.
TM_DEVICE void RotateLane(int first, int rope_dim, const float (&y)[kLaneValues],
                          const float (&c)[kLaneValues], const float (&s)[kLaneValues],
                          float (&x)[kLaneValues]) {
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) {
    const int d = first + i;
    if (d < rope_dim) {
      const float own = MulRounded(x[i], c[i]);
      const float turned = MulRounded(y[i], s[i]);
      x[i] = d < rope_dim / 2 ? own - turned : own + turned;
    }
  }
}

// Rotate the pairs through global memory, where the row is rewritten anyway.
template <int kRowLanes>
TM_DEVICE void ProcessRow<kRowLanes>::RotateInMemory(const float* cosines, const float* sines) {
  const int half = op().rope_dim / 2;
  SyncWarp();  // Norm has finished reading the row
  Store();
  SyncWarp();
  ForEachPiece([&](const RowLane& of, float(&values)[kLaneValues]) {
    float y[kLaneValues] = {};
    float c[kLaneValues] = {};
    float s[kLaneValues] = {};
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      const int d = of.first() + i;
      if (d < op().rope_dim) {
        y[i] = LoadGlobal(row + (d < half ? d + half : d - half));
        c[i] = LoadGlobal(cosines + (d < half ? d : d - half));
        s[i] = LoadGlobal(sines + (d < half ? d : d - half));
      }
    }
    RotateLane(of.first(), op().rope_dim, y, c, s, values);
  });
}

// Rotate the pairs (i, i + half) by the token's angles. If half is not a multiple of eight, a
// pair's values are at different places in their lanes, and in a row of pieces in any lane.
template <int kRowLanes>
TM_DEVICE void ProcessRow<kRowLanes>::Rotate(const float* all_cosines, const float* all_sines) {
  const int half = op().rope_dim / 2;
  const int first = at.first();
  const float* cosines = all_cosines + static_cast<int64_t>(token) * half;
  const float* sines = all_sines + static_cast<int64_t>(token) * half;
  if (kPieces > 1 || half % kLaneValues != 0) {
    RotateInMemory(cosines, sines);
    return;
  }
  float y[kLaneValues];
  const int distance = half / kLaneValues;
  const int other = first >= 2 * half ? at.lane
                    : first < half    ? at.lane + distance
                                      : at.lane - distance;
  const int base = ThreadIndexX() & 31 & -kRowLanes;
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) {
    y[i] = ShuffleTo(x[0][i], base + other);
  }
  if (first < op().rope_dim && at.active()) {
    float c[kLaneValues];
    float s[kLaneValues];
    const int angle = first < half ? first : first - half;
    LoadFloats(cosines + angle, c);
    LoadFloats(sines + angle, s);
    RotateLane(first, op().rope_dim, y, c, s, x[0]);
  }
}

template <int kRowLanes>
TM_DEVICE void ProcessRow<kRowLanes>::Scale() {
  if (at.active()) {
    const float scale = op().query_scaling.At(LoadGlobal(op().batch.positions + token));
#pragma unroll
    for (int i = 0; i < kPieces * kLaneValues; ++i) {
      float& value = x[i / kLaneValues][i % kLaneValues];
      value = MulRounded(value, scale);
    }
  }
}

template <int kRowLanes>
TM_DEVICE void ProcessRow<kRowLanes>::SubtractMean() {
  const float* means = op().k_mean + static_cast<int64_t>(head) * op().kv.head_dim;
  ForEachPiece([&](const RowLane& of, float(&values)[kLaneValues]) {
    float mean[kLaneValues];
    LoadFloats(means + of.first(), mean);
    for (int i = 0; i < kLaneValues; ++i) {
      values[i] -= mean[i];
    }
  });
}

// Compute q · k_mean of the head's group from the row in memory.
template <int kRowLanes>
TM_DEVICE void ProcessRow<kRowLanes>::DotMean() {
  const int kv_head = head / (op().q_heads / op().kv.kv_heads);
  const float* mean = op().k_mean + static_cast<int64_t>(kv_head) * op().kv.head_dim;
  SyncWarp();
  Store();
  SyncWarp();
  const float dot = SumInChains<kRowLanes>(
      at, [&](int i, float sum) { return fmaf(LoadGlobal(row + i), LoadGlobal(mean + i), sum); });
  if (at.active() && at.lane == 0) {
    StoreGlobal(op().q_dot_mean + static_cast<int64_t>(token) * op().q_heads + head, dot);
  }
}

// Apply the normalized Walsh-Hadamard transform to every run of rotation_size values, at least 16.
template <int kRowLanes>
TM_DEVICE void ProcessRow<kRowLanes>::Hadamard() {
  RotateRow(x, at.lane, launch.rotation_size);
}

// Return the location of row `slot` in one side of a block.
TM_DEVICE RowTarget TargetOf(const KvLayerView& kv, KvSide side, int64_t block, int head,
                             int slot) {
  const bool is_k = side == KvSide::kK;
  RowTarget to;
  to.format = is_k ? kv.format[0] : kv.format[1];
  to.payload = kv.Payload(side, block, head) +
               static_cast<int64_t>(slot) * (is_k ? kv.row_bytes[0] : kv.row_bytes[1]);
  to.meta = nullptr;
  if (IsFp4(to.format)) {
    to.meta = kv.Scales(side, block, head) + static_cast<int64_t>(slot) * kv.ScaleStride();
  } else if (IsInteger(to.format)) {
    to.meta = kv.Params(side, block, head) +
              static_cast<int64_t>(slot) * (is_k ? kv.param_bytes[0] : kv.param_bytes[1]);
  }
  const float* scales = is_k ? kv.global_scale[0] : kv.global_scale[1];
  to.global_scale = scales != nullptr ? LoadGlobal(scales + head) : 1.f;
  return to;
}

// Return the sequence of a token. Decode sequences come first, with one token each.
TM_DEVICE int SequenceOf(const BatchView& batch, int token) {
  if (token < batch.num_decode) {
    return token;
  }
  int low = batch.num_decode;  // the sequence is in [low, high)
  int high = batch.num_seqs;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (LoadGlobal(batch.cu_seqlens + middle) <= token) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The slot of a token in the pool that is written.
struct TokenSlot {
  const KvLayerView& kv;
  int32_t block;  // negative: the token has none
  int slot;
};

// REQUIRES: the token belongs to the step.
TM_DEVICE TokenSlot SlotOfToken(const WriteKvParams& op, int token) {
  const bool window16 = op.window16.data != nullptr;
  const KvLayerView& kv = window16 ? op.window16 : op.kv;
  const int position = LoadGlobal(op.batch.positions + token);
  const int shift = CountZeros(kv.block_seq_len);
  const int32_t block =
      LoadGlobal((window16 ? op.batch.window16_tables : op.batch.block_tables) +
                 SequenceOf(op.batch, token) * op.batch.block_table_stride + (position >> shift));
  return {kv, block, position & (kv.block_seq_len - 1)};
}

// Return the location of a token's K or V row.
TM_DEVICE RowTarget TargetOfToken(const WriteKvParams& op, RowKind kind, int token, int head) {
  const KvLayerView& kv = op.window16.data != nullptr ? op.window16 : op.kv;
  RowTarget none = {kind == RowKind::kK ? kv.format[0] : kv.format[1], nullptr, nullptr, 1.f};
  if (kind == RowKind::kQ || token >= op.batch.num_tokens) {
    return none;
  }
  const TokenSlot at = SlotOfToken(op, token);
  if (at.block < 0) {
    return none;
  }
  return TargetOf(at.kv, kind == RowKind::kK ? KvSide::kK : KvSide::kV, at.block, head, at.slot);
}

// Subtract the offset of the key's block, which comes from K's bias, and store it with the first
// slot.
template <int kRowLanes>
template <DataType T>
TM_DEVICE void ProcessRow<kRowLanes>::SubtractOffset() {
  ProcessRow base = *this;
  const float* k_base = op().k_base + static_cast<int64_t>(head) * op().kv.head_dim;
  base.ForEachPiece([&](const RowLane& of, float(&values)[kLaneValues]) {
    LoadFloats(k_base + of.first(), values);
  });
  if (op().block_cos != nullptr) {
    base.Rotate(op().block_cos, op().block_sin);
  }
  if (op().k_mean != nullptr) {
    base.SubtractMean();
  }
  if (launch.rotation_size > 0) {
    base.Hadamard();
  }
  LaneValues values[kPieces];
  RoundPieces<T>(base.x, values);
  const ValueRange range = RangeOfPieces<kRowLanes, T>(values, at);
  const TokenSlot place = at.active() ? SlotOfToken(op(), token) : TokenSlot{op().kv, -1, 0};
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const RowLane of = at.Piece(piece);
    const IntLane<8> offset = EncodeIntIn<8, T>(range, values[piece], of);
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      const auto code = static_cast<float>(offset.codes.v[i / 4] >> (8 * (i % 4)) & 0xffu);
      x[piece][i] = AddToNumber(x[piece][i], -(MulRounded(code, offset.scale) + offset.zero));
    }
    if (of.active() && place.slot == 0 && place.block >= 0) {
      StoreIntLane<T>(OffsetTarget(place.kv, place.block, head), of, offset);
    }
  }
}

struct BlockRows {
  RowKind kind;
  int first;  // index of its first row among the rows of its kind
};

template <int kRowLanes>
TM_DEVICE BlockRows RowsOf(const WriteKvLaunch& p, int64_t block) {
  const int64_t kv_blocks = 2 * int64_t{p.kv_blocks};
  const int64_t blocks = p.q_blocks + kv_blocks;
  const auto before = static_cast<int>(block * kv_blocks / blocks);  // earlier blocks of K and V
  if ((block + 1) * kv_blocks / blocks == before) {
    return {RowKind::kQ, (static_cast<int>(block) - before) * RowsOfBlock(kRowLanes)};
  }
  const bool is_k = before < p.kv_blocks;
  return {is_k ? RowKind::kK : RowKind::kV,
          (before - (is_k ? 0 : p.kv_blocks)) * RowsOfBlock(kRowLanes)};
}

// Grid: q_blocks + 2 * kv_blocks.
template <int kRowLanes, DataType T>
__global__ void __launch_bounds__(kWriteThreads, WriteBlocks(kRowLanes))
    WriteKvKernel(WriteKvLaunch p) {
  BeginKernel();
  const WriteKvParams& op = p.op;
  const BlockRows rows = RowsOf<kRowLanes>(p, BlockIndexX());
  const RowKind kind = rows.kind;
  const int heads = kind == RowKind::kQ ? op.q_heads : op.kv.kv_heads;
  const int index = rows.first + ThreadIndexX() / RowThreads(kRowLanes);
  const int token = index / heads;
  const bool valid = token < op.batch.num_tokens;
  ProcessRow<kRowLanes> row = {
      .launch = p,
      .kind = kind,
      .at = {ThreadIndexX() % RowThreads(kRowLanes), valid ? op.kv.head_dim : 0},
      .token = token,
      .head = index % heads,
      .row = nullptr,
      .x = {}};
  row.Load();
  const RowTarget to = TargetOfToken(op, kind, token, row.head);  // overlaps with row.Load
  row.AddBias();
  if (kind != RowKind::kV) {
    const float* weight = kind == RowKind::kQ ? op.q_norm : op.k_norm;
    if (weight != nullptr && !op.norm_after_rope) {
      const int64_t first = static_cast<int64_t>(row.head_of_all()) * op.kv.head_dim;
      row.Norm(weight, op.bias != nullptr ? op.bias + first : nullptr);
    }
    if (op.rope_cos != nullptr) {
      row.Rotate(op.rope_cos, op.rope_sin);
    }
    if (weight != nullptr && op.norm_after_rope) {
      SyncWarp();
      row.Store();
      SyncWarp();
      row.Norm(weight, nullptr);
    }
    if (kind == RowKind::kQ && op.query_scaling.beta != 0.f) {
      row.Scale();
    }
    if (kind == RowKind::kQ && op.k_mean != nullptr && op.q_dot_mean != nullptr) {
      row.DotMean();
    }
    if (kind == RowKind::kK && op.k_mean != nullptr) {
      row.SubtractMean();
    }
    if (p.rotation_size > 0) {
      row.Hadamard();
    }
    if (kind == RowKind::kK && op.k_base != nullptr) {
      row.template SubtractOffset<T>();
    }
  } else if (op.v_norm != nullptr) {
    const int64_t first = static_cast<int64_t>(row.head_of_all()) * op.kv.head_dim;
    row.Norm(op.v_norm, op.bias != nullptr ? op.bias + first : nullptr);
  }
  SyncWarp();  // all lanes have finished reading the row
  if (kind != RowKind::kV || op.bias != nullptr || op.v_norm != nullptr) {
    row.Store();
  }
  if (kind == RowKind::kQ) {
    return;
  }
  LaneValues values[RowPieces(kRowLanes)];
  RoundPieces<T>(row.x, values);
#pragma unroll
  for (const LaneValues& piece : values) {
    if (piece.has_nonfinite() && to.payload != nullptr) {
      AddGlobal(op.num_nonfinite, CountNonfinite(piece));
    }
    if (to.payload != nullptr) {
      AddClipped(piece, to.format, to.global_scale, op.num_clipped);
    }
  }
  WriteRow<kRowLanes, T>(to, row.at, values, op.search_scales);
}

}  // namespace turbomind::cuda
