#pragma once

// ⑦ Prefill attention over dense 16-bit keys and values, for any number of new tokens, by
// mma.m16n8k16. prefill_wide.cuh does the same by products of warp groups.
//
// A block owns kRows rows (prefill_rows.cuh) of one sequence and one KV head, 16 kRowTiles for each
// of its four warps.
//
// Bytes moved: the keys and values of the positions that at least one row sees, in tiles of kKeys
// positions. cp.async fills one of two stages while the other is read. Bound: tensor cores
// (mma.m16n8k16). Two row tiles per warp halve the shared memory reads per product, which are the
// next bound.
//
// Ranges (prefill_shape.cuh) are processed one after the other. That of the quantized pool comes
// first, so that the scale of its values is a single multiplication of the sums so far.

#include <cstdint>

#include "turbomind/backend/cuda/prefill/prefill_rows.cuh"

namespace turbomind::cuda {

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
  const int num_rows = task.num_rows();
  for (int i = ThreadIndexX(); i < C::kRows * C::kChunks; i += kPrefillThreads) {
    const int row = i / C::kChunks;
    const int chunk = i % C::kChunks;
    Words<16> packed = {};
    if (task.first_row + row < num_rows) {
      packed = LoadQueryPiece<C>(task.Query(task.first_row + row) + 8 * chunk);
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
  const int64_t from = 2 * FirstElement<C>(task, range, first) + 16 * ThreadIndexX();
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

// c += a · b for the tiles of 8 columns n and n + 1, of which b has four matrices.
template <class C>
TM_DEVICE void MultiplyTwoTiles(float* sums, const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  auto* tiles = reinterpret_cast<float(*)[4]>(sums);
  Multiply<C::kBFloat>(tiles[0], a, b[0], b[1]);
  Multiply<C::kBFloat>(tiles[1], a, b[2], b[3]);
}

// Compute queries times keys.
template <class C>
TM_DEVICE void MultiplyKeys(const Lane& at, const QueryStep<C>* query, const char* keys,
                            Scores<C>& scores) {
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (float& score : scores[tile]) {
      score = 0.f;
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
        MultiplyTwoTiles<C>(scores[tile] + 4 * n, q.a[tile], b);
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
      PackWeights<C>(weights[tile], u, a[tile]);
    }
#pragma unroll
    for (int n = 0; n < C::kChunks; n += 2) {
      uint32_t b[4];
      LoadMatricesTransposed(b, from + u * 16 * C::kStride + 16 * n);
#pragma unroll
      for (int tile = 0; tile < C::kRowTiles; ++tile) {
        MultiplyTwoTiles<C>(state->o[tile] + 4 * n, a[tile], b);
      }
    }
  }
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
  const ScoreScale scale = ScaleOf<C>(task, range);
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
    CapScores<C>(task, scale.cap_scale, scores);
    if (first < mine.all.begin || first + kKeys > mine.all.end) {
      HideScores<C>(task, range, first, scores);
    }
    ScaleDown<C>(UpdateSoftmax<C>(scale.scale, scores, state), state);
    AddValues<C>(task.at, keys + C::kSideBytes, scores, state);
  }
}

// Grid: tiles × (heads of the views · splits); kPrefillThreads threads; C::kSharedBytes.
template <class C>
__global__ void __launch_bounds__(kPrefillThreads, kPrefillBlocks)
    PrefillKernel(PrefillParams params) {
  BeginKernel();
  const PrefillTask<C> task = FindTask<C>(params, ThreadIndexX() >> 5);
  StoreQueries<C>(task);
  SyncBlock();
  QueryStep<C> query[C::kQueryInRegisters ? C::kSteps : 1] = {};
  if constexpr (C::kQueryInRegisters) {
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) {
      LoadQueryStep<C>(task.at, step, &query[step]);
    }
  }
  PrefillState<C> state;
  const float value_scale = HeadScale(params.value_scale, task.kv_head());
#pragma unroll 1
  for (int range = 0; range < kPrefillRanges; ++range) {
    ReadRange<C>(task, query, range, &state);
    if (range == 0) {
      state.ScaleSums(value_scale);
    }
  }
  WriteRows<C>(task, state);
}

}  // namespace turbomind::cuda
