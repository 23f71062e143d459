// ⑥⑦ Linear layers: the packing of activations, and the kernel of each format. The arithmetic of
// one tile is in linear_<instruction set>.h.

#include "turbomind/backend/cpu/isa/linear/linear.h"

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/quantize_activations.h"
#include "turbomind/backend/cpu/isa/linear/tile_loop.h"
#include "turbomind/backend/cpu/packed_layout.h"

#if defined(TM_ISA_avx512)
#include "turbomind/backend/cpu/isa/linear/k_quants_avx512.h"
#include "turbomind/backend/cpu/isa/linear/linear_avx512.h"
#include "turbomind/backend/cpu/isa/linear/nvfp4_avx512.h"
#elif defined(TM_ISA_avx2)
#include "turbomind/backend/cpu/isa/linear/k_quants_avx2.h"
#include "turbomind/backend/cpu/isa/linear/linear_avx2.h"
#include "turbomind/backend/cpu/isa/linear/nvfp4_avx2.h"
#else
#include "turbomind/backend/cpu/isa/linear/k_quants_scalar.h"
#include "turbomind/backend/cpu/isa/linear/linear_scalar.h"
#include "turbomind/backend/cpu/isa/linear/nvfp4_scalar.h"
#endif

namespace turbomind::TM_ISA {
namespace {

// Rounds to nearest even. Subnormals become zero, because vdpbf16ps treats them as zero.
TM_HD uint16_t ToBF16(float x) {
  const uint32_t bits = FloatBits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > kInfinityBits) {
    return static_cast<uint16_t>((bits >> 16) | 0x40u);
  }
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (rounded & 0x7f80u) == 0 ? static_cast<uint16_t>(rounded & 0x8000u)
                                  : static_cast<uint16_t>(rounded);
}

// Returns the sum of the first 16 codes of a row from QuantizeBlock.
TM_HD int32_t SumOfHalf(const uint8_t* row) {
  int32_t sum = 0;
  for (int i = 0; i < kQuantBlock / 2; ++i) {
    sum += static_cast<int8_t>(row[i]) * 256 + static_cast<int8_t>(row[kQuantBlock + i]);
  }
  return sum;
}

void PackQuantPanel(const PackPanelArgs& a) {
  const int rows = a.num_rows;
  const int64_t steps = NumSteps(a.format, a.cols);
  for (int r = 0; r < rows; ++r) {
    const float* x = RowToPack(a, r);
    for (int64_t s = 0; s < steps; ++s) {
      uint8_t* step = a.panel + s * PanelStepBytes(a.format, rows);
      uint8_t* scales = step + rows * kQuantRowBytes;
      uint8_t* offsets = scales + rows * 4;
      uint8_t* row = step + r * kQuantRowBytes;
      int32_t sum;
      const float scale = QuantizeBlock(x + s * kQuantBlock, reinterpret_cast<int8_t*>(row), sum);
      StoreFloat(scale, scales + 4 * r);
      if (HasMinimum(a.format)) {
        StoreFloat(scale * static_cast<float>(sum), offsets + 4 * r);
      } else if (HasHalfScales(a.format)) {
        const int32_t first = SumOfHalf(row);
        StoreOffset(a.format, first, offsets + 4 * r);
        StoreOffset(a.format, sum - first, offsets + 4 * (rows + r));
      } else {
        StoreOffset(a.format, sum, offsets + 4 * r);
      }
      ArrangeRow(a.format, row);
    }
  }
}

void PackBF16Panel(const PackPanelArgs& a) {
  for (int r = 0; r < a.num_rows; ++r) {
    const float* x = RowToPack(a, r);
    for (int64_t c = 0; c < a.cols; c += 2) {
      const uint16_t pair[2] = {ToBF16(x[c]), c + 1 < a.cols ? ToBF16(x[c + 1]) : uint16_t{0}};
      __builtin_memcpy(a.panel + (c / 2 * a.num_rows + r) * 4, pair, sizeof(pair));
    }
  }
}

void PackF32Panel(const PackPanelArgs& a) {
  for (int r = 0; r < a.num_rows; ++r) {
    const float* x = RowToPack(a, r);
    for (int64_t c = 0; c < a.cols; ++c) {
      StoreFloat(x[c], a.panel + (c * a.num_rows + r) * 4);
    }
  }
}

template <MatrixFormat F>
struct TileKernel {
  static constexpr MatrixFormat kFormat = F;
  template <int R>
  static constexpr int kTiles = F == MatrixFormat::kNvfp4 ? kNvTilesAtOnce<R> : kTilesAtOnce<R>;

  static constexpr int64_t PanelBytes(int64_t cols) {
    return turbomind::PanelBytes(F, cols, kPanelRows);
  }

  template <int R, int T>
  static void Multiply(const TileRun& run) {
    if constexpr (IsKQuant(F)) {
      MultiplyKTiles<F, R, T>(run);
    } else if constexpr (F == MatrixFormat::kNvfp4) {
      MultiplyNvTiles<R, T>(run);
    } else {
      MultiplyTiles<F, R, T>(run);
    }
  }
};

template <MatrixFormat F>
void MultiplyFormat(const MultiplyArgs& a) {
  MultiplyPanels<TileKernel<F>>(a);
}

}  // namespace

void PackPanel(const PackPanelArgs& args) {
  switch (args.format) {
    case MatrixFormat::kF32:
      return PackF32Panel(args);
    case MatrixFormat::kBF16:
      return PackBF16Panel(args);
    case MatrixFormat::kQ4_0:
    case MatrixFormat::kQ4_1:
    case MatrixFormat::kQ8_0:
    case MatrixFormat::kQ4_K:
    case MatrixFormat::kQ5_K:
    case MatrixFormat::kQ6_K:
    case MatrixFormat::kNvfp4:
      return PackQuantPanel(args);
    case MatrixFormat::kMxfp4:
    case MatrixFormat::kMxfp4Split:
      return PackMxfp4Panel(args);
  }
}

PanelPlan PlanPanels(MatrixFormat format, int64_t cols, int /*all_rows*/) {
  return PlanOf(PanelBytes(format, cols, kPanelRows), RowBlockBytes(format));
}

void Multiply(const MultiplyArgs& args) {
  switch (args.format) {
    case MatrixFormat::kF32:
      return MultiplyFormat<MatrixFormat::kF32>(args);
    case MatrixFormat::kBF16:
      return MultiplyFormat<MatrixFormat::kBF16>(args);
    case MatrixFormat::kQ4_0:
      return MultiplyFormat<MatrixFormat::kQ4_0>(args);
    case MatrixFormat::kQ4_1:
      return MultiplyFormat<MatrixFormat::kQ4_1>(args);
    case MatrixFormat::kQ8_0:
      return MultiplyFormat<MatrixFormat::kQ8_0>(args);
    case MatrixFormat::kQ4_K:
      return MultiplyFormat<MatrixFormat::kQ4_K>(args);
    case MatrixFormat::kQ5_K:
      return MultiplyFormat<MatrixFormat::kQ5_K>(args);
    case MatrixFormat::kQ6_K:
      return MultiplyFormat<MatrixFormat::kQ6_K>(args);
    case MatrixFormat::kNvfp4:
      return MultiplyFormat<MatrixFormat::kNvfp4>(args);
    case MatrixFormat::kMxfp4:
    case MatrixFormat::kMxfp4Split:
      return MultiplyMxfp4(args);
  }
}

int64_t MultiplyScratchBytes(MatrixFormat format, int64_t cols) {
  return IsMxfp4(format) ? cols / kQuantBlock * kMxTileBlockBytes : 0;
}

}  // namespace turbomind::TM_ISA
