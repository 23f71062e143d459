#pragma once

#include <cstdint>

namespace turbomind::cuda {

// The bytes of one vectorized memory access.
template <int kBytes>
struct alignas(kBytes) Words {
  uint32_t v[kBytes / 4];
};

}  // namespace turbomind::cuda
