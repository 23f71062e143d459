// ⑥⑦ Conversion of the rows of a state. The loops have no order of sums, so compilers vectorize
// them and every instruction set returns the same bits.

#include "turbomind/kv/state_codec.h"

#include "turbomind/backend/cpu/isa/recurrent/recurrent.h"

namespace turbomind::TM_ISA {
namespace {

uint32_t MaxBits(const float* row, int cols) {
  uint32_t max = 0;
  for (int i = 0; i < cols; ++i) {
    const uint32_t bits = FloatBits(row[i]) & 0x7FFFFFFFu;
    max = bits > max ? bits : max;
  }
  return max;
}

}  // namespace

void EncodeStateRows(const StateRows& rows) {
  for (int64_t r = 0; r < rows.num_rows; ++r) {
    const float* row = rows.values + r * rows.cols;
    if (rows.format == StateFormat::kBf16) {
      auto* codes = reinterpret_cast<uint16_t*>(rows.codes) + r * rows.cols;
      for (int i = 0; i < rows.cols; ++i) {
        codes[i] = FloatToBFloat16(row[i]);
      }
      continue;
    }
    const StateScale scale = MakeStateScale(MaxBits(row, rows.cols));
    rows.scales[r] = scale.scale;
    auto* codes = reinterpret_cast<int8_t*>(rows.codes) + r * rows.cols;
    for (int i = 0; i < rows.cols; ++i) {
      codes[i] = EncodeStateValue(row[i], scale.inverse);
    }
  }
}

void DecodeStateRows(const StateRows& rows) {
  for (int64_t r = 0; r < rows.num_rows; ++r) {
    float* row = rows.values + r * rows.cols;
    if (rows.format == StateFormat::kBf16) {
      const auto* codes = reinterpret_cast<const uint16_t*>(rows.codes) + r * rows.cols;
      for (int i = 0; i < rows.cols; ++i) {
        row[i] = BFloat16ToFloat(codes[i]);
      }
      continue;
    }
    const auto* codes = reinterpret_cast<const int8_t*>(rows.codes) + r * rows.cols;
    for (int i = 0; i < rows.cols; ++i) {
      row[i] = DecodeStateValue(codes[i], rows.scales[r]);
    }
  }
}

}  // namespace turbomind::TM_ISA
