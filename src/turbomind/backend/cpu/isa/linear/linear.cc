// ⑥⑦ Linear layers: the loop over tiles and panels, and the packing of activations. The arithmetic
// of one tile is in linear_<instruction set>.h.

#include "turbomind/backend/cpu/isa/linear/linear.h"

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/quantize_activations.h"
#include "turbomind/backend/cpu/packed_layout.h"

#if defined(TM_ISA_avx512)
#include "turbomind/backend/cpu/isa/linear/linear_avx512.h"
#elif defined(TM_ISA_avx2)
#include "turbomind/backend/cpu/isa/linear/linear_avx2.h"
#else
#include "turbomind/backend/cpu/isa/linear/linear_scalar.h"
#endif

namespace turbomind::TM_ISA {
namespace {

constexpr int64_t kPrefetchBytes = 4096;  // prefetch distance of a tile with 2 to 11 rows

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

void PackQuantPanel(const PackPanelArgs& a) {
  const int rows = a.num_rows;
  const int64_t steps = NumSteps(a.format, a.cols);
  const int32_t zero_point = ZeroPoint(a.format);
  for (int r = 0; r < rows; ++r) {
    const float* x = RowToPack(a, r);
    for (int64_t s = 0; s < steps; ++s) {
      uint8_t* step = a.panel + s * PanelStepBytes(a.format, rows);
      uint8_t* scales = step + rows * kQuantRowBytes;
      uint8_t* offsets = scales + rows * 4;
      uint8_t* row = step + r * kQuantRowBytes;
      int32_t sum;
      const float scale = QuantizeBlock(x + s * kQuantBlock, reinterpret_cast<int8_t*>(row), sum);
      ArrangeRow(a.format, row);
      StoreFloat(scale, scales + 4 * r);
      if (a.format == MatrixFormat::kQ4_1) {
        StoreFloat(scale * static_cast<float>(sum), offsets + 4 * r);
      } else {
        const int32_t offset = -zero_point * sum;
        __builtin_memcpy(offsets + 4 * r, &offset, sizeof(offset));
      }
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
TileRun RunAt(const MultiplyArgs& a, int tile, int row) {
  TileRun run;
  run.tile_bytes = TileBytes(F, a.cols);
  run.tile = a.tiles + tile * run.tile_bytes;
  run.steps = NumSteps(F, a.cols);
  run.next = run.tile;
  run.panel = a.panels + row / kPanelRows * PanelBytes(F, a.cols, kPanelRows);
  run.bias = a.bias == nullptr ? nullptr : a.bias + tile * kTileRows;
  run.y = a.y + row * a.y_stride + tile * kTileRows;
  run.y_stride = a.y_stride;
  run.num_outputs = a.num_outputs - tile * kTileRows;
  run.accumulate = a.accumulate;
  return run;
}

// Multiplies all tiles with the last panel, which has R rows.
template <MatrixFormat F, int R>
void MultiplyPanel(const MultiplyArgs& a, int row) {
  constexpr int kTiles = kTilesAtOnce<R>;
  int tile = 0;
  for (; tile + kTiles <= a.num_tiles; tile += kTiles) {
    TileRun run = RunAt<F>(a, tile, row);
    run.next = run.tile + kPrefetchBytes;
    MultiplyTiles<F, R, kTiles>(run);
  }
  if constexpr (kTiles > 1) {
    for (; tile < a.num_tiles; ++tile) {
      MultiplyTiles<F, R, 1>(RunAt<F>(a, tile, row));
    }
  }
}

template <MatrixFormat F>
void MultiplyFormat(const MultiplyArgs& a) {
  const int full_rows = a.num_rows / kPanelRows * kPanelRows;
  for (int tile = 0; full_rows > 0 && tile < a.num_tiles; ++tile) {
    for (int row = 0; row < full_rows; row += kPanelRows) {
      TileRun run = RunAt<F>(a, tile, row);
      run.next = row == 0 ? run.tile + run.tile_bytes : run.tile;
      MultiplyTiles<F, kPanelRows, 1>(run);
    }
  }
  WithRows(a.num_rows - full_rows, [&]<int R>() { MultiplyPanel<F, R>(a, full_rows); });
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
      return PackQuantPanel(args);
    case MatrixFormat::kMxfp4:
    case MatrixFormat::kMxfp4Split:
      return PackMxfp4Panel(args);
  }
}

int64_t FullPanelBytes(MatrixFormat format, int64_t cols) {
  return PanelBytes(format, cols, kPanelRows);
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
    case MatrixFormat::kMxfp4:
    case MatrixFormat::kMxfp4Split:
      return MultiplyMxfp4(args);
  }
}

int64_t MultiplyScratchBytes(MatrixFormat format, int64_t cols) {
  return IsMxfp4(format) ? cols / kQuantBlock * kMxTileBlockBytes : 0;
}

}  // namespace turbomind::TM_ISA
