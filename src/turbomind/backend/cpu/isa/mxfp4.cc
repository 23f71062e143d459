// ⑥⑦ Linear layers with MXFP4 weights: the loop over rows of the matrix and panels, and the packing
// of activations in the order in which the nibbles come. The arithmetic is in
// mxfp4_<instruction set>.h.

#include "turbomind/backend/cpu/isa/mxfp4.h"

#include <cstdint>

#include "turbomind/backend/cpu/isa/quantize_activations.h"

#if defined(TM_ISA_avx512)
#include "turbomind/backend/cpu/isa/mxfp4_avx512.h"
#elif defined(TM_ISA_avx2)
#include "turbomind/backend/cpu/isa/mxfp4_avx2.h"
#else
#include "turbomind/backend/cpu/isa/mxfp4_scalar.h"
#endif

namespace turbomind::TM_ISA {
namespace {

// One block of a row → its place in the panel's step at `to`.
void PackMxBlock(const float* x, MatrixFormat format, int block, uint8_t* to) {
  int8_t halves[2][kQuantBlock];
  int32_t sum;
  const float scale = 0.5f * QuantizeBlock(x, halves[0], sum);
  const bool split = format == MatrixFormat::kMxfp4Split;
  for (int half = 0; half < 2; ++half) {
    uint8_t* low = to + 2 * half * kMxStepBytes + 16 * block;
    uint8_t* high = low + kMxStepBytes;
    for (int j = 0; j < 16; ++j) {
      low[j] = static_cast<uint8_t>(halves[half][split ? 2 * j : j]);
      high[j] = static_cast<uint8_t>(halves[half][split ? 2 * j + 1 : 16 + j]);
    }
  }
  const int32_t offset = -kMxZeroPoint * sum;
  uint8_t* meta = to + 4 * kMxStepBytes + 16 * block;
  for (int o = 0; o < kMxOutputs; ++o) {
    StoreFloat(scale, meta + 4 * o);
    __builtin_memcpy(meta + kMxStepBytes + 4 * o, &offset, sizeof(offset));
  }
}

template <MatrixFormat F>
MxRun RunAt(const MultiplyArgs& a, int64_t output, int row) {
  MxRun run;
  const int64_t row_bytes = MxRowBytes(F, a.cols);
  run.blocks = a.cols / kQuantBlock;
  const int64_t left = a.num_outputs - output;
  run.num_outputs = static_cast<int>(left < kMxOutputs ? left : kMxOutputs);
  for (int o = 0; o < kMxOutputs; ++o) {
    const int64_t at = output + (o < run.num_outputs ? o : run.num_outputs - 1);
    run.rows[o] = a.tiles + at * row_bytes;
    run.scales[o] = F == MatrixFormat::kMxfp4Split ? a.scales + at * run.blocks : nullptr;
  }
  run.next = run.rows[0] + kMxOutputs * row_bytes;
  run.next_scales =
      F == MatrixFormat::kMxfp4Split ? run.scales[0] + kMxOutputs * run.blocks : nullptr;
  run.panel = a.panels + row / kPanelRows * PanelBytes(F, a.cols, kPanelRows);
  run.bias = a.bias == nullptr ? nullptr : a.bias + output;
  run.y = a.y + row * a.y_stride + output;
  run.y_stride = a.y_stride;
  run.accumulate = a.accumulate;
  return run;
}

template <MatrixFormat F>
void MultiplyLastPanel(const MxRun& run, int num_rows) {
  switch (num_rows) {
    case 1:
      return MultiplyMxRows<F, 1>(run);
    case 2:
      return MultiplyMxRows<F, 2>(run);
    case 3:
      return MultiplyMxRows<F, 3>(run);
    case 4:
      return MultiplyMxRows<F, 4>(run);
    case 5:
      return MultiplyMxRows<F, 5>(run);
    case 6:
      return MultiplyMxRows<F, 6>(run);
    case 7:
      return MultiplyMxRows<F, 7>(run);
    case 8:
      return MultiplyMxRows<F, 8>(run);
    case 9:
      return MultiplyMxRows<F, 9>(run);
    case 10:
      return MultiplyMxRows<F, 10>(run);
    case 11:
      return MultiplyMxRows<F, 11>(run);
    default:
      return;
  }
}

template <MatrixFormat F>
void MultiplyFormat(const MultiplyArgs& a) {
  const int full_rows = a.num_rows / kPanelRows * kPanelRows;
  for (int64_t output = 0; output < a.num_outputs; output += kMxOutputs) {
    for (int row = 0; row < full_rows; row += kPanelRows) {
      MultiplyMxRows<F, kPanelRows>(RunAt<F>(a, output, row));
    }
    if (full_rows < a.num_rows) {
      MultiplyLastPanel<F>(RunAt<F>(a, output, full_rows), a.num_rows - full_rows);
    }
  }
}

}  // namespace

void PackMxfp4Panel(const PackPanelArgs& a) {
  const int64_t blocks = a.cols / kQuantBlock;
  const int64_t steps = MxSteps(blocks);
  for (int r = 0; r < a.num_rows; ++r) {
    const float* x = RowToPack(a, r);
    uint8_t* last = a.panel + ((steps - 1) * a.num_rows + r) * kMxPanelRowBytes;
    __builtin_memset(last, 0, kMxPanelRowBytes);
    for (int64_t b = 0; b < blocks; ++b) {
      PackMxBlock(x + b * kQuantBlock, a.format, static_cast<int>(b % kMxStepBlocks),
                  a.panel + (b / kMxStepBlocks * a.num_rows + r) * kMxPanelRowBytes);
    }
  }
}

void MultiplyMxfp4(const MultiplyArgs& args) {
  if (args.format == MatrixFormat::kMxfp4) {
    MultiplyFormat<MatrixFormat::kMxfp4>(args);
  } else {
    MultiplyFormat<MatrixFormat::kMxfp4Split>(args);
  }
}

}  // namespace turbomind::TM_ISA
