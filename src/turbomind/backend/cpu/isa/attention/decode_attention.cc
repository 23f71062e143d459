// ⑦ Decode: one query token and one KV head with all its query heads, over adjacent splits of at
// most kSplitTokens positions each. Codes are unpacked in registers, once for up to kMaxHeads
// heads; 4-bit values are unpacked once for up to kMaxQuadHeads. No tile is materialized. Integer
// codes are computed in integer arithmetic unless `exact` requests FP32.

#include <cstdint>
#include <span>

#include "turbomind/backend/cpu/isa/attention/attention.h"
#include "turbomind/backend/cpu/isa/attention/attention_fast_bias.h"
#include "turbomind/backend/cpu/isa/attention/attention_load.h"
#include "turbomind/backend/cpu/isa/attention/attention_offset.h"
#include "turbomind/backend/cpu/isa/attention/attention_softmax.h"
#include "turbomind/backend/cpu/isa/attention/attention_softmax_rows.h"
#include "turbomind/backend/cpu/isa/attention/attention_views.h"
#include "turbomind/backend/cpu/isa/attention/decode_attention_float.h"
#include "turbomind/backend/cpu/isa/attention/decode_attention_integer.h"

namespace turbomind::TM_ISA {
namespace {

using ScoreFn = void (*)(const ScoreArgs&);
using ValueFn = void (*)(const ValueArgs&);

// The numbers of heads that one call can handle. Groups are padded up to one of these. Scalar code
// gains nothing from several heads. Sanitizer builds have few (TM_FEW_HEAD_COUNTS), because more
// would take minutes to compile.
#if defined(TM_ISA_scalar)
constexpr int kHeadCounts[] = {1};
#elif defined(TM_ISA_avx2) && defined(TM_FEW_HEAD_COUNTS)
constexpr int kHeadCounts[] = {3};
#elif defined(TM_ISA_avx2)
constexpr int kHeadCounts[] = {1, 2, 3, 4};  // more would spill their sums
#elif defined(TM_FEW_HEAD_COUNTS)
constexpr int kHeadCounts[] = {4};
#else
constexpr int kHeadCounts[] = {1, 2, 3, 4, 8};
#endif
constexpr int kNumHeadCounts = sizeof(kHeadCounts) / sizeof(int);
constexpr int kMaxHeads = kHeadCounts[kNumHeadCounts - 1];

template <Stored S>
ScoreFn FindScore(int index, bool exact) {
  ScoreFn fn = nullptr;
  Unroll<kNumHeadCounts>([&](auto i) {
    constexpr int at = decltype(i)::value;
    if (at == index) {
      fn = ScoreTile<S, kHeadCounts[at]>;
      if constexpr (IsInteger(S)) {
        fn = exact ? fn : ScoreTileInteger<S, kHeadCounts[at]>;
      }
    }
  });
  return fn;
}

template <Stored S>
ValueFn FindValue(int index, bool exact) {
  ValueFn fn = nullptr;
  Unroll<kNumHeadCounts>([&](auto i) {
    constexpr int at = decltype(i)::value;
    if (at == index) {
      fn = AddValues<S, kHeadCounts[at]>;
      if constexpr (IsInteger(S)) {
        fn = exact ? fn : AddValuesInteger<S, kHeadCounts[at]>;
      }
    }
  });
  return fn;
}

using RoundFn = RoundedQuery (*)(const float* q, int head_dim, int32_t* pairs);

struct SplitKernels {
  ScoreFn score;
  ValueFn value;
  RoundFn round;  // null: keys are multiplied in FP32
  bool rounds_weights;
};

SplitKernels FindKernels(const KvLayerView& layer, int heads_index, bool exact) {
  SplitKernels k;
  DispatchStored(StoredAs(layer.format[0], layer.dtype), [&]<Stored S>() {
    k.score = FindScore<S>(heads_index, exact);
    k.round = nullptr;
    if constexpr (IsInteger(S)) {
      k.round = exact ? nullptr : RoundQuery<S>;
    }
  });
  DispatchStored(StoredAs(layer.format[1], layer.dtype), [&]<Stored S>() {
    k.value = FindValue<S>(heads_index, exact);
    k.rounds_weights = IsInteger(S) && !exact;
  });
  return k;
}

// One view of the cache: the layer's quantized pool or its window.
struct View {
  int index = 0;
  KvHead kv;
  SplitKernels kernels;
  float scale = 1.f;         // factor from sums to scores
  float offset_scale = 1.f;  // factor from q · K offset to scores
  float value_scale = 1.f;   // factor of the weights of its values
  float score_cap = 0.f;     // 0: none
  bool interleaved = false;  // order of its value lanes
};

View OpenView(int index, int heads_index, const DecodeSplitsArgs& args) {
  const KvHead& kv = index == 0 ? args.kv : args.window16;
  View view;
  view.index = index;
  view.kv = kv;
  view.kernels = FindKernels(*kv.layer, heads_index, args.exact);
  view.scale = ScoreScale(kv, args.softmax_scale);
  view.offset_scale = args.softmax_scale * kLog2E;
  view.score_cap = args.score_cap;
  view.value_scale = args.window16.layer != nullptr ? ValueScale(kv) : 1.f;
  view.interleaved = HasInterleavedValues(kv, args.exact);
  return view;
}

// The queries, rounded for the integer keys of one view.
struct RoundedHeads {
  alignas(64) int32_t pairs[kMaxHeads * kMaxHeadDim / 2];  // ScoreArgs
  float scale[kMaxHeads];                                  // RoundedQuery
  float sum[kMaxHeads];
  bool ready = false;  // few splits read the window
};

// Up to kMaxHeads query heads and their attention state in a split.
struct Heads {
  int num_heads = 0;
  int padded = 0;
  int head_dim = 0;
  alignas(64) float q[kMaxHeads * kMaxHeadDim];
  alignas(64) float o[kMaxHeads * kMaxHeadDim];
  alignas(64) float scores[kMaxHeads * kTileTokens];
  alignas(64) float meta[2][kMaxHeadDim / 16 * kTileTokens];
  float qsum[kMaxHeads];
  RoundedHeads rounded[2];                             // by view
  alignas(64) float shift[2][kMaxHeads * kSplitRuns];  // by view, of the current split
  bool shifted[2];                                     // the shifts of the view are known
  float old[kMaxHeads];  // for the current tile: SoftmaxState::Factors
  float tile[kMaxHeads];
  ValueScales value_scales;
  alignas(64) int32_t weight_pairs[kMaxHeads * kMaxHeadDim / 16 * kTilePairs];
  SoftmaxState state[kMaxHeads];
  float amplitudes[kMaxHeads * 2 * kMaxFastPairs];
  TileSide sides[2];
  bool interleaved = false;  // order of o
};

// Fills the fields that all splits share.
void FillHeads(const DecodeSplitsArgs& args, int first_head, int padded, Heads* heads) {
  const int head_dim = heads->head_dim;
  __builtin_memset(heads->q, 0, sizeof(float) * padded * head_dim);
  __builtin_memset(heads->scores, 0, sizeof(float) * padded * kTileTokens);
  __builtin_memset(heads->shift, 0, sizeof(heads->shift));
  for (int h = 0; h < padded; ++h) {
    heads->qsum[h] = 0.f;
    heads->old[h] = 0.f;
    heads->tile[h] = 0.f;
  }
  __builtin_memcpy(heads->q, args.q + first_head * head_dim,
                   sizeof(float) * heads->num_heads * head_dim);
  for (int h = 0; h < heads->num_heads; ++h) {
    heads->qsum[h] = SumRow(heads->q + h * head_dim, head_dim);
  }
  FillAmplitudes(args.fast_bias, args.kv, heads->q, heads->num_heads, args.softmax_scale,
                 heads->amplitudes);
  heads->sides[0].meta = heads->meta[0];
  heads->sides[1].meta = heads->meta[1];
}

// Rounds the queries for a view with integer keys, unless they are. Padding heads have a query of
// zero.
void RoundQueries(const View& view, Heads& heads) {
  RoundedHeads& to = heads.rounded[view.index];
  if (view.kernels.round == nullptr || to.ready) {
    return;
  }
  to.ready = true;
  const int padded = heads.padded;
  int32_t pairs[kMaxHeadDim / 2];
  for (int h = 0; h < padded; ++h) {
    const RoundedQuery rounded =
        view.kernels.round(heads.q + h * heads.head_dim, heads.head_dim, pairs);
    to.scale[h] = rounded.scale;
    to.sum[h] = rounded.sum;
    for (int i = 0; i < heads.head_dim / 2; ++i) {
      to.pairs[i * padded + h] = pairs[i];
    }
  }
}

void Reorder(Heads& heads, bool interleaved) {
  for (int h = 0; heads.interleaved != interleaved && h < heads.num_heads; ++h) {
    float* o = heads.o + h * heads.head_dim;
    if (interleaved) {
      InterleaveRow(o, heads.head_dim);
    } else {
      DeinterleaveRow(o, heads.head_dim);
    }
  }
  heads.interleaved = interleaved;
}

float ScaleOfHead(const View& view, const Heads& heads, int h) {
  return view.kernels.round != nullptr ? view.scale * heads.rounded[view.index].scale[h]
                                       : view.scale;
}

// Returns the shifts of head h for the tile at a position.
float* ShiftOf(Heads& heads, const View& view, int tile, int h) {
  return heads.shift[view.index] + h * kSplitRuns + tile % kSplitTokens / 16;
}

// Returns the rows from head h on. `scale` must also start at head h.
TileRows RowsFrom(int h, const View& view, int tile, const float* scale, Heads& heads) {
  return {heads.scores + h * kTileTokens,
          scale,
          ShiftOf(heads, view, tile, h),
          kSplitRuns,
          heads.state + h,
          heads.old + h,
          heads.tile + h,
          view.value_scale};
}

#if defined(TM_ISA_avx512)
// Updates several heads at once, for a tile that is visible as a whole. Returns the number of heads
// updated.
int UpdateHeadsTogether(const View& view, int tile, const float* scale, Heads& heads) {
  int h = 0;
  const auto update = [&]<int N>() {
    UpdateRows<N>(RowsFrom(h, view, tile, scale + h, heads));
    h += N;
  };
  while (h + 4 <= heads.num_heads) {
    update.template operator()<4>();
  }
  if (h + 3 == heads.num_heads) {
    update.template operator()<3>();
  } else if (h + 2 == heads.num_heads) {
    update.template operator()<2>();
  }
  return h;
}
#else
int UpdateHeadsTogether(const View& /*view*/, int /*tile*/, const float* /*scale*/,
                        Heads& /*heads*/) {
  return 0;
}
#endif

void UpdateSoftmax(const View& view, int tile, const Seen& seen, Heads& heads) {
  float scale[kMaxHeads];
  for (int h = 0; h < heads.num_heads; ++h) {
    scale[h] = ScaleOfHead(view, heads, h);
    if (view.score_cap != 0.f) {
      float* shift = ShiftOf(heads, view, tile, h);
      CapScores(heads.scores + h * kTileTokens, {scale[h], shift}, view.score_cap);
      scale[h] = 1.f;
      __builtin_memset(shift, 0, kTileRuns * sizeof(float));
    }
  }
  const bool rounds = view.kernels.rounds_weights;
  const bool all = seen.begin == 0 && seen.end == kTileTokens;
  for (int h = all && rounds ? UpdateHeadsTogether(view, tile, scale, heads) : 0;
       h < heads.num_heads; ++h) {
    UpdateOneRow(RowsFrom(h, view, tile, scale + h, heads), seen, rounds);
  }
}

// Fills the shifts of the split [begin, end), unless they are. Without K offsets they stay zero.
void ShiftScores(const View& view, int begin, int end, Heads& heads) {
  bool& shifted = heads.shifted[view.index];
  if (!shifted && view.kv.layer->HasKOffset()) {
    begin = begin / 16 * 16;
    ShiftRows(view.kv, begin, end,
              {heads.q, heads.qsum, heads.num_heads, view.offset_scale,
               heads.shift[view.index] + begin % kSplitTokens / 16, kSplitRuns});
  }
  shifted = true;
}

// Adds the scores of the fast bias to the sums of a tile.
void AddFastBias(const FastBias& bias, const View& view, int tile, Heads& heads) {
  for (int h = 0; bias.num_pairs > 0 && h < heads.num_heads; ++h) {
    AddWaves(bias, view.kv.head, tile, heads.amplitudes + h * 2 * bias.num_pairs,
             ScaleOfHead(view, heads, h), heads.scores + h * kTileTokens);
  }
}

// Processes one tile and prefetches the next one.
void ReadTile(const DecodeSplitsArgs& args, const View& view, int tile, const Seen& seen,
              const Seen& split, Heads& heads) {
  const int context = args.position + 1;
  OpenTile(view.kv, KvSide::kK, tile, seen.begin, seen.end, &heads.sides[0]);
  OpenTile(view.kv, KvSide::kV, tile, seen.begin, seen.end, &heads.sides[1]);
  RoundQueries(view, heads);
  const RoundedHeads* rounded =
      view.kernels.round != nullptr ? &heads.rounded[view.index] : nullptr;
  OpenNext(view.kv, KvSide::kK, tile + kTileTokens, context, &heads.sides[0]);
  view.kernels.score({&heads.sides[0], heads.q, rounded != nullptr ? rounded->pairs : nullptr,
                      rounded != nullptr ? rounded->sum : heads.qsum, heads.head_dim,
                      heads.scores});
  ShiftScores(view, split.begin, split.end, heads);
  AddFastBias(args.fast_bias, view, tile, heads);
  UpdateSoftmax(view, tile, seen, heads);
  Reorder(heads, view.interleaved);
  OpenNext(view.kv, KvSide::kV, tile + kTileTokens, context, &heads.sides[1]);
  view.kernels.value({&heads.sides[1], heads.scores, heads.old, heads.tile, seen.begin, seen.end,
                      heads.head_dim, heads.o, &heads.value_scales, heads.weight_pairs});
}

int SplitEnd(int begin) { return (begin / kSplitTokens + 1) * kSplitTokens; }

// Processes all tiles of one split. `views` has one entry, or two if the layer keeps a
// window.
void ReadSplit(const DecodeSplitsArgs& args, std::span<const View> views, int padded, int begin,
               int end, Heads& heads) {
  __builtin_memset(heads.o, 0, sizeof(float) * padded * heads.head_dim);
  for (int h = 0; h < padded; ++h) {
    heads.state[h] = SoftmaxState();
  }
  heads.interleaved = views[0].interleaved;  // o is zero
  heads.shifted[0] = heads.shifted[1] = false;
  for (const View& view : views) {
    if (view.kv.layer->HasKOffset()) {
      PrefetchOffsets(view.kv, end, MinOf(end + kSplitTokens, args.end));
    }
  }
  const Visible visible = MakeVisible(args.rule, args.position, begin, end);
  for (int tile = begin / kTileTokens * kTileTokens; tile < end; tile += kTileTokens) {
    for (size_t i = 0; i < views.size(); ++i) {
      const Seen seen = SeenOf(visible, tile, i == 1);
      if (seen.begin < seen.end) {
        ReadTile(args, views[i], tile, seen, {begin, end}, heads);
      }
    }
  }
  Reorder(heads, false);
}

void WriteStates(const Heads& heads, float* states) {
  for (int h = 0; h < heads.num_heads; ++h) {
    float* out = states + h * (kStateHeader + heads.head_dim);
    out[0] = heads.state[h].m;
    out[1] = heads.state[h].l;
    __builtin_memcpy(out + kStateHeader, heads.o + h * heads.head_dim,
                     sizeof(float) * heads.head_dim);
  }
}

// Processes up to kMaxHeads query heads over the splits of [begin, end).
void DecodeHeads(const DecodeSplitsArgs& args, int first_head, int num_heads) {
  int index = 0;
  while (kHeadCounts[index] < num_heads) {
    ++index;
  }
  const int padded = kHeadCounts[index];
  Heads heads;
  heads.num_heads = num_heads;
  heads.padded = padded;
  heads.head_dim = args.kv.layer->head_dim;
  if (args.kv.layer->HasKOffset()) {
    PrefetchOffsets(args.kv, args.begin, MinOf(args.end, SplitEnd(args.begin)));
  }
  FillHeads(args, first_head, padded, &heads);
  const size_t num_views = args.window16.layer != nullptr ? 2 : 1;
  View views[2];
  for (size_t i = 0; i < num_views; ++i) {
    views[i] = OpenView(static_cast<int>(i), index, args);
  }
  const int64_t head_stride = kStateHeader + heads.head_dim;
  float* states = args.states + first_head * head_stride;
  for (int begin = args.begin; begin < args.end; states += args.group * head_stride) {
    const int end = MinOf(args.end, SplitEnd(begin));
    ReadSplit(args, {views, num_views}, padded, begin, end, heads);
    WriteStates(heads, states);
    begin = end;
  }
}

}  // namespace

void DecodeSplits(const DecodeSplitsArgs& args) {
  if (args.group <= kMaxHeads) {
    return DecodeHeads(args, 0, args.group);
  }
  // Process split by split, so that all heads after the first kMaxHeads find the split in the
  // cache.
  DecodeSplitsArgs split = args;
  for (; split.begin < args.end; split.begin = split.end) {
    split.end = MinOf(args.end, SplitEnd(split.begin));
    for (int head = 0; head < args.group; head += kMaxHeads) {
      DecodeHeads(split, head, MinOf(args.group - head, kMaxHeads));
    }
    split.states += args.group * (kStateHeader + args.kv.layer->head_dim);
  }
}

void MergeSplits(const MergeSplitsArgs& args) {
  alignas(64) float o[kMaxHeadDim] = {};
  SoftmaxState total;
  for (int i = 0; i < args.num_splits; ++i) {
    const float* split = args.states + i * args.state_stride;
    SoftmaxState state;
    state.m = split[0];
    state.l = split[1];
    total.Merge(state, o, split + kStateHeader, args.head_dim);
  }
  WriteOutput(o, args.head_dim, total.Finish(args.sink, args.sink_shift, args.value_scale),
              args.out);
}

}  // namespace turbomind::TM_ISA
