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

// What a lane has of a block and an output. The second scale is that of the last four columns if
// SplitsColumns.
struct EmbedBlock {
  uint32_t pairs[4] = {};
  float scales[2] = {1.f, 1.f};
  float minimum = -0.f;  // the identity of addition, even for -0
};

// Expand the whole unit and then select values. Selecting addresses would need local memory.
template <MatrixFormat F>
TM_DEVICE EmbedBlock SelectBlock(const typename WeightFragments<F>::Unit& unit, int block,
                                 int half) {
  using W = WeightFragments<F>;
  EmbedBlock out;
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
        out.pairs[p] = mine ? both[h][p] : out.pairs[p];
      }
      const float scale = W::Scale(unit, b, h);
      out.scales[0] = mine ? scale : out.scales[0];
      if constexpr (SplitsColumns(F)) {
        const float second = W::Scale(unit, b, h, 1);
        out.scales[1] = mine ? second : out.scales[1];
      }
      if constexpr (W::kMinimum) {
        const float minimum = W::Minimum(unit, b, h);
        out.minimum = mine ? minimum : out.minimum;
      }
    }
  }
  return out;
}

// Grid: tokens × parts of a row of kEmbedThreads * kEmbedCols columns.
template <MatrixFormat F>
__global__ void __launch_bounds__(kEmbedThreads) EmbedKernel(EmbedKernelParams params) {
  BeginKernel();
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
    const int lane = row % 8 * 4;
    if constexpr (SplitsColumns(F)) {
      const int part = col / SecondCols(F) % 2;
#pragma unroll
      for (int k = 0; k < 2; ++k) {  // two lanes have four of the columns each
        const auto unit = W::Load(tile, first / UnitCols(F), lane + col % 16 / 4 + k, tile_bytes);
        const EmbedBlock selected = SelectBlock<F>(unit, block, row / 8);
        const float scale = (part == 0 ? selected.scales[0] : selected.scales[1]) * params.factor;
#pragma unroll
        for (int p = 0; p < 2; ++p) {
          const uint32_t pair = part == 0 ? selected.pairs[p] : selected.pairs[2 + p];
          values[4 * k + 2 * p] = scale * BitsFloat(pair << 16);
          values[4 * k + 2 * p + 1] = scale * BitsFloat(pair & 0xffff0000u);
        }
      }
    } else {
      const int t = (col - FirstCol<F>(block, 0)) / FirstCol<F>(0, 1);
      const auto unit = W::Load(tile, first / UnitCols(F), lane + t, tile_bytes);
      const EmbedBlock selected = SelectBlock<F>(unit, block, row / 8);
      const float scale = selected.scales[0] * params.factor;
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const uint32_t pair = selected.pairs[p];
        values[2 * p] = fmaf(scale, BitsFloat(pair << 16), selected.minimum);
        values[2 * p + 1] = fmaf(scale, BitsFloat(pair & 0xffff0000u), selected.minimum);
      }
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
