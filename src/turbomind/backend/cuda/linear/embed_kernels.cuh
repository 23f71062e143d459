#pragma once

// ⑥ Dequantizes rows of a weight matrix: embeddings of tokens.

#include <cmath>
#include <cstdint>

#include "turbomind/backend/cuda/linear/weight_fragments.cuh"

namespace turbomind::cuda {

struct EmbedKernelParams {
  const char* table = nullptr;
  const int32_t* ids = nullptr;  // [gridDim.x]
  float* out = nullptr;          // [gridDim.x, cols]
  int cols = 0;
  float factor = 1.f;  // of the table, which belongs to the scales
  float scale = 1.f;   // factor of every value
};

inline constexpr int kEmbedThreads = 128;
inline constexpr int kEmbedCols = 8;  // per thread at a time

// Grid: tokens × parts of a row of kEmbedThreads * kEmbedCols columns.
template <MatrixFormat F>
__global__ void __launch_bounds__(kEmbedThreads) EmbedKernel(EmbedKernelParams params) {
  const int group = BlockIndexY() * kEmbedThreads + ThreadIndexX();  // group of 8 columns
  const int first = group * kEmbedCols;
  if (first >= params.cols) {
    return;
  }
  const int64_t id = LoadGlobal(params.ids + BlockIndexX());
  const int64_t tile_bytes = TileBytes(F, params.cols);
  const char* tile = params.table + id / kTileOutputs * tile_bytes;
  const int row = static_cast<int>(id % kTileOutputs);
  float values[kEmbedCols];
  if constexpr (F == MatrixFormat::kF32) {
    const char* from = tile + row * (tile_bytes / kTileOutputs) + static_cast<int64_t>(first) * 4;
#pragma unroll
    for (int i = 0; i < kEmbedCols; ++i) {
      values[i] =
          first + i < params.cols ? LoadGlobal(reinterpret_cast<const float*>(from) + i) : 0.f;
    }
  } else {
    using W = WeightFragments<F>;
    const int col = first % UnitCols(F);  // in the unit
    const int block = IsFp8(F) ? col / kEmbedCols % W::kBlocks : col / kQuantBlock;
    const int t = (col - FirstCol<F>(block, 0)) / FirstCol<F>(0, 1);
    const int half = row / 8;
    const auto unit = W::Load(tile, first / UnitCols(F), row % 8 * 4 + t, tile_bytes);
    uint32_t pairs[4] = {};
    float scale = 1.f;
    float minimum = -0.f;  // the identity of addition, even for -0
    // Expand the whole unit and then select values. Selecting addresses would need local memory.
#pragma unroll
    for (int b = 0; b < W::kBlocks; ++b) {
      uint32_t both[2][4];
      if constexpr (W::kProducts) {
        W::ExpandCodes(unit, b, both);
      } else {
        W::Expand(unit, b, both);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool mine = b == block && h == half;
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          pairs[p] = mine ? both[h][p] : pairs[p];
        }
        const float block_scale = W::Scale(unit, b, h);
        scale = mine ? block_scale : scale;
        if constexpr (W::kMinimum) {
          const float block_minimum = W::Minimum(unit, b, h);
          minimum = mine ? block_minimum : minimum;
        }
      }
    }
    scale *= params.factor;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const uint32_t pair = pairs[p];
      values[2 * p] = fmaf(scale, BitsFloat(pair << 16), minimum);
      values[2 * p + 1] = fmaf(scale, BitsFloat(pair & 0xffff0000u), minimum);
    }
  }
#pragma unroll
  for (float& value : values) {
    value *= params.scale;
  }
  float* out = params.out + static_cast<int64_t>(BlockIndexX()) * params.cols + first;
  if (params.cols % kEmbedCols == 0) {
#pragma unroll
    for (int i = 0; i < kEmbedCols; i += 4) {
      const Words<16> words = {{FloatBits(values[i]), FloatBits(values[i + 1]),
                                FloatBits(values[i + 2]), FloatBits(values[i + 3])}};
      StoreGlobal(reinterpret_cast<Words<16>*>(out + i), words);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kEmbedCols; ++i) {
    if (first + i < params.cols) {
      StoreGlobal(out + i, values[i]);
    }
  }
}

}  // namespace turbomind::cuda
