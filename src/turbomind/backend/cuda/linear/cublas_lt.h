#pragma once

// cuBLASLt, where it is installed: products of BF16 matrices. Loaded at run time; nothing of it is
// needed to build. One thread at a time.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "turbomind/backend/cuda/runtime/runtime.h"

namespace turbomind::cuda {

// y = x · wᵀ (+ bias) (+ y); all memory is the GPU's, all matrices are row-major.
struct BFloatProduct {
  const void* w = nullptr;  // BF16 [outputs, cols], 256-byte aligned
  const void* x = nullptr;  // BF16 [rows, cols], 256-byte aligned
  const float* bias = nullptr;
  float* y = nullptr;  // [rows, outputs], rows y_stride floats apart
  int64_t y_stride = 0;
  int64_t outputs = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  bool accumulate = false;
};

class CublasLt {
 public:
  // Where it is without anybody saying so: names on the loader's path, then files of toolkits in
  // `root`, the newest first.
  static std::vector<std::string> UsualPlaces(const std::string& root = "/usr/local");
  // The first of `libraries` (paths or names, as dlopen takes them) that can be loaded, for the GPU
  // in use; null where none can, and `why` says in one line what is wrong with each.
  static std::unique_ptr<CublasLt> Load(const std::vector<std::string>& libraries,
                                        std::string* why);
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  std::string name() const;  // e.g. "cuBLASLt 13.0"

  // False where the library has no way to do it: nothing was done. Throws InternalError where it
  // fails. The workspace is 256-byte aligned and kWorkspaceBytes long. Can be part of a graph where
  // a product of the same shape has run before: then its plan is made and its kernel loaded.
  bool Multiply(const BFloatProduct& product, void* workspace, Stream stream);

  static constexpr size_t kWorkspaceBytes = size_t{32} << 20;

 private:
  struct Functions;
  struct Plan;
  // rows, outputs, cols, y_stride, alignment of y, of the bias (0: none)
  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, uint32_t, uint32_t>;

  CublasLt();
  const Plan& PlanOf(const Key& key, const BFloatProduct& product);

  std::unique_ptr<Functions> functions_;
  void* handle_ = nullptr;
  std::map<Key, Plan> plans_;
};

}  // namespace turbomind::cuda
