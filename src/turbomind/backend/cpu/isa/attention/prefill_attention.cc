// ⑦ Prefill: a block of query rows (new tokens × heads of one group) over all their positions. Each
// tile of the cache is unpacked into scratch once per view. Each row then runs the same operations
// in the same order as decode, so the bits are the same.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention.h"
#include "turbomind/backend/cpu/isa/attention/prefill_attention_block.h"
#include "turbomind/backend/cpu/isa/attention/prefill_attention_float.h"
#include "turbomind/backend/cpu/isa/attention/prefill_attention_integer.h"
#include "turbomind/backend/cpu/isa/attention/prefill_attention_softmax.h"
#include "turbomind/kv/sliding_window.h"
#if defined(TM_ISA_amx)
#include "turbomind/backend/cpu/isa/attention/prefill_attention_amx.h"
#endif

namespace turbomind::TM_ISA {
namespace {

#if defined(TM_ISA_amx)
// Selects the AMX tile kernels for FP4 keys and values of a view.
void UseTiles(TileFns& fns, bool keys, bool values) {
  if (keys) {
    fns.unpack_keys = UnpackKeysForTiles;
    fns.score = ScoreTileOnTiles;
  }
  if (values) {
    fns.add_values = AddTileValuesOnTiles;
  }
}
#else
void UseTiles(TileFns& /*fns*/, bool /*keys*/, bool /*values*/) {}
void SplitQueries(const Block& /*block*/) {}
#endif

void RoundQueries(const Block& b, RoundedQuery (*round)(const float*, int, int32_t*)) {
  for (int row = 0; row < b.rows; ++row) {
    const RoundedQuery rounded =
        round(b.q + row * b.head_dim, b.head_dim, b.pairs + row * b.head_dim / 2);
    b.q_scale[row] = rounded.scale;
    b.rounded_sum[row] = rounded.sum;
  }
  SplitQueries(b);
}

// Selects the kernels of a view. Integer codes use integer arithmetic unless `exact` requests FP32.
TileFns FindFns(const KvLayerView& layer, bool exact) {
  TileFns fns;
  DispatchStored(StoredAs(layer.format[0], layer.dtype), [&]<Stored S>() {
    fns.unpack_keys = UnpackKeys<S>;
    fns.score = ScoreTile<IsGrouped(S), IsAffine(S)>;
    if constexpr (IsInteger(S)) {
      if (!exact) {
        fns.unpack_keys = UnpackKeyPairs<S>;
        fns.score = ScoreTileInteger<S>;
        fns.round = RoundQuery<S>;
      }
    }
  });
  DispatchStored(StoredAs(layer.format[1], layer.dtype), [&]<Stored S>() {
    fns.add_values = AddTileValues<S>;
    if constexpr (IsInteger(S)) {
      if (!exact) {
        fns.add_values = AddTileValuesInteger<S>;
        fns.rounds_weights = true;
      }
    }
  });
  const auto is_fp4 = [&](int side) {
    return StoredAs(layer.format[side], layer.dtype) == Stored::kFp4;
  };
  UseTiles(fns, !exact && is_fp4(0), !exact && is_fp4(1));
  return fns;
}

void ReadTile(Block& b, const View& view, int tile) {
  const Seen any = SeenByAny(b, view, tile);
  if (any.begin >= any.end) {
    return;
  }
  OpenTile(view.kv, KvSide::kK, tile, any.begin, any.end, &b.side[0]);
  OpenTile(view.kv, KvSide::kV, tile, any.begin, any.end, &b.side[1]);
  view.fns.unpack_keys(b);
  view.fns.score(b);
  UpdateSoftmax(b, view, tile, AllSeeAll(b, view, tile));
  view.fns.add_values(b, view, tile, any);
}

void FinishSplit(const Block& b) {
  for (int row = 0; row < b.rows; ++row) {
    float* o = b.o + row * b.head_dim;
    b.total[row].Merge(b.state[row], b.total_o + row * b.head_dim, o, b.head_dim);
    b.state[row] = SoftmaxState();
    __builtin_memset(o, 0, b.head_dim * sizeof(float));
  }
}

Block MakeBlock(const PrefillRowsArgs& args) {
  Block b;
  b.args = &args;
  b.head_dim = args.kv.layer->head_dim;
  b.rows = args.num_tokens * args.group;
  float* free = args.scratch;
  const auto take = [&free](int64_t count) {
    float* at = free;
    free += (count + 15) / 16 * 16;
    return at;
  };
  const int64_t row_floats = static_cast<int64_t>(b.rows) * b.head_dim;
  b.keys = take(kTileTokens * b.head_dim);
  b.values = take(kTileTokens * b.head_dim);
  for (TileSide& side : b.side) {
    side.meta = take(kTileTokens * (b.head_dim / 16 + 2));
  }
  b.scores = take(static_cast<int64_t>(b.rows) * kTileTokens);
  b.q = take(row_floats);
  b.o = take(row_floats);
  b.total_o = take(row_floats);
  b.old = take(b.rows);
  b.tile = take(b.rows);
  b.q_scale = take(b.rows);
  b.rounded_sum = take(b.rows);
  b.pairs = reinterpret_cast<int32_t*>(take(row_floats / 2));
  b.halves = take(static_cast<int64_t>(b.rows + 15) / 16 * 16 * b.head_dim);
  b.qsum = take(b.rows);
  b.state = reinterpret_cast<SoftmaxState*>(take(2 * b.rows));
  b.total = reinterpret_cast<SoftmaxState*>(take(2 * b.rows));
  b.visible = reinterpret_cast<Visible*>(take(4 * args.num_tokens));
  for (int token = 0; token < args.num_tokens; ++token) {
    const int position = args.position + token;
    const int begin = FirstVisible(args.window, position);
    b.visible[token] = MakeVisible(args.rule, position, begin, position + 1);
  }
  for (int row = 0; row < b.rows; ++row) {
    b.state[row] = SoftmaxState();
    b.total[row] = SoftmaxState();
    const float* q = args.q + row / args.group * args.q_stride +
                     static_cast<int64_t>(row % args.group) * b.head_dim;
    __builtin_memcpy(b.q + row * b.head_dim, q, b.head_dim * sizeof(float));
    b.qsum[row] = SumRow(q, b.head_dim);
  }
  __builtin_memset(b.o, 0, row_floats * sizeof(float));
  return b;
}

View MakeView(const PrefillRowsArgs& args, bool window16) {
  View view;
  view.kv = window16 ? args.window16 : args.kv;
  view.fns = FindFns(*view.kv.layer, args.exact);
  view.scale = ScoreScale(view.kv, args.softmax_scale);
  view.value_scale = args.window16.layer != nullptr ? ValueScale(view.kv) : 1.f;
  view.window16 = window16;
  view.interleave = window16 && HasInterleavedValues(args.kv, args.exact);
  return view;
}

void WriteRow(const Block& b, int row) {
  const PrefillRowsArgs& args = *b.args;
  const int token = row / args.group;
  const int head = row % args.group;
  const float* sink = args.sinks != nullptr ? args.sinks + head : nullptr;
  const float shift =
      args.q_dot_mean != nullptr
          ? args.softmax_scale * args.q_dot_mean[token * args.q_dot_mean_stride + head]
          : 0.f;
  const float value_scale = args.window16.layer != nullptr ? 1.f : ValueScale(args.kv);
  const float factor = b.total[row].Finish(sink, shift, value_scale);
  float* o = b.total_o + row * b.head_dim;
  if (HasInterleavedValues(args.kv, args.exact)) {
    DeinterleaveRow(o, b.head_dim);
  }
  WriteOutput(o, b.head_dim, factor,
              args.out + token * args.out_stride + static_cast<int64_t>(head) * b.head_dim);
}

}  // namespace

void PrefillRows(const PrefillRowsArgs& args) {
  Block b = MakeBlock(args);
#if defined(TM_ISA_amx)
  const TileConfig config(FullShape());
#endif
  const int num_views = args.window16.layer != nullptr ? 2 : 1;
  View views[2];
  views[0] = MakeView(args, false);
  if (views[0].fns.round != nullptr) {
    RoundQueries(b, views[0].fns.round);
  }
  if (num_views == 2) {
    views[1] = MakeView(args, true);  // 16-bit values: queries are not rounded
  }
  const int begin = b.visible[0].begin;
  const int end = b.visible[args.num_tokens - 1].end;
  for (int tile = begin / kTileTokens * kTileTokens; tile < end; tile += kTileTokens) {
    if (tile % kSplitTokens == 0) {
      FinishSplit(b);
    }
    for (int i = 0; i < num_views; ++i) {
      ReadTile(b, views[i], tile);
    }
  }
  FinishSplit(b);
  for (int row = 0; row < b.rows; ++row) {
    WriteRow(b, row);
  }
}

}  // namespace turbomind::TM_ISA
