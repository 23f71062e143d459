#include "turbomind/backend/cuda/linear/cublas_lt.h"

#include <dlfcn.h>

#include <algorithm>
#include <filesystem>

#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

constexpr const char* kFileNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
constexpr size_t kMinVersion = 120000;     // older versions use another numbering
constexpr size_t kMinFp8Version = 120900;  // scales of rows and of 128 columns

// Values of cuBLASLt's enums.
constexpr int kSuccess = 0;
constexpr int kTypeFloat32 = 0;
constexpr int kTypeBFloat16 = 14;
constexpr int kTypeE4m3 = 28;
constexpr int kComputeFloat32 = 68;
constexpr int kTransposed = 1;
constexpr int kDescTransposeA = 3;
constexpr int kDescEpilogue = 7;
constexpr int kDescBias = 8;
constexpr int kDescScalesA = 17;
constexpr int kDescScalesB = 18;
constexpr int kDescScaleModeA = 31;
constexpr int kDescScaleModeB = 32;
constexpr int kScalesOfRows = 3;
constexpr int kScalesOf128Columns = 4;
constexpr uint32_t kEpilogueBias = 4;
constexpr int kPreferWorkspaceBytes = 1;
constexpr int kPreferAlignmentC = 7;
constexpr int kPreferAlignmentD = 8;

constexpr uint32_t kBestAlignment = 256;
constexpr size_t kMaxPlans = 4096;

struct Algorithm {
  uint64_t data[8];
};

struct Heuristic {
  Algorithm algorithm;
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};

void Require(int status, const char* what) {
  if (status != kSuccess) {
    throw InternalError(std::string("A cuBLASLt call failed (") + what + "): status " +
                        std::to_string(status));
  }
}

// Return the error of the last dlopen.
std::string LoadError(const std::string& name) {
  const std::string words = dlerror();
  return words.starts_with(name + ": cannot open") ? "cannot find " + name : words;
}

uint32_t AlignmentOf(const void* p) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  return address == 0 ? 0
                      : static_cast<uint32_t>(
                            std::min<uintptr_t>(address & -address, uintptr_t{kBestAlignment}));
}

}  // namespace

struct CublasLt::Functions {
  void* library = nullptr;
  size_t (*version)();
  int (*create)(void** handle);
  int (*destroy)(void* handle);
  int (*desc_create)(void** desc, int compute, int scale);
  int (*desc_set)(void* desc, int attribute, const void* value, size_t bytes);
  int (*desc_destroy)(void* desc);
  int (*layout_create)(void** layout, int type, uint64_t rows, uint64_t cols, int64_t ld);
  int (*layout_destroy)(void* layout);
  int (*preference_create)(void** preference);
  int (*preference_set)(void* preference, int attribute, const void* value, size_t bytes);
  int (*preference_destroy)(void* preference);
  int (*heuristic)(void* handle, void* desc, void* a, void* b, void* c, void* d, void* preference,
                   int wanted, Heuristic* results, int* found);
  int (*matmul)(void* handle, void* desc, const void* alpha, const void* a, void* a_layout,
                const void* b, void* b_layout, const void* beta, const void* c, void* c_layout,
                void* d, void* d_layout, const Algorithm* algorithm, void* workspace,
                size_t workspace_bytes, Stream stream);

  ~Functions() {
    if (library != nullptr) {
      dlclose(library);
    }
  }

  // Load all functions. Return the name of one that the library lacks, or null if it has all.
  const char* Find() {
    const char* missing = nullptr;
    const auto find = [&](auto& function, const char* name) {
      void* found = dlsym(library, name);
      missing = found == nullptr ? name : missing;
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
    };
    find(version, "cublasLtGetVersion");
    find(create, "cublasLtCreate");
    find(destroy, "cublasLtDestroy");
    find(desc_create, "cublasLtMatmulDescCreate");
    find(desc_set, "cublasLtMatmulDescSetAttribute");
    find(desc_destroy, "cublasLtMatmulDescDestroy");
    find(layout_create, "cublasLtMatrixLayoutCreate");
    find(layout_destroy, "cublasLtMatrixLayoutDestroy");
    find(preference_create, "cublasLtMatmulPreferenceCreate");
    find(preference_set, "cublasLtMatmulPreferenceSetAttribute");
    find(preference_destroy, "cublasLtMatmulPreferenceDestroy");
    find(heuristic, "cublasLtMatmulAlgoGetHeuristic");
    find(matmul, "cublasLtMatmul");
    return missing;
  }
};

// Descriptors that are created once per shape. In the library's column-major terms, y is wᵀ · x.
struct CublasLt::Plan {
  explicit Plan(const Functions& f) : functions(&f) {}
  ~Plan() {
    for (void* layout : {w, x, y}) {
      if (layout != nullptr) {
        functions->layout_destroy(layout);
      }
    }
    if (desc != nullptr) {
      functions->desc_destroy(desc);
    }
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  const Functions* functions;
  void* desc = nullptr;
  void* w = nullptr;
  void* x = nullptr;
  void* y = nullptr;
  bool possible = false;
  Algorithm algorithm = {};
};

// Set the addresses of the scales.
void CublasLt::SetScales(const Functions& f, void* desc, const Fp8Product& fp8) {
  Require(f.desc_set(desc, kDescScalesA, &fp8.w_scales, sizeof(fp8.w_scales)), "scales");
  Require(f.desc_set(desc, kDescScalesB, &fp8.x_scales, sizeof(fp8.x_scales)), "scales");
}

CublasLt::CublasLt() : functions_(std::make_unique<Functions>()) {}

CublasLt::~CublasLt() {
  plans_.clear();
  if (handle_ != nullptr) {
    functions_->destroy(handle_);
  }
}

size_t CublasLt::version() const { return functions_->version(); }

std::string CublasLt::name() const {
  return "cuBLASLt " + std::to_string(version() / 10000) + "." +
         std::to_string(version() / 100 % 100);
}

std::vector<std::string> CublasLt::UsualPlaces(const std::string& root) {
  std::vector<std::string> files;
  std::error_code error;
  for (std::filesystem::directory_iterator at(root, error), end; !error && at != end;
       at.increment(error)) {
    for (const char* name : kFileNames) {
      const std::filesystem::path file = at->path() / "lib64" / name;
      std::error_code ignored;
      if (at->path().filename().string().starts_with("cuda") &&
          std::filesystem::exists(file, ignored)) {
        files.push_back(file);
      }
    }
  }
  std::sort(files.rbegin(), files.rend());
  files.insert(files.begin(), std::begin(kFileNames), std::end(kFileNames));
  return files;
}

std::unique_ptr<CublasLt> CublasLt::Load(const std::vector<std::string>& libraries,
                                         std::string* why) {
  why->clear();
  for (const std::string& name : libraries) {
    std::unique_ptr<CublasLt> loaded(new CublasLt);
    Functions& functions = *loaded->functions_;
    // Never unload it: recorded graphs contain its kernels, and loading it again is slow.
    functions.library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    std::string wrong;
    if (functions.library == nullptr) {
      wrong = LoadError(name);
    } else if (const char* missing = functions.Find(); missing != nullptr) {
      wrong = name + " does not export " + missing;
    } else if (functions.version() < kMinVersion) {
      wrong = name + " has version " + std::to_string(functions.version()) + ", but " +
              std::to_string(kMinVersion) + " or newer is required";
    } else if (const int status = functions.create(&loaded->handle_); status != kSuccess) {
      wrong = name + " cannot be initialized: status " + std::to_string(status);
    } else {
      return loaded;
    }
    *why += (why->empty() ? "" : "; ") + wrong;
  }
  if (libraries.empty()) {
    *why = "no library was given";
  }
  return nullptr;
}

const CublasLt::Plan& CublasLt::PlanOf(const BFloatProduct& product, const Fp8Product* fp8) {
  const int scales = fp8 == nullptr ? 0 : fp8->in_groups ? kScalesOf128Columns : kScalesOfRows;
  const Key key = {scales,
                   fp8 == nullptr ? 0 : fp8->w_stride,
                   product.rows,
                   product.outputs,
                   product.cols,
                   product.y_stride,
                   AlignmentOf(product.y),
                   AlignmentOf(product.bias)};
  const auto found = plans_.find(key);
  if (found != plans_.end()) {
    return found->second;
  }
  if (plans_.size() >= kMaxPlans) {
    plans_.clear();
  }
  const Functions& f = *functions_;
  Plan& plan = plans_.try_emplace(key, f).first->second;
  const auto outputs = static_cast<uint64_t>(product.outputs);
  const auto rows = static_cast<uint64_t>(product.rows);
  const auto cols = static_cast<uint64_t>(product.cols);
  Require(f.desc_create(&plan.desc, kComputeFloat32, kTypeFloat32), "descriptor");
  Require(f.desc_set(plan.desc, kDescTransposeA, &kTransposed, sizeof(kTransposed)), "transpose");
  if (product.bias != nullptr) {
    Require(f.desc_set(plan.desc, kDescEpilogue, &kEpilogueBias, sizeof(kEpilogueBias)), "bias");
    Require(f.desc_set(plan.desc, kDescBias, &product.bias, sizeof(product.bias)), "bias");
  }
  const int type = fp8 == nullptr ? kTypeBFloat16 : kTypeE4m3;
  const int64_t w_stride = fp8 == nullptr ? product.cols : fp8->w_stride;
  Require(f.layout_create(&plan.w, type, cols, outputs, w_stride), "layout");
  Require(f.layout_create(&plan.x, type, cols, rows, product.cols), "layout");
  Require(f.layout_create(&plan.y, kTypeFloat32, outputs, rows, product.y_stride), "layout");
  if (fp8 != nullptr) {
    if (f.version() < kMinFp8Version) {
      return plan;
    }
    Require(f.desc_set(plan.desc, kDescScaleModeA, &scales, sizeof(scales)), "scales");
    Require(f.desc_set(plan.desc, kDescScaleModeB, &scales, sizeof(scales)), "scales");
    SetScales(f, plan.desc, *fp8);
  }
  plan.possible = Choose(product, &plan);
  return plan;
}

// Find the library's best algorithm. Return false if it has none.
bool CublasLt::Choose(const BFloatProduct& product, Plan* plan) {
  const Functions& f = *functions_;
  void* preference = nullptr;
  Require(f.preference_create(&preference), "preference");
  const uint64_t workspace_bytes = kWorkspaceBytes;
  const uint32_t alignment =
      std::min(AlignmentOf(product.y),
               AlignmentOf(reinterpret_cast<const void*>(product.y_stride * sizeof(float))));
  int found_algorithms = 0;
  Heuristic best = {};
  const bool known =
      f.preference_set(preference, kPreferWorkspaceBytes, &workspace_bytes, sizeof(uint64_t)) ==
          kSuccess &&
      f.preference_set(preference, kPreferAlignmentC, &alignment, sizeof(alignment)) == kSuccess &&
      f.preference_set(preference, kPreferAlignmentD, &alignment, sizeof(alignment)) == kSuccess &&
      f.heuristic(handle_, plan->desc, plan->w, plan->x, plan->y, plan->y, preference, 1, &best,
                  &found_algorithms) == kSuccess;
  f.preference_destroy(preference);
  plan->algorithm = best.algorithm;
  return known && found_algorithms > 0 && best.status == kSuccess;
}

bool CublasLt::Multiply(const BFloatProduct& product, void* workspace, Stream stream) {
  return Run(product, nullptr, workspace, stream);
}

bool CublasLt::Multiply(const Fp8Product& product, void* workspace, Stream stream) {
  Check(product.codes.bias == nullptr, "a product of FP8 has no bias");
  return Run(product.codes, &product, workspace, stream);
}

bool CublasLt::Run(const BFloatProduct& product, const Fp8Product* fp8, void* workspace,
                   Stream stream) {
  const Plan& plan = PlanOf(product, fp8);
  if (!plan.possible) {
    return false;
  }
  if (fp8 != nullptr) {
    SetScales(*functions_, plan.desc, *fp8);
  }
  if (product.bias != nullptr) {
    Require(functions_->desc_set(plan.desc, kDescBias, &product.bias, sizeof(product.bias)),
            "bias");
  }
  const float beta = product.accumulate ? 1.f : 0.f;
  Require(functions_->matmul(handle_, plan.desc, &product.factor, product.w, plan.w, product.x,
                             plan.x, &beta, product.y, plan.y, product.y, plan.y, &plan.algorithm,
                             workspace, kWorkspaceBytes, stream),
          "matrix product");
  return true;
}

}  // namespace turbomind::cuda
