#pragma once

// ⑦ What the kernels of prefill attention have in common: the rows of a block, and what a warp does
// with its rows' scores, sums and results in registers.
//
// A row is a query of one head. The rows of a block are the query heads of a KV head, token by
// token, so that small chunks fill tiles and all heads share the loaded data. Each warp has
// C::kRowTiles tiles of 16 rows and its own online softmax. Lane 4 g + t of a warp has the rows g
// and g + 8 of a tile: number 4 n + i of its scores or sums belongs to row g + i / 2 * 8 and to
// column 8 n + 2 t + i % 2, as in the results of mma.m16n8k16 and of products of warp groups.
//
// A row's sums depend only on its own query and the positions that it sees, not on the other rows.
// Tiles begin at multiples of C::kKeys, and a row's reference maximum rises only when one of its
// own scores exceeds it by more than 2^8. It starts finite, so that a tile without visible
// positions adds nothing.

#include <cmath>
#include <cstdint>

#include "turbomind/backend/cuda/decode/decode_shape.cuh"
#include "turbomind/backend/cuda/kv/fragments.cuh"
#include "turbomind/backend/cuda/prefill/prefill_shape.cuh"

namespace turbomind::cuda {

// A block's constants for the whole kernel.
template <class C>
struct PrefillTask {
  const PrefillParams& params;
  int sequence;
  int head;  // index in the views
  int split;
  int first_row;  // of the block, within the sequence
  Lane at;

  TM_DEVICE const PrefillSequence& of() const { return params.sequences[sequence]; }
  TM_DEVICE int kv_head() const { return params.first_head + head; }
  TM_DEVICE int num_rows() const { return of().num_tokens * params.group; }
  // Return the position of a row. Rows past the last have the position of the last.
  TM_DEVICE int Position(int row) const {
    const int last = num_rows() - 1;
    return of().position + (row < last ? row : last) / params.group;
  }
  // Return the lane's row g + 8 * half of a tile.
  TM_DEVICE int Row(int tile, int half) const {
    return first_row + 16 * (C::kRowTiles * at.warp + tile) + at.g + 8 * half;
  }
  // Return where the query of a row begins.
  TM_DEVICE const float* Query(int row) const {
    const int64_t token = of().first_token + row / params.group;
    const int q_head = kv_head() * params.group + row % params.group;
    return params.q + token * params.q_stride + q_head * C::kHeadDim;
  }
};

// Return the task of a block. `warp` is the thread's, counted among those that have rows. Grid:
// tiles × (heads of the views · splits).
template <class C>
TM_DEVICE PrefillTask<C> FindTask(const PrefillParams& params, int warp) {
  const int tile = params.num_tiles - 1 - BlockIndexX();  // a sequence's longest tiles first
  int sequence = 0;
  while (sequence + 1 < params.num_sequences && params.sequences[sequence + 1].first_tile <= tile) {
    ++sequence;
  }
  const int lane = ThreadIndexX() & 31;
  const int num_splits = C::kCanSplit ? params.num_splits : 1;
  return {params,
          sequence,
          BlockIndexY() / num_splits,
          BlockIndexY() % num_splits,
          (tile - params.sequences[sequence].first_tile) * C::kRows,
          {lane, warp, lane >> 2, lane & 3}};
}

// Load eight values of a query, rounded.
template <class C>
TM_DEVICE Words<16> LoadQueryPiece(const float* from) {
  Words<16> packed;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto x = LoadGlobal(reinterpret_cast<const Words<16>*>(from) + half);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const float low = BitsFloat(x.v[2 * pair]);
      const float high = BitsFloat(x.v[2 * pair + 1]);
      packed.v[2 * half + pair] = C::kBFloat ? PackBFloat2(low, high) : PackFiniteHalf2(low, high);
    }
  }
  return packed;
}

template <class C>
struct PrefillState {
  float m[C::kRowTiles][2];  // for the rows g and g + 8
  float l[C::kRowTiles][2];  // over the lane's columns only, until the end
  float o[C::kRowTiles][C::kHeadDim / 2];

  TM_DEVICE PrefillState() : m(), l(), o() {
#pragma unroll
    for (int i = 0; i < 2 * C::kRowTiles; ++i) {
      m[i / 2][i % 2] = kMinRowMax;
    }
  }
  TM_DEVICE void ScaleSums(float factor) {
#pragma unroll
    for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
      for (float& sum : o[tile]) {
        sum *= factor;
      }
    }
  }
};

template <class C>
using Scores = float[C::kRowTiles][C::kKeys / 2];

// The positions of a range that rows see. Tiles outside `some` are skipped. Tiles inside `all` need
// no mask.
struct SeenByRows {
  SeenPositions some;
  SeenPositions all;
};

template <class C>
TM_DEVICE SeenByRows SeenByRange(const PrefillTask<C>& task, int range, int first_row,
                                 int num_rows) {
  const PrefillParams& p = task.params;
  const SeenPositions first = SeenBy(p.rule, p.window, range, task.Position(first_row));
  const SeenPositions last =
      SeenBy(p.rule, p.window, range, task.Position(first_row + num_rows - 1));
  return {{first.begin, last.end}, {last.begin, first.end}};
}

// Return the number of the first element of a position in the view. It may lie outside the range,
// and then so may the element.
template <class C>
TM_DEVICE int64_t FirstElement(const PrefillTask<C>& task, int range, int first) {
  const DenseRange& rows = task.of().ranges[range];
  const DenseView& view = task.params.views[range == 0 ? 0 : 1];
  return (task.head * view.num_rows + rows.row + first - rows.begin) * C::kHeadDim;
}

// Factors from products to scores in units of log2: of all scores, and of capped ones.
struct ScoreScale {
  float scale;      // of what CapScores returns
  float cap_scale;  // of what it reads
};

template <class C>
TM_DEVICE ScoreScale ScaleOf(const PrefillTask<C>& task, int range) {
  const PrefillParams& p = task.params;
  const float factor = range == 0 ? HeadScale(p.key_scale, task.kv_head()) : 1.f;
  const float scale = p.softmax_scale * kLog2E * factor;
  return {p.score_cap != 0.f ? 1.f : scale, scale};
}

template <class C>
TM_DEVICE void CapScores(const PrefillTask<C>& task, float scale, Scores<C>& scores) {
  const float cap = task.params.score_cap;
  if (cap != 0.f) {
#pragma unroll
    for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
      for (float& score : scores[tile]) {
        score = CapScore(score, scale, cap);
      }
    }
  }
}

// Set the scores of positions that a row does not see to -infinity.
template <class C>
TM_DEVICE void HideScores(const PrefillTask<C>& task, int range, int first, Scores<C>& scores) {
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const SeenPositions seen =
          SeenBy(task.params.rule, task.params.window, range, task.Position(task.Row(tile, half)));
      const int begin = seen.begin - first - 2 * task.at.t;
      const int end = seen.end - first - 2 * task.at.t;
#pragma unroll
      for (int n = 0; n < C::kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (8 * n + i < begin || 8 * n + i >= end) {
            scores[tile][4 * n + 2 * half + i] = -INFINITY;
          }
        }
      }
    }
  }
}

// How much o must be scaled down because m has risen. `any` is the same for all lanes of a warp.
template <class C>
struct Rise {
  bool any = false;
  float factor[C::kRowTiles][2];
};

template <class C>
TM_DEVICE void ScaleDown(const Rise<C>& rise, PrefillState<C>* state) {
  if (rise.any) {
#pragma unroll
    for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < C::kHeadDim / 2; ++i) {
        state->o[tile][i] *= rise.factor[tile][i / 2 % 2];
      }
    }
  }
}

// Replace the scores by weights 2^(score - m), and add them to l. If m rises, scale l down. The
// caller must call ScaleDown with the result before it adds products with these weights.
template <class C>
TM_DEVICE Rise<C> UpdateSoftmax(float scale, Scores<C>& scores, PrefillState<C>* state) {
  float max_score[C::kRowTiles][2];
  bool above = false;
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = -INFINITY;
#pragma unroll
      for (int n = 0; n < C::kKeys / 8; ++n) {
        x = fmaxf(x, fmaxf(scores[tile][4 * n + 2 * half], scores[tile][4 * n + 2 * half + 1]));
      }
      max_score[tile][half] = x * scale;
      above = above || max_score[tile][half] > state->m[tile][half] + kLazyMax;
    }
  }
  Rise<C> rise;
  rise.any = AnyInWarp(above);
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& factor = rise.factor[tile][half];
      factor = 1.f;
      if (rise.any) {
        float x = max_score[tile][half];
        x = fmaxf(x, ShuffleXor(x, 1));
        x = fmaxf(x, ShuffleXor(x, 2));
        const float m = state->m[tile][half];
        if (x > m + kLazyMax) {
          factor = Exp2Approx(m - x);
          state->m[tile][half] = x;
          state->l[tile][half] *= factor;
        }
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < C::kKeys / 2; ++i) {
      float& x = scores[tile][i];
      x = Exp2Approx(fmaf(x, scale, -state->m[tile][i / 2 % 2]));
      state->l[tile][i / 2 % 2] += x;
    }
  }
  return rise;
}

// Round the weights of 16 positions of a tile to operand a of a product.
template <class C>
TM_DEVICE void PackWeights(const float (&weights)[C::kKeys / 2], int step, uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* x = weights + 4 * (2 * step + i / 2) + i % 2 * 2;
    a[i] = PackPair<C::kBFloat>(x[0], x[1]);
  }
}

// Return a query's sink logit, in units of log2. A sink adds weight but no value.
TM_DEVICE float SinkLogit(const PrefillParams& p, int64_t token, int q_head) {
  if (p.sinks == nullptr) {
    return -INFINITY;
  }
  const float shift = p.q_dot_mean != nullptr
                          ? p.softmax_scale * LoadGlobal(p.q_dot_mean + token * p.q_heads + q_head)
                          : 0.f;
  return (LoadGlobal(p.sinks + q_head) - shift) * kLog2E;
}

// Return the factor that normalizes the sums o of weights relative to 2^m, if the weights sum to l.
TM_DEVICE float FinalScale(float sink, float m, float l) {
  const float max_score = fmaxf(m, sink);
  const float factor = Exp2Approx(m - max_score);
  return factor / (l * factor + Exp2Approx(sink - max_score));
}

template <class C>
TM_DEVICE void WriteRows(const PrefillTask<C>& task, const PrefillState<C>& state) {
  const PrefillParams& p = task.params;
  const int num_rows = task.num_rows();
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float m = state.m[tile][half];
      float l = state.l[tile][half];
      l += ShuffleXor(l, 1);
      l += ShuffleXor(l, 2);
      const int row = task.Row(tile, half);
      if (row >= num_rows) {
        continue;
      }
      const int64_t token = task.of().first_token + row / p.group;
      const int in_group = row % p.group;
      float factor = 1.f;
      float* out;
      if (C::kCanSplit && p.num_splits > 1) {
        const int64_t partial =
            task.split * p.num_rows +
            ((token - p.sequences[0].first_token) * p.num_heads + task.head) * p.group + in_group;
        out = p.partial_o + partial * C::kHeadDim;
        if (task.at.t == 0) {
          const Words<8> ml = {{FloatBits(m), FloatBits(l)}};
          StoreGlobal(reinterpret_cast<Words<8>*>(p.partial_ml + 2 * partial), ml);
        }
      } else {
        const int q_head = task.kv_head() * p.group + in_group;
        out = p.out + (token * p.q_heads + q_head) * C::kHeadDim;
        factor = FinalScale(SinkLogit(p, token, q_head), m, l);
      }
#pragma unroll
      for (int n = 0; n < C::kHeadDim / 8; ++n) {
        const float* sums = state.o[tile] + 4 * n + 2 * half;
        const Words<8> pair = {{FloatBits(sums[0] * factor), FloatBits(sums[1] * factor)}};
        StoreGlobal(reinterpret_cast<Words<8>*>(out + 8 * n + 2 * task.at.t), pair);
      }
    }
  }
}

}  // namespace turbomind::cuda
