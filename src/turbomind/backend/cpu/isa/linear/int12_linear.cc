// ⑥⑦ Linear layers with activations of 12 bits, for AVX-512 alone: their packing, and the kernel of
// each format whose codes have 4 bits. The arithmetic of one tile is in int12_avx512.h.

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/int12_activations.h"
#include "turbomind/backend/cpu/isa/linear/int12_avx512.h"
#include "turbomind/backend/cpu/isa/linear/linear.h"
#include "turbomind/backend/cpu/isa/linear/panels.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::TM_ISA {
namespace {

struct Int12Activations {
  static constexpr bool Has(MatrixFormat format) { return HasInt12Panels(format); }
  static constexpr int RowBytes(MatrixFormat /*format*/) { return kInt12RowBytes; }
  static TM_HD float Quantize(const float* x, uint8_t* row, int32_t& sum) {
    return QuantizeInt12Block(x, row, sum);
  }
  static TM_HD void Arrange(MatrixFormat /*format*/, uint8_t* /*row*/) {}

  template <MatrixFormat F, int R>
  static constexpr int kTiles = kTilesAtOnce<R>;
  template <MatrixFormat F, int R, int T>
  static void Multiply(const TileRun& run) {
    MultiplyInt12Tiles<F, R, T>(run);
  }
};

}  // namespace

void FillInt12Kernels(CpuDenseKernels& kernels) {
  kernels.coarse = {.computes = Int12Activations::Has,
                    .pack_panel = PackQuantPanel<Int12Activations>,
                    .plan_panels = PlanQuantPanels<Int12Activations>,
                    .multiply = MultiplyQuant<Int12Activations>,
                    .scratch_bytes = MultiplyScratchBytes};
}

}  // namespace turbomind::TM_ISA
