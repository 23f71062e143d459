// ⑦ Prefill: a block of query rows (new tokens × heads of one group) over all their positions. Each
// tile of the cache is dequantised into scratch, once per view (keys transposed and unscaled,
// values scaled); then every row does, in the same order, the operations that decode does, so the
// bits are the same.
//
// Compute bound: kRows × 4 registers of sums per pass, 24 FMAs for 10 loads with AVX-512.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention.h"
#include "turbomind/backend/cpu/isa/attention_load.h"
#include "turbomind/backend/cpu/isa/attention_softmax.h"
#include "turbomind/backend/cpu/isa/attention_views.h"

namespace turbomind::TM_ISA {
namespace {

#if defined(TM_ISA_avx512)
constexpr int kRows = 6;
constexpr int kColumns = 4;
#else
constexpr int kRows = 2;
constexpr int kColumns = 2;
#endif

// Everything one item works on; the arrays lie in the caller's scratch.
struct Block {
  const PrefillRowsArgs* args = nullptr;
  int head_dim = 0;
  int rows = 0;             // tokens * group
  float* keys = nullptr;    // [head_dim, kTileTokens]
  float* values = nullptr;  // [kTileTokens, head_dim] in the order of the layer's values
  TileSide side[2];
  float* scores = nullptr;  // [rows, kTileTokens]
  float* q = nullptr;       // [rows, head_dim]
  float* o = nullptr;       // [rows, head_dim] of the split
  float* total_o = nullptr;
  SoftmaxState* state = nullptr;  // [rows] of the split
  SoftmaxState* total = nullptr;
  float* corrections = nullptr;  // [rows]
  float* qsum = nullptr;         // [rows]
  Visible* visible = nullptr;    // [tokens]
};

template <Stored S>
void UnpackKeys(const Block& b) {
  const Table16 table = NibbleTable < BitsOf(S) == 4 ? S : Stored::kFp4 > ();
  const TileSide& side = b.side[0];
  for (int part = 0; part < 4; ++part) {
    if (side.rows[part] == nullptr) {
      continue;
    }
    for (int base = 0; base < b.head_dim; base += PieceDims(S)) {
      I32x16 words[4];
      LoadTransposed(side.rows[part] + base * BitsOf(S) / 8, side.stride, words);
      float* keys = b.keys + base * kTileTokens + 16 * part;
      Unroll<PieceDims(S)>([&](auto index) __attribute__((always_inline)) {
        constexpr int j = decltype(index)::value;
        if (j < 16 || base + 16 < b.head_dim) {  // else the load ran into the next row
          Store(keys + j * kTileTokens, KeyLane<S>(words, j, table));
        }
      });
    }
  }
}

// Tokens [begin, end) of the tile; returns whether all values are finite.
template <Stored S>
bool UnpackValues(const Block& b, int begin, int end) {
  const ValueReader<S> reader;
  const TileSide& side = b.side[1];
  I32x16 largest = Set1Int(0);
  for (int token = begin; token < end; ++token) {
    const uint8_t* row = side.rows[token / 16] + (token % 16) * side.stride;
    for (int group = 0; group < b.head_dim / 16; ++group) {
      const F32x16 value = reader.Read(row, group, side.meta, token);
      largest = MaxInt(largest, And(Bits(value), Set1Int(0x7fffffff)));
      Store(b.values + token * b.head_dim + 16 * group, value);
    }
  }
  return Count(Less(largest, Set1Int(0x7f800000))) == kLanes;
}

// Scores of R rows and C columns of 16 tokens: the sums of DecodeSplit.
template <bool kGrouped, bool kAffine, int R, int C>
TM_HD void ScoreRows(const Block& b, int row, int column) {
  const float* meta = b.side[0].meta + column;
  float* scores = b.scores + row * kTileTokens + column;
  const float* q = b.q + row * b.head_dim;
  for (int group = 0; group < b.head_dim / 16; ++group) {
    F32x16 sum[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        sum[r][c] = Zero();
      }
    }
    const float* keys = b.keys + group * 16 * kTileTokens + column;
#pragma GCC unroll 2
    for (int d = 0; d < 16; ++d) {
      F32x16 key[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        key[c] = Load(keys + d * kTileTokens + 16 * c);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F32x16 x = Set1(q[r * b.head_dim + group * 16 + d]);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
          sum[r][c] = Fma(key[c], x, sum[r][c]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        float* at = scores + r * kTileTokens + 16 * c;
        const F32x16 total = group == 0 ? Zero() : Load(at);
        Store(at, kGrouped ? Fma(sum[r][c], Load(meta + group * kTileTokens + 16 * c), total)
                           : Add(total, sum[r][c]));
      }
    }
  }
  if (kAffine) {
    for (int r = 0; r < R; ++r) {
      for (int c = 0; c < C; ++c) {
        float* at = scores + r * kTileTokens + 16 * c;
        const F32x16 zero = Mul(Load(meta + kTileTokens + 16 * c), Set1(b.qsum[row + r]));
        Store(at, Fma(Load(meta + 16 * c), Load(at), zero));
      }
    }
  }
}

template <bool kGrouped, bool kAffine>
void ScoreTile(const Block& b) {
  for (int column = 0; column < kTileTokens; column += 16 * kColumns) {
    int row = 0;
    for (; row + kRows <= b.rows; row += kRows) {
      ScoreRows<kGrouped, kAffine, kRows, kColumns>(b, row, column);
    }
    for (; row < b.rows; ++row) {
      ScoreRows<kGrouped, kAffine, 1, kColumns>(b, row, column);
    }
  }
}

// o = o * correction + Σ weight · v over the tokens [begin, end) of the tile.
template <int R, int G>
TM_HD void AddRows(const Block& b, int row, int group, int begin, int end) {
  float* out = b.o + row * b.head_dim + 16 * group;
  const float* weights = b.scores + row * kTileTokens;
  F32x16 o[R][G];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      o[r][g] = Mul(Load(out + r * b.head_dim + 16 * g), Set1(b.corrections[row + r]));
    }
  }
  for (int token = begin; token < end; ++token) {
    const float* from = b.values + token * b.head_dim + 16 * group;
    F32x16 value[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      value[g] = Load(from + 16 * g);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F32x16 weight = Set1(weights[r * kTileTokens + token]);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        o[r][g] = Fma(weight, value[g], o[r][g]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      Store(out + r * b.head_dim + 16 * g, o[r][g]);
    }
  }
}

template <int R>
void AddRowsAllDims(const Block& b, int row, int begin, int end) {
  const int num_groups = b.head_dim / 16;
  int group = 0;
  for (; group + kColumns <= num_groups; group += kColumns) {
    AddRows<R, kColumns>(b, row, group, begin, end);
  }
  for (; group < num_groups; ++group) {
    AddRows<R, 1>(b, row, group, begin, end);
  }
}

struct TileFns {
  void (*unpack_keys)(const Block&);
  bool (*unpack_values)(const Block&, int, int);
  void (*score)(const Block&);
};

template <Stored... S>
struct StoredList {
  static constexpr void (*kUnpackKeys[])(const Block&) = {UnpackKeys<S>...};
  static constexpr bool (*kUnpackValues[])(const Block&, int, int) = {UnpackValues<S>...};
  static constexpr void (*kScore[])(const Block&) = {ScoreTile<IsGrouped(S), IsAffine(S)>...};
};
// In the order of the enumeration.
using AllStored = StoredList<Stored::kF32, Stored::kF16, Stored::kBF16, Stored::kInt8,
                             Stored::kInt4, Stored::kE4m3, Stored::kE5m2, Stored::kFp4>;

TileFns FindFns(const KvLayerView& layer) {
  const int k = static_cast<int>(StoredAs(layer.mode[0], layer.dtype));
  const int v = static_cast<int>(StoredAs(layer.mode[1], layer.dtype));
  return {AllStored::kUnpackKeys[k], AllStored::kUnpackValues[v], AllStored::kScore[k]};
}

// One view of the cache: the layer's pool or the 16-bit one.
struct View {
  KvHead kv;
  TileFns fns;
  float scale = 1.f;         // from sums to scores
  float value_factor = 1.f;  // of the weights of its values
  bool hot = false;
  bool interleave = false;  // its values have yet to get the order of o
};

Seen SeenByRow(const Block& b, const View& view, int tile, int row) {
  return SeenOf(b.visible[row / b.args->group], tile, view.hot);
}

// What any of the rows sees.
Seen SeenByAny(const Block& b, const View& view, int tile) {
  Seen all = {kTileTokens, 0};
  for (int token = 0; token < b.args->num_tokens; ++token) {
    const Seen seen = SeenOf(b.visible[token], tile, view.hot);
    if (seen.begin < seen.end) {
      all = {Smaller(all.begin, seen.begin), Larger(all.end, seen.end)};
    }
  }
  return all;
}

void AddValues(const Block& b, const View& view, int tile, const Seen& any, bool all_finite) {
  int row = 0;
  // A hidden token has weight 0 and leaves a sum as it is, unless its value is NaN or infinite.
  for (; all_finite && row + kRows <= b.rows; row += kRows) {
    AddRowsAllDims<kRows>(b, row, any.begin, any.end);
  }
  for (; row < b.rows; ++row) {
    const Seen seen = SeenByRow(b, view, tile, row);
    if (seen.begin < seen.end) {
      AddRowsAllDims<1>(b, row, seen.begin, seen.end);
    }
  }
}

void UpdateSoftmax(const Block& b, const View& view, int tile) {
  for (int row = 0; row < b.rows; ++row) {
    const Seen seen = SeenByRow(b, view, tile, row);
    float* scores = b.scores + row * kTileTokens;
    if (seen.begin < seen.end) {
      b.corrections[row] = b.state[row].Update(scores, view.scale, seen.begin, seen.end);
      ScaleWeights(scores, view.value_factor);
    } else {
      b.corrections[row] = 1.f;
      __builtin_memset(scores, 0, kTileTokens * sizeof(float));
    }
  }
}

void ReadTile(Block& b, const View& view, int tile) {
  const Seen any = SeenByAny(b, view, tile);
  if (any.begin >= any.end) {
    return;
  }
  OpenTile(view.kv, KvSide::kK, tile, any.begin, any.end, &b.side[0]);
  OpenTile(view.kv, KvSide::kV, tile, any.begin, any.end, &b.side[1]);
  view.fns.unpack_keys(b);
  const bool all_finite = view.fns.unpack_values(b, any.begin, any.end);
  for (int token = any.begin; view.interleave && token < any.end; ++token) {
    InterleaveRow(b.values + token * b.head_dim, b.head_dim);
  }
  view.fns.score(b);
  UpdateSoftmax(b, view, tile);
  AddValues(b, view, tile, any, all_finite);
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
  b.corrections = take(b.rows);
  b.qsum = take(b.rows);
  b.state = reinterpret_cast<SoftmaxState*>(take(2 * b.rows));
  b.total = reinterpret_cast<SoftmaxState*>(take(2 * b.rows));
  b.visible = reinterpret_cast<Visible*>(take(4 * args.num_tokens));
  for (int token = 0; token < args.num_tokens; ++token) {
    const int position = args.position + token;
    const int begin = args.window > 0 ? Larger(0, position + 1 - args.window) : 0;
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

View MakeView(const PrefillRowsArgs& args, bool hot) {
  View view;
  view.kv = hot ? args.hot : args.kv;
  view.fns = FindFns(*view.kv.layer);
  view.scale = ScoreScale(view.kv, args.softmax_scale);
  view.value_factor = args.hot.layer != nullptr ? ValueFactor(view.kv) : 1.f;
  view.hot = hot;
  view.interleave = hot && HasInterleavedValues(args.kv);
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
  const float value_factor = args.hot.layer != nullptr ? 1.f : ValueFactor(args.kv);
  const float factor = b.total[row].Finish(sink, shift, value_factor);
  float* o = b.total_o + row * b.head_dim;
  if (HasInterleavedValues(args.kv)) {
    DeinterleaveRow(o, b.head_dim);
  }
  WriteOutput(o, b.head_dim, factor,
              args.out + token * args.out_stride + static_cast<int64_t>(head) * b.head_dim);
}

}  // namespace

void PrefillRows(const PrefillRowsArgs& args) {
  Block b = MakeBlock(args);
  const int num_views = args.hot.layer != nullptr ? 2 : 1;
  View views[2];
  views[0] = MakeView(args, false);
  if (num_views == 2) {
    views[1] = MakeView(args, true);
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
