// ⑥⑦ Packs activations in BF16 for tiles, in the order in which weights are unpacked.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/backend/cpu/isa/amx/bf16_linear.h"
#include "turbomind/backend/cpu/isa/linear/linear.h"

namespace turbomind::TM_ISA {
namespace {

// The column of each place of a step.
struct ColumnOrder {
  alignas(64) uint16_t from[kBf16StepCols];
};

constexpr ColumnOrder MakeColumnOrder(MatrixFormat format) {
  ColumnOrder order = {};
  for (int i = 0; i < kBf16StepCols; ++i) {
    order.from[i] = static_cast<uint16_t>(ColumnAt(format, i));
  }
  return order;
}

constexpr ColumnOrder kOrders[] = {MakeColumnOrder(MatrixFormat::kBF16),
                                   MakeColumnOrder(MatrixFormat::kMxfp4Split),
                                   MakeColumnOrder(MatrixFormat::kQ4_0)};

const ColumnOrder& OrderOf(MatrixFormat format) {
  return kOrders[format == MatrixFormat::kBF16 ? 0 : format == MatrixFormat::kMxfp4Split ? 1 : 2];
}

// Returns the lanes of 16 columns of which `count` exist.
TM_HD __mmask16 FirstColumns(int64_t count) {
  return static_cast<__mmask16>(count <= 0 ? 0 : count >= 16 ? 0xffff : (1 << count) - 1);
}

// Packs the columns from `first` on of all rows to a step.
void PackStep(const PackPanelArgs& a, int64_t first, __m512i order, uint8_t* step) {
  const __mmask16 lower = FirstColumns(a.cols - first);
  const __mmask16 upper = FirstColumns(a.cols - first - 16);
  for (int r = 0; r < a.num_rows; ++r) {
    const float* x = RowToPack(a, r) + first;
    const auto rounded = (__m512i)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(upper, x + 16),
                                                      _mm512_maskz_loadu_ps(lower, x));
    _mm512_store_si512(step + r * 2 * kBf16StepCols, _mm512_permutexvar_epi16(order, rounded));
  }
  for (int r = a.num_rows; r < kBf16PanelRows; ++r) {
    _mm512_store_si512(step + r * 2 * kBf16StepCols, _mm512_setzero_si512());
  }
}

}  // namespace

void PackBf16Panel(const PackPanelArgs& args) {
  const __m512i order = _mm512_load_si512(OrderOf(args.format).from);
  for (int64_t s = 0; s < Bf16Steps(args.cols); ++s) {
    PackStep(args, s * kBf16StepCols, order, args.panel + s * kBf16PanelStep);
  }
}

}  // namespace turbomind::TM_ISA
