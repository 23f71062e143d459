// ⑦ Attention over latents: some query rows over one split. All rows multiply the same tile, so a
// tile is expanded once, and the lanes are query rows: a value of the cache is broadcast and
// multiplied with a run of them. A key is a whole row of the tile and a value its first part.
//
// Work per tile and block of 16 rows: 64 * (rank + rotary_dim) products for the scores and 64 * rank
// for the values. With 16 heads, reading the tile takes far less time.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention.h"
#include "turbomind/backend/cpu/isa/attention/attention_softmax.h"
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

// The memory of a call.
struct Memory {
  float* q;     // [blocks, width, lanes]
  float* tile;  // [kTileTokens, width]
  float* meta[2];
  float* sums;  // [kTileTokens, lanes]
};

struct Call {
  const LatentSplitArgs& args;
  int rank;
  int width;  // of a key
  Memory memory;
};

Memory Arrange(const LatentSplitArgs& args, int rank, int width) {
  Memory memory;
  memory.q = args.scratch;
  memory.tile = memory.q + int64_t{args.rows.num_blocks()} * width * kLanes;
  memory.meta[1] = memory.tile + int64_t{kTileTokens} * width;
  memory.meta[0] = memory.meta[1] + MaxOf(rank / 16, 2) * kTileTokens;
  memory.sums = memory.meta[0] + MaxOf((width - rank) / 16, 2) * kTileTokens;
  return memory;
}

// Writes row r of the queries to lane r % kLanes of its block. Lanes without a row get zeros.
void ArrangeQueries(const Call& call) {
  const LatentRows& rows = call.args.rows;
  const auto copy = [](float* to, const float* from, int n) {
    for (int d = 0; d < n; ++d) {
      to[d * kLanes] = from[d];
    }
  };
  __builtin_memset(call.memory.q, 0,
                   sizeof(float) * rows.num_blocks() * call.width * kLanes);
  for (int i = 0; i < rows.num_rows; ++i) {
    const int64_t token = (rows.first_row + i) / rows.heads;
    const int64_t head = (rows.first_row + i) % rows.heads;
    float* to = call.memory.q + int64_t{i / kLanes} * call.width * kLanes + i % kLanes;
    copy(to, rows.q + token * rows.q_stride + head * call.rank, call.rank);
    copy(to + int64_t{call.rank} * kLanes,
         rows.rotary + token * rows.rotary_stride + head * rows.rotary_head_stride,
         call.width - call.rank);
  }
}

// Returns what the rows of a block see of a tile in a view.
void FindSeen(const LatentSplitArgs& args, int block, int tile, bool window16, BlockSeen* seen) {
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
    seen->all = seen->all && seen->begin[lane] == seen->some.begin &&
                seen->end[lane] == seen->some.end;
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
  for (const KvSide side : {KvSide::kV, KvSide::kK}) {
    LatentSide rows = OpenLatentSide(kv, side, call.memory.meta[static_cast<int>(side)]);
    FindRows(kv, tile, some, call.args.end, &rows);
    ExpandLatentSide(kv, rows, some, call.memory.tile + (side == KvSide::kV ? 0 : call.rank),
                     call.width);
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
    ScoreTile(call, block, seen.some);
    const F32x16 correction = state.Update(call.memory.sums, scale, seen);
    AddValues(call, seen.some, correction, state.o());
  }
}

}  // namespace

void LatentSplit(const LatentSplitArgs& args) {
  const KvLayerView& layer = *args.kv.layer;
  const int width = layer.head_dim + layer.rotary_dim;
  const Call call = {args, layer.head_dim, width, Arrange(args, layer.head_dim, width)};
  ArrangeQueries(call);
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
  }
}

}  // namespace turbomind::TM_ISA
