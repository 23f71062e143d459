#pragma once

// The weights of a warp on their way from global memory: a ring of units in shared memory, filled
// by cp.async.
//
// Loads into registers cannot run ahead as far. A warp has six scoreboards, and the compiler gives
// the loads of the next units of weights and those of x the same one. Waiting for x then also waits
// for the weights that were requested last, so that only one unit is in flight. Groups of cp.async
// are waited for in their order.

#include <algorithm>
#include <cstdint>

#include "turbomind/backend/cuda/linear/linear_shape.cuh"
#include "turbomind/backend/cuda/linear/weight_fragments.cuh"

namespace turbomind::cuda {

// Units of kTiles tiles of format F, in kStages stages. A warp has its own ring of kBytes.
template <MatrixFormat F, int kTiles, int kStages>
class WeightRing {
 public:
  using W = WeightFragments<F>;
  static constexpr int kStageBytes = kTiles * W::kStagedBytes;
  static constexpr int kBytes = kStages * kStageBytes;
  static_assert(W::kStagedBytes % 16 == 0);

  // `memory` has kBytes of shared memory and is 16-byte aligned. Tiles past the last one are copies
  // of it, whose results are not stored.
  TM_DEVICE WeightRing(const LinearBlock& block, int first_tile, int64_t tile_bytes, char* memory)
      : tile_bytes_(tile_bytes), memory_(memory) {
    const int last = static_cast<int>(NumTiles(block.num_outputs)) - 1;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      const int tile = first_tile + m < last ? first_tile + m : last;
      tiles_[m] = block.weight + tile * tile_bytes;
    }
  }

  // Use another matrix's tile in place of tile M.
  template <int M>
  TM_DEVICE void SetTile(const char* tile) {
    tiles_[M] = tile;
  }

  // Start to copy a unit into a stage. The caller commits the copies as a group.
  TM_DEVICE void Copy(int unit, int stage) {
    const int lane = ThreadIndexX() & 31;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      W::Copy(tiles_[m], unit, lane, tile_bytes_, At(stage, m));
    }
  }

  // Read the lane's part of a stage. REQUIRES: all lanes have waited for the stage, and the warp
  // has been synchronized since.
  TM_DEVICE void Load(int stage, typename W::Unit (&units)[kTiles]) const {
    const int lane = ThreadIndexX() & 31;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      units[m] = W::LoadStaged(At(stage, m), lane);
    }
  }

 private:
  TM_DEVICE char* At(int stage, int m) const {
    return memory_ + stage * kStageBytes + m * W::kStagedBytes;
  }

  const char* tiles_[kTiles];
  int64_t tile_bytes_;
  char* memory_;
};

}  // namespace turbomind::cuda
