#pragma once

// MXFP4 in portable code: slow, but the simplest definition of the arithmetic.

#include <cstdint>

#include "turbomind/backend/cpu/isa/mxfp4/mxfp4.h"
#include "turbomind/core/float_convert.h"

namespace turbomind::TM_ISA {

TM_HD int32_t HalvesAt(const MxPanelRow& x, int nibble, int at) {
  return 256 * static_cast<int8_t>(x.high[nibble][at]) + static_cast<int8_t>(x.low[nibble][at]);
}

TM_HD int32_t TwiceE2M1(int code) {
  return static_cast<int32_t>(2.f * E2M1ToFloat(static_cast<uint8_t>(code)));
}

// Returns Σ 2 * E2M1(code) * activation for block `block` of a step. `codes` are its 16 bytes.
TM_HD int32_t DotMxBlock(const uint8_t* codes, const MxPanelRow& x, int block) {
  int32_t sum = 0;
  for (int j = 0; j < 16; ++j) {
    sum += TwiceE2M1(codes[j] & 0x0f) * HalvesAt(x, 0, 16 * block + j);
    sum += TwiceE2M1(codes[j] >> 4) * HalvesAt(x, 1, 16 * block + j);
  }
  return sum;
}

template <MatrixFormat F>
TM_HD float DotMxRow(const MxRun& run, int output, int num_rows, int r) {
  float sums[kMxStepBlocks] = {};
  for (int64_t b = 0; b < kMxStepBlocks * MxSteps(run.blocks); ++b) {
    const int lane = static_cast<int>(b % kMxStepBlocks);
    const MxPanelRow x = MxRowAt(run.panel, b / kMxStepBlocks, num_rows, r);
    float d;
    __builtin_memcpy(&d, x.scales + 16 * lane, sizeof(d));
    int32_t dot = 0;
    uint8_t exponent = 0;
    if (b < run.blocks) {
      const uint8_t* block = run.rows[output] + b * kMxBlockBytes<F>;
      exponent = F == MatrixFormat::kMxfp4 ? block[0] : run.scales[output][b];
      dot = DotMxBlock(block + kMxCodesAt<F>, x, lane);
    }
    sums[lane] = __builtin_fmaf(static_cast<float>(dot) * d, E8M0ToFloat(exponent), sums[lane]);
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

template <MatrixFormat F, int R>
void MultiplyMxRows(const MxRun& run) {
  for (int o = 0; o < run.num_outputs; ++o) {
    for (int r = 0; r < R; ++r) {
      const float sum = DotMxRow<F>(run, o, R, r);
      float* y = run.y + r * run.y_stride + o;
      const float out = run.bias != nullptr ? sum + run.bias[o] : sum;
      *y = run.accumulate ? out + *y : out;
    }
  }
}

}  // namespace turbomind::TM_ISA
