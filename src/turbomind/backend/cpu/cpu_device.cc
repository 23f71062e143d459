#include "turbomind/backend/cpu/cpu_device.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "turbomind/backend/cpu/cpu_dense_ops.h"
#include "turbomind/backend/cpu/cpu_kv_ops.h"
#include "turbomind/backend/cpu/cpu_linear.h"
#include "turbomind/backend/cpu/dense_kernels.h"
#include "turbomind/backend/cpu/kv_kernels.h"
#include "turbomind/backend/cpu/mxfp4_matrix.h"
#include "turbomind/backend/cpu/packed_matrix.h"
#include "turbomind/core/check.h"
#include "turbomind/core/thread_pool.h"
#include "turbomind/ops/rope.h"

namespace turbomind {
namespace {

constexpr const char* kIsaEnv = "LMDEPLOY_CPU_ISA";
constexpr int kMaxThreads = 1024;

bool CanRunAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

bool CanRunAvx512() {
  return CanRunAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512bf16");
}

// Checks for AMX and asks the operating system for permission. The system saves the tile registers,
// 8 KB per thread, only for processes that have requested it.
bool CanRunAmx() {
  constexpr unsigned kTiles = 1u << 24;
  constexpr unsigned kInt8 = 1u << 25;
  constexpr unsigned kBf16 = 1u << 22;
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kTiles) == 0 || (d & kInt8) == 0 ||
      (d & kBf16) == 0) {
    return false;
  }
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILE_DATA
  static const bool permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return permitted;
}

std::string ResolveIsa(std::string_view wanted) {
  const std::vector<std::string> choices = AvailableCpuIsas();
  std::string source = "isa";
  std::string isa(wanted);
  if (isa.empty()) {
    const char* pinned = std::getenv(kIsaEnv);
    if (pinned == nullptr || *pinned == '\0') {
      return choices.back();
    }
    source = kIsaEnv;
    isa = pinned;
  }
  std::string list;
  for (const std::string& choice : choices) {
    if (choice == isa) {
      return isa;
    }
    list += (list.empty() ? "" : ", ") + choice;
  }
  throw InvalidArgument(source + " is \"" + isa + "\". This machine can run: " + list);
}

class CpuDevice final : public Device {
 public:
  CpuDevice(int num_threads, std::string isa) : pool_(num_threads), isa_(std::move(isa)) {
    if (isa_ == "amx") {
      amx::FillDenseKernels(dense_);
      amx::FillKvKernels(kv_);
    } else if (isa_ == "avx512") {
      avx512::FillDenseKernels(dense_);
      avx512::FillKvKernels(kv_);
    } else if (isa_ == "avx2") {
      avx2::FillDenseKernels(dense_);
      avx2::FillKvKernels(kv_);
    } else {
      scalar::FillDenseKernels(dense_);
      scalar::FillKvKernels(kv_);
    }
  }

  DeviceCapability capability() const override { return {}; }

  std::string name() const override {
    const int threads = pool_.num_threads();
    return "cpu (" + isa_ + ", " + std::to_string(threads) +
           (threads == 1 ? " thread)" : " threads)");
  }

  void* Reserve(size_t num_bytes) override { return ReservePages(num_bytes); }
  void Release(void* memory, size_t num_bytes) override { ReleasePages(memory, num_bytes); }
  void Copy(void* to, const void* from, size_t num_bytes) override {
    if (num_bytes > 0) {
      std::memcpy(to, from, num_bytes);
    }
  }

  int num_host_threads() const override { return pool_.num_threads(); }
  void ForEachOnHost(int64_t num_items, FunctionRef<void(int64_t item, int thread)> fn) override {
    pool_.ParallelFor(num_items, fn);
  }

  std::unique_ptr<PackedMatrix> PackMatrix(const MatrixSource& source, bool exact) override {
    if (IsMxfp4(source.format) && !exact && !source.packed) {
      return std::make_unique<CpuMxfp4Matrix>(source, arena_, pool_);
    }
    return std::make_unique<CpuPackedMatrix>(source, exact, arena_, pool_);
  }

  void Embed(const EmbedParams& params) override { CpuEmbed(pool_, params); }
  void FillRope(const FillRopeParams& params) override {
    params.table->Fill(params.positions, params.num_tokens, params.cos, params.sin);
  }
  void RmsNorm(const RmsNormParams& params) override { CpuRmsNorm(dense_, pool_, params); }
  void Linear(const LinearParams& params) override {
    CpuLinear(dense_, pool_, linear_scratch_, params);
  }
  void GatedActivation(const GatedActivationParams& params) override {
    CpuGatedActivation(dense_, pool_, params);
  }
  void GroupedLinear(const GroupedLinearParams& params) override {
    CpuGroupedLinear(dense_, pool_, linear_scratch_, params);
  }
  void RouteExperts(const RouteExpertsParams& params) override { CpuRouteExperts(pool_, params); }
  void GroupRows(const GroupRowsParams& params) override { CpuGroupRows(params); }
  void CombineExperts(const CombineExpertsParams& params) override {
    CpuCombineExperts(pool_, params);
  }
  void WriteKv(const WriteKvParams& params) override { CpuWriteKv(kv_, pool_, params); }
  void QuantizeBlocks(const QuantizeBlocksParams& params) override {
    CpuQuantizeBlocks(kv_, pool_, params);
  }
  void FlattenKV(const FlattenKVParams& params) override { CpuFlattenKV(kv_, pool_, params); }
  void PrefillAttention(const AttentionParams& params) override {
    CpuPrefillAttention(kv_, pool_, kv_scratch_, params);
  }
  void DecodeAttention(const AttentionParams& params) override {
    CpuDecodeAttention(kv_, pool_, kv_scratch_, params);
  }

 private:
  ThreadPool pool_;
  std::string isa_;
  CpuDenseKernels dense_;
  CpuKvKernels kv_;
  MatrixArena arena_;
  CpuLinearScratch linear_scratch_;
  CpuKvScratch kv_scratch_;
};

}  // namespace

std::vector<std::string> AvailableCpuIsas() {
  std::vector<std::string> isas = {"scalar"};
  if (CanRunAvx2()) {
    isas.push_back("avx2");
  }
  if (CanRunAvx512()) {
    isas.push_back("avx512");
    if (CanRunAmx()) {
      isas.push_back("amx");
    }
  }
  return isas;
}

std::unique_ptr<Device> MakeCpuDevice(int num_threads, std::string_view isa) {
  if (num_threads < 1 || num_threads > kMaxThreads) {
    throw InvalidArgument("num_threads is " + std::to_string(num_threads) +
                          ". It must be from 1 to " + std::to_string(kMaxThreads));
  }
  return std::make_unique<CpuDevice>(num_threads, ResolveIsa(isa));
}

}  // namespace turbomind
