#pragma once

// ⑦ What the blocks of attention over latents compute, and their queries and tiles in shared memory
// (latent_attention.cuh).

#include <cstdint>

#include "turbomind/backend/cuda/latent/latent_shape.cuh"
#include "turbomind/backend/cuda/tile/tile_expand.cuh"

namespace turbomind::cuda {

// A block's constants for the whole kernel.
struct LatentTask {
  const LatentParams& params;
  int sequence;
  int first_token;
  int position;   // of the first token
  int num_rows;   // of the sequence
  int first_row;  // of the block
  int64_t partial;
  SeenPositions range;  // all positions of the block
  bool exists = true;   // false for an item without positions, which has no partial result

  // Return the position of a row. Rows past the last have the position of the last.
  TM_DEVICE int Position(int row) const {
    const int last = num_rows - 1;
    return position + (row < last ? row : last) / params.q_heads;
  }
};

// Return the task of a block of an item's rows.
TM_DEVICE LatentTask ItemTask(const LatentParams& p, int rows_of_block) {
  const DecodeItem item = LoadGlobal(p.items + BlockIndexY() / p.num_parts);
  const int part = BlockIndexY() % p.num_parts;
  return {.params = p,
          .sequence = item.sequence,
          .first_token = item.sequence,
          .position = LoadGlobal(p.context_lens + item.sequence) - 1,
          .num_rows = p.q_heads,
          .first_row = BlockIndexX() * rows_of_block,
          .partial = static_cast<int64_t>(item.partial) * p.num_parts + part,
          .range = PartOf({item.begin, item.end}, part, p.num_parts),
          .exists = item.begin < item.end};
}

// Return the task of a block of a sequence's rows.
TM_DEVICE LatentTask SequenceTask(const LatentParams& p, int rows_of_block) {
  const TileRows rows = FindTileRows(
      {p.cu_seqlens, p.first_seq, p.end_seq, p.first_token, p.num_tiles}, p.q_heads, rows_of_block);
  const int context = LoadGlobal(p.context_lens + rows.sequence);
  return {.params = p,
          .sequence = rows.sequence,
          .first_token = rows.first_token,
          .position = context - rows.num_tokens,
          .num_rows = rows.num_tokens * p.q_heads,
          .first_row = rows.first_row,
          .partial =
              static_cast<int64_t>(rows.first_token - p.first_token) * p.num_parts + BlockIndexY(),
          .range = PartOf({0, context}, BlockIndexY(), p.num_parts)};
}

// Copy the block's queries to shared memory, rounded, and clear the tile. Rows past the last and
// dimensions past the rank are zero.
template <class C>
TM_DEVICE void StoreLatentQueries(const LatentTask& task) {
  const LatentParams& p = task.params;
  const int rank = p.views[0].head_dim;
  const int rotary = p.views[0].rotary_dim;
  constexpr int kPieces = C::kStride / 16;
  for (int i = ThreadIndexX(); i < (C::kRows + C::kTokens) * kPieces; i += kTileThreads) {
    const int row = task.first_row + i / kPieces;
    const int d = i % kPieces * 8;
    Words<16> packed = {};
    if (i < C::kRows * kPieces && row < task.num_rows) {
      const int64_t token = task.first_token + row / p.q_heads;
      const int head = row % p.q_heads;
      if (d < rank) {
        packed = RoundQuery<C::kBFloat>(p.q + token * p.q_stride +
                                        static_cast<int64_t>(head) * rank + d);
      } else if (d >= C::kRank && d - C::kRank < rotary) {
        packed = RoundQuery<C::kBFloat>(p.q_rotary + token * p.q_rotary_stride +
                                        head * p.q_rotary_head_stride + d - C::kRank);
      }
    }
    StoreShared(SharedMemory() + 16 * i, packed);
  }
}

// Return the first byte of a part in slot `slot` of a block.
TM_DEVICE const std::byte* PartOfBlock(const KvLayerView& kv, int part, int64_t block, int slot) {
  const KvSide side = part % 2 == 0 ? KvSide::kV : KvSide::kK;
  const int s = part % 2 == 0 ? 1 : 0;
  if (part < 2) {
    return kv.Payload(side, block, 0) + static_cast<int64_t>(slot) * kv.row_bytes[s];
  }
  return kv.scale_bytes[s] > 0
             ? kv.Scales(side, block, 0) + static_cast<int64_t>(slot) * kv.ScaleStride()
             : kv.Params(side, block, 0) + static_cast<int64_t>(slot) * kv.param_bytes[s];
}

// Return the block of a position in a view.
TM_DEVICE int32_t BlockOf(const LatentTask& task, int view, int position) {
  return LoadGlobal(task.params.block_tables[view] +
                    static_cast<int64_t>(task.sequence) * task.params.block_table_stride +
                    (position >> CountZeros(task.params.views[view].block_seq_len)));
}

// kRunTokens tokens of a tile, and the slots of a block that they are in.
struct TokenRun {
  int index;  // in the tile
  int64_t block;
  int slot;  // of the first token
};

// Copy a part of a run of tokens with `threads` threads, of which this is number `thread`.
template <class C>
TM_DEVICE void CopyPart(const KvLayerView& kv, int part, const TokenRun& run, int thread,
                        int threads) {
  int before = 0;  // bytes of a row
#pragma unroll
  for (int i = 0; i < part; ++i) {
    before += BytesOfPart(kv, i);
  }
  const int bytes = BytesOfPart(kv, part);  // and pieces of a run
  if (bytes > 0) {
    char* to = SharedMemory() + C::kRawAt + C::kTokens * before + 16 * (run.index * bytes + thread);
    const std::byte* from = PartOfBlock(kv, part, run.block, run.slot) + 16 * thread;
#pragma unroll 4
    for (int i = thread; i < bytes; i += threads) {
      CopyAsync(to, from, 16);
      to += 16 * threads;
      from += 16 * threads;
    }
  }
}

// Copy the stored rows of the tile at `first`, as far as they are in `seen`, by runs of kRunTokens
// tokens. The copies form one committed group. Some warps copy each run: three quarters of them the
// latents, which have most bytes, and the others the rest.
template <class C>
TM_DEVICE void CopyRawTile(const LatentTask& task, int warp, int view, const SeenPositions& seen,
                           int first) {
  constexpr int kRunWarps = kTileWarps / (C::kTokens / kRunTokens);
  constexpr int kRestWarps = kRunWarps / 4;
  constexpr int kThreadsOfLatents = 32 * (kRunWarps - kRestWarps);
  const KvLayerView& kv = task.params.views[view];
  const int index = warp / kRunWarps;
  const int thread = warp % kRunWarps * 32 + (ThreadIndexX() & 31);
  const int position = first + index * kRunTokens;
  if (position + kRunTokens > seen.begin && position < seen.end) {
    const TokenRun run = {index, BlockOf(task, view, position), position & (kv.block_seq_len - 1)};
    if (thread < kThreadsOfLatents) {
      CopyPart<C>(kv, 0, run, thread, kThreadsOfLatents);
    } else {
#pragma unroll
      for (int part = 1; part < kRowParts; ++part) {
        CopyPart<C>(kv, part, run, thread - kThreadsOfLatents, 32 * kRestWarps);
      }
    }
  }
  CommitCopies();
}

// The run of tokens and the lane of eight values whose offset a thread holds.
template <class C>
struct OffsetThread {
  static constexpr int kLanes = C::kRank / kLaneValues;
  static_assert(C::kRuns * kLanes <= kTileThreads);
  int run = ThreadIndexX() / kLanes;
  int lane = ThreadIndexX() % kLanes;

  TM_DEVICE bool Exists(const KvLayerView& kv) const {
    return kv.HasKOffset() && run < C::kRuns && lane * kLaneValues < kv.head_dim;
  }
};

// Load this thread's part of the offsets of the tile at `first`, while the tile before is
// multiplied. Runs outside `seen` get zeros.
template <class C>
TM_DEVICE OffsetLane LoadTileOffset(const LatentTask& task, int view, const SeenPositions& seen,
                                    int first) {
  const KvLayerView& kv = task.params.views[view];
  const OffsetThread<C> at;
  const int position = first + at.run * kRunTokens;
  OffsetLane out = {};
  if (at.Exists(kv) && position + kRunTokens > seen.begin && position < seen.end) {
    out = LoadOffset(kv, BlockOf(task, view, position), 0, at.lane);
  }
  return out;
}

// Store what LoadTileOffset has loaded for ExpandTile. `scale` is the factor from expanded values
// to values.
template <class C>
TM_DEVICE void StoreTileOffset(const KvLayerView& kv, const OffsetLane& offset, float scale) {
  const OffsetThread<C> at;
  if (!at.Exists(kv)) {
    return;
  }
  const IntParam param = kv.dtype == DataType::kBFloat16
                             ? IntParamOf<DataType::kBFloat16>(offset.meta)
                             : IntParamOf<DataType::kFloat16>(offset.meta);
  const float inverse = 1.f / scale;
  float value[kLaneValues];
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) {
    value[i] = fmaf(static_cast<float>(CodeOf(offset, i)), param.scale, param.zero) * inverse;
  }
  Words<16> halves;
#pragma unroll
  for (int i = 0; i < kLaneValues / 2; ++i) {
    halves.v[i] = PackFiniteHalf2(value[2 * i], value[2 * i + 1]);
  }
  StoreShared(SharedMemory() + C::kOffsetsAt + at.run * C::kOffsetBytes + 16 * at.lane, halves);
}

template <class C>
TM_DEVICE void ExpandTile(const KvLayerView& kv, int begin, int end) {
  const char* raw = SharedMemory() + C::kRawAt;
  const char* parts[kRowParts];
#pragma unroll
  for (int part = 0; part < kRowParts; ++part) {
    parts[part] = raw;
    raw += C::kTokens * BytesOfPart(kv, part);
  }
#pragma unroll 1
  for (int s = 0; s < 2; ++s) {
    const bool is_v = s == 0;
    const RawSide side = {
        .format = is_v ? kv.format[1] : kv.format[0],
        .payload = is_v ? parts[0] : parts[1],
        .meta = is_v ? parts[2] : parts[3],
        .row_bytes = BytesOfPart(kv, s),
        .meta_bytes = BytesOfPart(kv, 2 + s),
        .values = is_v ? kv.head_dim : kv.rotary_dim,
        .column = is_v ? 0 : C::kRank,
        .offsets = is_v && kv.HasKOffset() ? SharedMemory() + C::kOffsetsAt : nullptr,
        .offset_bytes = C::kOffsetBytes};
    ExpandStored<C>(side, kv.dtype, begin, end);
  }
}

}  // namespace turbomind::cuda
