#pragma once

// ⑦ What the blocks of attention with large heads compute, and their queries and tiles in shared
// memory (large_head_attention.cuh).

#include <cstdint>

#include "turbomind/backend/cuda/large_head/large_head_shape.cuh"
#include "turbomind/backend/cuda/tile/tile_expand.cuh"

namespace turbomind::cuda {

// A block's constants for the whole kernel.
struct LargeHeadTask {
  const LargeHeadParams& params;
  int sequence;
  int kv_head;
  int group;  // query heads of the KV head
  int first_token;
  int position;   // of the first token
  int num_rows;   // of the sequence
  int first_row;  // of the block
  int64_t partial;
  SeenPositions range;  // all positions of the block
  bool exists = true;   // false for an item without positions, which has no partial result

  TM_DEVICE int QueryHead(int row) const { return kv_head * group + row % group; }
  // Return the position of a row. Rows past the last have the position of the last.
  TM_DEVICE int Position(int row) const {
    const int last = num_rows - 1;
    return position + (row < last ? row : last) / group;
  }
};

// Return the task of a block of an item's rows. Grid: (KV heads · blocks of rows) × items.
TM_DEVICE LargeHeadTask LargeItemTask(const LargeHeadParams& p, int rows_of_block) {
  const DecodeItem item = LoadGlobal(p.items + BlockIndexY());
  const int group = p.merge.q_heads / p.views[0].kv_heads;
  const int blocks = (group + rows_of_block - 1) / rows_of_block;
  return {.params = p,
          .sequence = item.sequence,
          .kv_head = BlockIndexX() / blocks,
          .group = group,
          .first_token = item.sequence,
          .position = item.end - 1,
          .num_rows = group,
          .first_row = BlockIndexX() % blocks * rows_of_block,
          .partial = item.partial,
          .range = {item.begin, item.end},
          .exists = item.begin < item.end};
}

// Return the task of a block of a sequence's rows. Grid: num_tiles × (KV heads · parts).
TM_DEVICE LargeHeadTask LargeSequenceTask(const LargeHeadParams& p, int rows_of_block) {
  const int group = p.merge.q_heads / p.views[0].kv_heads;
  const TileRows rows = FindTileRows(
      {p.cu_seqlens, p.first_seq, p.end_seq, p.first_token, p.num_tiles}, group, rows_of_block);
  const int context = LoadGlobal(p.context_lens + rows.sequence);
  const int part = BlockIndexY() % p.num_parts;
  const int first = FirstVisible(p.window, context - rows.num_tokens);
  return {.params = p,
          .sequence = rows.sequence,
          .kv_head = BlockIndexY() / p.num_parts,
          .group = group,
          .first_token = rows.first_token,
          .position = context - rows.num_tokens,
          .num_rows = rows.num_tokens * group,
          .first_row = rows.first_row,
          .partial = static_cast<int64_t>(rows.first_token - p.first_token) * p.num_parts + part,
          .range = PartOf({first, context}, part, p.num_parts)};
}

// Copy the block's queries to shared memory, rounded, and clear the tile and the rows of K offsets,
// of which the last is ones. Query rows past the last and dimensions past head_dim are zero.
template <class C>
TM_DEVICE void StoreLargeQueries(const LargeHeadTask& task) {
  const LargeHeadParams& p = task.params;
  const int head_dim = p.merge.head_dim;
  constexpr int kPiecesOfRow = C::kStride / 16;
  constexpr int kAllRows = C::kRows + C::kTokens + C::kOffsetRows;
  for (int i = ThreadIndexX(); i < kAllRows * kPiecesOfRow; i += kTileThreads) {
    const int in_block = i / kPiecesOfRow;
    const int row = task.first_row + in_block;
    const int d = i % kPiecesOfRow * 8;
    Words<16> packed = {};
    if (in_block < C::kRows && row < task.num_rows && d < head_dim) {
      const int64_t token = task.first_token + row / task.group;
      packed = RoundQuery<C::kBFloat>(p.q + token * p.q_stride +
                                      static_cast<int64_t>(task.QueryHead(row)) * head_dim + d);
    } else if (C::kOffsetRows > 0 && in_block == kAllRows - 1) {
      packed = {{kHalfOne, kHalfOne, kHalfOne, kHalfOne}};
    }
    StoreShared(SharedMemory() + 16 * i, packed);
  }
}

// Copy `bytes` whole pieces of 16 bytes with the threads of a run.
TM_DEVICE void CopyPieces(char* to, const std::byte* from, int bytes, int thread, int threads) {
#pragma unroll 4
  for (int at = 16 * thread; at < bytes; at += 16 * threads) {
    CopyAsync(to + at, from + at, 16);
  }
}

// A tile of positions that at least one row sees.
struct LargeTile {
  int view;
  int first;
  int begin;  // of the seen tokens, relative to `first`
  int end;
  int parity;  // which of two places the metadata has
};

// Return the block of a position of a tile.
TM_DEVICE int64_t BlockOf(const LargeHeadTask& task, const LargeTile& tile, int token) {
  const LargeHeadParams& p = task.params;
  return LoadGlobal(p.block_tables[tile.view] +
                    static_cast<int64_t>(task.sequence) * p.block_table_stride +
                    ((tile.first + token) >> CountZeros(p.views[tile.view].block_seq_len)));
}

// Return where the metadata of a tile begins in shared memory.
template <class C>
TM_DEVICE char* MetaOfTile(const KvLayerView& kv, int parity) {
  return SharedMemory() + C::kRawAt +
         C::kTokens * (kv.row_bytes[0] + kv.row_bytes[1] + parity * MetaBytes(kv));
}

// Copy a side of a tile as it is stored, by runs of kRunTokens tokens, and the metadata of both
// sides together with the keys. The copies form one committed group.
template <class C>
TM_DEVICE void CopySide(const LargeHeadTask& task, int side, const LargeTile& tile) {
  constexpr int kRunThreads = kTileThreads / (C::kTokens / kRunTokens);
  const LargeHeadParams& p = task.params;
  const KvLayerView& kv = p.views[tile.view];
  const int run = ThreadIndexX() / kRunThreads;
  const int thread = ThreadIndexX() % kRunThreads;
  const int token = run * kRunTokens;
  if (token + kRunTokens > tile.begin && token < tile.end) {
    const int64_t block = BlockOf(task, tile, token);
    const int64_t slot = (tile.first + token) & (kv.block_seq_len - 1);
    const auto of = static_cast<KvSide>(side);
    char* const raw = SharedMemory() + C::kRawAt + (side == 0 ? 0 : C::kTokens * kv.row_bytes[0]);
    const int row_bytes = side == 0 ? kv.row_bytes[0] : kv.row_bytes[1];
    CopyPieces(raw + token * row_bytes, kv.Payload(of, block, task.kv_head) + slot * row_bytes,
               kRunTokens * row_bytes, thread, kRunThreads);
    if (side == 0) {
      char* meta = MetaOfTile<C>(kv, tile.parity);
      const int scales = kv.ScaleStride();
      if (scales > 0) {
        CopyPieces(meta + token * scales,
                   kv.Scales(KvSide::kK, block, task.kv_head) + slot * scales, kRunTokens * scales,
                   thread, kRunThreads);
      }
      meta += C::kTokens * scales;
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const int bytes = kv.param_bytes[s];
        if (bytes > 0) {
          CopyPieces(meta + token * bytes,
                     kv.Params(static_cast<KvSide>(s), block, task.kv_head) + slot * bytes,
                     kRunTokens * bytes, thread, kRunThreads);
        }
        meta += C::kTokens * bytes;
      }
    }
  }
  CommitCopies();
}

// Expand the codes of the K offset of each run of tokens.
template <class C>
TM_DEVICE void ExpandOffsets(const LargeHeadTask& task, const LargeTile& tile) {
  const KvLayerView& kv = task.params.views[tile.view];
  constexpr int kRunThreads = kTileThreads / C::kRuns;
  const int run = ThreadIndexX() / kRunThreads;
  const int token = run * kRunTokens;
  if (token + kRunTokens <= tile.begin || token >= tile.end) {
    return;
  }
  const int64_t block = BlockOf(task, tile, token);
  for (int lane = ThreadIndexX() % kRunThreads; lane * kLaneValues < kv.head_dim;
       lane += kRunThreads) {
    const OffsetLane offset = LoadOffset(kv, block, task.kv_head, lane);
    Words<16> halves;
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      uint32_t pairs[2];
      Fragments<KvCacheMode::kInt8, DataType::kFloat16>::Expand(offset.payload.v[word], pairs);
      halves.v[2 * word] = pairs[0];
      halves.v[2 * word + 1] = pairs[1];
    }
    StoreShared(SharedMemory() + C::kOffsetsAt + run * C::kStride + 16 * lane, halves);
  }
}

// Return (scale, zero) of the K offset of a token's block.
TM_DEVICE IntParam OffsetParam(const LargeHeadTask& task, const LargeTile& tile, int token) {
  const KvLayerView& kv = task.params.views[tile.view];
  const RowTarget from = OffsetTarget(kv, BlockOf(task, tile, token), task.kv_head);
  const auto bits = LoadGlobal(reinterpret_cast<const uint32_t*>(from.meta));
  return kv.dtype == DataType::kBFloat16 ? IntParamOf<DataType::kBFloat16>(bits)
                                         : IntParamOf<DataType::kFloat16>(bits);
}

// Apply the scale of expanded keys and add the fast bias. The threads of a token have expanded it.
template <class C>
TM_DEVICE void AddBiasToKeys(const LargeHeadTask& task, const LargeTile& tile, float scale) {
  const LargeHeadParams& p = task.params;
  const KvLayerView& kv = p.views[tile.view];
  const int token = ThreadIndexX() / C::kExpandThreads;
  SyncWarp();  // FP4 is expanded in other runs than these
  if (token < tile.begin || token >= tile.end) {
    return;
  }
  char* const row = SharedMemory() + C::kTileAt + token * C::kStride;
#pragma unroll 1
  for (int lane = ThreadIndexX() % C::kExpandThreads; lane * kLaneValues < kv.head_dim;
       lane += C::kExpandThreads) {
    float bias[kLaneValues] = {};
    AddFastBias(p.fast_bias, {lane, kv.head_dim}, task.kv_head, tile.first + token, bias);
    auto halves = LoadShared<Words<16>>(row + 16 * lane);
#pragma unroll
    for (int i = 0; i < kLaneValues / 2; ++i) {
      halves.v[i] = PackFiniteHalf2(fmaf(LowHalf(halves.v[i]), scale, bias[2 * i]),
                                    fmaf(HighHalf(halves.v[i]), scale, bias[2 * i + 1]));
    }
    StoreShared(row + 16 * lane, halves);
  }
}

// Return the factor from a view's expanded values of a side to the values. Those of the window have
// no global scale.
TM_DEVICE float SideScale(const KvLayerView& kv, int side, int kv_head) {
  const float* scales = side == 0 ? kv.global_scale[0] : kv.global_scale[1];
  return HeadScale(scales, kv_head) * ExpandedUnit(side == 0 ? kv.format[0] : kv.format[1]);
}

// Expand a side of a tile.
template <class C>
TM_DEVICE void ExpandLargeSide(const LargeHeadTask& task, int side, const LargeTile& tile) {
  const KvLayerView& kv = task.params.views[tile.view];
  const char* const meta = MetaOfTile<C>(kv, tile.parity);
  const char* const params = meta + C::kTokens * kv.ScaleStride();
  const bool is_k = side == 0;
  const bool has_scales = (is_k ? kv.scale_bytes[0] : kv.scale_bytes[1]) > 0;
  const RawSide raw = {
      .format = is_k ? kv.format[0] : kv.format[1],
      .payload = SharedMemory() + C::kRawAt + (is_k ? 0 : C::kTokens * kv.row_bytes[0]),
      .meta = has_scales ? meta + (is_k ? 0 : kv.scale_bytes[0])
                         : params + (is_k ? 0 : C::kTokens * kv.param_bytes[0]),
      .row_bytes = is_k ? kv.row_bytes[0] : kv.row_bytes[1],
      .meta_bytes = has_scales ? kv.ScaleStride()
                    : is_k     ? kv.param_bytes[0]
                               : kv.param_bytes[1],
      .values = kv.head_dim,
      .column = 0};
  ExpandStored<C>(raw, kv.dtype, tile.begin, tile.end);
  if constexpr (!C::kBFloat) {
    if (is_k && task.params.fast_bias.num_pairs > 0) {
      AddBiasToKeys<C>(task, tile, SideScale(kv, 0, task.kv_head));
    }
    if (is_k && kv.HasKOffset()) {
      ExpandOffsets<C>(task, tile);
    }
  }
}

}  // namespace turbomind::cuda
