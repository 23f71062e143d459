#pragma once

// The storage formats of a matrix in a checkpoint, and the table of what they are. The loader
// expands GGUF's other types. A format without a row or without a case does not compile.

#include <cstdint>

#include "turbomind/core/host_device.h"

namespace turbomind {

//   kMxfp4       GGUF's blocks of 17 bytes: E8M0 exponent e, then 16 bytes; byte j holds value j
//                (low nibble) and 16 + j (high nibble)
//   kMxfp4Split  Hugging Face's form: codes [rows, cols / 2], byte j of a row holds values 2j (low)
//                and 2j + 1 (high); separate exponents [rows, cols / 32]
// An MXFP4 value is E2M1(code) * 2^(e - 127); e = 255 is NaN.
// kQ4_K, kQ5_K and kQ6_K are GGUF's K-quants (ops/k_quants.h). kNvfp4 has GGUF's blocks of 64
// values (ops/nvfp4.h). kFp8 and kFp8Block are E4M3 codes with separate scales (ops/fp8.h). A
// device without kernels for a format rejects it.
enum class MatrixFormat : uint8_t {
  kF32,
  kBF16,
  kQ4_0,
  kQ4_1,
  kQ8_0,
  kMxfp4,
  kMxfp4Split,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kNvfp4,
  kFp8,
  kFp8Block  // the last one
};

inline constexpr int kNumMatrixFormats = static_cast<int>(MatrixFormat::kFp8Block) + 1;

// Formats that share the arrangement of their bytes, and thus their packers and kernels.
enum class MatrixFamily : uint8_t {
  kFloat,
  kQuant,  // GGUF's blocks of 32: FP16 d, perhaps FP16 m, codes
  kMxfp4,
  kKQuant,
  kNvfp4,
  kFp8
};

struct MatrixFormatInfo {
  const char* name = nullptr;  // in Python and in files of packed weights
  MatrixFamily family = MatrixFamily::kFloat;
  int bits = 0;                  // of a code
  int block_cols = 0;            // columns are whole blocks, except for kFloat, which has no blocks
  int block_bytes = 0;           // of block_cols values
  int zero_point = 0;            // subtracted from unsigned codes
  bool has_minimum = false;      // of a block, which kernels add apart from the codes
  bool has_half_scales = false;  // each 16 columns have a scale
};

// Returns the row of a format in the table of formats.
TM_HD constexpr MatrixFormatInfo InfoOf(MatrixFormat format) {
  using enum MatrixFamily;
  switch (format) {
    case MatrixFormat::kF32:
      return {.name = "f32", .family = kFloat, .bits = 32, .block_cols = 32, .block_bytes = 4 * 32};
    case MatrixFormat::kBF16:
      return {
          .name = "bf16", .family = kFloat, .bits = 16, .block_cols = 32, .block_bytes = 2 * 32};
    case MatrixFormat::kQ4_0:
      return {.name = "q4_0",
              .family = kQuant,
              .bits = 4,
              .block_cols = 32,
              .block_bytes = 2 + 16,
              .zero_point = 8};
    case MatrixFormat::kQ4_1:
      return {.name = "q4_1",
              .family = kQuant,
              .bits = 4,
              .block_cols = 32,
              .block_bytes = 4 + 16,
              .has_minimum = true};
    case MatrixFormat::kQ8_0:
      return {.name = "q8_0",
              .family = kQuant,
              .bits = 8,
              .block_cols = 32,
              .block_bytes = 2 + 32,
              .zero_point = 128};
    case MatrixFormat::kMxfp4:
      return {
          .name = "mxfp4", .family = kMxfp4, .bits = 4, .block_cols = 32, .block_bytes = 1 + 16};
    case MatrixFormat::kMxfp4Split:
      return {
          .name = "mxfp4_split", .family = kMxfp4, .bits = 4, .block_cols = 32, .block_bytes = 16};
    case MatrixFormat::kQ4_K:
      return {.name = "q4_k",
              .family = kKQuant,
              .bits = 4,
              .block_cols = 256,
              .block_bytes = 144,
              .has_minimum = true};
    case MatrixFormat::kQ5_K:
      return {.name = "q5_k",
              .family = kKQuant,
              .bits = 5,
              .block_cols = 256,
              .block_bytes = 176,
              .has_minimum = true};
    case MatrixFormat::kQ6_K:
      return {.name = "q6_k",
              .family = kKQuant,
              .bits = 6,
              .block_cols = 256,
              .block_bytes = 210,
              .zero_point = 32,
              .has_half_scales = true};
    case MatrixFormat::kNvfp4:  // codes are looked up: 2 * E2M1 + 12
      return {.name = "nvfp4",
              .family = kNvfp4,
              .bits = 4,
              .block_cols = 64,
              .block_bytes = 4 + 32,
              .zero_point = 12,
              .has_half_scales = true};
    case MatrixFormat::kFp8:
      return {.name = "fp8", .family = kFp8, .bits = 8, .block_cols = 1, .block_bytes = 1};
    case MatrixFormat::kFp8Block:
      return {.name = "fp8_block", .family = kFp8, .bits = 8, .block_cols = 1, .block_bytes = 1};
  }
  __builtin_unreachable();
}

// Calls fn.template operator()<F>() with the format as a template argument. On the host alone.
template <class Fn>
inline __attribute__((always_inline)) decltype(auto) DispatchMatrix(MatrixFormat format, Fn&& fn) {
  switch (format) {
    case MatrixFormat::kF32:
      return fn.template operator()<MatrixFormat::kF32>();
    case MatrixFormat::kBF16:
      return fn.template operator()<MatrixFormat::kBF16>();
    case MatrixFormat::kQ4_0:
      return fn.template operator()<MatrixFormat::kQ4_0>();
    case MatrixFormat::kQ4_1:
      return fn.template operator()<MatrixFormat::kQ4_1>();
    case MatrixFormat::kQ8_0:
      return fn.template operator()<MatrixFormat::kQ8_0>();
    case MatrixFormat::kMxfp4:
      return fn.template operator()<MatrixFormat::kMxfp4>();
    case MatrixFormat::kMxfp4Split:
      return fn.template operator()<MatrixFormat::kMxfp4Split>();
    case MatrixFormat::kQ4_K:
      return fn.template operator()<MatrixFormat::kQ4_K>();
    case MatrixFormat::kQ5_K:
      return fn.template operator()<MatrixFormat::kQ5_K>();
    case MatrixFormat::kQ6_K:
      return fn.template operator()<MatrixFormat::kQ6_K>();
    case MatrixFormat::kNvfp4:
      return fn.template operator()<MatrixFormat::kNvfp4>();
    case MatrixFormat::kFp8:
      return fn.template operator()<MatrixFormat::kFp8>();
    case MatrixFormat::kFp8Block:
      return fn.template operator()<MatrixFormat::kFp8Block>();
  }
  __builtin_unreachable();
}

TM_HD constexpr bool IsFloat(MatrixFormat format) {
  return InfoOf(format).family == MatrixFamily::kFloat;
}
TM_HD constexpr bool IsQuantized(MatrixFormat format) {
  return InfoOf(format).family == MatrixFamily::kQuant;
}
TM_HD constexpr bool IsMxfp4(MatrixFormat format) {
  return InfoOf(format).family == MatrixFamily::kMxfp4;
}
TM_HD constexpr bool IsKQuant(MatrixFormat format) {
  return InfoOf(format).family == MatrixFamily::kKQuant;
}
TM_HD constexpr bool IsFp8(MatrixFormat format) {
  return InfoOf(format).family == MatrixFamily::kFp8;
}
TM_HD constexpr bool HasMinimum(MatrixFormat format) { return InfoOf(format).has_minimum; }
TM_HD constexpr bool HasHalfScales(MatrixFormat format) { return InfoOf(format).has_half_scales; }
TM_HD constexpr int ZeroPoint(MatrixFormat format) { return InfoOf(format).zero_point; }
TM_HD constexpr int SourceBlockCols(MatrixFormat format) { return InfoOf(format).block_cols; }
TM_HD constexpr int SourceBlockBytes(MatrixFormat format) { return InfoOf(format).block_bytes; }

}  // namespace turbomind
