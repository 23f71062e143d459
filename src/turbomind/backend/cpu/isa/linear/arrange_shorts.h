#pragma once

// Activations as int16, for kernels that multiply codes of more than 4 bits with them.

#include <cstdint>

#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::TM_ISA {

// Returns the column of number i of a row of int16: the first and the third of four adjacent
// columns come first, then the second and the fourth.
TM_HD constexpr int ShortColumn(int i) { return i / 4 * 4 + i % 2 * 2 + i % 4 / 2; }

// Rearranges a row of a step from QuantizeBlock's layout to int16.
TM_HD void ArrangeShorts(uint8_t* row) {
  int16_t pairs[kQuantBlock];
  for (int i = 0; i < kQuantBlock; ++i) {
    const int8_t* high = reinterpret_cast<const int8_t*>(row) + ShortColumn(i);
    pairs[i] = static_cast<int16_t>(high[0] * 256 + high[kQuantBlock]);
  }
  __builtin_memcpy(row, pairs, sizeof(pairs));
}

}  // namespace turbomind::TM_ISA
