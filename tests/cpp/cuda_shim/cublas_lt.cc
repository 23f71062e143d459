// A stand-in for cuBLASLt on the shim's GPU, with the functions that
// backend/cuda/linear/cublas_lt.cc uses. It follows the manual for the attributes that are used
// there, and computes in FP64.

#include <cstdint>
#include <cstring>

namespace {

constexpr int kInvalid = 7;

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
};

struct Layout {
  int type;
  uint64_t rows;
  uint64_t cols;
  int64_t ld;
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

// Reports no algorithm for 65 outputs, so that tests cover that case.
TM_EXPORT int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void* d, void*, int,
                                             Heuristic* results, int* found) {
  *results = {};
  *found = static_cast<Layout*>(d)->rows == 65 ? 0 : 1;
  return 0;
}

TM_EXPORT int cublasLtMatmul(void*, void* desc, const float* alpha, const uint16_t* a,
                             const Layout* a_layout, const uint16_t* b, const Layout* b_layout,
                             const float* beta, const float* c, const Layout* c_layout, float* d,
                             const Layout* d_layout, const void*, void*, size_t, void*) {
  const auto& op = *static_cast<Desc*>(desc);
  const bool right = op.transpose_a == 1 && a_layout->type == 14 && b_layout->type == 14 &&
                     c_layout->type == 0 && d_layout->type == 0 &&
                     a_layout->rows == b_layout->rows && a_layout->cols == d_layout->rows &&
                     b_layout->cols == d_layout->cols;
  if (!right) {
    return kInvalid;
  }
  for (uint64_t n = 0; n < d_layout->cols; ++n) {
    for (uint64_t m = 0; m < d_layout->rows; ++m) {
      double sum = 0;
      for (uint64_t k = 0; k < a_layout->rows; ++k) {
        sum += double{FromBFloat(a[m * static_cast<uint64_t>(a_layout->ld) + k])} *
               FromBFloat(b[n * static_cast<uint64_t>(b_layout->ld) + k]);
      }
      sum *= *alpha;
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
