#pragma once

// ⑦ Prefill attention over dense 16-bit keys and values, for any number of new tokens.
//
// A block owns kRows rows of one sequence and one KV head. A row is a query of one head. The rows
// are the query heads of the KV head, token by token, so that small chunks fill tiles and all heads
// share the loaded data. Each of the four warps has kRowTiles tiles of 16 rows and its own online
// softmax.
//
// Bytes moved: the keys and values of the positions that at least one row sees, in tiles of kKeys
// positions. cp.async fills one of two stages while the other is read. Bound: tensor cores
// (mma.m16n8k16). Two row tiles per warp halve the shared memory reads per product, which are the
// next bound.
//
// A row's sums depend only on its own query and the positions that it sees, not on the other rows.
// Tiles begin at multiples of kKeys, and a row's reference maximum rises only when one of its own
// scores exceeds it by more than 2^8. It starts finite, so that a tile without visible positions
// adds nothing.
//
// Ranges (prefill_shape.cuh) are processed one after the other. That of the quantized pool comes
// first, so that the scale of its values is a single multiplication of the sums so far.

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
};

template <class C>
struct PrefillState {
  float m[C::kRowTiles][2];  // for the rows g and g + 8
  float l[C::kRowTiles][2];  // over the lane's columns only, until the end
  float o[C::kRowTiles][C::kChunks][4];
};

// Operand A for one step of 16 dimensions.
template <class C>
struct QueryStep {
  uint32_t a[C::kRowTiles][4];
};

template <class C>
TM_DEVICE void LoadQueryStep(const Lane& at, int step, QueryStep<C>* query) {
  const int row = 16 * C::kRowTiles * at.warp + (at.lane & 15);
  const char* from = SharedMemory() + row * C::kStride + 32 * step + (at.lane >> 4) * 16;
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
    LoadMatrices(query->a[tile], from + tile * 16 * C::kStride);
  }
}

// Copy the block's queries to shared memory, rounded. Rows past the last are zero.
template <class C>
TM_DEVICE void StoreQueries(const PrefillTask<C>& task) {
  const PrefillParams& p = task.params;
  const int num_rows = task.num_rows();
  const float* q = p.q + task.of().first_token * p.q_stride +
                   static_cast<int64_t>(task.kv_head()) * p.group * C::kHeadDim;
  for (int i = ThreadIndexX(); i < C::kRows * C::kChunks; i += kPrefillThreads) {
    const int row = i / C::kChunks;
    const int chunk = i % C::kChunks;
    Words<16> packed = {};
    if (task.first_row + row < num_rows) {
      const int token = (task.first_row + row) / p.group;
      const int head = (task.first_row + row) % p.group;
      const float* from = q + token * p.q_stride + head * C::kHeadDim + 8 * chunk;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto x = LoadGlobal(reinterpret_cast<const Words<16>*>(from) + half);
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const float low = BitsFloat(x.v[2 * pair]);
          const float high = BitsFloat(x.v[2 * pair + 1]);
          packed.v[2 * half + pair] =
              C::kBFloat ? PackBFloat2(low, high) : PackFiniteHalf2(low, high);
        }
      }
    }
    StoreShared(SharedMemory() + row * C::kStride + 16 * chunk, packed);
  }
}

// Thread i copies the 16-byte pieces i, i + kPrefillThreads, ... of a tile's keys and values.
// Return the row of the piece that is `base` pieces after the thread's first.
template <class C>
TM_DEVICE int CopiedRow(int base) {
  if constexpr (kPrefillThreads % C::kChunks == 0) {  // the compiler can compute the difference
    return ThreadIndexX() / C::kChunks + base / C::kChunks;
  } else {
    return (ThreadIndexX() + base) / C::kChunks;
  }
}

// Copy the tile of positions [first, first + kKeys) into a stage, with zeros for positions outside
// the rows. The copies form one committed group.
template <class C>
TM_DEVICE void LoadTile(const PrefillTask<C>& task, int range, int first, char* stage) {
  constexpr int kPieces = C::kKeys * C::kChunks;
  static_assert(kPieces % kPrefillThreads == 0);
  const DenseRange& rows = task.of().ranges[range];
  const DenseView& view = task.params.views[range == 0 ? 0 : 1];
  const int64_t first_row = task.head * view.num_rows + rows.row + first - rows.begin;
  const int64_t from = first_row * (2 * C::kHeadDim) + 16 * ThreadIndexX();
  const char* const keys = reinterpret_cast<const char*>(view.k) + from;
  const char* const values = reinterpret_cast<const char*>(view.v) + from;
  char* const to = stage + 16 * ThreadIndexX();
  if (first >= rows.begin && first + C::kKeys <= rows.end) {
#pragma unroll
    for (int base = 0; base < kPieces; base += kPrefillThreads) {
      char* const at = to + 16 * (base + CopiedRow<C>(base));  // a row is padded by one piece
      CopyAsync(at, keys + 16 * base, 16);
      CopyAsync(at + C::kSideBytes, values + 16 * base, 16);
    }
  } else {
#pragma unroll 1
    for (int base = 0; base < kPieces; base += kPrefillThreads) {
      const int row = CopiedRow<C>(base);
      const int valid = first + row >= rows.begin && first + row < rows.end ? 16 : 0;
      CopyAsync(to + 16 * (base + row), keys + 16 * base, valid);
      CopyAsync(to + 16 * (base + row) + C::kSideBytes, values + 16 * base, valid);
    }
  }
  CommitCopies();
}

template <class C>
using Scores = float[C::kRowTiles][C::kKeys / 8][4];

// Compute queries times keys: rows g and g + 8, columns 8 n + 2 t and the next.
template <class C>
TM_DEVICE void MultiplyKeys(const Lane& at, const QueryStep<C>* query, const char* keys,
                            Scores<C>& scores) {
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int n = 0; n < C::kKeys / 8; ++n) {
      scores[tile][n][0] = scores[tile][n][1] = scores[tile][n][2] = scores[tile][n][3] = 0.f;
    }
  }
  // The four matrices have 8 keys and 8 dimensions, the next 8 dimensions, and the same for the
  // next 8 keys.
  const char* from =
      keys + ((at.lane & 7) + (at.lane >> 4) * 8) * C::kStride + (at.lane >> 3 & 1) * 16;
#pragma unroll
  for (int step = 0; step < C::kSteps; ++step) {
    QueryStep<C> loaded;
    if constexpr (!C::kQueryInRegisters) {
      LoadQueryStep<C>(at, step, &loaded);
    }
    const QueryStep<C>& q = C::kQueryInRegisters ? query[step] : loaded;
#pragma unroll
    for (int n = 0; n < C::kKeys / 8; n += 2) {
      uint32_t b[4];
      LoadMatrices(b, from + n * 8 * C::kStride + 32 * step);
#pragma unroll
      for (int tile = 0; tile < C::kRowTiles; ++tile) {
        Multiply<C::kBFloat>(scores[tile][n], q.a[tile], b[0], b[1]);
        Multiply<C::kBFloat>(scores[tile][n + 1], q.a[tile], b[2], b[3]);
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
            scores[tile][n][2 * half + i] = -INFINITY;
          }
        }
      }
    }
  }
}

// Replace the scores by weights 2^(score - m). If m rises, scale o and l down.
template <class C>
TM_DEVICE void UpdateSoftmax(float scale, Scores<C>& scores, PrefillState<C>* state) {
  float max_score[C::kRowTiles][2];
  bool above = false;
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = -INFINITY;
#pragma unroll
      for (int n = 0; n < C::kKeys / 8; ++n) {
        x = fmaxf(x, fmaxf(scores[tile][n][2 * half], scores[tile][n][2 * half + 1]));
      }
      max_score[tile][half] = x * scale;
      above = above || max_score[tile][half] > state->m[tile][half] + kLazyMax;
    }
  }
  if (AnyInWarp(above)) {
#pragma unroll
    for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = max_score[tile][half];
        x = fmaxf(x, ShuffleXor(x, 1));
        x = fmaxf(x, ShuffleXor(x, 2));
        const float m = state->m[tile][half];
        if (x > m + kLazyMax) {
          const float factor = Exp2Approx(m - x);
          state->m[tile][half] = x;
          state->l[tile][half] *= factor;
#pragma unroll
          for (int n = 0; n < C::kChunks; ++n) {
            state->o[tile][n][2 * half] *= factor;
            state->o[tile][n][2 * half + 1] *= factor;
          }
        }
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int n = 0; n < C::kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = scores[tile][n][i];
        x = Exp2Approx(fmaf(x, scale, -state->m[tile][i / 2]));
        state->l[tile][i / 2] += x;
      }
    }
  }
}

// o += weights · values.
template <class C>
TM_DEVICE void AddValues(const Lane& at, const char* values, const Scores<C>& weights,
                         PrefillState<C>* state) {
  // The four matrices have 8 positions and 8 dimensions, the next 8 positions, and the same for the
  // next 8 dimensions.
  const char* from = values + (at.lane & 15) * C::kStride + (at.lane >> 4) * 16;
#pragma unroll
  for (int u = 0; u < C::kKeys / 16; ++u) {
    uint32_t a[C::kRowTiles][4];
#pragma unroll
    for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&x)[4] = weights[tile][2 * u + i / 2];
        a[tile][i] = PackPair<C::kBFloat>(x[i % 2 * 2], x[i % 2 * 2 + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < C::kChunks; n += 2) {
      uint32_t b[4];
      LoadMatricesTransposed(b, from + u * 16 * C::kStride + 16 * n);
#pragma unroll
      for (int tile = 0; tile < C::kRowTiles; ++tile) {
        Multiply<C::kBFloat>(state->o[tile][n], a[tile], b[0], b[1]);
        Multiply<C::kBFloat>(state->o[tile][n + 1], a[tile], b[2], b[3]);
      }
    }
  }
}

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

template <class C>
TM_DEVICE void ReadRange(const PrefillTask<C>& task, const QueryStep<C>* query, int range,
                         PrefillState<C>* state) {
  constexpr int kKeys = C::kKeys;
  SeenPositions seen = SeenByRange<C>(task, range, task.first_row, C::kRows).some;
  if constexpr (C::kCanSplit) {
    const int begin = task.of().split_begin + task.split * task.of().split_len;
    const int end = begin + task.of().split_len;
    seen = {seen.begin > begin ? seen.begin : begin, seen.end < end ? seen.end : end};
  }
  if (seen.begin >= seen.end) {
    return;
  }
  constexpr int kWarpRows = 16 * C::kRowTiles;
  const SeenByRows mine =
      SeenByRange<C>(task, range, task.first_row + kWarpRows * task.at.warp, kWarpRows);
  const PrefillParams& p = task.params;
  const float factor = range == 0 ? HeadScale(p.key_scale, task.kv_head()) : 1.f;
  const float score_scale = p.softmax_scale * kLog2E * factor;
  const float scale = p.score_cap != 0.f ? 1.f : score_scale;
  char* const stages = SharedMemory() + C::kQueryBytes;
  int stage = 0;
  SyncBlock();  // no thread still reads the stages
  LoadTile<C>(task, range, seen.begin / kKeys * kKeys, stages);
#pragma unroll 1
  for (int first = seen.begin / kKeys * kKeys; first < seen.end; first += kKeys) {
    WaitForCopies<0>();
    SyncBlock();  // all threads' copies have arrived, and no thread reads the other stage
    const char* const keys = stages + stage * C::kStageBytes;
    stage ^= 1;
    if (first + kKeys < seen.end) {
      LoadTile<C>(task, range, first + kKeys, stages + stage * C::kStageBytes);
    }
    if (first + kKeys <= mine.some.begin || first >= mine.some.end) {
      continue;
    }
    Scores<C> scores;
    MultiplyKeys<C>(task.at, query, keys, scores);
    if (p.score_cap != 0.f) {
#pragma unroll
      for (int i = 0; i < C::kRowTiles * C::kKeys / 8 * 4; ++i) {
        float& score = scores[i / (C::kKeys / 8 * 4)][i / 4 % (C::kKeys / 8)][i % 4];
        score = CapScore(score, score_scale, p.score_cap);
      }
    }
    if (first < mine.all.begin || first + kKeys > mine.all.end) {
      HideScores<C>(task, range, first, scores);
    }
    UpdateSoftmax<C>(scale, scores, state);
    AddValues<C>(task.at, keys + C::kSideBytes, scores, state);
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
      for (int n = 0; n < C::kChunks; ++n) {
        const Words<8> pair = {{FloatBits(state.o[tile][n][2 * half] * factor),
                                FloatBits(state.o[tile][n][2 * half + 1] * factor)}};
        StoreGlobal(reinterpret_cast<Words<8>*>(out + 8 * n + 2 * task.at.t), pair);
      }
    }
  }
}

// Grid: tiles × (heads of the views · splits); kPrefillThreads threads; C::kSharedBytes.
template <class C>
__global__ void __launch_bounds__(kPrefillThreads, kPrefillBlocks)
    PrefillKernel(PrefillParams params) {
  BeginKernel();
  const int tile = params.num_tiles - 1 - BlockIndexX();  // a sequence's longest tiles first
  int sequence = 0;
  while (sequence + 1 < params.num_sequences && params.sequences[sequence + 1].first_tile <= tile) {
    ++sequence;
  }
  const int thread = ThreadIndexX();
  const int lane = thread & 31;
  const int num_splits = C::kCanSplit ? params.num_splits : 1;
  const PrefillTask<C> task = {params,
                               sequence,
                               BlockIndexY() / num_splits,
                               BlockIndexY() % num_splits,
                               (tile - params.sequences[sequence].first_tile) * C::kRows,
                               {lane, thread >> 5, lane >> 2, lane & 3}};
  StoreQueries<C>(task);
  SyncBlock();
  QueryStep<C> query[C::kQueryInRegisters ? C::kSteps : 1] = {};
  if constexpr (C::kQueryInRegisters) {
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) {
      LoadQueryStep<C>(task.at, step, &query[step]);
    }
  }
  PrefillState<C> state = {};
#pragma unroll
  for (int i = 0; i < 2 * C::kRowTiles; ++i) {
    state.m[i / 2][i % 2] = kMinRowMax;
  }
  const float value_scale = HeadScale(params.value_scale, task.kv_head());
#pragma unroll 1
  for (int range = 0; range < kPrefillRanges; ++range) {
    ReadRange<C>(task, query, range, &state);
    if (range == 0) {
#pragma unroll
      for (int i = 0; i < C::kRowTiles * C::kChunks * 4; ++i) {
        state.o[i / (C::kChunks * 4)][i / 4 % C::kChunks][i % 4] *= value_scale;
      }
    }
  }
  WriteRows<C>(task, state);
}

}  // namespace turbomind::cuda
