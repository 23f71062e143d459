// ⑦ Prefill attention in BF16 on AMX tiles, for devices that are not deterministic. A tile of 64
// tokens is unpacked to BF16 with its scales. Scores and sums of values are products of BF16 with
// sums in FP32, which stay in the registers: a register of sums is 16 rows of queries by 16 tokens
// or 16 dimensions. The order of a row's sums does not depend on the other rows.
//
// The softmax takes longer than the products. The products of the next 16 rows and of the previous
// ones are therefore placed between its halves: the processor computes both at the same time.

#include <cstdint>

#include "turbomind/backend/cpu/isa/amx/tiles.h"
#include "turbomind/backend/cpu/isa/attention/attention.h"
#include "turbomind/backend/cpu/isa/attention/bf16_attention_load.h"
#include "turbomind/backend/cpu/isa/attention/bf16_attention_softmax.h"
#include "turbomind/backend/cpu/isa/attention/prefill_attention_item.h"
#include "turbomind/backend/cpu/isa/attention/prefill_attention_softmax.h"

namespace turbomind::TM_ISA {
namespace {

constexpr int kMinRows = 16;    // of an item; fewer rows do not fill a register
constexpr int kQueryParts = 2;  // BF16 numbers whose sum is a query
constexpr int64_t kScoreStride = kTileTokens * sizeof(float);
constexpr int64_t kWeightStride = kTileTokens * sizeof(uint16_t);

struct Bf16Fns {
  int key_parts = 1;
  bool affine_keys = false;  // the scales of keys are applied to the scores
  void (*unpack_keys)(const Block&) = nullptr;
  bool (*unpack_values)(const Block&, const Seen&) = nullptr;
  bool (*read_value)(const Block&, int token, float* row) = nullptr;
};

Bf16Fns FindFns(const KvLayerView& layer) {
  Bf16Fns fns;
  DispatchStored(StoredAs(layer.format[0], layer.dtype), [&]<Stored S>() {
    fns.key_parts = KeyParts(S);
    fns.affine_keys = IsAffine(S);
    fns.unpack_keys = UnpackKeysBf16<S>;
  });
  DispatchStored(StoredAs(layer.format[1], layer.dtype), [&]<Stored S>() {
    fns.unpack_values = UnpackValuesBf16<S>;
    fns.read_value = ReadValueRow<S>;
  });
  return fns;
}

struct Bf16View {
  View view;
  Bf16Fns fns;
};

int BlocksOf(const Block& b) { return (b.rows + kRegisterRows - 1) / kRegisterRows; }

// The queries in b.halves are bf16[blocks of 16 rows][kQueryParts][steps][16 rows][32].
uint8_t* QueryRegister(const Block& b, int block, int part, int step) {
  return reinterpret_cast<uint8_t*>(b.halves) +
         ((block * kQueryParts + part) * StepsOf(b) + step) * kTileRegister;
}

struct QueryOrder {
  alignas(64) uint16_t from[32];
};
// Returns the dimensions of a step in the order of the pairs of keys.
constexpr QueryOrder MakeQueryOrder() {
  QueryOrder order = {};
  for (int i = 0; i < kStepDims; ++i) {
    order.from[i] = static_cast<uint16_t>(i / 8 * 8 + i % 8 / 2 + i % 2 * 4);
  }
  return order;
}
constexpr QueryOrder kQueryOrder = MakeQueryOrder();

// Returns 16 of the BF16 numbers as FP32.
template <int kHalf>
F32x16 WidenHalf(__m512i shorts) {
  const __m256i half =
      kHalf == 0 ? _mm512_castsi512_si256(shorts) : _mm512_extracti64x4_epi64(shorts, 1);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}

// Rounds one step of a query. Each part has what the previous ones leave.
void RoundStep(const Block& b, int row, int step) {
  const float* q = b.q + row * b.head_dim + kStepDims * step;
  F32x16 first = Load(q);
  F32x16 second = kStepDims * step + 16 < b.head_dim ? Load(q + 16) : Zero();
  const __m512i order = _mm512_load_si512(kQueryOrder.from);
  for (int part = 0; part < kQueryParts; ++part) {
    const auto rounded = (__m512i)_mm512_cvtne2ps_pbh(second.v, first.v);
    _mm512_store_si512(QueryRegister(b, row / kRegisterRows, part, step) + row % kRegisterRows * 64,
                       _mm512_permutexvar_epi16(order, rounded));
    first = Sub(first, WidenHalf<0>(rounded));
    second = Sub(second, WidenHalf<1>(rounded));
  }
}

// Rounds the queries. Rows up to the end of a register, and the dimensions of a key up to the end
// of its last step, are zero.
void PrepareItem(const Block& b) {
  const int blocks = BlocksOf(b);
  __builtin_memset(b.halves, 0,
                   static_cast<size_t>(blocks * kQueryParts * StepsOf(b)) * kTileRegister);
  __builtin_memset(b.keys, 0, 2 * static_cast<size_t>(KeyPartBytes(b)));
  for (int row = 0; row < b.rows; ++row) {
    for (int step = 0; step < StepsOf(b); ++step) {
      RoundStep(b, row, step);
    }
  }
}

// The scores and weights of 16 rows.
struct BlockScores {
  alignas(64) float scores[kRegisterRows * kTileTokens];
  alignas(64) uint16_t weights[kRegisterRows * kTileTokens];
};

// Adds the products of a part of the keys with the first kParts parts of 16 queries to the
// registers 0 to 3, one for each run of tokens. A register of keys is loaded once for all parts.
template <int kParts>
void AddScores(const Block& b, int block, int key_part) {
  for (int step = 0; step < StepsOf(b); ++step) {
    Unroll<kParts>([&](auto part) __attribute__((always_inline)) {
      LoadTile<4 + decltype(part)::value>(QueryRegister(b, block, decltype(part)::value, step), 64);
    });
    Unroll<2>([&](auto pair) __attribute__((always_inline)) {
      constexpr int first = 2 * decltype(pair)::value;
      LoadTile<6>(KeyRegister(b, key_part, step, first), 64);
      LoadTile<7>(KeyRegister(b, key_part, step, first + 1), 64);
      Unroll<kParts>([&](auto part) __attribute__((always_inline)) {
        DotBf16<first, 4 + decltype(part)::value, 6>();
        DotBf16<first + 1, 4 + decltype(part)::value, 7>();
      });
    });
  }
}

// Computes the scores of 16 rows. The product of two second parts would be too small to matter.
void ScoreBlock(const Block& b, const Bf16Fns& fns, int block, float* scores) {
  Unroll<4>([](auto run) __attribute__((always_inline)) { ZeroTile<decltype(run)::value>(); });
  AddScores<kQueryParts>(b, block, 0);
  if (fns.key_parts == 2) {
    AddScores<1>(b, block, 1);
  }
  Unroll<4>([&](auto run) __attribute__((always_inline)) {
    StoreTile<decltype(run)::value>(scores + 16 * decltype(run)::value, kScoreStride);
  });
}

// Adds N groups of 16 dimensions to o. The registers 4 and 5 have the weights.
template <int N>
void AddGroups(const Block& b, int block, int group) {
  const int64_t stride = b.head_dim * static_cast<int64_t>(sizeof(float));
  float* o = b.o + block * kRegisterRows * b.head_dim + 16 * group;
  Unroll<N>([&](auto g) __attribute__((always_inline)) {
    LoadTile<decltype(g)::value>(o + 16 * decltype(g)::value, stride);
  });
  Unroll<2>([&](auto step) __attribute__((always_inline)) {
    Unroll<N>([&](auto g) __attribute__((always_inline)) {
      constexpr int i = decltype(g)::value;
      LoadTile<6 + i % 2>(ValueRegister(b, group + i, decltype(step)::value), 64);
      DotBf16<i, 4 + decltype(step)::value, 6 + i % 2>();
    });
  });
  Unroll<N>([&](auto g) __attribute__((always_inline)) {
    StoreTile<decltype(g)::value>(o + 16 * decltype(g)::value, stride);
  });
}

void AddBlockValues(const Block& b, int block, const uint16_t* weights) {
  LoadTile<4>(weights, kWeightStride);
  LoadTile<5>(weights + kStepDims, kWeightStride);
  const int groups = b.head_dim / 16;
  int group = 0;
  for (; group + 4 <= groups; group += 4) {
    AddGroups<4>(b, block, group);
  }
  for (; group < groups; ++group) {
    AddGroups<1>(b, block, group);
  }
}

// Zeros the token in the unpacked values.
void ClearValue(const Block& b, int token) {
  for (int group = 0; group < b.head_dim / 16; ++group) {
    auto* pairs = reinterpret_cast<uint16_t*>(ValueRegister(b, group, token / 32)) +
                  token % 32 / 2 * 32 + token % 2;
    for (int i = 0; i < 16; ++i) {
      pairs[2 * i] = 0;
    }
  }
}

// Clears all unfit tokens of `seen` and returns them as bits.
uint64_t ClearUnfitValues(const Block& b, const Bf16View& view, const Seen& seen) {
  float row[kMaxHeadDim];
  uint64_t unfit = 0;
  for (int token = seen.begin; token < seen.end; ++token) {
    if (!view.fns.read_value(b, token, row)) {
      ClearValue(b, token);
      unfit |= uint64_t{1} << token;
    }
  }
  return unfit;
}

// One tile of one view.
struct TileOf {
  const Bf16View* view;
  int tile;
  bool all;        // every row sees all of the tile
  uint64_t unfit;  // tokens
};

Seen SeenByPaddedRow(const Block& b, const TileOf& t, int row) {
  return row < b.rows ? SeenByRow(b, t.view->view, t.tile, row) : Seen{0, 0};
}

// Adds the unfit tokens in FP32 to the rows that see them.
void AddUnfitValues(const Block& b, const TileOf& t, int block, const uint16_t* weights) {
  float value[kMaxHeadDim];
  for (int token = 0; token < kTileTokens; ++token) {
    if ((t.unfit >> token & 1) == 0) {
      continue;
    }
    t.view->fns.read_value(b, token, value);
    for (int r = 0; r < kRegisterRows; ++r) {
      const int row = block * kRegisterRows + r;
      const Seen seen = SeenByPaddedRow(b, t, row);
      if (seen.begin <= token && token < seen.end) {
        const uint32_t bits = uint32_t{weights[r * kTileTokens + token]} << 16;
        const F32x16 weight = FromBits(Set1Int(static_cast<int32_t>(bits)));
        float* o = b.o + row * b.head_dim;
        for (int d = 0; d < b.head_dim; d += kLanes) {
          Store(o + d, Fma(weight, Load(value + d), Load(o + d)));
        }
      }
    }
  }
}

void AddValues(const Block& b, const TileOf& t, int block, const uint16_t* weights) {
  AddBlockValues(b, block, weights);
  if (t.unfit != 0) {
    AddUnfitValues(b, t, block, weights);
  }
}

// Applies the scales of int8 and int4 keys to the sums over their codes.
void ScaleScores(const Block& b, int row, float* scores) {
  const float qsum = row < b.rows ? b.qsum[row] : 0.f;
  for (int i = 0; i < kTileTokens; i += kLanes) {
    Store(scores + i, AffineScore(Load(scores + i), qsum, b.side[0].meta + i));
  }
}

// Adds the shifts of a row, which are in units of log2, to its sums.
void AddShift(const Block& b, const View& view, int row, float* scores) {
  if (row >= b.rows) {
    return;
  }
  for (int i = 0; i < kTileTokens; i += kLanes) {
    const float shift = b.shift[row * kTileRuns + i / kLanes] / view.scale;
    Store(scores + i, Add(Load(scores + i), Set1(shift)));
  }
}

// Turns the scores of the rows [first, first + 8) of a block into weights.
void UpdateHalf(const Block& b, const TileOf& t, int block, int first, BlockScores& of) {
  const View& view = t.view->view;
  ViewScales scales = {view.scale, view.value_scale};
  for (int r = first; r < first + kRegisterRows / 2; ++r) {
    if (t.view->fns.affine_keys) {
      ScaleScores(b, block * kRegisterRows + r, of.scores + r * kTileTokens);
    }
    if (view.kv.layer->HasKOffset()) {
      AddShift(b, view, block * kRegisterRows + r, of.scores + r * kTileTokens);
    }
    if (block * kRegisterRows + r < b.rows) {
      AddFastBias(b, view, t.tile, block * kRegisterRows + r, view.scale,
                  of.scores + r * kTileTokens);
    }
    if (b.args->score_cap != 0.f) {
      CapScores(of.scores + r * kTileTokens, {view.scale, kNoShift}, b.args->score_cap);
    }
  }
  if (b.args->score_cap != 0.f) {
    scales.score = 1.f;
  }
  for (int r = first; r < first + kRegisterRows / 2; r += kRowsAtOnce) {
    const int row = block * kRegisterRows + r;
    const FourRows rows = {of.scores + r * kTileTokens, of.weights + r * kTileTokens, b.state + row,
                           b.o + row * b.head_dim, b.head_dim};
    if (t.all) {
      UpdateFourRows<true>(rows, nullptr, scales);
    } else {
      const Seen seen[kRowsAtOnce] = {SeenByPaddedRow(b, t, row), SeenByPaddedRow(b, t, row + 1),
                                      SeenByPaddedRow(b, t, row + 2),
                                      SeenByPaddedRow(b, t, row + 3)};
      UpdateFourRows<false>(rows, seen, scales);
    }
  }
}

void ReadTile(Block& b, const Bf16View& view, int tile) {
  const Seen any = SeenByAny(b, view.view, tile);
  if (any.begin >= any.end) {
    return;
  }
  OpenTile(view.view.kv, KvSide::kK, tile, any.begin, any.end, &b.side[0]);
  OpenTile(view.view.kv, KvSide::kV, tile, any.begin, any.end, &b.side[1]);
  view.fns.unpack_keys(b);
  ShiftScores(b, view.view, tile, any);
  TileOf t = {&view, tile, AllSeeAll(b, view.view, tile), 0};
  if (!view.fns.unpack_values(b, any)) {
    t.unfit = ClearUnfitValues(b, view, any);
  }
  BlockScores of[2];
  const int blocks = BlocksOf(b);
  ScoreBlock(b, view.fns, 0, of[0].scores);
  for (int block = 0; block < blocks; ++block) {
    BlockScores& here = of[block % 2];
    BlockScores& other = of[1 - block % 2];
    if (block + 1 < blocks) {
      ScoreBlock(b, view.fns, block + 1, other.scores);
    }
    UpdateHalf(b, t, block, 0, here);
    if (block > 0) {
      AddValues(b, t, block - 1, other.weights);
    }
    UpdateHalf(b, t, block, kRegisterRows / 2, here);
  }
  AddValues(b, t, blocks - 1, of[(blocks - 1) % 2].weights);
}

Bf16View OpenBf16View(const PrefillRowsArgs& args, bool window16) {
  const View view = OpenView(args, window16);
  return {view, FindFns(*view.kv.layer)};
}

// The softmax divides by these factors and assumes that they keep the order of scores.
bool HasPositiveScales(const View& view) { return view.scale > 0.f && view.value_scale > 0.f; }

}  // namespace

void PrefillRowsBf16(const PrefillRowsArgs& args) {
  const int num_views = args.window16.layer != nullptr ? 2 : 1;
  Bf16View views[2];
  bool positive = true;
  for (int i = 0; i < num_views; ++i) {
    views[i] = OpenBf16View(args, i == 1);
    positive = positive && HasPositiveScales(views[i].view);
  }
  if (args.exact || !positive || args.num_tokens * args.group < kMinRows) {
    return PrefillRows(args);
  }
  Block b = MakeBlock(args);
  PrepareItem(b);
  const TileConfig config(FullShape());
  ForEachTile(b, [&](int tile) {
    for (int i = 0; i < num_views; ++i) {
      ReadTile(b, views[i], tile);
    }
  });
}

}  // namespace turbomind::TM_ISA
