#pragma once

// Linear layers of one instruction set; see dense_kernels.h for the arguments.

#include "turbomind/backend/cpu/dense_kernels.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::TM_ISA {

// The operands of one call: T adjacent tiles, R rows.
struct TileRun {
  const uint8_t* tile = nullptr;
  int64_t tile_bytes = 0;
  int64_t steps = 0;
  const uint8_t* next = nullptr;   // prefetched, as many bytes as the tiles have
  const uint8_t* panel = nullptr;  // packed for R rows
  const float* bias = nullptr;     // [num_outputs] or null
  float* y = nullptr;              // [R, num_outputs]
  int64_t y_stride = 0;
  int64_t num_outputs = 0;  // may be less than 16 T
  bool accumulate = false;
};

// Returns row `r` of the rows to pack.
TM_HD const float* RowToPack(const PackPanelArgs& args, int r) {
  return args.x + (args.x_rows == nullptr ? r : args.x_rows[r]) * args.x_stride;
}

// Calls fn.template operator()<R>() for the number of rows of a panel. Does nothing for 0.
template <class Fn>
TM_HD void WithRows(int num_rows, const Fn& fn) {
  switch (num_rows) {
    case 1:
      return fn.template operator()<1>();
    case 2:
      return fn.template operator()<2>();
    case 3:
      return fn.template operator()<3>();
    case 4:
      return fn.template operator()<4>();
    case 5:
      return fn.template operator()<5>();
    case 6:
      return fn.template operator()<6>();
    case 7:
      return fn.template operator()<7>();
    case 8:
      return fn.template operator()<8>();
    case 9:
      return fn.template operator()<9>();
    case 10:
      return fn.template operator()<10>();
    case 11:
      return fn.template operator()<11>();
    case 12:
      return fn.template operator()<12>();
    default:
      return;
  }
}

// Returns a plan of panels of kPanelRows rows, with as many in a block as `block_bytes` hold.
TM_HD PanelPlan PlanOf(int64_t panel_bytes, int64_t block_bytes) {
  const int64_t panels = block_bytes / panel_bytes;
  return {kPanelRows, panel_bytes, panels < 1 ? 1 : panels};
}

// Bytes of a row block. That of MXFP4 is larger, because a transposed tile then serves more rows.
constexpr int64_t RowBlockBytes(MatrixFormat format) {
  return IsMxfp4(format) ? 640 << 10 : 256 << 10;
}

void PackPanel(const PackPanelArgs& args);
PanelPlan PlanPanels(MatrixFormat format, int64_t cols, int all_rows);
void PackMxfp4Panel(const PackPanelArgs& args);
void Multiply(const MultiplyArgs& args);
void MultiplyMxfp4(const MultiplyArgs& args);
int64_t MultiplyScratchBytes(MatrixFormat format, int64_t cols);

// The same with activations of 8 bits. REQUIRES: HasInt8Panels(format).
void PackInt8Panel(const PackPanelArgs& args);
PanelPlan PlanInt8Panels(MatrixFormat format, int64_t cols, int all_rows);
void MultiplyInt8(const MultiplyArgs& args);

}  // namespace turbomind::TM_ISA
