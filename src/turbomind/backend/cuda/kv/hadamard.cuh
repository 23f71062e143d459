#pragma once

// ⑥⑦ The rotation of K and of latents by a warp, with the bits of the CPU: stages h = 1, 2, 4, ...,
// then one multiplication by RotationNorm.

#include "turbomind/backend/cuda/runtime/intrinsics.cuh"
#include "turbomind/kv/layout.h"

namespace turbomind::cuda {

// Run the stages below min(size, 32 * kValues). Lane i of the warp has values i * kValues and
// following.
template <int kValues>
TM_DEVICE void HadamardStages(float (&x)[kValues], int lane, int size) {
#pragma unroll
  for (int h = 1; h < kValues; h *= 2) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if ((i & h) == 0) {
        const float a = x[i];
        const float b = x[i + h];
        x[i] = a + b;
        x[i + h] = a - b;
      }
    }
  }
  for (int mask = 1; mask < 32 && mask * kValues < size; mask *= 2) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const float other = ShuffleXor(x[i], mask);
      x[i] = (lane & mask) != 0 ? other - x[i] : other + x[i];
    }
  }
}

// Rotate a row in runs of `size` values, at least kValues. The warp has a piece of 32 * kValues
// values after the other.
template <int kPieces, int kValues>
TM_DEVICE void RotateRow(float (&x)[kPieces][kValues], int lane, int size) {
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    HadamardStages(x[piece], lane, size);
  }
#pragma unroll
  for (int h = 1; h < kPieces; h *= 2) {
    if (h * 32 * kValues < size) {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        if ((piece & h) == 0) {
#pragma unroll
          for (int i = 0; i < kValues; ++i) {
            const float a = x[piece][i];
            const float b = x[piece + h][i];
            x[piece][i] = a + b;
            x[piece + h][i] = a - b;
          }
        }
      }
    }
  }
  const float norm = RotationNorm(size);
#pragma unroll
  for (int i = 0; i < kPieces * kValues; ++i) {
    x[i / kValues][i % kValues] *= norm;
  }
}

}  // namespace turbomind::cuda
