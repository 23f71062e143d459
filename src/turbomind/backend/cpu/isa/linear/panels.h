#pragma once

// Panels of quantized activations, and the products with them, for every way to quantize. A class
// of activations has
//   static bool Has(MatrixFormat format);  // whether there are kernels for weights of the format
//   static int RowBytes(MatrixFormat format);  // codes of a row in a step
//   static float Quantize(const float* x, uint8_t* row, int32_t& sum);  // 32 columns; the scale
//   static int32_t SumOfHalf(const uint8_t* row);  // the first 16 codes; not if no format needs it
//   static void Arrange(MatrixFormat format, uint8_t* row);  // codes to the order of the kernels
//   template <MatrixFormat F, int R> static constexpr int kTiles;  // at once with R rows
//   template <MatrixFormat F, int R, int T> static void Multiply(const TileRun& run);

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/linear.h"
#include "turbomind/backend/cpu/isa/linear/quantize_activations.h"
#include "turbomind/backend/cpu/isa/linear/tile_loop.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::TM_ISA {

// Bytes of a step: the codes of all rows, their scales, then their offsets or sums.
template <class A>
TM_HD constexpr int QuantStepBytes(MatrixFormat format, int rows) {
  return rows * (A::RowBytes(format) + (HasHalfScales(format) ? 12 : 8));
}

// Bytes of a full panel.
template <class A>
TM_HD constexpr int64_t QuantPanelBytes(MatrixFormat format, int64_t cols) {
  return NumSteps(format, cols) * QuantStepBytes<A>(format, kPanelRows);
}

template <class A>
void PackQuantPanel(const PackPanelArgs& a) {
  const int rows = a.num_rows;
  const int row_bytes = A::RowBytes(a.format);
  const int step_bytes = QuantStepBytes<A>(a.format, rows);
  const int64_t steps = NumSteps(a.format, a.cols);
  for (int r = 0; r < rows; ++r) {
    const float* x = RowToPack(a, r);
    for (int64_t s = 0; s < steps; ++s) {
      uint8_t* step = a.panel + s * step_bytes;
      uint8_t* row = step + r * row_bytes;
      uint8_t* scale_at = step + rows * row_bytes + 4 * r;
      uint8_t* offset_at = scale_at + 4 * rows;
      int32_t sum;
      const float scale = A::Quantize(x + s * kQuantBlock, row, sum);
      StoreFloat(scale, scale_at);
      if (HasMinimum(a.format)) {
        StoreFloat(scale * static_cast<float>(sum), offset_at);
      } else if (!HasHalfScales(a.format)) {
        StoreOffset(a.format, sum, offset_at);
      } else if constexpr (requires { A::SumOfHalf(row); }) {
        const int32_t first = A::SumOfHalf(row);
        StoreOffset(a.format, first, offset_at);
        StoreOffset(a.format, sum - first, offset_at + 4 * rows);
      }
      A::Arrange(a.format, row);
    }
  }
}

template <class A>
PanelPlan PlanQuantPanels(MatrixFormat format, int64_t cols, int /*all_rows*/) {
  return PlanOf(QuantPanelBytes<A>(format, cols), RowBlockBytes(format));
}

// The kernel of a format with activations A, for MultiplyPanels.
template <class A, MatrixFormat F>
struct QuantKernel {
  static constexpr MatrixFormat kFormat = F;
  template <int R>
  static constexpr int kTiles = A::template kTiles<F, R>;

  static constexpr int64_t PanelBytes(int64_t cols) { return QuantPanelBytes<A>(F, cols); }

  template <int R, int T>
  static void Multiply(const TileRun& run) {
    A::template Multiply<F, R, T>(run);
  }
};

// REQUIRES: A::Has(args.format).
template <class A>
void MultiplyQuant(const MultiplyArgs& args) {
  DispatchMatrix(args.format, [&]<MatrixFormat F>() {
    if constexpr (A::Has(F)) {
      MultiplyPanels<QuantKernel<A, F>>(args);
    }
  });
}

}  // namespace turbomind::TM_ISA
