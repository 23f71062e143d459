#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <string>

#include "turbomind/backend/cuda/attention/attention_ops.h"
#include "turbomind/backend/cuda/attention/decode_tuning.h"
#include "turbomind/backend/cuda/cuda_device.h"
#include "turbomind/backend/cuda/decode/decode_ops.h"
#include "turbomind/backend/cuda/decode/decode_variants.h"
#include "turbomind/backend/cuda/dense/dense_ops.h"
#include "turbomind/backend/cuda/kv/kv_ops.h"
#include "turbomind/backend/cuda/kv/latent_rows.h"
#include "turbomind/backend/cuda/large_head/large_head_ops.h"
#include "turbomind/backend/cuda/latent/latent_ops.h"
#include "turbomind/backend/cuda/linear/cuda_matrix.h"
#include "turbomind/backend/cuda/linear/linear_ops.h"
#include "turbomind/backend/cuda/linear/linear_tuning.h"
#include "turbomind/backend/cuda/prefill/prefill_ops.h"
#include "turbomind/backend/cuda/prefill/prefill_tuning.h"
#include "turbomind/backend/cuda/recurrent/recurrent_ops.h"
#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/backend/cuda/runtime/event_timer.h"
#include "turbomind/backend/cuda/runtime/step_arrays.h"
#include "turbomind/backend/cuda/runtime/step_graphs.h"
#include "turbomind/backend/cuda/runtime/used_gpu.h"
#include "turbomind/backend/cuda/sampling/sampling_ops.h"
#include "turbomind/backend/cuda/transfer/row_transfer.h"
#include "turbomind/backend/cuda/tuner/overlap_tuning.h"
#include "turbomind/core/check.h"
#include "turbomind/core/thread_pool.h"
#include "turbomind/kv/block_seq_len.h"

namespace turbomind::cuda {
namespace {

constexpr int kMinSm = 80;  // cp.async, mma.m16n8k16 of BF16

GpuProperties Resolve(int gpu) {
  std::string why;
  const int count = NumGpus(&why);
  if (gpu < 0 || gpu >= count) {
    throw InvalidArgument("GPU " + std::to_string(gpu) + " cannot be used: " +
                          (count == 0 ? why : "the number of GPUs is " + std::to_string(count)));
  }
  GpuProperties properties = PropertiesOf(gpu);
  if (properties.sm < kMinSm) {
    throw InvalidArgument(properties.name + " has compute capability " +
                          std::to_string(properties.sm / 10) + "." +
                          std::to_string(properties.sm % 10) + "; 8.0 or newer is required");
  }
  UseGpu(gpu);
  return properties;
}

// Owns a stream. Declare it before its users, so that it is destroyed last.
class OwnStream {
 public:
  OwnStream() : stream_(CreateStream()) {}
  ~OwnStream() { DestroyStream(stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  operator Stream() const { return stream_; }

 private:
  Stream stream_;
};

// Pinned memory that only grows.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  ~PinnedBuffer() {
    if (memory_ != nullptr) {
      FreePinned(memory_);
    }
  }
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  void* Get(size_t num_bytes) {
    if (num_bytes > num_bytes_) {
      if (memory_ != nullptr) {
        FreePinned(memory_);
      }
      memory_ = nullptr;
      num_bytes_ = 0;
      num_bytes = std::bit_ceil(num_bytes);  // batches grow by one sequence at a time
      memory_ = AllocatePinned(num_bytes);
      num_bytes_ = num_bytes;
    }
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  size_t num_bytes_ = 0;
};

// Return null if the backend's own kernels compute matrix products. `products` receives the name of
// whatever computes them.
std::unique_ptr<CublasLt> LoadCublasLt(const CudaDeviceOptions& options, std::string* products) {
  std::string why = "deterministic";
  std::unique_ptr<CublasLt> library;
  if (!options.deterministic) {
    library = CublasLt::Load(options.cublas_lt, &why);
  }
  *products = library != nullptr ? library->name() : "own kernels (" + why + ")";
  return library;
}

class CudaDevice final : public Device {
 public:
  CudaDevice(int gpu, const CudaDeviceOptions& options)
      : gpu_(gpu),
        properties_(Resolve(gpu)),
        workspace_(stream_, properties_.workspace_step_bytes),
        context_{stream_,
                 properties_,
                 options.deterministic,
                 &workspace_,
                 options.fp8_activations && !options.deterministic,
                 ProbeWarpGroups(stream_)},
        arrays_(stream_),
        graphs_(stream_),
        planner_(context_),
        samplings_(stream_),
        pool_(options.num_threads),
        uploader_(stream_, pool_),
        matrix_memory_(properties_.matrix_piece_bytes),
        kernels_(options.kernels),
        linear_(LoadCublasLt(options, &gemm_backend_)) {
    if (context_.fp8_activations && !linear_.multiplies_fp8(context_)) {
      throw InvalidArgument("gemm_input_dtype",
                            "is fp8, which needs a GPU of SM 90 and cuBLASLt. This is SM " +
                                std::to_string(properties_.sm) + " with " + gemm_backend_);
    }
  }

  ~CudaDevice() override { UseGpuToFree(gpu_); }

  DeviceCapability capability() const override { return CudaCapability(context_.gpu.sm); }
  std::string name() const override {
    return "cuda:" + std::to_string(gpu_) + " (" + context_.gpu.name + ", sm " +
           std::to_string(context_.gpu.sm) + ", " + std::to_string(pool_.num_threads()) +
           (pool_.num_threads() == 1 ? " thread)" : " threads)");
  }
  void RequireAttention(const KvLayerView& layer) const override {
    if (!block::IsPagedBlockSeqLen(layer.block_seq_len)) {
      throw InvalidArgument("CUDA has no kernels for blocks of " +
                            std::to_string(layer.block_seq_len) +
                            " tokens. Use at most 128 (--cache-block-seq-len).");
    }
    if (layer.HasLatents()) {
      RequireLatentKernels(layer);
      return;
    }
    if (HasLargeHeads(layer)) {
      RequireLargeHeadKernels(layer, properties_);
      return;
    }
    FindDecodeVariant(layer, 1, properties_);  // prefill has the same head_dims and dtypes
  }

  std::string gemm_backend() const override { return gemm_backend_; }
  std::string gemm_input_dtype() const override {
    return context_.fp8_activations ? "fp8" : "bfloat16";
  }

  std::optional<int64_t> free_bytes() const override {
    UseGpu(gpu_);
    return static_cast<int64_t>(GpuMemory().free_bytes);
  }

  void* Reserve(size_t num_bytes) override {
    if (num_bytes == 0) {
      return nullptr;
    }
    UseGpu(gpu_);
    void* memory = AllocateGpu(num_bytes);
    ClearBytes(memory, num_bytes, stream_);
    return memory;
  }
  void Release(void* memory, size_t) override {
    if (memory != nullptr) {
      UseGpuToFree(gpu_);
      FreeGpu(memory);
      ++num_released_;
    }
  }
  void Copy(void* to, const void* from, size_t num_bytes) override {
    UseGpu(gpu_);
    CopyBytes(to, from, num_bytes, stream_);
  }
  void Synchronize() override {
    UseGpu(gpu_);
    cuda::Synchronize(stream_);
  }
  void* ReadBack(void* memory, size_t num_bytes) override {
    UseGpu(gpu_);
    void* host = read_back_.Get(num_bytes);
    CopyBytes(host, memory, num_bytes, stream_);
    cuda::Synchronize(stream_);
    return host;
  }

  void RunStep(const StepParams& step, FunctionRef<void()> ops) override;
  void RunInOrderOf(void* stream, FunctionRef<void()> work) override;

  int num_host_threads() const override { return pool_.num_threads(); }
  void ForEachOnHost(int64_t num_items, FunctionRef<void(int64_t item, int thread)> fn) override {
    pool_.ParallelFor(num_items, fn);
  }

  std::unique_ptr<PackedMatrix> PackMatrix(const MatrixSource& source, bool exact) override {
    UseGpu(gpu_);
    return CudaPackMatrix(matrix_memory_, uploader_, source, exact);
  }

  TuningResult Tune(const TuningParams& params) override;

  void Embed(const EmbedParams& params) override {
    EmbedParams p = params;
    p.ids = arrays_.OnGpu(params.ids);
    linear_.Embed(context_, p);
  }
  void FillRope(const FillRopeParams& params) override {
    FillRopeParams p = params;
    p.positions = arrays_.OnGpu(params.positions);
    p.sets = params.sets == nullptr ? nullptr : arrays_.OnGpu(params.sets);
    CudaFillRope(context_, p);
  }
  void Norm(const NormParams& params) override { CudaNorm(context_, params); }
  void Add(const AddParams& params) override { CudaAdd(context_, params); }
  void SoftCap(const SoftCapParams& params) override { CudaSoftCap(context_, params); }
  void Linear(const LinearParams& params) override { linear_.Linear(context_, params); }
  void Project(const ProjectParams& params) override { linear_.Project(context_, params); }
  void GatedActivation(const GatedActivationParams& params) override {
    CudaGatedActivation(context_, params);
  }
  void GroupedLinear(const GroupedLinearParams& params) override {
    linear_.GroupedLinear(context_, params);
  }
  void GroupedGate(const GroupedGateParams& params) override {
    linear_.GroupedGate(context_, params);
  }
  void RouteExperts(const RouteExpertsParams& params) override {
    CudaRouteExperts(context_, params);
  }
  void GroupRows(const GroupRowsParams& params) override { CudaGroupRows(context_, params); }
  void AssignExperts(const AssignExpertsParams& params) override {
    CudaAssignExperts(context_, params);
  }
  void CombineExperts(const CombineExpertsParams& params) override {
    CudaCombineExperts(context_, params);
  }
  void CopyHeads(const CopyHeadsParams& params) override;
  void WriteKv(const WriteKvParams& params) override { CudaWriteKv(context_, WithBatch(params)); }
  void QuantizeBlocks(const QuantizeBlocksParams& params) override;
  void FlattenKV(const FlattenKVParams& params) override {
    CudaFlattenKV(context_, WithBatch(params));
  }
  void PrefillAttention(const AttentionParams& params) override {
    const BatchView& batch = params.batch;
    CudaPrefillAttention(context_, prefill_choices_, WithBatch(params), batch,
                         {batch.num_decode, batch.num_seqs});
  }
  void DecodeAttention(const AttentionParams& params) override {
    if (context_.deterministic) {  // the same bits as prefill, which may read these tokens again
      const BatchView& batch = params.batch;
      CudaPrefillAttention(context_, prefill_choices_, WithBatch(params), batch,
                           {0, batch.num_decode});
      return;
    }
    CudaDecodeAttention(context_, planner_, WithBatch(params));
  }
  void WriteLatents(const WriteLatentsParams& params) override {
    CudaWriteLatents(context_, WithBatch(params));
  }
  void HeadLinear(const HeadLinearParams& params) override { linear_.HeadLinear(context_, params); }
  void LatentAttention(const LatentAttentionParams& params) override {
    CudaLatentAttention(context_, planner_, WithBatch(params), params.batch);
  }
  void ShortConvolution(const ShortConvolutionParams& params) override {
    CudaShortConvolution(context_, WithStates(params));
  }
  void GatedDelta(const GatedDeltaParams& params) override {
    CudaGatedDelta(context_, WithHeads(params));
  }
  void SelectiveScan(const SelectiveScanParams& params) override {
    CudaSelectiveScan(context_, WithHeads(params));
  }
  void GatedNorm(const GatedNormParams& params) override { CudaGatedNorm(context_, params); }
  void SigmoidGate(const SigmoidGateParams& params) override { CudaSigmoidGate(context_, params); }
  void SaveCheckpoints(const StateCopyParams& params) override {
    CudaSaveCheckpoints(context_, params);
  }
  void RestoreCheckpoints(const StateCopyParams& params) override {
    CudaRestoreCheckpoints(context_, params);
  }
  bool ArgMaxRows(const ArgMaxRowsParams& params) override {
    CudaArgMaxRows(context_, params);
    return true;
  }
  bool SampleRows(const SampleRowsParams& params) override;

 private:
  template <class Params>
  Params WithBatch(const Params& params) const {
    Params p = params;
    p.batch = arrays_.OnGpu(params.batch);
    return p;
  }
  template <class Params>
  Params WithStates(const Params& params) const {
    Params p = WithBatch(params);
    p.states = arrays_.OnGpu(params.states);
    return p;
  }
  template <class Params>
  Params WithHeads(const Params& params) const {
    Params p = params;
    p.heads = WithStates(params.heads);
    return p;
  }

  const int gpu_;
  const GpuProperties properties_;  // read before any GPU resource is created
  OwnStream stream_;
  Workspace workspace_;
  const Context context_;
  StepArrays arrays_;
  StepGraphs graphs_;
  DecodePlanner planner_;
  MirroredBytes samplings_;
  ThreadPool pool_;
  Uploader uploader_;
  MatrixMemory matrix_memory_;
  const std::string kernels_;
  std::string gemm_backend_;
  CudaLinear linear_;
  PrefillChoices prefill_choices_;
  int64_t num_released_ = 0;  // recorded graphs may hold released addresses
  PinnedBuffer read_back_;
};

TuningResult CudaDevice::Tune(const TuningParams& params) {
  if (context_.deterministic) {
    return {};
  }
  UseGpu(gpu_);
  EventTimer timer(stream_);
  const auto time = [&](const std::string&, const std::string&, FunctionRef<void()> work) {
    return timer.Time(work);
  };
  const auto seconds = [] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  };
  const TunerClock clock = {time, seconds, seconds() + params.max_seconds};
  TuningResult result;
  Tuner tuner(params.saved, clock, &result);
  TuneLinear(context_, linear_, params.layers, tuner);
  TunePrefill(context_, prefill_choices_, params.attention, tuner);
  if (!params.layers.empty()) {
    TuneOverlap(context_, tuner);
  }
  TuneDecode(context_, planner_, params.attention, tuner);
  const std::string library = std::to_string(linear_.library_version());
  result.machine = properties_.name + ", SM " + std::to_string(properties_.sm) + ", driver " +
                   properties_.driver + ", cuBLASLt " + library + ", kernels " + kernels_;
  return result;
}

void CudaDevice::RunInOrderOf(void* stream, FunctionRef<void()> work) {
  const UsedGpu used(gpu_);
  const auto other = static_cast<Stream>(stream);
  WaitForStream(stream_, other);
  try {
    work();
  } catch (...) {
    WaitForStream(other, stream_);
    throw;
  }
  WaitForStream(other, stream_);
}

void CudaDevice::CopyHeads(const CopyHeadsParams& params) {
  const int gpu = GpuOf(params.array);
  if (gpu != gpu_ && gpu != kEveryGpu) {
    throw InvalidArgument("An array is not in the memory of GPU " + std::to_string(gpu_) +
                          ", which has the cache.");
  }
  CudaCopyHeads(stream_, params);
}

void CudaDevice::QuantizeBlocks(const QuantizeBlocksParams& params) {
  QuantizeBlocksParams p = params;
  const std::span<const PendingQuantization> blocks_to_quantize =
      arrays_.OnGpu(params.blocks_to_quantize);
  p.blocks_to_quantize = blocks_to_quantize.data();
  p.num_to_quantize = static_cast<int>(blocks_to_quantize.size());
  CudaQuantizeBlocks(context_, p);
}

bool CudaDevice::SampleRows(const SampleRowsParams& params) {
  const size_t num_bytes = static_cast<size_t>(params.num_samplings) * sizeof(RowSampling);
  samplings_.Reserve(num_bytes);
  std::copy_n(params.samplings, params.num_samplings,
              reinterpret_cast<RowSampling*>(samplings_.host()));
  samplings_.Upload(num_bytes);
  CudaSampleRows(context_, params, reinterpret_cast<const RowSampling*>(samplings_.gpu()));
  return true;
}

void CudaDevice::RunStep(const StepParams& step, FunctionRef<void()> ops) {
  UseGpu(gpu_);
  arrays_.Upload(step);
  const bool saves_states = step.states != nullptr && step.states->num_saves > 0;
  bool decodes_only = !step.op_by_op && !context_.deterministic && !saves_states;
  for (int i = 0; i < step.num_groups; ++i) {
    const BatchView& batch = step.groups[i].batch;
    decodes_only = decodes_only && batch.num_decode == batch.num_seqs;
  }
  if (!context_.deterministic) {
    planner_.Upload(step);
  }
  if (!decodes_only) {
    ops();
    return;
  }
  const auto generations = [this]() -> int64_t {
    return num_released_ + arrays_.generation() + workspace_.generation() + planner_.generation();
  };
  graphs_.Run(arrays_.shape(), generations, ops);
}

}  // namespace

std::unique_ptr<Device> MakeDevice(int gpu, const CudaDeviceOptions& options) {
  return std::make_unique<CudaDevice>(gpu, options);
}

}  // namespace turbomind::cuda
