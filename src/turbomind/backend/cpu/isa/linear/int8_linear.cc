// ⑥⑦ Linear layers with activations of 8 bits: the packing of activations, and the kernel of each
// format. The arithmetic of one tile is in int8_<instruction set>.h.

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/linear.h"
#include "turbomind/backend/cpu/isa/linear/quantize_activations.h"
#include "turbomind/backend/cpu/isa/linear/tile_loop.h"
#include "turbomind/backend/cpu/packed_layout.h"

#if defined(TM_ISA_avx512)
#include "turbomind/backend/cpu/isa/linear/int8_avx512.h"
#elif defined(TM_ISA_avx2)
#include "turbomind/backend/cpu/isa/linear/int8_avx2.h"
#else
#include "turbomind/backend/cpu/isa/linear/int8_scalar.h"
#endif

namespace turbomind::TM_ISA {
namespace {

TM_HD int32_t SumOfHalf(const int8_t* codes) {
  int32_t sum = 0;
  for (int i = 0; i < kQuantBlock / 2; ++i) {
    sum += codes[i];
  }
  return sum;
}

void PackQuantPanel(const PackPanelArgs& a) {
  const int rows = a.num_rows;
  const int row_bytes = Int8RowBytes(a.format);
  const int step_bytes = Int8PanelStepBytes(a.format, rows, row_bytes);
  const int64_t steps = NumSteps(a.format, a.cols);
  for (int r = 0; r < rows; ++r) {
    const float* x = RowToPack(a, r);
    for (int64_t s = 0; s < steps; ++s) {
      uint8_t* step = a.panel + s * step_bytes;
      uint8_t* row = step + r * row_bytes;
      uint8_t* scale_at = step + rows * row_bytes + 4 * r;
      uint8_t* offset_at = scale_at + 4 * rows;
      auto* codes = reinterpret_cast<int8_t*>(row);
      int32_t sum;
      const float scale = QuantizeInt8Block(x + s * kQuantBlock, codes, sum);
      StoreFloat(scale, scale_at);
      if (HasMinimum(a.format)) {
        StoreFloat(scale * static_cast<float>(sum), offset_at);
      } else if (a.format == MatrixFormat::kQ6_K) {
        const int32_t first = SumOfHalf(codes);
        StoreOffset(a.format, first, offset_at);
        StoreOffset(a.format, sum - first, offset_at + 4 * rows);
      } else {
        StoreOffset(a.format, sum, offset_at);
      }
      ArrangeInt8Row(a.format, row);
    }
  }
}

template <MatrixFormat F>
struct Int8Kernel {
  static constexpr MatrixFormat kFormat = F;
  template <int R>
  static constexpr int kTiles = kInt8TilesAtOnce<F, R>;

  static constexpr int64_t PanelBytes(int64_t cols) {
    return NumSteps(F, cols) * Int8PanelStepBytes(F, kPanelRows, Int8RowBytes(F));
  }

  template <int R, int T>
  static void Multiply(const TileRun& run) {
    MultiplyInt8Tiles<F, R, T>(run);
  }
};

// Returns the bytes of a full panel.
int64_t FullInt8PanelBytes(MatrixFormat format, int64_t cols) {
  if (!HasInt8Panels(format)) {
    return PanelBytes(format, cols, kPanelRows);
  }
  return NumSteps(format, cols) * Int8PanelStepBytes(format, kPanelRows, Int8RowBytes(format));
}

}  // namespace

void PackInt8Panel(const PackPanelArgs& args) {
  if (HasInt8Panels(args.format)) {
    PackQuantPanel(args);
  } else {
    PackPanel(args);
  }
}

PanelPlan PlanInt8Panels(MatrixFormat format, int64_t cols, int /*all_rows*/) {
  return PlanOf(FullInt8PanelBytes(format, cols), RowBlockBytes(format));
}

void MultiplyInt8(const MultiplyArgs& args) {
  switch (args.format) {
    case MatrixFormat::kQ4_0:
      return MultiplyPanels<Int8Kernel<MatrixFormat::kQ4_0>>(args);
    case MatrixFormat::kQ4_1:
      return MultiplyPanels<Int8Kernel<MatrixFormat::kQ4_1>>(args);
    case MatrixFormat::kQ8_0:
      return MultiplyPanels<Int8Kernel<MatrixFormat::kQ8_0>>(args);
    case MatrixFormat::kQ4_K:
      return MultiplyPanels<Int8Kernel<MatrixFormat::kQ4_K>>(args);
    case MatrixFormat::kQ5_K:
      return MultiplyPanels<Int8Kernel<MatrixFormat::kQ5_K>>(args);
    case MatrixFormat::kQ6_K:
      return MultiplyPanels<Int8Kernel<MatrixFormat::kQ6_K>>(args);
    case MatrixFormat::kF32:
    case MatrixFormat::kBF16:
    case MatrixFormat::kMxfp4:
    case MatrixFormat::kMxfp4Split:
    case MatrixFormat::kNvfp4:
      return Multiply(args);
  }
}

void FillInt8Kernels(CpuDenseKernels& kernels) {
  kernels.pack_panel = PackInt8Panel;
  kernels.plan_panels = PlanInt8Panels;
  kernels.multiply = MultiplyInt8;
}

}  // namespace turbomind::TM_ISA
