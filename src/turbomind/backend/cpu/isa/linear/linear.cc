// ⑥⑦ Linear layers: the packing of activations, and the kernel of each format. The arithmetic of
// one tile is in linear_<instruction set>.h.

#include "turbomind/backend/cpu/isa/linear/linear.h"

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/panels.h"
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

// Activations of 16 bits: two int8 halves.
struct Int16Activations {
  static constexpr bool Has(MatrixFormat format) { return HasQuantPanels(format); }
  static constexpr int RowBytes(MatrixFormat /*format*/) { return kQuantRowBytes; }
  static TM_HD float Quantize(const float* x, uint8_t* row, int32_t& sum) {
    return QuantizeBlock(x, reinterpret_cast<int8_t*>(row), sum);
  }
  static TM_HD int32_t SumOfHalf(const uint8_t* row) {
    int32_t sum = 0;
    for (int i = 0; i < kQuantBlock / 2; ++i) {
      sum += static_cast<int8_t>(row[i]) * 256 + static_cast<int8_t>(row[kQuantBlock + i]);
    }
    return sum;
  }
  static TM_HD void Arrange(MatrixFormat format, uint8_t* row) { ArrangeRow(format, row); }

  template <MatrixFormat F, int R>
  static constexpr int kTiles = F == MatrixFormat::kNvfp4 ? kNvTilesAtOnce<R> : kTilesAtOnce<R>;
  template <MatrixFormat F, int R, int T>
  static void Multiply(const TileRun& run) {
    if constexpr (IsKQuant(F)) {
      MultiplyKTiles<F, R, T>(run);
    } else if constexpr (F == MatrixFormat::kNvfp4) {
      MultiplyNvTiles<R, T>(run);
    } else {
      static_assert(IsQuantized(F), "the family of the format needs a kernel");
      MultiplyTiles<F, R, T>(run);
    }
  }
};

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

// The kernel of FP32 or BF16 weights.
template <MatrixFormat F>
struct FloatKernel {
  static constexpr MatrixFormat kFormat = F;
  template <int R>
  static constexpr int kTiles = kTilesAtOnce<R>;

  static constexpr int64_t PanelBytes(int64_t cols) {
    return turbomind::PanelBytes(F, cols, kPanelRows);
  }

  template <int R, int T>
  static void Multiply(const TileRun& run) {
    MultiplyTiles<F, R, T>(run);
  }
};

}  // namespace

void PackPanel(const PackPanelArgs& args) {
  if (args.format == MatrixFormat::kF32) {
    PackF32Panel(args);
  } else if (args.format == MatrixFormat::kBF16) {
    PackBF16Panel(args);
  } else if (IsMxfp4(args.format)) {
    PackMxfp4Panel(args);
  } else {
    PackQuantPanel<Int16Activations>(args);
  }
}

PanelPlan PlanPanels(MatrixFormat format, int64_t cols, int /*all_rows*/) {
  return PlanOf(PanelBytes(format, cols, kPanelRows), RowBlockBytes(format));
}

void Multiply(const MultiplyArgs& args) {
  if (IsMxfp4(args.format)) {
    MultiplyMxfp4(args);
  } else if (args.format == MatrixFormat::kF32) {
    MultiplyPanels<FloatKernel<MatrixFormat::kF32>>(args);
  } else if (args.format == MatrixFormat::kBF16) {
    MultiplyPanels<FloatKernel<MatrixFormat::kBF16>>(args);
  } else {
    MultiplyQuant<Int16Activations>(args);
  }
}

int64_t MultiplyScratchBytes(MatrixFormat format, int64_t cols) {
  return IsMxfp4(format) ? cols / kQuantBlock * kMxTileBlockBytes : 0;
}

}  // namespace turbomind::TM_ISA
