// ⑦ Attention over latents: some query rows over adjacent splits. All rows multiply the same tile,
// so a tile is expanded once, and the lanes are query rows: a value of the cache is broadcast and
// multiplied with a run of them. A key is a whole row of the tile and a value its first part.
//
// Work per tile and block of 16 rows: 64 * (rank + rotary_dim) products for the scores and 64 *
// rank for the values. With 16 heads, reading the tile takes far less time.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention.h"
#include "turbomind/backend/cpu/isa/attention/attention_softmax.h"
#include "turbomind/backend/cpu/isa/attention/kv_rotate.h"
#include "turbomind/backend/cpu/isa/attention/latent_bytes.h"
#include "turbomind/backend/cpu/isa/attention/latent_offset.h"
#include "turbomind/backend/cpu/isa/attention/latent_softmax.h"
#include "turbomind/backend/cpu/isa/attention/latent_tile.h"

namespace turbomind::TM_ISA {
namespace {

// Sums in registers: tokens of a score loop, and dimensions of a value loop. They do not change
// results.
#if defined(TM_ISA_avx512)
constexpr int kSums = 16;
#elif defined(TM_ISA_avx2)
constexpr int kSums = 4;
#else
constexpr int kSums = 1;
#endif

constexpr int kRun = 16;  // tokens that are rounded to bytes together; in one block of the cache
static_assert(kRun % kSums == 0 && kRun % kTokenBytes == 0);

// The memory of a call.
struct Memory {
  float* q;     // [blocks, width, lanes]
  float* tile;  // [kTileTokens, width]
  float* meta[2];
  float* sums;  // [kTileTokens, lanes]
  // In 8 bits:
  ByteTile bytes;
  ByteQueries byte_q;     // of all blocks
  int32_t* byte_weights;  // [kTileTokens / kTokenBytes, lanes]
  float* shifts;          // [kTileRuns, lanes]
};

struct Call {
  LatentSplitsArgs args;  // of one split
  int last;               // the end of all splits
  int rank;
  int width;  // of a key
  Memory memory;
};

Memory Arrange(const LatentSplitsArgs& args, int rank, int width) {
  Memory memory;
  memory.q = args.scratch;
  memory.tile = memory.q + int64_t{args.rows.num_blocks()} * width * kLanes;
  memory.meta[1] = memory.tile + int64_t{kTileTokens} * width;
  memory.meta[0] = memory.meta[1] + MaxOf(rank / 16, 2) * kTileTokens;
  memory.sums = memory.meta[0] + MaxOf((width - rank) / 16, 2) * kTileTokens;
  // All buffers of floats so far have whole runs of 16.
  float* next = memory.sums + kTileTokens * kLanes;
  const auto take = [&](int64_t floats) {
    float* const at = next;
    next += floats;
    return at;
  };
  const int blocks = args.rows.num_blocks();
  memory.bytes.keys = reinterpret_cast<int8_t*>(take(kTileTokens * kLatentKeyStride / 4));
  memory.bytes.values = reinterpret_cast<int8_t*>(take(kTileTokens * rank / 4));
  memory.bytes.scales = take(kTileTokens);
  memory.bytes.offsets = reinterpret_cast<int32_t*>(take(kTileTokens));
  memory.byte_q.codes = reinterpret_cast<int32_t*>(take(int64_t{blocks} * rank / 4 * kLanes));
  memory.byte_q.scales = take(int64_t{blocks} * kLanes);
  memory.byte_q.sums = reinterpret_cast<int32_t*>(take(int64_t{blocks} * kLanes));
  memory.byte_q.rotary =
      reinterpret_cast<int32_t*>(take(int64_t{blocks} * (width - rank) / 2 * kLanes));
  memory.byte_q.rotary_scales = take(int64_t{blocks} * kLanes);
  memory.bytes.rotary = reinterpret_cast<int16_t*>(take(kTileTokens * (width - rank) / 2));
  memory.bytes.rotary_scales = take(kTileTokens);
  memory.byte_weights = reinterpret_cast<int32_t*>(take(kTileTokens / kTokenBytes * kLanes));
  memory.shifts = take(kTileRuns * kLanes);
  return memory;
}

// Copies `dim` values of 16 rows to lanes: to[d][lane].
void ToLanes(const float* rows, int64_t stride, int dim, float* to) {
  for (int d = 0; d < dim; d += 4) {
    I32x16 columns[4];
    LoadTransposed(reinterpret_cast<const uint8_t*>(rows + d),
                   stride * static_cast<int64_t>(sizeof(float)), columns);
    for (int i = 0; i < 4; ++i) {
      StoreInt(to + (d + i) * kLanes, columns[i]);
    }
  }
}

// Writes row r of the queries to lane r % kLanes of its block. Lanes without a row get zeros.
void ArrangeRows(const Call& call) {
  const LatentRows& rows = call.args.rows;
  const int rotary_dim = call.width - call.rank;
  for (int block = 0; block < rows.num_blocks(); ++block) {
    float* to = call.memory.q + int64_t{block} * call.width * kLanes;
    const auto q_of = [&](int row) {
      return rows.q + row / rows.heads * rows.q_stride +
             static_cast<int64_t>(row % rows.heads) * call.rank;
    };
    const auto rotary_of = [&](int row) {
      return rows.rotary + row / rows.heads * rows.rotary_stride +
             row % rows.heads * rows.rotary_head_stride;
    };
    const int first = rows.first_row + block * kLanes;
    const int count = MinOf(kLanes, rows.num_rows - block * kLanes);
    if (count == kLanes && first % rows.heads + kLanes <= rows.heads) {  // heads of one token
      ToLanes(q_of(first), call.rank, call.rank, to);
      ToLanes(rotary_of(first), rows.rotary_head_stride, rotary_dim,
              to + int64_t{call.rank} * kLanes);
      continue;
    }
    __builtin_memset(to, 0, sizeof(float) * call.width * kLanes);
    for (int lane = 0; lane < count; ++lane) {
      const float* q = q_of(first + lane);
      const float* rotary = rotary_of(first + lane);
      for (int d = 0; d < call.width; ++d) {
        to[d * kLanes + lane] = d < call.rank ? q[d] : rotary[d - call.rank];
      }
    }
  }
}

// Arranges the queries, and rotates them if the latents are.
void ArrangeQueries(const Call& call) {
  ArrangeRows(call);
  for (int block = 0; call.args.rows.rotate && block < call.args.rows.num_blocks(); ++block) {
    HadamardLanes(call.memory.q + int64_t{block} * call.width * kLanes, call.rank,
                  RotationSize(call.rank));
  }
}

// Returns what the rows of a block see of a tile in a view.
void FindSeen(const LatentSplitsArgs& args, int block, int tile, bool window16, BlockSeen* seen) {
  const LatentRows& rows = args.rows;
  seen->some = {kTileTokens, 0};
  seen->all = true;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int row = block * kLanes + lane;
    if (row >= rows.num_rows) {
      seen->begin[lane] = seen->end[lane] = 0;
      continue;
    }
    const int position = args.position + (rows.first_row + row) / rows.heads;
    const Visible visible =
        MakeVisible(args.rule, position, args.begin, MinOf(args.end, position + 1));
    const Seen one = SeenOf(visible, tile, window16);
    seen->begin[lane] = one.begin;
    seen->end[lane] = one.end;
    if (one.begin < one.end) {
      seen->some = {MinOf(seen->some.begin, one.begin), MaxOf(seen->some.end, one.end)};
    }
  }
  for (int lane = 0; lane < MinOf(kLanes, rows.num_rows - block * kLanes); ++lane) {
    seen->all =
        seen->all && seen->begin[lane] == seen->some.begin && seen->end[lane] == seen->some.end;
  }
}

// Computes the sums of a tile's keys with the queries of a block.
void ScoreTile(const Call& call, int block, const Seen& seen) {
  const float* q = call.memory.q + int64_t{block} * call.width * kLanes;
  for (int t = seen.begin / kSums * kSums; t < seen.end; t += kSums) {
    const float* key = call.memory.tile + int64_t{t} * call.width;
    F32x16 sum[kSums];
    for (F32x16& one : sum) {
      one = Zero();
    }
    for (int d = 0; d < call.width; ++d) {
      const F32x16 query = Load(q + d * kLanes);
      Unroll<kSums>([&](auto i) __attribute__((always_inline)) {
        constexpr int at = decltype(i)::value;
        sum[at] = Fma(query, Set1(key[at * call.width + d]), sum[at]);
      });
    }
    for (int i = 0; i < kSums; ++i) {
      Store(call.memory.sums + (t + i) * kLanes, sum[i]);
    }
  }
}

// Adds the weighted values of a tile to o, which is first multiplied with `correction`.
void AddValues(const Call& call, const Seen& seen, F32x16 correction, float* o) {
  for (int d = 0; d < call.rank; d += kSums) {
    F32x16 sum[kSums];
    for (int i = 0; i < kSums; ++i) {
      sum[i] = Mul(Load(o + (d + i) * kLanes), correction);
    }
    for (int t = seen.begin; t < seen.end; ++t) {
      const F32x16 weight = Load(call.memory.sums + t * kLanes);
      const float* value = call.memory.tile + int64_t{t} * call.width + d;
      Unroll<kSums>([&](auto i) __attribute__((always_inline)) {
        constexpr int at = decltype(i)::value;
        sum[at] = Fma(weight, Set1(value[at]), sum[at]);
      });
    }
    for (int i = 0; i < kSums; ++i) {
      Store(o + (d + i) * kLanes, sum[i]);
    }
  }
}

// Returns the queries of a block.
ByteQueries QueriesOf(const Call& call, int block) {
  const ByteQueries& all = call.memory.byte_q;
  const int64_t at = int64_t{block} * kLanes;
  return {all.codes + at * call.rank / 4, all.scales + at, all.sums + at,
          all.rotary + at * (call.width - call.rank) / 2, all.rotary_scales + at};
}

// As ScoreTile, in integers, with the offsets.
void ScoreBytes(const Call& call, int block, const LatentOffsets& offsets, const Seen& seen) {
  const ByteTile& bytes = call.memory.bytes;
  const ByteQueries q = QueriesOf(call, block);
  const int rotary_dim = call.width - call.rank;
  const F32x16 scale = Load(q.scales);
  const F32x16 rotary_scale = Load(q.rotary_scales);
  ShiftScores(offsets, q, call.rank, call.memory.shifts);
  for (int t = seen.begin / kSums * kSums; t < seen.end; t += kSums) {
    I32x16 sum[kSums];
    for (I32x16& one : sum) {
      one = Set1Int(0);
    }
    const int16_t* rotary = bytes.rotary + int64_t{t} * rotary_dim;
    for (int d = 0; d < rotary_dim; d += 2) {
      const I32x16 query = LoadInt(q.rotary + d / 2 * kLanes);
      Unroll<kSums>([&](auto i) __attribute__((always_inline)) {
        constexpr int at = decltype(i)::value;
        sum[at] = DotPair(sum[at], query, rotary + at * rotary_dim + d);
      });
    }
    const F32x16 shift = Load(call.memory.shifts + t / kOffsetRun * kLanes);
    for (int i = 0; i < kSums; ++i) {
      const F32x16 factor = Mul(rotary_scale, Set1(bytes.rotary_scales[t + i]));
      Store(call.memory.sums + (t + i) * kLanes, Fma(ToFloat(sum[i]), factor, shift));
      sum[i] = Set1Int(bytes.offsets[t + i]);
    }
    const int8_t* key = bytes.keys + t * kLatentKeyStride;
    for (int d = 0; d < call.rank; d += 4) {
      const I32x16 query = LoadInt(q.codes + d / 4 * kLanes);
      Unroll<kSums>([&](auto i) __attribute__((always_inline)) {
        constexpr int at = decltype(i)::value;
        sum[at] = DotBytes(sum[at], query, key + at * kLatentKeyStride + d);
      });
    }
    for (int i = 0; i < kSums; ++i) {
      float* to = call.memory.sums + (t + i) * kLanes;
      const F32x16 factor = Mul(scale, Set1(bytes.scales[t + i]));
      Store(to, Fma(ToFloat(sum[i]), factor, Load(to)));
    }
  }
}

// As AddValues, with values and weights in 8 bits. With kOffset, also adds `offset` [rank], each
// value `weight` times.
template <bool kOffset>
void AddBytesOfValues(const Call& call, const Seen& seen, F32x16 correction, F32x16 weight,
                      const float* offset, float* o) {
  const ByteTile& bytes = call.memory.bytes;
  int32_t* weights = call.memory.byte_weights;
  const F32x16 factor = WeighBytes(call.memory.sums, bytes.scales, seen.begin, seen.end, weights);
  constexpr int64_t stride = kValueRun * kTokenBytes;
  for (int d = 0; d < call.rank; d += kByteDims) {
    for (int first = 0; first < kByteDims; first += kSums) {
      I32x16 sum[kSums];
      for (I32x16& one : sum) {
        one = Set1Int(0);
      }
      for (int t = seen.begin / kTokenBytes; t * kTokenBytes < seen.end; ++t) {
        const I32x16 codes = LoadInt(weights + t * kLanes);
        const int8_t* value = bytes.values + (d + first) / kValueRun * (kTileTokens * kValueRun) +
                              t * stride + first % kValueRun * kTokenBytes;
        Unroll<kSums>([&](auto i) __attribute__((always_inline)) {
          constexpr int at = decltype(i)::value;
          sum[at] = DotBytes(sum[at], codes, value + at * kTokenBytes);
        });
      }
      Unroll<kSums>([&](auto i) __attribute__((always_inline)) {
        const int dim = d + ValueDim(first + decltype(i)::value);
        F32x16 value = Mul(Load(o + dim * kLanes), correction);
        if constexpr (kOffset) {
          value = Fma(weight, Set1(offset[dim]), value);
        }
        Store(o + dim * kLanes, Fma(ToFloat(sum[decltype(i)::value]), factor, value));
      });
    }
  }
}

// Adds the weighted values of a tile in 8 bits, with the offsets. The last of these is added
// together with the values. With blocks of 64 tokens or more, a tile has only one.
void AddBytesAndOffsets(const Call& call, const LatentOffsets& offsets, const Seen& seen,
                        F32x16 correction, float* o) {
  if (offsets.count == 0) {
    AddBytesOfValues<false>(call, seen, correction, Zero(), nullptr, o);
    return;
  }
  const LatentOffset* one = offsets.of;
  const auto weight = [&] {
    return SumWeights(call.memory.sums,
                      {MaxOf(one->seen.begin, seen.begin), MinOf(one->seen.end, seen.end)});
  };
  for (; one + 1 < offsets.of + offsets.count; ++one) {
    AddOffsetOfValues(*one, call.rank, correction, weight(), o);
    correction = Set1(1.f);
  }
  AddBytesOfValues<true>(call, seen, correction, weight(), one->values, o);
}

// Rounds the latents of the tokens `seen`, which are in the run that begins at `position`.
template <KvCacheMode M>
void ExpandRun(const Call& call, const KvHead& kv, int position, const Seen& seen) {
  const KvLayerView& layer = *kv.layer;
  const int shift = __builtin_ctz(static_cast<unsigned>(layer.block_seq_len));
  const auto row_of = [&](int at) {
    const int64_t block = at < call.last ? kv.blocks[at >> shift] : -1;
    return block < 0 ? KvRow{} : layer.Row(KvSide::kV, block, 0, at & (layer.block_seq_len - 1));
  };
  const float* scale = layer.global_scale[static_cast<int>(KvSide::kV)];
  const float factor = scale != nullptr ? *scale : 1.f;
  const int64_t bytes = layer.row_bytes[1];
  const KvRow next = row_of(position + kTileTokens);
  const KvRow first = row_of(position);
  const int begin = position % kTileTokens;
  TokenFactors factors[kRun];  // of all tokens first: finding them is a chain of slow instructions
  for (int token = seen.begin; token < seen.end; ++token) {
    const int i = token - begin;
    call.memory.bytes.scales[token] = FindFactors<M>(first.metadata + i * layer.ScaleStride(),
                                                     call.rank / 16, factor, &factors[i]);
  }
  for (int token = seen.begin; token < seen.end; ++token) {
    const int i = token - begin;
    if (next.payload != nullptr) {
      PrefetchBytes(reinterpret_cast<const std::byte*>(next.payload + i * bytes), bytes);
      PrefetchBytes(reinterpret_cast<const std::byte*>(next.metadata + i * layer.ScaleStride()),
                    layer.scale_bytes[1]);
    }
    ExpandToken(first.payload + i * bytes, call.rank, factors[i], token, call.memory.bytes);
  }
}

// Finds the rows of a side of a tile.
LatentSide FindSide(const Call& call, const KvHead& kv, KvSide side, int tile, const Seen& some) {
  LatentSide found = OpenLatentSide(kv, side, call.memory.meta[static_cast<int>(side)]);
  FindRows(kv, tile, some, call.last, &found);
  return found;
}

// Rounds the rows of a tile to integers. Tokens that complete a run count as zero.
void ExpandToBytes(const Call& call, const KvHead& kv, int tile, const Seen& some) {
  const ByteTile& bytes = call.memory.bytes;
  const int rotary_dim = call.width - call.rank;
  const auto expand = kv.layer->format[1] == KvCacheMode::kFp4Mx ? ExpandRun<KvCacheMode::kFp4Mx>
                                                                 : ExpandRun<KvCacheMode::kFp4Nv>;
  const LatentSide rotary = FindSide(call, kv, KvSide::kK, tile, some);
  for (int first = some.begin / kRun * kRun; first < some.end; first += kRun) {
    const Seen seen = {MaxOf(first, some.begin), MinOf(first + kRun, some.end)};
    // In turns: each prefetches the next tile, and few requests fit into the queue of L1.
    ExpandLatentSide(kv, rotary, seen, call.memory.tile + call.rank, call.width);
    expand(call, kv, tile + first, seen);
    for (int token = first; token < first + kRun; ++token) {
      if (token >= seen.begin && token < seen.end) {
        RoundRotary(call.memory.tile + int64_t{token} * call.width + call.rank, rotary_dim, token,
                    bytes);
        continue;
      }
      __builtin_memset(bytes.keys + token * kLatentKeyStride, 0, call.rank);
      __builtin_memset(bytes.rotary + int64_t{token} * rotary_dim, 0, rotary_dim * sizeof(int16_t));
      bytes.scales[token] = bytes.rotary_scales[token] = 0.f;
      bytes.offsets[token] = 0;
    }
    for (int t = first; t < first + kRun; t += kTokenBytes) {  // while L1 has the keys
      for (int d = 0; d < call.rank; d += kByteDims) {
        InterleaveTokens(bytes.keys + t * kLatentKeyStride + d, kLatentKeyStride,
                         bytes.values + d * kTileTokens + t * kValueRun);
      }
    }
  }
}

// Adds one view of a tile to the states of all blocks.
void AddTile(const Call& call, const KvHead& kv, int tile, bool window16) {
  const int num_blocks = call.args.rows.num_blocks();
  Seen some = {kTileTokens, 0};
  BlockSeen seen;
  for (int block = 0; block < num_blocks; ++block) {
    FindSeen(call.args, block, tile, window16, &seen);
    if (seen.some.begin < seen.some.end) {
      some = {MinOf(some.begin, seen.some.begin), MaxOf(some.end, seen.some.end)};
    }
  }
  if (some.begin >= some.end) {
    return;
  }
  const bool in_bytes =
      !call.args.exact && IsFp4(kv.layer->format[1]) && call.rank % kByteDims == 0;
  LatentOffsets offsets;
  FindOffsets(kv, tile, some, call.last, &offsets);
  if (in_bytes) {
    ExpandToBytes(call, kv, tile, some);
  } else {
    for (const KvSide side : {KvSide::kV, KvSide::kK}) {
      ExpandLatentSide(kv, FindSide(call, kv, side, tile, some), some,
                       call.memory.tile + (side == KvSide::kV ? 0 : call.rank), call.width);
    }
    AddOffsets(offsets, call.rank, call.memory.tile, call.width);
  }
  // The score loop reads whole runs of tokens.
  const auto clear = [&](int begin, int end) {
    __builtin_memset(call.memory.tile + int64_t{begin} * call.width, 0,
                     sizeof(float) * (end - begin) * call.width);
  };
  clear(some.begin / kSums * kSums, some.begin);
  clear(some.end, (some.end + kSums - 1) / kSums * kSums);
  const F32x16 scale = Set1(call.args.softmax_scale * kLog2E);
  for (int block = 0; block < num_blocks; ++block) {
    FindSeen(call.args, block, tile, window16, &seen);
    if (seen.some.begin >= seen.some.end) {
      continue;
    }
    const LatentState state = {call.args.states + block * LatentStateFloats(call.rank)};
    if (in_bytes) {
      ScoreBytes(call, block, offsets, seen.some);
    } else {
      ScoreTile(call, block, seen.some);
    }
    const F32x16 correction = state.Update(call.memory.sums, scale, seen);
    if (in_bytes) {
      AddBytesAndOffsets(call, offsets, seen.some, correction, state.o());
    } else {
      AddValues(call, seen.some, correction, state.o());
    }
  }
}

// Computes the states of all blocks for one split.
void AddSplit(const Call& call) {
  const LatentSplitsArgs& args = call.args;
  for (int block = 0; block < args.rows.num_blocks(); ++block) {
    LatentState{args.states + block * LatentStateFloats(call.rank)}.Clear(call.rank);
  }
  for (int tile = args.begin; tile < args.end; tile += kTileTokens) {
    AddTile(call, args.kv, tile, false);
    if (args.window16.layer != nullptr) {
      AddTile(call, args.window16, tile, true);
    }
  }
}

}  // namespace

void LatentSplits(const LatentSplitsArgs& args) {
  const KvLayerView& layer = *args.kv.layer;
  const int width = layer.head_dim + layer.rotary_dim;
  Call call = {args, args.end, layer.head_dim, width, Arrange(args, layer.head_dim, width)};
  ArrangeQueries(call);
  const KvCacheMode format = layer.format[1];
  if (!args.exact && IsFp4(format) && call.rank % kByteDims == 0) {
    for (int block = 0; block < args.rows.num_blocks(); ++block) {
      RoundToBytes(call.memory.q + int64_t{block} * width * kLanes, call.rank, layer.rotary_dim,
                   QueriesOf(call, block));
    }
  }
  const int64_t state_floats = args.rows.num_blocks() * LatentStateFloats(call.rank);
  for (int begin = args.begin; begin < args.end; begin = call.args.end) {
    call.args.begin = begin;
    call.args.end = MinOf(args.end, (begin / kSplitTokens + 1) * kSplitTokens);
    AddSplit(call);
    if (args.later == nullptr) {
      call.args.states += state_floats;
    } else if (begin == args.begin) {
      call.args.states = args.later;
    } else {
      LatentMerge({args.states, args.later, args.rows.num_blocks(), call.rank});
    }
  }
}

void LatentMerge(const LatentMergeArgs& args) {
  for (int block = 0; block < args.num_blocks; ++block) {
    const int64_t at = block * LatentStateFloats(args.rank);
    // `later` is only read.
    LatentState{args.states + at}.Merge({const_cast<float*>(args.later) + at}, args.rank);
  }
}

void LatentOutput(const LatentOutputArgs& args) {
  for (int i = 0; i < args.rows.num_rows; ++i) {
    const float* state = args.states + i / kLanes * LatentStateFloats(args.rank) + i % kLanes;
    const float l = state[kLanes];
    const float factor = l == 0.f ? 0.f : 1.f / l;
    const int row = args.rows.first_row + i;
    float* out = args.out + row / args.rows.heads * args.rows.q_stride +
                 static_cast<int64_t>(row % args.rows.heads) * args.rank;
    for (int d = 0; d < args.rank; ++d) {
      out[d] = state[(kStateHeader + d) * kLanes] * factor + 0.f;  // 0 instead of -0
    }
    if (args.rows.rotate) {
      HadamardRow(out, args.rank, RotationSize(args.rank));
    }
  }
}

}  // namespace turbomind::TM_ISA
