// ⑥⑦ Linear layers with activations of 8 bits: the packing of activations, and the kernel of each
// format. The arithmetic of one tile is in int8_<instruction set>.h.

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/linear.h"
#include "turbomind/backend/cpu/isa/linear/panels.h"
#include "turbomind/backend/cpu/isa/linear/quantize_activations.h"
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

struct Int8Activations {
  static constexpr bool Has(MatrixFormat format) { return HasInt8Panels(format); }
  static constexpr int RowBytes(MatrixFormat format) { return Int8RowBytes(format); }
  static TM_HD float Quantize(const float* x, uint8_t* row, int32_t& sum) {
    return QuantizeInt8Block(x, reinterpret_cast<int8_t*>(row), sum);
  }
  static TM_HD int32_t SumOfHalf(const uint8_t* row) {
    int32_t sum = 0;
    for (int i = 0; i < kQuantBlock / 2; ++i) {
      sum += static_cast<int8_t>(row[i]);
    }
    return sum;
  }
  static TM_HD void Arrange(MatrixFormat format, uint8_t* row) { ArrangeInt8Row(format, row); }

  template <MatrixFormat F, int R>
  static constexpr int kTiles = kInt8TilesAtOnce<F, R>;
  template <MatrixFormat F, int R, int T>
  static void Multiply(const TileRun& run) {
    MultiplyInt8Tiles<F, R, T>(run);
  }
};

}  // namespace

void PackInt8Panel(const PackPanelArgs& args) { PackQuantPanel<Int8Activations>(args); }

PanelPlan PlanInt8Panels(MatrixFormat format, int64_t cols, int all_rows) {
  return PlanQuantPanels<Int8Activations>(format, cols, all_rows);
}

void MultiplyInt8(const MultiplyArgs& args) { MultiplyQuant<Int8Activations>(args); }

void FillInt8Kernels(CpuDenseKernels& kernels) {
  kernels.coarse = {.computes = Int8Activations::Has,
                    .pack_panel = PackInt8Panel,
                    .plan_panels = PlanInt8Panels,
                    .multiply = MultiplyInt8,
                    .scratch_bytes = MultiplyScratchBytes};
}

}  // namespace turbomind::TM_ISA
