#pragma once

// The rotation of K on the host.

#include "turbomind/kv/layout.h"

namespace turbomind {

// Applies the normalized Hadamard rotation of WriteKv to `size` values, a power of two. It is its
// own inverse.
inline void RotateRun(float* x, int size) {
  for (int h = 1; h < size; h *= 2) {
    for (int base = 0; base < size; base += 2 * h) {
      for (int i = base; i < base + h; ++i) {
        const float a = x[i];
        const float b = x[i + h];
        x[i] = a + b;
        x[i + h] = a - b;
      }
    }
  }
  const float norm = RotationNorm(size);
  for (int i = 0; i < size; ++i) {
    x[i] *= norm;
  }
}

}  // namespace turbomind
