#pragma once

// ⑦ Prefill attention over dense 16-bit keys and values by products of warp groups
// (warp_group.cuh), for many new tokens. prefill_attention.cuh does the same by mma.m16n8k16.
//
// A block owns kRows rows (prefill_rows.cuh) of one sequence and one KV head: 64 for each of two
// groups of four warps. A third group copies tiles of kKeys keys or values to the slots of a ring
// in shared memory, in the order keys 0, values 0, keys 1, ...
//
// Bytes moved: the keys and values of the positions that at least one row sees, once per block.
// Bound: tensor cores. For that, each group multiplies the next tile's keys, and this tile's
// values, while it computes the softmax. The groups also take turns at starting products, so that
// one computes a softmax while the other one's products run.
//
// Shared memory: the queries, the slots, and two mbarriers for each slot. Queries and tiles are
// slabs of rows of kSlabBytes, swizzled for the products.
//
// Invariants:
// 1. A slot is written only after all eight warps have arrived at its `empty`, and it is read only
//    after all four copying warps have arrived at its `full`.
// 2. All groups process the same tiles in the same order.
// 3. A row's bits depend only on its query and the positions that it sees: not on the chunk, on the
//    other rows, or on the other sequences of the launch. They differ from those of PrefillKernel.

#include <algorithm>
#include <cstdint>

#include "turbomind/backend/cuda/prefill/prefill_rows.cuh"

namespace turbomind::cuda {

// T is the operands' type.
template <DataType T, int D>
struct PrefillWideConfig {
  static_assert(D == 64 || D == 96 || D == 128 || D == 256);
  static constexpr bool kBFloat = T == DataType::kBFloat16;
  static constexpr int kHeadDim = D;
  static constexpr int kRowTiles = 1;  // of a warp
  static constexpr bool kCanSplit = false;
  static constexpr int kGroups = 2;      // with rows
  static constexpr int kGroupRows = 64;  // of a product
  static constexpr int kGroupThreads = 128;
  static constexpr int kGroupWarps = kGroupThreads / 32;
  static constexpr int kRows = kGroups * kGroupRows;
  static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
  static constexpr int kKeys = D > 128 ? 64 : 128;  // positions per tile
  // Registers per thread: 168 at the launch, for three groups. Copies need few.
  static constexpr int kRegisters = 232;
  static constexpr int kCopyRegisters = 40;
  static_assert(kGroups * kRegisters + kCopyRegisters <= 3 * 168);

  static constexpr int kSlabBytes = D % 64 == 0 ? 128 : 64;  // of a row
  static constexpr int kSlabs = 2 * D / kSlabBytes;
  static constexpr int kQuerySlab = kRows * kSlabBytes;
  static constexpr int kTileSlab = kKeys * kSlabBytes;
  static constexpr int kColumns = D > 128 ? 128 : D;  // of one product with values
  static constexpr int kQueryBytes = kSlabs * kQuerySlab;
  static constexpr int kSlotBytes = kSlabs * kTileSlab;
  static constexpr int kMaxBytes = 226 << 10;  // of 227 KiB
  static constexpr int kSlots = std::min(8, (kMaxBytes - kQueryBytes) / kSlotBytes);
  // Copied tiles that have not arrived. Values are multiplied after the next keys, so that two more
  // slots are in use.
  static constexpr int kAhead = kSlots > 5 ? 2 : 1;
  static_assert(kAhead + 3 <= kSlots);
  static constexpr int kFullAt = kQueryBytes + kSlots * kSlotBytes;
  static constexpr int kEmptyAt = kFullAt + 8 * kSlots;
  static constexpr int kSharedBytes = kEmptyAt + 8 * kSlots;
};

// Barriers of some threads (SyncSome).
inline constexpr int kQueriesBarrier = 1;  // the queries are in shared memory
inline constexpr int kTurnBarrier = 2;     // the first group may start products; 3: the second one

// Return where piece `piece` of 16 bytes of row `row` lies in a slab.
template <class C>
TM_DEVICE int SwizzledAt(int row, int piece) {
  const int swizzle = C::kSlabBytes == 128 ? row % 8 : row / 2 % 4;
  return row * C::kSlabBytes + (piece ^ swizzle) * 16;
}

// A place in the ring. A thread passes all slots in their order, or every second one.
template <class C>
struct RingCursor {
  int slot = 0;
  int phase = 0;

  TM_DEVICE void Advance(int count) {
    slot += count;
    if (slot >= C::kSlots) {
      slot -= C::kSlots;
      phase ^= 1;
    }
  }
  TM_DEVICE char* tile() const { return SharedMemory() + C::kQueryBytes + slot * C::kSlotBytes; }
  TM_DEVICE char* full() const { return SharedMemory() + C::kFullAt + 8 * slot; }
  TM_DEVICE char* empty() const { return SharedMemory() + C::kEmptyAt + 8 * slot; }
};

// Let the first lane of a warp arrive for all of them.
TM_DEVICE void ArriveAsWarp(void* barrier) {
  SyncWarp();
  if ((ThreadIndexX() & 31) == 0) {
    ArriveMbarrier(barrier);
  }
}

// Copy the tile of positions [first, first + kKeys) of keys or values into a slot, with zeros for
// positions outside the rows. A thread copies one piece of every kStep rows of each slab.
template <class C>
TM_DEVICE void CopyTile(const DenseRange& rows, int first, const uint16_t* from, char* slot) {
  constexpr int kPieces = C::kSlabBytes / 16;
  constexpr int kStep = C::kGroupThreads / kPieces;
  static_assert(kStep % 8 == 0 && C::kKeys % kStep == 0);
  const int thread = ThreadIndexX() % C::kGroupThreads;
  const int row = thread / kPieces;
  const char* at =
      reinterpret_cast<const char*>(from) + row * (2 * C::kHeadDim) + thread % kPieces * 16;
  char* to = slot + SwizzledAt<C>(row, thread % kPieces);
  if (first >= rows.begin && first + C::kKeys <= rows.end) {
#pragma unroll
    for (int slab = 0; slab < C::kSlabs; ++slab) {
#pragma unroll
      for (int i = 0; i < C::kKeys / kStep; ++i) {
        CopyAsync(to + slab * C::kTileSlab + i * kStep * C::kSlabBytes,
                  at + slab * C::kSlabBytes + i * kStep * 2 * C::kHeadDim, 16);
      }
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < C::kKeys / kStep; ++i) {
      const int position = first + row + i * kStep;
      const int valid = position >= rows.begin && position < rows.end ? 16 : 0;
#pragma unroll 1
      for (int slab = 0; slab < C::kSlabs; ++slab) {
        CopyAsync(to + slab * C::kTileSlab + i * kStep * C::kSlabBytes,
                  at + slab * C::kSlabBytes + i * kStep * 2 * C::kHeadDim, valid);
      }
    }
  }
  CommitCopies();
}

// Fill the ring. `arriving` is the oldest slot whose copies have not arrived.
template <class C>
TM_DEVICE void CopyTiles(const PrefillTask<C>& task) {
  RingCursor<C> next;
  RingCursor<C> arriving;
  int num_copied = 0;
  const auto arrive = [&] {
    FenceSharedForProducts();
    ArriveAsWarp(arriving.full());
    arriving.Advance(1);
  };
#pragma unroll 1
  for (int range = 0; range < kPrefillRanges; ++range) {
    const SeenPositions seen = SeenByRange<C>(task, range, task.first_row, C::kRows).some;
    if (seen.begin >= seen.end) {
      continue;
    }
    const DenseView& view = task.params.views[range == 0 ? 0 : 1];
#pragma unroll 1
    for (int first = seen.begin / C::kKeys * C::kKeys; first < seen.end; first += C::kKeys) {
      const int64_t element = FirstElement<C>(task, range, first);
#pragma unroll 1
      for (int side = 0; side < 2; ++side) {
        WaitMbarrier(next.empty(), next.phase ^ 1);
        CopyTile<C>(task.of().ranges[range], first, (side == 0 ? view.k : view.v) + element,
                    next.tile());
        next.Advance(1);
        if (++num_copied > C::kAhead) {
          WaitForCopies<C::kAhead>();
          arrive();
        }
      }
    }
  }
  WaitForCopies<0>();
  for (int i = num_copied < C::kAhead ? num_copied : C::kAhead; i > 0; --i) {
    arrive();
  }
}

// Copy the rows' queries to shared memory, rounded. Rows past the last are zero.
template <class C>
TM_DEVICE void StoreWideQueries(const PrefillTask<C>& task) {
  constexpr int kPieces = C::kSlabBytes / 16;
  const int num_rows = task.num_rows();
  for (int i = ThreadIndexX(); i < C::kRows * C::kHeadDim / 8; i += C::kGroups * C::kGroupThreads) {
    const int row = i / (C::kHeadDim / 8);
    const int piece = i % (C::kHeadDim / 8);
    Words<16> packed = {};
    if (task.first_row + row < num_rows) {
      packed = LoadQueryPiece<C>(task.Query(task.first_row + row) + 8 * piece);
    }
    StoreShared(
        SharedMemory() + piece / kPieces * C::kQuerySlab + SwizzledAt<C>(row, piece % kPieces),
        packed);
  }
  FenceSharedForProducts();
  SyncSome(kQueriesBarrier, C::kGroups * C::kGroupThreads);
}

// Weights of a tile, as operand a of the products with its values.
template <class C>
using PackedWeights = uint32_t[C::kKeys / 16][4];

// What a group with rows has: its queries in shared memory and its places in the ring.
template <class C>
struct WideGroup {
  const PrefillTask<C>& task;
  int group;
  RingCursor<C> keys;    // of the next tile
  RingCursor<C> values;  // of the tile whose weights are known

  TM_DEVICE char* queries() const {
    return SharedMemory() + group * (C::kGroupRows * C::kSlabBytes);
  }
};

// Start queries times the next tile's keys, a group of products.
template <class C>
TM_DEVICE void StartScores(const WideGroup<C>& group, Scores<C>& scores) {
  WaitMbarrier(group.keys.full(), group.keys.phase);
  const char* queries = KeepShared(group.queries());  // or descriptions of it fill registers
  const char* keys = group.keys.tile();
  FenceRegisters();
#pragma unroll
  for (int step = 0; step < C::kHeadDim / 16; ++step) {
    const int slab = 32 * step / C::kSlabBytes;
    const int column = 32 * step % C::kSlabBytes;
    MultiplySharedRows<C::kBFloat, C::kKeys, C::kSlabBytes>(
        scores[0], {queries, static_cast<uint32_t>(slab * C::kQuerySlab + column)},
        {keys, static_cast<uint32_t>(slab * C::kTileSlab + column)}, step > 0);
  }
  CommitProducts();
}

// Start o += weights · values, a group of products.
template <class C>
TM_DEVICE void StartValues(const WideGroup<C>& group, const PackedWeights<C>& weights,
                           PrefillState<C>* state) {
  WaitMbarrier(group.values.full(), group.values.phase);
  const char* values = group.values.tile();
  FenceRegisters();
#pragma unroll
  for (int step = 0; step < C::kKeys / 16; ++step) {
#pragma unroll
    for (int part = 0; part < C::kHeadDim / C::kColumns; ++part) {
      constexpr int kPartBytes = C::kColumns * 2 / C::kSlabBytes * C::kTileSlab;
      MultiplyColumns<C::kBFloat, C::kColumns, C::kSlabBytes>(
          state->o[0] + part * (C::kColumns / 2), weights[step],
          {values, static_cast<uint32_t>(part * kPartBytes + step * 16 * C::kSlabBytes)},
          C::kTileSlab);
    }
  }
  CommitProducts();
}

// Wait for the products of StartValues, and release their slot.
template <class C>
TM_DEVICE void EndValues(WideGroup<C>& group, PrefillState<C>* state) {
  WaitForProducts<0>();
  KeepSums(state->o[0]);
  ArriveAsWarp(group.values.empty());
  group.values.Advance(2);
}

// A range of positions, for one warp.
struct WideRange {
  int index;
  SeenPositions all;  // that no row hides
  ScoreScale scale;
};

// Turn scores into weights, and release the slot of their keys. The products of StartScores have
// ended, and `first` is the first position of the tile.
template <class C>
TM_DEVICE Rise<C> WeighScores(WideGroup<C>& group, const WideRange& range, int first,
                              Scores<C>& scores, PrefillState<C>* state) {
  KeepSums(scores[0]);
  ArriveAsWarp(group.keys.empty());
  group.keys.Advance(2);
  CapScores<C>(group.task, range.scale.cap_scale, scores);
  if (first < range.all.begin || first + C::kKeys > range.all.end) {
    HideScores<C>(group.task, range.index, first, scores);
  }
  return UpdateSoftmax<C>(range.scale.scale, scores, state);
}

template <class C>
TM_DEVICE void PackTile(const Scores<C>& scores, PackedWeights<C>& weights) {
#pragma unroll
  for (int step = 0; step < C::kKeys / 16; ++step) {
    PackWeights<C>(scores[0], step, weights[step]);
  }
}

// Add the positions of a range. The products of a tile's values run with those of the next keys.
template <class C>
TM_DEVICE void ReadWideRange(WideGroup<C>& group, int index, PrefillState<C>* state) {
  const PrefillTask<C>& task = group.task;
  const SeenPositions seen = SeenByRange<C>(task, index, task.first_row, C::kRows).some;
  if (seen.begin >= seen.end) {
    return;
  }
  const int row = task.first_row + 16 * task.at.warp;
  const WideRange range = {index, SeenByRange<C>(task, index, row, 16).all,
                           ScaleOf<C>(task, index)};
  int first = seen.begin / C::kKeys * C::kKeys;
  Scores<C> scores = {};
  PackedWeights<C> weights;
  StartScores<C>(group, scores);
  WaitForProducts<0>();
  ScaleDown<C>(WeighScores<C>(group, range, first, scores, state), state);
  PackTile<C>(scores, weights);
#pragma unroll 1
  for (first += C::kKeys; first < seen.end; first += C::kKeys) {
    SyncSome(kTurnBarrier + group.group, C::kGroups * C::kGroupThreads);
    StartScores<C>(group, scores);
    StartValues<C>(group, weights, state);
    ArriveSome(kTurnBarrier + 1 - group.group, C::kGroups * C::kGroupThreads);
    WaitForProducts<1>();  // for the scores
    const Rise<C> rise = WeighScores<C>(group, range, first, scores, state);
    EndValues<C>(group, state);
    ScaleDown<C>(rise, state);
    PackTile<C>(scores, weights);
  }
  StartValues<C>(group, weights, state);
  EndValues<C>(group, state);
}

// Compute the rows of one group.
template <class C>
TM_DEVICE void ComputeWideRows(const PrefillTask<C>& task, int index) {
  StoreWideQueries<C>(task);
  WideGroup<C> group = {task, index, {}, {}};
  group.values.Advance(1);
  if (index == 1) {  // the first group begins
    ArriveSome(kTurnBarrier, C::kGroups * C::kGroupThreads);
  }
  PrefillState<C> state;
  const float value_scale = HeadScale(task.params.value_scale, task.kv_head());
#pragma unroll 1
  for (int range = 0; range < kPrefillRanges; ++range) {
    ReadWideRange<C>(group, range, &state);
    if (range == 0) {
      state.ScaleSums(value_scale);
    }
  }
  if (index == 0) {  // the turn that the second group has given back
    SyncSome(kTurnBarrier, C::kGroups * C::kGroupThreads);
  }
  WriteRows<C>(task, state);
}

// Grid: tiles × heads of the views; C::kThreads; C::kSharedBytes.
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) PrefillWideKernel(PrefillParams params) {
  BeginKernel();
  if constexpr (kHasWarpGroups) {
    const int warp = WarpIndex();
    if (ThreadIndexX() == 0) {
#pragma unroll 1
      for (int slot = 0; slot < C::kSlots; ++slot) {
        InitMbarrier(SharedMemory() + C::kFullAt + 8 * slot, C::kGroupWarps);
        InitMbarrier(SharedMemory() + C::kEmptyAt + 8 * slot, C::kGroups * C::kGroupWarps);
      }
    }
    SyncBlock();
    if (warp >= C::kGroups * C::kGroupWarps) {
      GiveBackRegisters<C::kCopyRegisters>();
      CopyTiles<C>(FindTask<C>(params, 0));
    } else {
      AddRegisters<C::kRegisters>();
      ComputeWideRows<C>(FindTask<C>(params, ThreadIndexX() >> 5), warp / C::kGroupWarps);
    }
  } else {
    Trap();
  }
}

}  // namespace turbomind::cuda
