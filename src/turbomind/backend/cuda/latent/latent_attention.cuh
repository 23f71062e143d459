#pragma once

// ⑦ Attention over latents: decoding, drafts and prompts, with absorbed queries.
//
// All heads of a token read one row, so that a block's rows (token, head) multiply the same tile.
// A tile of positions is copied to shared memory as it is stored (cp.async, while the tile before
// it is multiplied) and expanded there to 16 bits once. Then
//   scores  each warp multiplies its rows with all tokens, over its part of the 576 dimensions
//   weights the parts are added and become weights: a few threads have a row, and its m and l
//   sums    each warp multiplies the weights with its columns of the latents
// Between the steps, the block waits for all warps.
//
// Bytes moved: the rows of the positions, once per block of rows. Bound: bytes with 16 heads, and
// shared memory or tensor cores with 64 and more (docs/gpu.md has the counts).
//
// A row's sums depend only on its own query and the positions that it sees, as in
// prefill_attention.cuh: tiles begin at multiples of kTokens, and hidden positions have weight 0.

#include <cmath>
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

// Copy a part of a run of tokens with `threads` threads, of which this is number `thread`.
template <class C>
TM_DEVICE void CopyPart(const KvLayerView& kv, int part, int run, int64_t block, int slot,
                        int thread, int threads) {
  int before = 0;  // bytes of a row
#pragma unroll
  for (int i = 0; i < part; ++i) {
    before += BytesOfPart(kv, i);
  }
  const int bytes = BytesOfPart(kv, part);  // and pieces of a run
  if (bytes > 0) {
    char* to = SharedMemory() + C::kRawAt + C::kTokens * before + 16 * (run * bytes + thread);
    const std::byte* from = PartOfBlock(kv, part, block, slot) + 16 * thread;
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
  const int run = warp / kRunWarps;
  const int thread = warp % kRunWarps * 32 + (ThreadIndexX() & 31);
  const int position = first + run * kRunTokens;
  if (position + kRunTokens > seen.begin && position < seen.end) {
    const int32_t block = LoadGlobal(
        task.params.block_tables[view] +
        static_cast<int64_t>(task.sequence) * task.params.block_table_stride +
        (position >> CountZeros(kv.block_seq_len)));
    const int slot = position & (kv.block_seq_len - 1);
    if (thread < kLatentThreadsOfRun) {
      CopyPart<C>(kv, 0, run, block, slot, thread, kLatentThreadsOfRun);
    } else {
#pragma unroll
      for (int part = 1; part < kRowParts; ++part) {
        CopyPart<C>(kv, part, run, block, slot, thread - kLatentThreadsOfRun, 32 * kRestWarps);
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
    out.v[p] = F::kHardware ? pairs[p]
                            : SelectBytes(pairs[p % 2 * 2], pairs[p % 2 * 2 + 1],
                                          p < 2 ? 0x5410 : 0x7632);
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
    const uint32_t bits = kBits == 8
                              ? SelectBytes(codes.v[i / 4], kBits2To23, 0x7440u + i % 4)
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

// A thread's warp in the block.
struct LatentLane {
  int lane;
  int warp;
  int group;   // of rows
  int column;  // among the warps of a group
  int g;       // rows g and g + 8 of a tile
  int t;       // columns 2 t and 2 t + 1 of eight
};

template <class C>
using LatentScores = float[C::kRowTiles][C::kTokens / 8][4];

// scores += queries · tile over 16 dimensions from column 16 * step on.
template <class C>
TM_DEVICE void AddScores(const LatentLane& at, int step, LatentScores<C>& scores) {
  const char* from =
      SharedMemory() + (16 * C::kRowTiles * at.group + (at.lane & 15)) * C::kStride +
      32 * step + (at.lane >> 4) * 16;
  uint32_t a[C::kRowTiles][4];
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
    LoadMatrices(a[tile], from + tile * 16 * C::kStride);
  }
  // The four matrices have 8 tokens and 8 dimensions, the next 8 dimensions, and the same for the
  // next 8 tokens.
  const char* tokens = SharedMemory() + C::kTileAt +
                       ((at.lane & 7) + (at.lane >> 4) * 8) * C::kStride + 32 * step +
                       (at.lane >> 3 & 1) * 16;
#pragma unroll
  for (int n = 0; n < C::kTokens / 8; n += 2) {
    uint32_t b[4];
    LoadMatrices(b, tokens + n * 8 * C::kStride);
#pragma unroll
    for (int tile = 0; tile < C::kRowTiles; ++tile) {
      Multiply<C::kBFloat>(scores[tile][n], a[tile], b[0], b[1]);
      Multiply<C::kBFloat>(scores[tile][n + 1], a[tile], b[2], b[3]);
    }
  }
}

// The factors of expanded latents and rotary parts.
struct LatentScales {
  float latent;
  float rotary;
};

// Compute the warp's part of the scores and store it.
template <class C>
TM_DEVICE void StoreScores(const LatentLane& at, const LatentScales& scales) {
  LatentScores<C> scores = {};
#pragma unroll
  for (int i = 0; i < C::kLatentSteps; ++i) {
    AddScores<C>(at, at.column + i * C::kColumnWarps, scores);
  }
  LatentScores<C> rotary = {};
  if (at.column < C::kRotarySteps) {
    AddScores<C>(at, C::kRank / 16 + at.column, rotary);
  }
  char* const to = SharedMemory() + C::kSumsAt +
                   (at.column * C::kRows + 16 * C::kRowTiles * at.group + at.g) * C::kSumStride +
                   8 * at.t;
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int n = 0; n < C::kTokens / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum[2];
        for (int i = 0; i < 2; ++i) {
          sum[i] = scores[tile][n][2 * half + i] * scales.latent +
                   rotary[tile][n][2 * half + i] * scales.rotary;
        }
        StoreShared(to + (16 * tile + 8 * half) * C::kSumStride + 32 * n,
                    Words<8>{{FloatBits(sum[0]), FloatBits(sum[1])}});
      }
    }
  }
}

// A row's softmax, which its threads share: m is the same in all of them, and l is over the
// thread's own tokens.
struct LatentSoftmax {
  float m = kMinRowMax;
  float l = 0.f;
};

// Maximum or sum over the threads of a row.
template <class C>
TM_DEVICE float MaxOfRow(float x) {
#pragma unroll
  for (int mask = 1; mask < C::kRowThreads; mask *= 2) {
    x = fmaxf(x, ShuffleXor(x, mask));
  }
  return x;
}
template <class C>
TM_DEVICE float SumOfRow(float x) {
#pragma unroll
  for (int mask = 1; mask < C::kRowThreads; mask *= 2) {
    x += ShuffleXor(x, mask);
  }
  return x;
}

// Replace a row's scores by weights 2^(score - m) in 16 bits, and store the factor by which m
// changes earlier sums. `seen` are the tokens of the tile that the row sees.
template <class C>
TM_DEVICE void StoreWeights(const SeenPositions& seen, float scale, LatentSoftmax* state) {
  const int row = ThreadIndexX() / C::kRowThreads;
  const int first = ThreadIndexX() % C::kRowThreads * C::kThreadScores;
  char* const sums = SharedMemory() + C::kSumsAt + row * C::kSumStride;
  float x[C::kThreadScores] = {};
#pragma unroll
  for (int warp = 0; warp < C::kColumnWarps; ++warp) {
    constexpr int kRun = C::kThreadScores < 4 ? C::kThreadScores : 4;
#pragma unroll
    for (int i = 0; i < C::kThreadScores; i += kRun) {
      const auto part = LoadShared<Words<4 * kRun>>(
          sums + warp * C::kRows * C::kSumStride + 4 * (first + i));
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
        x[i + j] += BitsFloat(part.v[j]);
      }
    }
  }
  float max_score = -INFINITY;
#pragma unroll
  for (int i = 0; i < C::kThreadScores; ++i) {
    const bool visible = first + i >= seen.begin && first + i < seen.end;
    x[i] = visible ? x[i] * scale : -INFINITY;
    max_score = fmaxf(max_score, x[i]);
  }
  max_score = MaxOfRow<C>(max_score);  // all threads of the row have read the sums
  float factor = 1.f;
  if (max_score > state->m + kLazyMax) {
    factor = Exp2Approx(state->m - max_score);
    state->m = max_score;
    state->l *= factor;
  }
#pragma unroll
  for (int i = 0; i < C::kThreadScores; ++i) {
    x[i] = Exp2Approx(x[i] - state->m);
    state->l += x[i];
  }
  if constexpr (C::kThreadScores == 1) {
    const uint32_t pair = PackPair<C::kBFloat>(x[0], 0.f);
    StoreShared(sums + 2 * first, static_cast<uint16_t>(pair));
  } else {
    Words<2 * C::kThreadScores> weights;
#pragma unroll
    for (int i = 0; i < C::kThreadScores / 2; ++i) {
      weights.v[i] = PackPair<C::kBFloat>(x[2 * i], x[2 * i + 1]);
    }
    StoreShared(sums + 2 * first, weights);
  }
  if (first == 0) {
    StoreShared(SharedMemory() + C::kFactorsAt + 4 * row, factor);
  }
}

template <class C>
using LatentSums = float[C::kRowTiles][C::kChunks][4];

// Return the stored factor of the lane's row g + 8 * half of a tile.
template <class C>
TM_DEVICE float FactorOf(const LatentLane& at, int tile, int half) {
  const int row = 16 * (C::kRowTiles * at.group + tile) + at.g + 8 * half;
  return LoadShared<float>(SharedMemory() + C::kFactorsAt + 4 * row);
}

// o = factor o + weights · latents, for the warp's columns.
template <class C>
TM_DEVICE void AddLatents(const LatentLane& at, LatentSums<C>& o) {
  float factor[C::kRowTiles][2];
  bool changed = false;
#pragma unroll
  for (int i = 0; i < 2 * C::kRowTiles; ++i) {
    factor[i / 2][i % 2] = FactorOf<C>(at, i / 2, i % 2);
    changed = changed || factor[i / 2][i % 2] != 1.f;
  }
  if (AnyInWarp(changed)) {
#pragma unroll
    for (int i = 0; i < C::kRowTiles * C::kChunks * 4; ++i) {
      o[i / (C::kChunks * 4)][i / 4 % C::kChunks][i % 4] *=
          factor[i / (C::kChunks * 4)][i % 4 / 2];
    }
  }
  const char* weights = SharedMemory() + C::kSumsAt +
                        (16 * C::kRowTiles * at.group + (at.lane & 15)) * C::kSumStride +
                        (at.lane >> 4) * 16;
  // The four matrices have 8 positions and 8 dimensions, the next 8 positions, and the same for the
  // next 8 dimensions.
  const char* values = SharedMemory() + C::kTileAt + (at.lane & 15) * C::kStride +
                       2 * C::kColumns * at.column + (at.lane >> 4) * 16;
#pragma unroll
  for (int u = 0; u < C::kTokens / 16; ++u) {
    uint32_t a[C::kRowTiles][4];
#pragma unroll
    for (int tile = 0; tile < C::kRowTiles; ++tile) {
      LoadMatrices(a[tile], weights + tile * 16 * C::kSumStride + 32 * u);
    }
#pragma unroll
    for (int n = 0; n < C::kChunks; n += 2) {
      uint32_t b[4];
      LoadMatricesTransposed(b, values + u * 16 * C::kStride + 16 * n);
#pragma unroll
      for (int tile = 0; tile < C::kRowTiles; ++tile) {
        Multiply<C::kBFloat>(o[tile][n], a[tile], b[0], b[1]);
        Multiply<C::kBFloat>(o[tile][n + 1], a[tile], b[2], b[3]);
      }
    }
  }
}

// Return the factors of a view's expanded values.
TM_DEVICE LatentScales ScalesOfView(const KvLayerView& kv) {
  LatentScales scales = {HeadScale(kv.global_scale[1], 0), HeadScale(kv.global_scale[0], 0)};
  if (kv.format[1] == KvCacheMode::kFp4Mx) {
    scales.latent *= Fragments<KvCacheMode::kFp4Mx, DataType::kFloat16>::kUnit;
  } else if (kv.format[1] == KvCacheMode::kFp4Nv) {
    scales.latent *= Fragments<KvCacheMode::kFp4Nv, DataType::kFloat16>::kUnit;
  }
  return scales;
}

// Read the positions that rows see in one of the ranges of prefill_shape.cuh.
template <class C>
TM_DEVICE void ReadLatents(const LatentTask& task, const LatentLane& at, int range,
                           LatentSoftmax* state, LatentSums<C>& o) {
  const LatentParams& p = task.params;
  const int view = range == 0 ? 0 : 1;
  const SeenPositions oldest = SeenBy(p.rule, 0, range, task.Position(task.first_row));
  const SeenPositions newest =
      SeenBy(p.rule, 0, range, task.Position(task.first_row + C::kRows - 1));
  const auto within = [&](const SeenPositions& x) -> SeenPositions {
    return {x.begin > task.range.begin ? x.begin : task.range.begin,
            x.end < task.range.end ? x.end : task.range.end};
  };
  const SeenPositions some = within({oldest.begin, newest.end});
  if (some.begin >= some.end) {
    return;
  }
  const SeenPositions mine = within(
      SeenBy(p.rule, 0, range, task.Position(task.first_row + ThreadIndexX() / C::kRowThreads)));
  const LatentScales scales = ScalesOfView(p.views[view]);
  const float scale = p.softmax_scale * kLog2E;
  // Warps whose rows are all past the last only copy and expand.
  const bool has_rows = task.first_row + 16 * C::kRowTiles * at.group < task.num_rows;
  CopyRawTile<C>(task, at.warp, view, some, some.begin / C::kTokens * C::kTokens);
#pragma unroll 1
  for (int first = some.begin / C::kTokens * C::kTokens; first < some.end; first += C::kTokens) {
    WaitForCopies<0>();
    SyncBlock();  // the tile has arrived, and no warp reads the one before it
    ExpandTile<C>(p.views[view], some.begin - first, some.end - first);
    SyncBlock();
    if (first + C::kTokens < some.end) {
      CopyRawTile<C>(task, at.warp, view, some, first + C::kTokens);
    }
    if (has_rows) {
      StoreScores<C>(at, scales);
    }
    SyncBlock();
    StoreWeights<C>({mine.begin - first, mine.end - first}, scale, state);
    SyncBlock();
    if (has_rows) {
      AddLatents<C>(at, o);
    }
  }
  SyncBlock();  // no warp reads the tile or the weights
}

// Store each row's factor of its sums: the one that normalizes them, or 1 for a partial result,
// whose m and l are stored too.
template <class C>
TM_DEVICE void FinishSoftmax(const LatentTask& task, const LatentSoftmax& state) {
  const LatentParams& p = task.params;
  const float l = SumOfRow<C>(state.l);
  const int in_block = ThreadIndexX() / C::kRowThreads;
  const int row = task.first_row + in_block;
  if (ThreadIndexX() % C::kRowThreads != 0 || row >= task.num_rows) {
    return;
  }
  float factor = 1.f;
  if (p.partial_o == nullptr) {
    factor = l > 0.f ? 1.f / l : 0.f;
  } else {
    const int64_t partial =
        (task.partial + static_cast<int64_t>(row / p.q_heads) * p.num_parts) * p.q_heads +
        row % p.q_heads;
    StoreGlobal(reinterpret_cast<Words<8>*>(p.partial_ml + 2 * partial),
                Words<8>{{FloatBits(state.m), FloatBits(l)}});
  }
  StoreShared(SharedMemory() + C::kFactorsAt + 4 * in_block, factor);
}

template <class C>
TM_DEVICE void WriteSums(const LatentTask& task, const LatentLane& at, const LatentSums<C>& o) {
  const LatentParams& p = task.params;
  const int rank = p.views[0].head_dim;
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row =
          task.first_row + 16 * (C::kRowTiles * at.group + tile) + at.g + 8 * half;
      if (row >= task.num_rows) {
        continue;
      }
      const int token = row / p.q_heads;
      const int64_t head = row % p.q_heads;
      float* to = p.partial_o == nullptr
                      ? p.out + (task.first_token + token) * p.q_stride + head * rank
                      : p.partial_o + ((task.partial + static_cast<int64_t>(token) * p.num_parts) *
                                           p.q_heads +
                                       head) *
                                          rank;
      const float factor = FactorOf<C>(at, tile, half);
#pragma unroll
      for (int n = 0; n < C::kChunks; ++n) {
        const int d = C::kColumns * at.column + 8 * n + 2 * at.t;
        if (d < rank) {
          StoreGlobal(reinterpret_cast<Words<8>*>(to + d),
                      Words<8>{{FloatBits(o[tile][n][2 * half] * factor),
                                FloatBits(o[tile][n][2 * half + 1] * factor)}});
        }
      }
    }
  }
}

// Grid: with items, blocks of an item's rows × (items · parts). Otherwise num_tiles × parts.
// kLatentThreads threads; C::SharedBytes.
template <class C>
__global__ void __launch_bounds__(kLatentThreads, C::kRows == 16 ? 2 : 1)
    LatentKernel(LatentParams params) {
  BeginKernel();
  const LatentTask task = params.items != nullptr ? ItemTask(params, C::kRows)
                                                  : SequenceTask(params, C::kRows);
  if (!task.exists) {
    return;
  }
  const int lane = ThreadIndexX() & 31;
  const int warp = WarpIndex();
  const LatentLane at = {lane,      warp,     warp / C::kColumnWarps, warp % C::kColumnWarps,
                         lane >> 2, lane & 3};
  StoreLatentQueries<C>(task);
  SyncBlock();
  LatentSoftmax state;
  LatentSums<C> o = {};
#pragma unroll 1
  for (int range = 0; range < kPrefillRanges; ++range) {
    ReadLatents<C>(task, at, range, &state, o);
    if (range == 0) {
      const float scale = ScalesOfView(params.views[0]).latent;
#pragma unroll
      for (int i = 0; i < C::kRowTiles * C::kChunks * 4; ++i) {
        o[i / (C::kChunks * 4)][i / 4 % C::kChunks][i % 4] *= scale;
      }
    }
  }
  FinishSoftmax<C>(task, state);
  SyncBlock();
  WriteSums<C>(task, at, o);
}

}  // namespace turbomind::cuda
