#pragma once

// ⑥⑦ Conversion of the rows of a state on the GPU: a warp converts a row. Bound by memory.

#include <cstdint>

#include "turbomind/backend/cuda/dense/elementwise.cuh"
#include "turbomind/backend/cuda/runtime/intrinsics.cuh"
#include "turbomind/kv/state_codec.h"
#include "turbomind/ops/checkpoint_params.h"

namespace turbomind::cuda {

inline constexpr int kCodecWarps = 8;

// One copy of StateCopyParams.
struct StateCodecParams {
  std::byte* state = nullptr;
  std::byte* checkpoint = nullptr;
  StateShape shape;
  StateFormat format = StateFormat::kF32;
};

// The place of a row in both slots.
struct StateRow {
  float* values = nullptr;
  std::byte* codes = nullptr;
  float* scale = nullptr;

  TM_DEVICE StateRow(const StateCodecParams& p, int64_t row) {
    const int64_t layer = row / p.shape.rows;
    const int64_t in_layer = row % p.shape.rows;
    const int64_t cols = p.shape.cols;
    values = reinterpret_cast<float*>(p.state + layer * p.shape.LayerBytes(StateFormat::kF32) +
                                      p.shape.exact_bytes) +
             in_layer * cols;
    std::byte* encoded = p.checkpoint + layer * p.shape.LayerBytes(p.format);
    scale = reinterpret_cast<float*>(encoded + p.shape.exact_bytes) + in_layer;
    codes = encoded + p.shape.CodesOffset(p.format) +
            in_layer * cols * (p.format == StateFormat::kInt8 ? 1 : 2);
  }
};

// Grid: ⌈layers × rows / kCodecWarps⌉.
__global__ void __launch_bounds__(32 * kCodecWarps) EncodeStateKernel(StateCodecParams p) {
  BeginKernel();
  const int lane = ThreadIndexX() & 31;
  const int64_t index = int64_t{BlockIndexX()} * kCodecWarps + ThreadIndexX() / 32;
  if (index >= p.shape.num_layers * p.shape.rows) {
    return;
  }
  const StateRow row(p, index);
  if (p.format == StateFormat::kBf16) {
    auto* codes = reinterpret_cast<uint16_t*>(row.codes);
    for (int i = lane; i < p.shape.cols; i += 32) {
      StoreGlobal(codes + i, FloatToBFloat16(LoadGlobal(row.values + i)));
    }
    return;
  }
  uint32_t max = 0;
  for (int i = lane; i < p.shape.cols; i += 32) {
    const uint32_t bits = FloatBits(LoadGlobal(row.values + i)) & 0x7FFFFFFFu;
    max = bits > max ? bits : max;
  }
  const StateScale scale = MakeStateScale(MaxInWarp(max));
  if (lane == 0) {
    StoreGlobal(row.scale, scale.scale);
  }
  auto* codes = reinterpret_cast<int8_t*>(row.codes);
  for (int i = lane; i < p.shape.cols; i += 32) {
    StoreGlobal(codes + i, EncodeStateValue(LoadGlobal(row.values + i), scale.inverse));
  }
}

// Grid: as above.
__global__ void __launch_bounds__(32 * kCodecWarps) DecodeStateKernel(StateCodecParams p) {
  BeginKernel();
  const int lane = ThreadIndexX() & 31;
  const int64_t index = int64_t{BlockIndexX()} * kCodecWarps + ThreadIndexX() / 32;
  if (index >= p.shape.num_layers * p.shape.rows) {
    return;
  }
  const StateRow row(p, index);
  if (p.format == StateFormat::kBf16) {
    const auto* codes = reinterpret_cast<const uint16_t*>(row.codes);
    for (int i = lane; i < p.shape.cols; i += 32) {
      StoreGlobal(row.values + i, BFloat16ToFloat(LoadGlobal(codes + i)));
    }
    return;
  }
  const float scale = LoadGlobal(row.scale);
  const auto* codes = reinterpret_cast<const int8_t*>(row.codes);
  for (int i = lane; i < p.shape.cols; i += 32) {
    StoreGlobal(row.values + i, DecodeStateValue(LoadGlobal(codes + i), scale));
  }
}

}  // namespace turbomind::cuda
