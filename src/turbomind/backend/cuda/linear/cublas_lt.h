#pragma once

// Products of BF16 and FP8 matrices by cuBLASLt, if it is installed. The library is loaded at run
// time and is not needed for the build. One thread at a time.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "turbomind/backend/cuda/runtime/runtime.h"

namespace turbomind::cuda {

// y = factor x · wᵀ (+ bias) (+ y). All memory is on the GPU, and all matrices are row-major.
struct BFloatProduct {
  const void* w = nullptr;  // BF16 [outputs, cols], 256-byte aligned
  const void* x = nullptr;  // BF16 [rows, cols], 256-byte aligned
  float factor = 1.f;
  const float* bias = nullptr;
  float* y = nullptr;  // [rows, outputs], rows y_stride floats apart
  int64_t y_stride = 0;
  int64_t outputs = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  bool accumulate = false;
};

// The same for E4M3 codes with FP32 scales, one for each row of w and x, or one for each 128
// columns of a row.
struct Fp8Product {
  BFloatProduct codes;   // w and x are E4M3; no bias, which the library reads in BF16 only
  int64_t w_stride = 0;  // bytes between the rows of w, a multiple of 16
  bool in_groups = false;
  const float* w_scales = nullptr;  // [outputs], or [ceil(cols / 128), outputs]
  const float* x_scales = nullptr;  // [rows], or [ceil(cols / 128), rows]
};

class CublasLt {
 public:
  // Return the default candidates: names on the loader's path, then files of the toolkits in
  // `root`, the newest first.
  static std::vector<std::string> UsualPlaces(const std::string& root = "/usr/local");
  // Load the first of `libraries` (paths or names, as dlopen takes them) that can be loaded, for
  // the current GPU. If none can, return null; `why` then describes in one line what is wrong with
  // each.
  static std::unique_ptr<CublasLt> Load(const std::vector<std::string>& libraries,
                                        std::string* why);
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  std::string name() const;  // e.g. "cuBLASLt 13.0"
  size_t version() const;    // e.g. 130002

  // Return false, without any effect, if the library has no algorithm for this product. Throws
  // InternalError if a call fails. The workspace is 256-byte aligned and has kWorkspaceBytes. A
  // graph may contain this call if a product of the same shape ran before: its plan then exists and
  // its kernel is loaded.
  bool Multiply(const BFloatProduct& product, void* workspace, Stream stream);
  bool Multiply(const Fp8Product& product, void* workspace, Stream stream);

  static constexpr size_t kWorkspaceBytes = size_t{32} << 20;

 private:
  struct Functions;
  struct Plan;
  // Kind of scales, bytes between the rows of w, rows, outputs, cols, y_stride, alignment of y,
  // alignment of the bias (0: none)
  using Key = std::tuple<int, int64_t, int64_t, int64_t, int64_t, int64_t, uint32_t, uint32_t>;

  CublasLt();
  // `fp8` is null for BF16.
  const Plan& PlanOf(const BFloatProduct& product, const Fp8Product* fp8);
  static void SetScales(const Functions& functions, void* desc, const Fp8Product& product);
  bool Choose(const BFloatProduct& product, Plan* plan);
  bool Run(const BFloatProduct& product, const Fp8Product* fp8, void* workspace, Stream stream);

  std::unique_ptr<Functions> functions_;
  void* handle_ = nullptr;
  std::map<Key, Plan> plans_;
};

}  // namespace turbomind::cuda
