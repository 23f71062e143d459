// ⑥⑦ Linear layers with MXFP4 weights: the loop over rows of the matrix and panels. Activations are
// packed in the order of the nibbles. The arithmetic is in mxfp4_<instruction set>.h.

#include "turbomind/backend/cpu/isa/mxfp4/mxfp4.h"

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/quantize_activations.h"

#if defined(TM_ISA_avx512)
#include "turbomind/backend/cpu/isa/mxfp4/mxfp4_avx512.h"
#include "turbomind/backend/cpu/isa/mxfp4/mxfp4_tiles_avx512.h"
#elif defined(TM_ISA_avx2)
#include "turbomind/backend/cpu/isa/mxfp4/mxfp4_avx2.h"
#else
#include "turbomind/backend/cpu/isa/mxfp4/mxfp4_scalar.h"
#endif

namespace turbomind::TM_ISA {
namespace {

// Quantizes 32 activations like QuantizeBlock: first those multiplied with the low nibbles of a
// block's 16 bytes, then those for the high ones. Returns half the scale, because codes are looked
// up doubled.
TM_HD float QuantizeMxBlock(const float* x, MatrixFormat format, int8_t* halves, int32_t& offset) {
  float ordered[kQuantBlock];
  if (format == MatrixFormat::kMxfp4Split) {
    for (int j = 0; j < 16; ++j) {
      ordered[j] = x[2 * j];
      ordered[16 + j] = x[2 * j + 1];
    }
    x = ordered;
  }
  int32_t sum;
  const float scale = 0.5f * QuantizeBlock(x, halves, sum);
  offset = -kMxZeroPoint * sum;
  return scale;
}

// Packs one block of a row to its place in the panel's step at `to`.
void PackMxBlock(const float* x, MatrixFormat format, int block, uint8_t* to) {
  int8_t halves[2 * kQuantBlock];
  int32_t offset;
  const float scale = QuantizeMxBlock(x, format, halves, offset);
  for (int part = 0; part < 4; ++part) {
    __builtin_memcpy(to + part * kMxStepBytes + 16 * block, halves + 16 * part, 16);
  }
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
  // Prefetch one row further than the next ones, because the last of them begins five steps after
  // its prefetch.
  run.next = run.rows[0] + (kMxOutputs + 1) * row_bytes;
  run.next_scales =
      F == MatrixFormat::kMxfp4Split ? run.scales[0] + kMxOutputs * run.blocks : nullptr;
  run.panel = a.panels + row / kPanelRows * PanelBytes(F, a.cols, kPanelRows);
  run.bias = a.bias == nullptr ? nullptr : a.bias + output;
  run.y = a.y + row * a.y_stride + output;
  run.y_stride = a.y_stride;
  run.accumulate = a.accumulate;
  return run;
}

#if defined(TM_ISA_avx512)
// Returns true if a panel is packed for MultiplyMxTile.
constexpr bool UsesTile(int rows) { return rows >= kMxTileRows; }

template <MatrixFormat F, int R>
void MultiplyTile(const MultiplyArgs& a, int64_t output, int row) {
  const MxRun rows = RunAt<F>(a, output, row);
  MxTileRun run;
  run.tile = a.scratch;
  run.blocks = rows.blocks;
  run.next = row == 0 ? rows.rows[0] + TileBytes(F, a.cols) : nullptr;
  run.panel = rows.panel;
  run.bias = rows.bias;
  run.y = rows.y;
  run.y_stride = rows.y_stride;
  const int64_t left = a.num_outputs - output;
  run.num_outputs = static_cast<int>(left < kTileRows ? left : kTileRows);
  run.accumulate = a.accumulate;
  MultiplyMxTile<R>(run);
}

template <MatrixFormat F>
void Transpose(const MultiplyArgs& a, int64_t output) {
  TransposeTile<F>(a, output);
}
#else
constexpr bool UsesTile(int /*rows*/) { return false; }
template <MatrixFormat F, int R>
void MultiplyTile(const MultiplyArgs& /*args*/, int64_t /*output*/, int /*row*/) {}
template <MatrixFormat F>
void Transpose(const MultiplyArgs& /*args*/, int64_t /*output*/) {}
#endif

// Computes up to 16 outputs from `output` on.
template <MatrixFormat F>
void MultiplyOutputs(const MultiplyArgs& a, int64_t output) {
  if (UsesTile(a.num_rows < kPanelRows ? a.num_rows : kPanelRows)) {
    Transpose<F>(a, output);
  }
  for (int row = 0; row < a.num_rows; row += kPanelRows) {
    WithRows(a.num_rows - row < kPanelRows ? a.num_rows - row : kPanelRows, [&]<int R>() {
      if constexpr (UsesTile(R)) {
        MultiplyTile<F, R>(a, output, row);
      } else {
        for (int64_t o = output; o < output + kTileRows && o < a.num_outputs; o += kMxOutputs) {
          MultiplyMxRows<F, R>(RunAt<F>(a, o, row));
        }
      }
    });
  }
}

template <MatrixFormat F>
void MultiplyFormat(const MultiplyArgs& a) {
  for (int64_t output = 0; output < a.num_outputs; output += kTileRows) {
    MultiplyOutputs<F>(a, output);
  }
}

static_assert(kMxStepBlocks * (kQuantRowBytes + 8) <= kMxPanelRowBytes);

// Packs a panel for MultiplyMxTile: kQ4_0's layout, with the columns in the order of the nibbles.
void PackTilePanel(const PackPanelArgs& a) {
  const int rows = a.num_rows;
  for (int r = 0; r < rows; ++r) {
    const float* x = RowToPack(a, r);
    for (int64_t b = 0; b < a.cols / kQuantBlock; ++b) {
      uint8_t* step = a.panel + b * rows * (kQuantRowBytes + 8);
      uint8_t* meta = step + rows * kQuantRowBytes + 4 * r;
      auto* halves = reinterpret_cast<int8_t*>(step + r * kQuantRowBytes);
      int32_t offset;
      StoreFloat(QuantizeMxBlock(x + b * kQuantBlock, a.format, halves, offset), meta);
      __builtin_memcpy(meta + 4 * rows, &offset, sizeof(offset));
    }
  }
}

void PackRowPanel(const PackPanelArgs& a) {
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

}  // namespace

void PackMxfp4Panel(const PackPanelArgs& args) {
  if (UsesTile(args.num_rows)) {
    PackTilePanel(args);
  } else {
    PackRowPanel(args);
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
