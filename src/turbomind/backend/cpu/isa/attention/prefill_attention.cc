// ⑦ Prefill: a block of query rows (new tokens × heads of one group) over all their positions. Each
// tile of the cache is unpacked into scratch once per view. Each row then runs the same operations
// in the same order as decode, so the bits are the same.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention.h"
#include "turbomind/backend/cpu/isa/attention/prefill_attention_block.h"
#include "turbomind/backend/cpu/isa/attention/prefill_attention_float.h"
#include "turbomind/backend/cpu/isa/attention/prefill_attention_integer.h"
#include "turbomind/backend/cpu/isa/attention/prefill_attention_item.h"
#include "turbomind/backend/cpu/isa/attention/prefill_attention_softmax.h"
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

// Rounds the queries for a view with integer keys.
void RoundQueries(const Block& b, const View& view) {
  if (view.fns.round == nullptr) {
    return;
  }
  const RoundedRows& to = b.rounded[view.window16];
  for (int row = 0; row < b.rows; ++row) {
    const RoundedQuery rounded =
        view.fns.round(b.q + row * b.head_dim, b.head_dim, to.pairs + row * b.head_dim / 2);
    to.scale[row] = rounded.scale;
    to.sum[row] = rounded.sum;
  }
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
  b.queries = &b.rounded[view.window16];
  view.fns.unpack_keys(b);
  view.fns.score(b);
  ShiftScores(b, view, tile, any);
  for (int row = 0; row < b.rows; ++row) {
    AddFastBias(b, view, tile, row, ScaleOfRow(b, view, row), b.scores + row * kTileTokens);
  }
  UpdateSoftmax(b, view, tile, AllSeeAll(b, view, tile));
  view.fns.add_values(b, view, tile, any);
}

View MakeView(const PrefillRowsArgs& args, bool window16) {
  View view = OpenView(args, window16);
  view.fns = FindFns(*view.kv.layer, args.exact);
  return view;
}

}  // namespace

void PrefillRows(const PrefillRowsArgs& args) {
  Block b = MakeBlock(args);
#if defined(TM_ISA_amx)
  const TileConfig config(FullShape());
#endif
  const int num_views = args.window16.layer != nullptr ? 2 : 1;
  View views[2];
  for (int i = 0; i < num_views; ++i) {
    views[i] = MakeView(args, i == 1);
    RoundQueries(b, views[i]);
  }
  if (views[0].fns.round != nullptr) {
    SplitQueries(b);
  }
  ForEachTile(b, [&](int tile) {
    for (int i = 0; i < num_views; ++i) {
      ReadTile(b, views[i], tile);
    }
  });
}

}  // namespace turbomind::TM_ISA
