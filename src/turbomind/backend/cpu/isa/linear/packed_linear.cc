// ⑥⑦ Linear layers with activations of 12 bits, for AVX-512 alone: their packing, and the kernel of
// each format whose codes have 4 bits. The arithmetic of one tile is in packed_avx512.h.

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/linear.h"
#include "turbomind/backend/cpu/isa/linear/packed_activations.h"
#include "turbomind/backend/cpu/isa/linear/packed_avx512.h"
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
      uint8_t* step = a.panel + s * PackedPanelStepBytes(rows);
      uint8_t* scale_at = step + rows * kPackedRowBytes + 4 * r;
      uint8_t* offset_at = scale_at + 4 * rows;
      int32_t sum;
      const float scale = QuantizePackedBlock(x + s * kQuantBlock, step + r * kPackedRowBytes, sum);
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
  return NumSteps(format, cols) * PackedPanelStepBytes(kPanelRows);
}

template <MatrixFormat F>
struct PackedKernel {
  static constexpr MatrixFormat kFormat = F;
  template <int R>
  static constexpr int kTiles = kTilesAtOnce<R>;

  static int64_t PanelBytes(int64_t cols) { return QuantPanelBytes(F, cols); }

  template <int R, int T>
  static void Multiply(const TileRun& run) {
    MultiplyPackedTiles<F, R, T>(run);
  }
};

}  // namespace

void PackPackedPanel(const PackPanelArgs& args) {
  if (HasPackedPanels(args.format)) {
    PackQuantPanel(args);
  } else {
    PackPanel(args);
  }
}

int64_t FullPackedPanelBytes(MatrixFormat format, int64_t cols) {
  return HasPackedPanels(format) ? QuantPanelBytes(format, cols) : FullPanelBytes(format, cols);
}

void MultiplyPacked(const MultiplyArgs& args) {
  switch (args.format) {
    case MatrixFormat::kQ4_0:
      return MultiplyPanels<PackedKernel<MatrixFormat::kQ4_0>>(args);
    case MatrixFormat::kQ4_1:
      return MultiplyPanels<PackedKernel<MatrixFormat::kQ4_1>>(args);
    case MatrixFormat::kQ4_K:
      return MultiplyPanels<PackedKernel<MatrixFormat::kQ4_K>>(args);
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

void FillPackedKernels(CpuDenseKernels& kernels) {
  kernels.pack_panel = PackPackedPanel;
  kernels.panel_bytes = FullPackedPanelBytes;
  kernels.multiply = MultiplyPacked;
}

}  // namespace turbomind::TM_ISA
