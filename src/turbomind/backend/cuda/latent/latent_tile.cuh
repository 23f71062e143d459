#pragma once

// ⑦ What the blocks of attention over latents compute, and their queries and tiles in shared memory
// (latent_attention.cuh).

#include <cstdint>

#include "turbomind/backend/cuda/kv/kv_flatten.cuh"
#include "turbomind/backend/cuda/latent/latent_shape.cuh"
#include "turbomind/backend/cuda/prefill/prefill_shape.cuh"

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

// Cut positions into parts, and return one of them.
TM_DEVICE SeenPositions PartOf(const SeenPositions& all, int part, int num_parts) {
  const int first = all.begin / kPartUnit * kPartUnit;
  const int units = (all.end - first + kPartUnit - 1) / kPartUnit;
  const int length = (units + num_parts - 1) / num_parts * kPartUnit;
  const int begin = first + part * length;
  const int end = begin + length;
  return {begin > all.begin ? begin : all.begin, end < all.end ? end : all.end};
}

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
  int tile = p.num_tiles - 1 - BlockIndexX();  // a sequence's longest tiles first
  int sequence = p.first_seq;
  int token = p.first_token;
  int next = LoadGlobal(p.cu_seqlens + sequence + 1);
  const auto tiles = [&] {
    return ((next - token) * p.q_heads + rows_of_block - 1) / rows_of_block;
  };
  while (sequence + 1 < p.end_seq && tile >= tiles()) {
    tile -= tiles();
    token = next;
    next = LoadGlobal(p.cu_seqlens + ++sequence + 1);
  }
  const int context = LoadGlobal(p.context_lens + sequence);
  return {.params = p,
          .sequence = sequence,
          .first_token = token,
          .position = context - (next - token),
          .num_rows = (next - token) * p.q_heads,
          .first_row = tile * rows_of_block,
          .partial = static_cast<int64_t>(token - p.first_token) * p.num_parts + BlockIndexY(),
          .range = PartOf({0, context}, BlockIndexY(), p.num_parts)};
}

// Round eight values to 16 bits.
template <bool kBFloat>
TM_DEVICE Words<16> RoundQuery(const float* from) {
  Words<16> out;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto x = LoadGlobal(reinterpret_cast<const Words<16>*>(from) + half);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const float low = BitsFloat(x.v[2 * pair]);
      const float high = BitsFloat(x.v[2 * pair + 1]);
      out.v[2 * half + pair] = kBFloat ? PackBFloat2(low, high) : PackFiniteHalf2(low, high);
    }
  }
  return out;
}

// Copy the block's queries to shared memory, rounded, and clear the tile. Rows past the last and
// dimensions past the rank are zero.
template <class C>
TM_DEVICE void StoreLatentQueries(const LatentTask& task) {
  const LatentParams& p = task.params;
  const int rank = p.views[0].head_dim;
  const int rotary = p.views[0].rotary_dim;
  constexpr int kPieces = C::kStride / 16;
  for (int i = ThreadIndexX(); i < (C::kRows + C::kTokens) * kPieces; i += kLatentThreads) {
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
  constexpr int kRunWarps = kLatentWarps / (C::kTokens / kRunTokens);
  constexpr int kRestWarps = kRunWarps / 4;
  constexpr int kLatentThreadsOfRun = 32 * (kRunWarps - kRestWarps);
  const KvLayerView& kv = task.params.views[view];
  const int index = warp / kRunWarps;
  const int thread = warp % kRunWarps * 32 + (ThreadIndexX() & 31);
  const int position = first + index * kRunTokens;
  if (position + kRunTokens > seen.begin && position < seen.end) {
    const int32_t block =
        LoadGlobal(task.params.block_tables[view] +
                   static_cast<int64_t>(task.sequence) * task.params.block_table_stride +
                   (position >> CountZeros(kv.block_seq_len)));
    const TokenRun run = {index, block, position & (kv.block_seq_len - 1)};
    if (thread < kLatentThreadsOfRun) {
      CopyPart<C>(kv, 0, run, thread, kLatentThreadsOfRun);
    } else {
#pragma unroll
      for (int part = 1; part < kRowParts; ++part) {
        CopyPart<C>(kv, part, run, thread - kLatentThreadsOfRun, 32 * kRestWarps);
      }
    }
  }
  CommitCopies();
}

// The stored rows of a side of a tile, in shared memory.
struct RawSide {
  KvCacheMode format;
  const char* payload;
  const char* meta;
  int row_bytes;
  int meta_bytes;
  int values;  // of a row
  int column;  // in the tile, of the first value
};

// Expand eight FP4 codes with their scale to raw FP16 values, in order (Fragments::kUnit).
template <KvCacheMode M>
TM_DEVICE Words<16> ExpandCodes(uint32_t codes, uint32_t scale) {
  using F = Fragments<M, DataType::kFloat16>;
  uint32_t pairs[4];
  F::Expand(codes, pairs);
#pragma unroll
  for (uint32_t& pair : pairs) {
    pair = MulHalf2(pair, scale);
  }
  Words<16> out;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    out.v[p] = F::kHardware
                   ? pairs[p]
                   : SelectBytes(pairs[p % 2 * 2], pairs[p % 2 * 2 + 1], p < 2 ? 0x5410 : 0x7632);
  }
  return out;
}

// Expand eight codes of an integer format: code * scale + zero in FP32, rounded to FP16. A code
// becomes the low bits of 2^23 + code, which is faster than a conversion.
template <int kBits>
TM_DEVICE Words<16> ExpandIntegers(const Words<kBits>& codes, const IntParam& param) {
  constexpr uint32_t kBits2To23 = 0x4b000000u;
  constexpr float kLevels = (1 << kBits) - 1;
  constexpr float kMaxHalf = 65504.f;
  float value[kLaneValues];
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) {
    const uint32_t bits = kBits == 8 ? SelectBytes(codes.v[i / 4], kBits2To23, 0x7440u + i % 4)
                                     : AndOr(codes.v[0] >> (4 * i), 0xfu, kBits2To23);
    value[i] = fmaf(BitsFloat(bits) - 0x1p23f, param.scale, param.zero);
  }
  if (fabsf(param.zero) + kLevels * param.scale > kMaxHalf) {
#pragma unroll
    for (float& x : value) {
      x = fminf(fmaxf(x, -kMaxHalf), kMaxHalf);
    }
  }
  Words<16> out;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    out.v[p] = PackHalf2(value[2 * p], value[2 * p + 1]);
  }
  return out;
}

// Expand a run of a token's values.
template <class C, DataType T, KvCacheMode M, int kValues>
TM_DEVICE void ExpandRun(const char* payload, const char* meta, Words<16> (&out)[kValues / 8]) {
  if constexpr (IsFp4(M)) {
    static_assert(kValues == kFp4Group);
    const auto codes = LoadShared<Words<8>>(payload);
    const uint32_t byte = LoadShared<uint8_t>(meta);
    const uint32_t scale = ScalePair<M, Fragments<M, T>::kHardware>(byte, byte);
    out[0] = ExpandCodes<M>(codes.v[0], scale);
    out[1] = ExpandCodes<M>(codes.v[1], scale);
  } else if constexpr (IsInteger(M)) {
    constexpr int kBits = Codec<M>::kBits;
    out[0] = ExpandIntegers<kBits>(LoadShared<Words<kBits>>(payload),
                                   IntParamOf<T>(LoadShared<uint32_t>(meta)));
  } else {
    const StoredLane<M> stored = {LoadShared<Words<StoredLane<M>::kBits>>(payload), 0};
    out[0] = DecodeHalves<T>(stored, !C::kBFloat);
  }
}

// Expand the tokens [begin, end) of a side to 16 bits, and clear the others. FP4 values are raw
// (Fragments::kUnit), all others as DecodeHalves gives them.
template <class C, DataType T, KvCacheMode M>
TM_DEVICE void ExpandSide(const RawSide& side, int begin, int end) {
  constexpr int kValues = IsFp4(M) ? kFp4Group : kLaneValues;
  const int token = ThreadIndexX() / C::kExpandThreads;
  const int lane = ThreadIndexX() % C::kExpandThreads;
  const bool seen = token >= begin && token < end;
  char* const to = SharedMemory() + C::kTileAt + token * C::kStride + 2 * side.column;
  const char* const payload = side.payload + token * side.row_bytes;
  const char* const meta = side.meta + token * side.meta_bytes;
#pragma unroll 4
  for (int run = lane; run < side.values / kValues; run += C::kExpandThreads) {
    Words<16> out[kValues / 8] = {};
    if (seen) {
      ExpandRun<C, T, M, kValues>(payload + run * (kValues * Codec<M>::kBits / 8),
                                  IsFp4(M) ? meta + run : meta, out);
    }
#pragma unroll
    for (int i = 0; i < kValues / 8; ++i) {
      StoreShared(to + 2 * kValues * run + 16 * i, out[i]);
    }
  }
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
    const RawSide side = {.format = is_v ? kv.format[1] : kv.format[0],
                          .payload = is_v ? parts[0] : parts[1],
                          .meta = is_v ? parts[2] : parts[3],
                          .row_bytes = BytesOfPart(kv, s),
                          .meta_bytes = BytesOfPart(kv, 2 + s),
                          .values = is_v ? kv.head_dim : kv.rotary_dim,
                          .column = is_v ? 0 : C::kRank};
    if constexpr (C::kBFloat) {
      ExpandSide<C, DataType::kBFloat16, KvCacheMode::kNone>(side, begin, end);
    } else {
      DispatchFormat(side.format, [&]<KvCacheMode M>() {
        if (kv.dtype == DataType::kBFloat16) {
          ExpandSide<C, DataType::kBFloat16, M>(side, begin, end);
        } else {
          ExpandSide<C, DataType::kFloat16, M>(side, begin, end);
        }
      });
    }
  }
}

}  // namespace turbomind::cuda
