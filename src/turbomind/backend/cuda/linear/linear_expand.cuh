#pragma once

// ⑥ Expands weights with block scales to BF16 [outputs, cols], for libraries that support nothing
// else. This rounds, because a scale has more bits than BF16, except with kProducts.

#include <cmath>
#include <cstdint>

#include "turbomind/backend/cuda/linear/weight_fragments.cuh"

namespace turbomind::cuda {

struct ExpandParams {
  const char* weight = nullptr;  // the first tile to expand
  uint16_t* out = nullptr;       // [16 gridDim.y, cols]
  int cols = 0;                  // whole units
};

inline constexpr int kExpandWarps = 4;

// Grid: parts of kExpandWarps units × tiles.
template <MatrixFormat F>
__global__ void __launch_bounds__(32 * kExpandWarps) ExpandKernel(ExpandParams params) {
  BeginKernel();
  using W = WeightFragments<F>;
  const int lane = ThreadIndexX() & 31;
  const int unit = BlockIndexX() * kExpandWarps + (ThreadIndexX() >> 5);
  if (unit >= params.cols / UnitCols(F)) {
    return;
  }
  const int64_t tile_bytes = TileBytes(F, params.cols);
  const auto words = W::Load(params.weight + BlockIndexY() * tile_bytes, unit, lane, tile_bytes);
#pragma unroll
  for (int block = 0; block < W::kBlocks; ++block) {
    uint32_t pairs[2][4];
    W::Expand(words, block, pairs);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ScalePairs<F>(words, block, half, pairs[half]);
      const Words<16> out = {{pairs[half][0], pairs[half][1], pairs[half][2], pairs[half][3]}};
      const int64_t row = BlockIndexY() * kTileOutputs + (lane >> 2) + 8 * half;
      const int col = unit * UnitCols(F) + FirstCol<F>(block, lane & 3);
      uint16_t* to = params.out + row * params.cols + col;
      if constexpr (SplitsColumns(F)) {
        StoreGlobal(reinterpret_cast<Words<8>*>(to), Words<8>{{out.v[0], out.v[1]}});
        StoreGlobal(reinterpret_cast<Words<8>*>(to + SecondCols(F)),
                    Words<8>{{out.v[2], out.v[3]}});
      } else {
        StoreGlobal(reinterpret_cast<Words<16>*>(to), out);
      }
    }
  }
}

}  // namespace turbomind::cuda
