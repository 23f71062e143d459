#include "turbomind/backend/cpu/cpu_device.h"

#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "turbomind/backend/cpu/cpu_dense_ops.h"
#include "turbomind/backend/cpu/cpu_kv_ops.h"
#include "turbomind/backend/cpu/cpu_latent_ops.h"
#include "turbomind/backend/cpu/cpu_linear.h"
#include "turbomind/backend/cpu/cpu_recurrent_ops.h"
#include "turbomind/backend/cpu/dense_kernels.h"
#include "turbomind/backend/cpu/kv_kernels.h"
#include "turbomind/backend/cpu/mxfp4_matrix.h"
#include "turbomind/backend/cpu/packed_matrix.h"
#include "turbomind/backend/cpu/recurrent_kernels.h"
#include "turbomind/core/check.h"
#include "turbomind/core/thread_pool.h"
#include "turbomind/ops/rope.h"

namespace turbomind {
namespace {

constexpr const char* kIsaEnv = "LMDEPLOY_CPU_ISA";
constexpr int kMaxThreads = 1024;

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
  throw InvalidArgument(source, "is \"" + isa + "\". This build and this machine have: " + list);
}

class CpuDevice final : public Device {
 public:
  CpuDevice(int num_threads, std::string isa, const CpuOptions& options)
      : pool_(num_threads), isa_(std::move(isa)), options_(options) {
    if (isa_ == "amx") {
      FillWith(amx::FillDenseKernels, amx::FillInt8Kernels, amx::FillKvKernels);
      if (is_free()) {
        amx::FillBf16Kernels(dense_);
        amx::FillBf16KvKernels(kv_);
      }
      avx512::FillRecurrentKernels(recurrent_);
    } else if (isa_ == "avx512") {
      FillWith(avx512::FillDenseKernels, avx512::FillInt8Kernels, avx512::FillKvKernels);
      avx512::FillRecurrentKernels(recurrent_);
      if (is_free()) {
        avx512::FillInt12Kernels(dense_);
      }
    } else if (isa_ == "avx2") {
      FillWith(avx2::FillDenseKernels, avx2::FillInt8Kernels, avx2::FillKvKernels);
      avx2::FillRecurrentKernels(recurrent_);
    } else {
      FillWith(scalar::FillDenseKernels, scalar::FillInt8Kernels, scalar::FillKvKernels);
      scalar::FillRecurrentKernels(recurrent_);
    }
  }

  DeviceCapability capability() const override {
    DeviceCapability capability;
    capability.has_all_formats = true;
    capability.has_recurrent_layers = true;
    return capability;
  }

  std::string name() const override {
    const int threads = pool_.num_threads();
    return "cpu (" + isa_ + ", " + std::to_string(threads) +
           (threads == 1 ? " thread" : " threads") + activations() + ")";
  }

  std::string gemm_input_dtype() const override {
    if (options_.int8_activations) {
      return "int8";
    }
    if (!is_free()) {
      return "int16";
    }
    return isa_ == "amx" ? "bfloat16" : isa_ == "avx512" ? "int12" : "int16";
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
    if (params.block_seq_len == 0) {
      params.table->Fill(params.positions, params.sets, params.num_tokens, params.cos, params.sin);
      return;
    }
    constexpr int kChunk = 64;
    const int length = params.block_seq_len;
    const int64_t half = params.table->dim() / 2;
    for (int first = 0; first < params.num_tokens; first += kChunk) {
      int32_t middle[kChunk];
      const int count = std::min(kChunk, params.num_tokens - first);
      for (int i = 0; i < count; ++i) {
        middle[i] = params.positions[first + i] / length * length + length / 2;
      }
      const int32_t* sets = params.sets == nullptr ? nullptr : params.sets + first;
      params.table->Fill(middle, sets, count, params.cos + first * half, params.sin + first * half);
    }
  }
  void Norm(const NormParams& params) override { CpuNorm(dense_, pool_, params); }
  void Add(const AddParams& params) override { CpuAdd(pool_, params); }
  void SoftCap(const SoftCapParams& params) override { CpuSoftCap(dense_, pool_, params); }
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
  void WriteLatents(const WriteLatentsParams& params) override {
    CpuWriteLatents(kv_, pool_, params);
  }
  void HeadLinear(const HeadLinearParams& params) override {
    CpuHeadLinear(dense_, pool_, linear_scratch_, params);
  }
  void LatentAttention(const LatentAttentionParams& params) override {
    CpuLatentAttention(kv_, pool_, kv_scratch_, params);
  }
  void ShortConvolution(const ShortConvolutionParams& params) override {
    CpuShortConvolution(recurrent_, pool_, params);
  }
  void GatedDelta(const GatedDeltaParams& params) override {
    CpuGatedDelta(recurrent_, pool_, params);
  }
  void SelectiveScan(const SelectiveScanParams& params) override {
    CpuSelectiveScan(recurrent_, pool_, params);
  }
  void GatedNorm(const GatedNormParams& params) override { CpuGatedNorm(dense_, pool_, params); }
  void SaveCheckpoints(const StateCopyParams& params) override {
    CpuSaveCheckpoints(recurrent_, pool_, params);
  }
  void RestoreCheckpoints(const StateCopyParams& params) override {
    CpuRestoreCheckpoints(recurrent_, pool_, params);
  }
  void SigmoidGate(const SigmoidGateParams& params) override {
    CpuSigmoidGate(dense_, pool_, params);
  }

 private:
  // Returns whether the fastest arithmetic of the instruction set may be used.
  bool is_free() const { return !options_.deterministic && !options_.int8_activations; }

  // Returns the part of the name about activations that do not have 16 bits.
  std::string activations() const {
    const std::string dtype = gemm_input_dtype();
    return dtype == "int16"      ? ""
           : dtype == "bfloat16" ? ", BF16 tiles"
                                 : ", " + dtype + " activations";
  }

  void FillWith(void (*dense)(CpuDenseKernels&), void (*int8)(CpuDenseKernels&),
                void (*kv)(CpuKvKernels&)) {
    dense(dense_);
    if (options_.int8_activations) {
      int8(dense_);
    }
    kv(kv_);
  }

  ThreadPool pool_;
  std::string isa_;
  CpuOptions options_;
  CpuDenseKernels dense_;
  CpuKvKernels kv_;
  CpuRecurrentKernels recurrent_;
  MatrixArena arena_;
  CpuLinearScratch linear_scratch_;
  CpuKvScratch kv_scratch_;
};

}  // namespace

std::unique_ptr<Device> MakeCpuDevice(int num_threads, std::string_view isa,
                                      const CpuOptions& options) {
  if (num_threads < 1 || num_threads > kMaxThreads) {
    throw InvalidArgument("num_threads", "is " + std::to_string(num_threads) +
                                             ". It must be from 1 to " +
                                             std::to_string(kMaxThreads));
  }
  return std::make_unique<CpuDevice>(num_threads, ResolveIsa(isa), options);
}

}  // namespace turbomind
