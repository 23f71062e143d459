#pragma once

#include <cstdint>

namespace turbomind::cuda {

// What one access moves.
template <int kBytes>
struct alignas(kBytes) Words {
  uint32_t v[kBytes / 4];
};

}  // namespace turbomind::cuda
