// ⑦ Decode: one query token, one KV head with all its query heads, one split of at most
// kSplitTokens positions. Codes are dequantised in registers, once for up to kMaxHeads heads; no
// tile is materialised.
//
// Instructions per 16 key or value elements with FP4 and AVX-512: shift, permute, and one FMA per
// head; keys add 0.75 for the transposition, values 2 for broadcast and scale.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention.h"
#include "turbomind/backend/cpu/isa/attention_load.h"
#include "turbomind/backend/cpu/isa/attention_softmax.h"
#include "turbomind/backend/cpu/isa/attention_views.h"

namespace turbomind::TM_ISA {
namespace {

struct ScoreArgs {
  const TileSide* keys = nullptr;
  const float* q = nullptr;     // [H, head_dim]
  const float* qsum = nullptr;  // [H], for affine codes
  int head_dim = 0;
  float* scores = nullptr;  // [H, kTileTokens]
};

// Adds dimension d of a step, whose lanes are `key`, to the sums of a group of 16 dimensions, and a
// full group to the totals.
template <Stored S, int H>
TM_HD void AddKey(F32x16 key, const ScoreArgs& args, const float* meta, int d, F32x16 (&sum)[H],
                  F32x16 (&total)[H]) {
  Unroll<H>([&](auto head) __attribute__((always_inline)) {
    constexpr int h = decltype(head)::value;
    sum[h] = Fma(key, Set1(args.q[h * args.head_dim + d]), sum[h]);
    if (d % 16 == 15) {
      total[h] = IsGrouped(S) ? Fma(sum[h], Load(meta + d / 16 * kTileTokens), total[h])
                              : Add(total[h], sum[h]);
      sum[h] = Zero();
    }
  });
}

// Scores of 16 tokens: sums over 16 dimensions at a time, each scaled as it is added.
template <Stored S, int H>
void ScoreTokens(const ScoreArgs& args, int part) {
  constexpr int kStep = StepDims(S);
  constexpr int kPiece = PieceDims(S);
  const Table16 table = NibbleTable < BitsOf(S) == 4 ? S : Stored::kFp4 > ();
  const TileSide& keys = *args.keys;
  const float* meta = keys.meta + 16 * part;
  F32x16 total[H];
  F32x16 sum[H];
  for (int h = 0; h < H; ++h) {
    total[h] = Zero();
    sum[h] = Zero();
  }
  for (int step = 0; step < args.head_dim; step += kStep) {
    // With an odd number of groups the last load runs into the next row, which the block holds (a
    // key row is never its last): those dimensions are skipped.
    const bool two_groups = kStep == 16 || step + 16 < args.head_dim;
    Unroll<kStep / kPiece>([&](auto piece) __attribute__((always_inline)) {
      constexpr int first = decltype(piece)::value * kPiece;
      I32x16 words[4];
      LoadTransposed(keys.rows[part] + (step + first) * BitsOf(S) / 8, keys.stride, words);
      Unroll<(kPiece < 16 ? kPiece : 16)>([&](auto j) __attribute__((always_inline)) {
        constexpr int d = decltype(j)::value;
        AddKey<S, H>(KeyLane<S>(words, d, table), args, meta, step + first + d, sum, total);
      });
      if (kPiece > 16 && two_groups) {
        Unroll<(kPiece > 16 ? 16 : 0)>([&](auto j) __attribute__((always_inline)) {
          constexpr int d = decltype(j)::value + 16;
          AddKey<S, H>(KeyLane<S>(words, d, table), args, meta, step + first + d, sum, total);
        });
      }
    });
  }
  for (int h = 0; h < H; ++h) {
    if (IsAffine(S)) {
      total[h] = Fma(Load(meta), total[h], Mul(Load(meta + kTileTokens), Set1(args.qsum[h])));
    }
    Store(args.scores + h * kTileTokens + 16 * part, total[h]);
  }
}

template <Stored S, int H>
void ScoreTile(const ScoreArgs& args) {
  for (int part = 0; part < 4; ++part) {
    if (args.keys->rows[part] != nullptr) {
      ScoreTokens<S, H>(args, part);
    }
  }
}

struct ValueArgs {
  const TileSide* values = nullptr;
  const float* weights = nullptr;      // [H, kTileTokens]
  const float* corrections = nullptr;  // [H]
  int begin = 0;                       // positions of the tile
  int end = 0;
  int head_dim = 0;
  float* o = nullptr;  // [H, head_dim] in the order of the layer's values
};

template <Stored S, int H, int Groups>
TM_HD void AddGroups(const ValueArgs& args, int group) {
  const ValueReader<S> reader;
  const TileSide& values = *args.values;
  F32x16 o[H][Groups];
#pragma GCC unroll 8
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
    for (int g = 0; g < Groups; ++g) {
      o[h][g] = Mul(Load(args.o + h * args.head_dim + 16 * (group + g)), Set1(args.corrections[h]));
    }
  }
  for (int part = args.begin / 16; part * 16 < args.end; ++part) {
    const uint8_t* rows = values.rows[part];
    const int first = args.begin > part * 16 ? args.begin : part * 16;
    const int last = args.end < part * 16 + 16 ? args.end : part * 16 + 16;
    for (int token = first; token < last; ++token) {
      const uint8_t* row = rows + (token - part * 16) * values.stride;
#pragma GCC unroll 4
      for (int g = 0; g < Groups; ++g) {
        const F32x16 value = reader.Read(row, group + g, values.meta, token);
#pragma GCC unroll 8
        for (int h = 0; h < H; ++h) {
          o[h][g] = Fma(Set1(args.weights[h * kTileTokens + token]), value, o[h][g]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
    for (int g = 0; g < Groups; ++g) {
      Store(args.o + h * args.head_dim + 16 * (group + g), o[h][g]);
    }
  }
}

// o = o * correction + Σ weight · v, tokens in order.
template <Stored S, int H>
void AddValues(const ValueArgs& args) {
  constexpr int kGroups = H <= 4 ? 4 : 2;
  const int num_groups = args.head_dim / 16;
  int group = 0;
  for (; group + kGroups <= num_groups; group += kGroups) {
    AddGroups<S, H, kGroups>(args, group);
  }
  for (; group < num_groups; ++group) {
    AddGroups<S, H, 1>(args, group);
  }
}

using ScoreFn = void (*)(const ScoreArgs&);
using ValueFn = void (*)(const ValueArgs&);

// Heads that one call handles: the group is padded up to these. Scalar code gains nothing from
// several.
#if defined(TM_ISA_scalar)
constexpr int kHeadCounts[] = {1};
#elif defined(TM_ISA_avx2)
constexpr int kHeadCounts[] = {1, 3};  // 16 registers hold no more
#elif defined(TM_FEW_HEAD_COUNTS)
constexpr int kHeadCounts[] = {1, 4};  // sanitizer builds: a quarter of the time to compile
#else
constexpr int kHeadCounts[] = {1, 2, 3, 4, 8};
#endif
constexpr int kNumHeadCounts = sizeof(kHeadCounts) / sizeof(int);
constexpr int kMaxHeads = kHeadCounts[kNumHeadCounts - 1];

template <Stored S>
ScoreFn FindScore(int index) {
  ScoreFn fn = nullptr;
  Unroll<kNumHeadCounts>([&](auto i) {
    constexpr int at = decltype(i)::value;
    fn = at == index ? ScoreTile<S, kHeadCounts[at]> : fn;
  });
  return fn;
}

template <Stored S>
ValueFn FindValue(int index) {
  ValueFn fn = nullptr;
  Unroll<kNumHeadCounts>([&](auto i) {
    constexpr int at = decltype(i)::value;
    fn = at == index ? AddValues<S, kHeadCounts[at]> : fn;
  });
  return fn;
}

template <class F>
decltype(auto) DispatchStored(Stored s, F fn) {
  switch (s) {
    case Stored::kF32:
      return fn.template operator()<Stored::kF32>();
    case Stored::kF16:
      return fn.template operator()<Stored::kF16>();
    case Stored::kBF16:
      return fn.template operator()<Stored::kBF16>();
    case Stored::kInt8:
      return fn.template operator()<Stored::kInt8>();
    case Stored::kInt4:
      return fn.template operator()<Stored::kInt4>();
    case Stored::kE4m3:
      return fn.template operator()<Stored::kE4m3>();
    case Stored::kE5m2:
      return fn.template operator()<Stored::kE5m2>();
    case Stored::kFp4:
      return fn.template operator()<Stored::kFp4>();
  }
  __builtin_unreachable();
}

struct SplitKernels {
  ScoreFn score;
  ValueFn value;
};

SplitKernels FindKernels(const KvLayerView& layer, int heads_index) {
  SplitKernels k;
  k.score = DispatchStored(StoredAs(layer.mode[0], layer.dtype),
                           [&]<Stored S>() { return FindScore<S>(heads_index); });
  k.value = DispatchStored(StoredAs(layer.mode[1], layer.dtype),
                           [&]<Stored S>() { return FindValue<S>(heads_index); });
  return k;
}

// One view of the cache: the layer's pool or the 16-bit one.
struct View {
  KvHead kv;
  SplitKernels kernels;
  float scale = 1.f;         // from sums to scores
  float value_factor = 1.f;  // of the weights of its values
  bool interleaved = false;  // order of its value lanes
};

View OpenView(const KvHead& kv, int heads_index, const DecodeSplitArgs& args) {
  View view;
  view.kv = kv;
  view.kernels = FindKernels(*kv.layer, heads_index);
  view.scale = ScoreScale(kv, args.softmax_scale);
  view.value_factor = args.hot.layer != nullptr ? ValueFactor(kv) : 1.f;
  view.interleaved = HasInterleavedValues(kv);
  return view;
}

// Up to kMaxHeads query heads and what they have seen of a split.
struct Heads {
  int num_heads = 0;
  int head_dim = 0;
  alignas(64) float q[kMaxHeads * kMaxHeadDim];
  alignas(64) float o[kMaxHeads * kMaxHeadDim];
  alignas(64) float scores[kMaxHeads * kTileTokens];
  alignas(64) float meta[2][kMaxHeadDim / 16 * kTileTokens];
  float qsum[kMaxHeads];
  float corrections[kMaxHeads];
  SoftmaxState state[kMaxHeads];
  TileSide sides[2];
  bool interleaved = false;  // order of o
};

void FillHeads(const DecodeSplitArgs& args, int first_head, int padded, Heads* heads) {
  const int head_dim = heads->head_dim;
  __builtin_memset(heads->q, 0, sizeof(float) * padded * head_dim);
  __builtin_memset(heads->o, 0, sizeof(float) * padded * head_dim);
  __builtin_memset(heads->scores, 0, sizeof(heads->scores));
  __builtin_memset(heads->qsum, 0, sizeof(heads->qsum));
  __builtin_memset(heads->corrections, 0, sizeof(heads->corrections));
  __builtin_memcpy(heads->q, args.q + first_head * head_dim,
                   sizeof(float) * heads->num_heads * head_dim);
  for (int h = 0; h < heads->num_heads; ++h) {
    heads->qsum[h] = SumRow(heads->q + h * head_dim, head_dim);
  }
  heads->sides[0].meta = heads->meta[0];
  heads->sides[1].meta = heads->meta[1];
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

void ReadTile(const View& view, int tile, const Seen& seen, Heads& heads) {
  OpenTile(view.kv, KvSide::kK, tile, seen.begin, seen.end, &heads.sides[0]);
  OpenTile(view.kv, KvSide::kV, tile, seen.begin, seen.end, &heads.sides[1]);
  view.kernels.score({&heads.sides[0], heads.q, heads.qsum, heads.head_dim, heads.scores});
  for (int h = 0; h < heads.num_heads; ++h) {
    float* scores = heads.scores + h * kTileTokens;
    heads.corrections[h] = heads.state[h].Update(scores, view.scale, seen.begin, seen.end);
    ScaleWeights(scores, view.value_factor);
  }
  Reorder(heads, view.interleaved);
  view.kernels.value({&heads.sides[1], heads.scores, heads.corrections, seen.begin, seen.end,
                      heads.head_dim, heads.o});
}

// Up to kMaxHeads query heads over one split.
void DecodeHeads(const DecodeSplitArgs& args, int first_head, int num_heads) {
  int index = 0;
  while (kHeadCounts[index] < num_heads) {
    ++index;
  }
  Heads heads;
  heads.num_heads = num_heads;
  heads.head_dim = args.kv.layer->head_dim;
  FillHeads(args, first_head, kHeadCounts[index], &heads);
  const int num_views = args.hot.layer != nullptr ? 2 : 1;
  View views[2];
  views[0] = OpenView(args.kv, index, args);
  if (num_views == 2) {
    views[1] = OpenView(args.hot, index, args);
  }
  heads.interleaved = views[0].interleaved;  // o is still zero
  const Visible visible = MakeVisible(args.rule, args.position, args.begin, args.end);
  const int first_tile = args.begin / kTileTokens * kTileTokens;
  for (int tile = first_tile; tile < args.end; tile += kTileTokens) {
    for (int i = 0; i < num_views; ++i) {
      const Seen seen = SeenOf(visible, tile, i == 1);
      if (seen.begin < seen.end) {
        ReadTile(views[i], tile, seen, heads);
      }
    }
  }
  Reorder(heads, false);
  for (int h = 0; h < num_heads; ++h) {
    float* out = args.states + (first_head + h) * (kStateHeader + heads.head_dim);
    out[0] = heads.state[h].m;
    out[1] = heads.state[h].l;
    __builtin_memcpy(out + kStateHeader, heads.o + h * heads.head_dim,
                     sizeof(float) * heads.head_dim);
  }
}

}  // namespace

void DecodeSplit(const DecodeSplitArgs& args) {
  for (int head = 0; head < args.group; head += kMaxHeads) {
    const int left = args.group - head;
    DecodeHeads(args, head, left < kMaxHeads ? left : kMaxHeads);
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
  WriteOutput(o, args.head_dim, total.Finish(args.sink, args.sink_shift, args.value_factor),
              args.out);
}

}  // namespace turbomind::TM_ISA
