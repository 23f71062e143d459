#include "turbomind/ops/nvfp4.h"

namespace turbomind {

void DequantizeNvBlock(const uint8_t* block, float factor, float* out) {
  for (int c = 0; c < kNvBlock; ++c) {
    out[c] = E2M1ToFloat(NvCode(block, c)) * (NvScaleToFloat(block[c / kNvGroup]) * factor);
  }
}

}  // namespace turbomind
