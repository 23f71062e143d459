// ⑥⑦ Packs activations in BF16 for tiles, in the order in which weights are unpacked.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/backend/cpu/isa/amx/bf16_linear.h"
#include "turbomind/backend/cpu/isa/amx/linear.h"
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

// Rounds 32 columns and stores them in their order.
TM_HD void StoreStep(__m512 first, __m512 second, __m512i order, uint8_t* to) {
  const auto rounded = (__m512i)_mm512_cvtne2ps_pbh(second, first);
  _mm512_store_si512(to, _mm512_permutexvar_epi16(order, rounded));
}

// Loads the first `count` of 16 columns, followed by zeros.
TM_HD __m512 LoadColumns(const float* x, int64_t count) {
  const int64_t bits = count <= 0 ? 0 : count >= 16 ? 0xffff : (1 << count) - 1;
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>(bits), x);
}

// `to` is the row's place in the first step of the panel.
void PackRow(const float* x, int64_t cols, __m512i order, uint8_t* to) {
  int64_t c = 0;
  for (; c + kBf16StepCols <= cols; c += kBf16StepCols, to += kBf16PanelStep) {
    StoreStep(_mm512_loadu_ps(x + c), _mm512_loadu_ps(x + c + 16), order, to);
  }
  if (c < cols) {
    StoreStep(LoadColumns(x + c, cols - c), LoadColumns(x + c + 16, cols - c - 16), order, to);
  }
}

void ZeroRow(int64_t cols, uint8_t* to) {
  for (int64_t s = 0; s < Bf16Steps(cols); ++s) {
    _mm512_store_si512(to + s * kBf16PanelStep, _mm512_setzero_si512());
  }
}

}  // namespace

void PackBf16Panel(const PackPanelArgs& args) {
  if (!OnBf16Tiles(args.format, args.all_rows)) {
    return PackPanel(args);
  }
  const __m512i order = _mm512_load_si512(OrderOf(args.format).from);
  for (int r = 0; r < kBf16PanelRows; ++r) {
    uint8_t* to = args.panel + r * 2 * kBf16StepCols;
    if (r < args.num_rows) {
      PackRow(RowToPack(args, r), args.cols, order, to);
    } else {
      ZeroRow(args.cols, to);
    }
  }
}

}  // namespace turbomind::TM_ISA
