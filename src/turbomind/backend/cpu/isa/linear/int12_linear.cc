// ⑥⑦ Linear layers with activations of 12 bits, for AVX-512 alone: their packing, and the kernel of
// each format whose codes have 4 bits. The arithmetic of one tile is in int12_avx512.h.

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/int12_activations.h"
#include "turbomind/backend/cpu/isa/linear/int12_avx512.h"
#include "turbomind/backend/cpu/isa/linear/linear.h"
#include "turbomind/backend/cpu/isa/linear/quantize_activations.h"
#include "turbomind/backend/cpu/isa/linear/tile_loop.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::TM_ISA {
namespace {

void PackQuantPanel(const PackPanelArgs& a) {
  const int rows = a.num_rows;
  const int64_t steps = NumSteps(a.format, a.cols);
  for (int r = 0; r < rows; ++r) {
    const float* x = RowToPack(a, r);
    for (int64_t s = 0; s < steps; ++s) {
      uint8_t* step = a.panel + s * Int12PanelStepBytes(rows);
      uint8_t* scale_at = step + rows * kInt12RowBytes + 4 * r;
      uint8_t* offset_at = scale_at + 4 * rows;
      int32_t sum;
      const float scale = QuantizeInt12Block(x + s * kQuantBlock, step + r * kInt12RowBytes, sum);
      StoreFloat(scale, scale_at);
      if (HasMinimum(a.format)) {
        StoreFloat(scale * static_cast<float>(sum), offset_at);
      } else {
        StoreOffset(a.format, sum, offset_at);
      }
    }
  }
}

int64_t QuantPanelBytes(MatrixFormat format, int64_t cols) {
  return NumSteps(format, cols) * Int12PanelStepBytes(kPanelRows);
}

template <MatrixFormat F>
struct Int12Kernel {
  static constexpr MatrixFormat kFormat = F;
  template <int R>
  static constexpr int kTiles = kTilesAtOnce<R>;

  static int64_t PanelBytes(int64_t cols) { return QuantPanelBytes(F, cols); }

  template <int R, int T>
  static void Multiply(const TileRun& run) {
    MultiplyInt12Tiles<F, R, T>(run);
  }
};

}  // namespace

void PackInt12Panel(const PackPanelArgs& args) {
  if (HasInt12Panels(args.format)) {
    PackQuantPanel(args);
  } else {
    PackPanel(args);
  }
}

PanelPlan PlanInt12Panels(MatrixFormat format, int64_t cols, int all_rows) {
  return HasInt12Panels(format) ? PlanOf(QuantPanelBytes(format, cols), RowBlockBytes(format))
                                : PlanPanels(format, cols, all_rows);
}

void MultiplyInt12(const MultiplyArgs& args) {
  switch (args.format) {
    case MatrixFormat::kQ4_0:
      return MultiplyPanels<Int12Kernel<MatrixFormat::kQ4_0>>(args);
    case MatrixFormat::kQ4_1:
      return MultiplyPanels<Int12Kernel<MatrixFormat::kQ4_1>>(args);
    case MatrixFormat::kQ4_K:
      return MultiplyPanels<Int12Kernel<MatrixFormat::kQ4_K>>(args);
    case MatrixFormat::kF32:
    case MatrixFormat::kBF16:
    case MatrixFormat::kQ8_0:
    case MatrixFormat::kQ5_K:
    case MatrixFormat::kQ6_K:
    case MatrixFormat::kMxfp4:
    case MatrixFormat::kMxfp4Split:
    case MatrixFormat::kNvfp4:
      return Multiply(args);
  }
}

void FillInt12Kernels(CpuDenseKernels& kernels) {
  kernels.pack_panel = PackInt12Panel;
  kernels.plan_panels = PlanInt12Panels;
  kernels.multiply = MultiplyInt12;
}

}  // namespace turbomind::TM_ISA
