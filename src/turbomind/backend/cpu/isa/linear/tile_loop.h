#pragma once

// The loop of linear layers over weight tiles and panels of activations. A `Kernel` computes one
// run of it:
//   static constexpr MatrixFormat kFormat;
//   template <int R> static constexpr int kTiles;  // tiles at once with R rows
//   static constexpr int64_t PanelBytes(int64_t cols);  // a full panel
//   template <int R, int T> static void Multiply(const TileRun& run);

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/linear.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::TM_ISA {

// Returns where a run of R < kPanelRows rows starts to prefetch. AVX2 reads a tile in two passes
// and prefetches the whole next tile meanwhile. One row of a quantized format takes one pass.
template <MatrixFormat F, int R>
TM_HD const uint8_t* NextOf(const TileRun& run) {
  constexpr int64_t kDistance = 4096;
#if defined(TM_ISA_avx2)
  constexpr bool kReadsTwice = R > 1 || F == MatrixFormat::kF32 || F == MatrixFormat::kBF16;
  return run.tile + (kReadsTwice ? run.tile_bytes : kDistance);
#else
  return run.tile + kDistance;
#endif
}

template <class Kernel>
TM_HD TileRun RunAt(const MultiplyArgs& a, int tile, int row) {
  TileRun run;
  run.tile_bytes = TileBytes(Kernel::kFormat, a.cols);
  run.tile = a.tiles + tile * run.tile_bytes;
  run.steps = NumSteps(Kernel::kFormat, a.cols);
  run.next = run.tile;
  run.panel = a.panels + row / kPanelRows * Kernel::PanelBytes(a.cols);
  run.bias = a.bias == nullptr ? nullptr : a.bias + tile * kTileRows;
  run.y = a.y + row * a.y_stride + tile * kTileRows;
  run.y_stride = a.y_stride;
  run.num_outputs = a.num_outputs - tile * kTileRows;
  run.accumulate = a.accumulate;
  return run;
}

// Multiplies all tiles with the last panel, which has R rows.
template <class Kernel, int R>
void MultiplyPanel(const MultiplyArgs& a, int row) {
  constexpr int kTiles = Kernel::template kTiles<R>;
  int tile = 0;
  for (; tile + kTiles <= a.num_tiles; tile += kTiles) {
    TileRun run = RunAt<Kernel>(a, tile, row);
    run.next = NextOf<Kernel::kFormat, R>(run);
    Kernel::template Multiply<R, kTiles>(run);
  }
  if constexpr (kTiles > 1) {
    for (; tile < a.num_tiles; ++tile) {
      Kernel::template Multiply<R, 1>(RunAt<Kernel>(a, tile, row));
    }
  }
}

template <class Kernel>
void MultiplyPanels(const MultiplyArgs& a) {
  const int full_rows = a.num_rows / kPanelRows * kPanelRows;
  for (int tile = 0; full_rows > 0 && tile < a.num_tiles; ++tile) {
    for (int row = 0; row < full_rows; row += kPanelRows) {
      TileRun run = RunAt<Kernel>(a, tile, row);
      run.next = row == 0 ? run.tile + run.tile_bytes : run.tile;
      Kernel::template Multiply<kPanelRows, 1>(run);
    }
  }
  WithRows(a.num_rows - full_rows, [&]<int R>() { MultiplyPanel<Kernel, R>(a, full_rows); });
}

}  // namespace turbomind::TM_ISA
