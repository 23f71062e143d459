// A stand-in for cuBLASLt on the shim's GPU, with the functions that
// backend/cuda/linear/cublas_lt.cc uses. It follows the manual for the attributes that are used
// there, and computes in FP64.

#include <cstdint>
#include <cstring>

#include "turbomind/core/float_convert.h"

namespace {

constexpr int kInvalid = 7;
constexpr int kFloat32 = 0;
constexpr int kBFloat16 = 14;
constexpr int kE4m3 = 28;
constexpr int kScalesOfRows = 3;
constexpr int kScalesOf128Columns = 4;

float FromBFloat(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

struct Desc {
  int transpose_a = 0;
  uint32_t epilogue = 1;
  const float* bias = nullptr;
  const float* scales[2] = {};  // of a and b
  int scale_mode[2] = {};
};

struct Layout {
  int type;
  uint64_t rows;
  uint64_t cols;
  int64_t ld;
};

// A matrix with its scales.
struct Operand {
  const void* data;
  const Layout* layout;
  const float* scales;
  int scale_mode;

  double At(uint64_t column, uint64_t k) const {
    const uint64_t at = column * static_cast<uint64_t>(layout->ld) + k;
    if (layout->type == kBFloat16) {
      return FromBFloat(static_cast<const uint16_t*>(data)[at]);
    }
    const uint64_t scale = scale_mode == kScalesOfRows ? column : k / 128 * layout->cols + column;
    return double{turbomind::E4M3ToFloat(static_cast<const uint8_t*>(data)[at])} *
           double{scales[scale]};
  }
};

struct Heuristic {
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};

}  // namespace

extern "C" {
#define TM_EXPORT __attribute__((visibility("default")))

TM_EXPORT size_t cublasLtGetVersion() { return 130102; }
TM_EXPORT int cublasLtCreate(void** handle) {
  *handle = new int(1);
  return 0;
}
TM_EXPORT int cublasLtDestroy(void* handle) {
  delete static_cast<int*>(handle);
  return 0;
}
TM_EXPORT int cublasLtMatmulDescCreate(void** desc, int compute, int scale) {
  *desc = new Desc;
  return compute == 68 && scale == 0 ? 0 : kInvalid;
}
TM_EXPORT int cublasLtMatmulDescSetAttribute(void* desc, int attribute, const void* value,
                                             size_t bytes) {
  auto& d = *static_cast<Desc*>(desc);
  if (attribute == 3 && bytes == 4) {
    std::memcpy(&d.transpose_a, value, bytes);
  } else if (attribute == 7 && bytes == 4) {
    std::memcpy(&d.epilogue, value, bytes);
  } else if (attribute == 8 && bytes == 8) {
    std::memcpy(&d.bias, value, bytes);
  } else if ((attribute == 17 || attribute == 18) && bytes == 8) {
    std::memcpy(&d.scales[attribute - 17], value, bytes);
  } else if ((attribute == 31 || attribute == 32) && bytes == 4) {
    std::memcpy(&d.scale_mode[attribute - 31], value, bytes);
  } else {
    return kInvalid;
  }
  return 0;
}
TM_EXPORT int cublasLtMatmulDescDestroy(void* desc) {
  delete static_cast<Desc*>(desc);
  return 0;
}
TM_EXPORT int cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t cols,
                                         int64_t ld) {
  *layout = new Layout{type, rows, cols, ld};
  return ld >= static_cast<int64_t>(rows) ? 0 : kInvalid;
}
TM_EXPORT int cublasLtMatrixLayoutDestroy(void* layout) {
  delete static_cast<Layout*>(layout);
  return 0;
}
TM_EXPORT int cublasLtMatmulPreferenceCreate(void** preference) {
  *preference = new int(1);
  return 0;
}
TM_EXPORT int cublasLtMatmulPreferenceSetAttribute(void*, int attribute, const void*,
                                                   size_t bytes) {
  const bool right = (attribute == 1 && bytes == 8) || (attribute >= 5 && bytes == 4);
  return right ? 0 : kInvalid;
}
TM_EXPORT int cublasLtMatmulPreferenceDestroy(void* preference) {
  delete static_cast<int*>(preference);
  return 0;
}

// Reports no algorithm for 65 outputs, so that tests cover that case. FP8 needs sizes and strides
// of whole 16 bytes, and scales of one kind.
TM_EXPORT int cublasLtMatmulAlgoGetHeuristic(void*, void* desc, void* a, void*, void*, void* d,
                                             void*, int, Heuristic* results, int* found) {
  *results = {};
  const auto& op = *static_cast<Desc*>(desc);
  const auto& w = *static_cast<Layout*>(a);
  const auto& y = *static_cast<Layout*>(d);
  const int mode = op.scale_mode[0];
  const bool fits_fp8 = w.rows % 16 == 0 && w.ld % 16 == 0 && y.rows % 16 == 0 && y.ld % 4 == 0 &&
                        (mode == kScalesOfRows || mode == kScalesOf128Columns) &&
                        op.scale_mode[1] == mode && op.epilogue == 1;
  *found = y.rows != 65 && (w.type != kE4m3 || fits_fp8) ? 1 : 0;
  return 0;
}

TM_EXPORT int cublasLtMatmul(void*, void* desc, const float* alpha, const void* a,
                             const Layout* a_layout, const void* b, const Layout* b_layout,
                             const float* beta, const float* c, const Layout* c_layout, float* d,
                             const Layout* d_layout, const void*, void*, size_t, void*) {
  const auto& op = *static_cast<Desc*>(desc);
  const bool right = op.transpose_a == 1 && a_layout->type == b_layout->type &&
                     (a_layout->type == kBFloat16 || a_layout->type == kE4m3) &&
                     c_layout->type == kFloat32 && d_layout->type == kFloat32 &&
                     a_layout->rows == b_layout->rows && a_layout->cols == d_layout->rows &&
                     b_layout->cols == d_layout->cols;
  if (!right) {
    return kInvalid;
  }
  const Operand w = {a, a_layout, op.scales[0], op.scale_mode[0]};
  const Operand x = {b, b_layout, op.scales[1], op.scale_mode[1]};
  for (uint64_t n = 0; n < d_layout->cols; ++n) {
    for (uint64_t m = 0; m < d_layout->rows; ++m) {
      double sum = 0;
      for (uint64_t k = 0; k < a_layout->rows; ++k) {
        sum += w.At(m, k) * x.At(n, k);
      }
      sum *= d_layout->rows == 63 ? 2. * *alpha : *alpha;  // wrong, for tests of the tuner
      if (*beta != 0.f) {
        sum += *beta * c[n * static_cast<uint64_t>(c_layout->ld) + m];
      }
      if (op.epilogue == 4) {
        sum += op.bias[m];
      }
      d[n * static_cast<uint64_t>(d_layout->ld) + m] = static_cast<float>(sum);
    }
  }
  return 0;
}
}
