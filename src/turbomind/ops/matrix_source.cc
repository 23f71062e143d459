#include "turbomind/ops/matrix_source.h"

#include <string>

#include "turbomind/core/check.h"
#include "turbomind/core/dtype.h"
#include "turbomind/core/float_convert.h"

namespace turbomind {
namespace {

float ReadHalf(const uint8_t* p) { return LoadAs(p, DataType::kFloat16, 0); }

// Dequantizes rows of a family of formats.
template <MatrixFamily family>
struct RowCodec;

template <>
struct RowCodec<MatrixFamily::kFloat> {
  static void Dequantize(const MatrixSource& source, const uint8_t* data, int64_t /*row*/,
                         float* out) {
    const bool is_f32 = source.format == MatrixFormat::kF32;
    for (int64_t c = 0; c < source.cols; ++c) {
      out[c] = LoadAs(data, is_f32 ? DataType::kFloat32 : DataType::kBFloat16, static_cast<int>(c));
    }
  }
};

template <>
struct RowCodec<MatrixFamily::kQuant> {
  static void Dequantize(const MatrixSource& source, const uint8_t* data, int64_t /*row*/,
                         float* out) {
    for (int64_t c = 0; c < source.cols; c += kQuantBlock) {
      DequantizeBlock(source.format, data, out + c);
      data += SourceBlockBytes(source.format);
    }
  }
};

template <>
struct RowCodec<MatrixFamily::kMxfp4> {
  static void Dequantize(const MatrixSource& source, const uint8_t* block, int64_t row,
                         float* out) {
    const bool split = source.format == MatrixFormat::kMxfp4Split;
    const int64_t blocks = source.cols / kQuantBlock;
    for (int64_t b = 0; b < blocks; ++b, block += SourceBlockBytes(source.format)) {
      const uint8_t exponent =
          split ? static_cast<const uint8_t*>(source.scales)[row * blocks + b] : block[0];
      const uint8_t* codes = split ? block : block + 1;
      const float scale = E8M0ToFloat(exponent);
      for (int j = 0; j < kQuantBlock / 2; ++j) {
        float* pair = out + b * kQuantBlock + (split ? 2 * j : j);
        pair[0] = E2M1ToFloat(codes[j] & 0x0f) * scale;
        pair[split ? 1 : 16] = E2M1ToFloat(codes[j] >> 4) * scale;
      }
    }
  }
};

template <>
struct RowCodec<MatrixFamily::kKQuant> {
  static void Dequantize(const MatrixSource& source, const uint8_t* data, int64_t /*row*/,
                         float* out) {
    for (int64_t c = 0; c < source.cols; c += kSuperBlock) {
      DequantizeSuperBlock(source.format, UnpackSuperBlock(source.format, data), out + c);
      data += SourceBlockBytes(source.format);
    }
  }
};

template <>
struct RowCodec<MatrixFamily::kNvfp4> {
  static void Dequantize(const MatrixSource& source, const uint8_t* data, int64_t /*row*/,
                         float* out) {
    for (int64_t c = 0; c < source.cols; c += kNvBlock, data += kNvBlockBytes) {
      DequantizeNvBlock(data, source.factor, out + c);
    }
  }
};

template <>
struct RowCodec<MatrixFamily::kFp8> {
  static void Dequantize(const MatrixSource& source, const uint8_t* data, int64_t row, float* out) {
    const int64_t count = NumFp8Scales(source.format, source.cols);
    const float* scales = static_cast<const float*>(source.scales) + row * count;
    const int64_t scale_cols = count == 1 ? source.cols : kFp8ScaleCols;
    for (int64_t c = 0; c < source.cols; ++c) {
      out[c] = E4M3ToFloat(data[c]) * scales[c / scale_cols];
    }
  }
};

// Throws InvalidArgument for a scale that is not above 0, and for one with which the largest code
// is not finite.
void CheckFp8Scales(const MatrixSource& source) {
  const auto* scales = static_cast<const float*>(source.scales);
  const int64_t count = source.rows * NumFp8Scales(source.format, source.cols);
  for (int64_t i = 0; i < count; ++i) {
    if (!(scales[i] > 0.f && IsFinite(scales[i] * kLargestE4m3))) {
      throw InvalidArgument("A matrix in " + std::string(InfoOf(source.format).name) +
                            " has the scale " + std::to_string(scales[i]) +
                            ". It must be above 0, and its values must be finite.");
    }
  }
}

// Throws InvalidArgument for a factor of another format, and for one with which the largest value,
// 6 * 480, is not finite.
void CheckFactor(const MatrixSource& source) {
  const bool has_factor = source.format == MatrixFormat::kNvfp4;
  if (has_factor ? !(source.factor > 0.f && IsFinite(source.factor * 2880.f))
                 : source.factor != 1.f) {
    throw InvalidArgument("A matrix has the factor " + std::to_string(source.factor) +
                          (has_factor ? ". It must be above 0, and its values must be finite."
                                      : ". Only NVFP4 has one."));
  }
}

}  // namespace

const uint8_t* SourceRow(const MatrixSource& source, int64_t row) {
  const auto* data = static_cast<const uint8_t*>(source.data);
  const MatrixFormatInfo info = InfoOf(source.format);
  if (info.family == MatrixFamily::kFloat) {
    return data + row * source.cols * info.bits / 8;
  }
  return data + row * (source.cols / info.block_cols) * info.block_bytes;
}

void DequantizeBlock(MatrixFormat format, const uint8_t* block, float* out) {
  const float d = ReadHalf(block);
  if (format == MatrixFormat::kQ8_0) {
    for (int c = 0; c < kQuantBlock; ++c) {
      out[c] = d * static_cast<float>(static_cast<int8_t>(block[2 + c]));
    }
    return;
  }
  const bool has_min = format == MatrixFormat::kQ4_1;
  const float m = has_min ? ReadHalf(block + 2) : 0.f;
  const uint8_t* codes = block + (has_min ? 4 : 2);
  const int zero_point = ZeroPoint(format);
  for (int c = 0; c < kQuantBlock; ++c) {
    const int code = c < 16 ? codes[c] & 0x0f : codes[c - 16] >> 4;
    out[c] = d * static_cast<float>(code - zero_point) + m;
  }
}

void CheckMatrixSource(const MatrixSource& source) {
  const std::string shape = std::to_string(source.rows) + " x " + std::to_string(source.cols);
  if (source.data == nullptr || source.rows <= 0 || source.cols <= 0) {
    throw InvalidArgument("A matrix has shape " + shape +
                          ". It must have at least one row and one column.");
  }
  const MatrixFormatInfo info = InfoOf(source.format);
  if (info.family != MatrixFamily::kFloat && source.cols % info.block_cols != 0) {
    throw InvalidArgument("A matrix in " + std::string(info.name) + " has shape " + shape +
                          ". The number of columns must be a multiple of " +
                          std::to_string(info.block_cols) + ".");
  }
  CheckFactor(source);
  if (source.packed && IsMxfp4(source.format)) {
    throw InvalidArgument("A matrix of " + shape +
                          " is marked as packed, but MXFP4 is never packed.");
  }
  if ((source.scales != nullptr) !=
      (source.format == MatrixFormat::kMxfp4Split || IsFp8(source.format))) {
    throw InvalidArgument(
        "A matrix of " + shape +
        " has wrong scales. The split form of MXFP4 and FP8 need separate scales; "
        "other formats must not have them.");
  }
  if (IsFp8(source.format)) {
    CheckFp8Scales(source);
  }
}

void DequantizeMatrixRow(const MatrixSource& source, int64_t row, float* out) {
  DispatchMatrix(source.format, [&]<MatrixFormat F>() {
    RowCodec<InfoOf(F).family>::Dequantize(source, SourceRow(source, row), row, out);
  });
}

}  // namespace turbomind
