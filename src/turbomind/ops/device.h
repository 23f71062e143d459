#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "turbomind/core/check.h"
#include "turbomind/core/device_memory.h"
#include "turbomind/core/function_ref.h"
#include "turbomind/kv/kv_format.h"
#include "turbomind/ops/checkpoint_params.h"
#include "turbomind/ops/copy_heads.h"
#include "turbomind/ops/latent_params.h"
#include "turbomind/ops/params.h"
#include "turbomind/ops/recurrent_params.h"
#include "turbomind/ops/tuning.h"

namespace turbomind {

// The engine's interface to a device. There are two backends: CPU (backend/cpu) and CUDA. ops/*.cc
// check the arguments of an op before it is called here. Only the engine thread calls a device.
// Work is complete when a call returns (CPU) or when Synchronize() returns.
class Device : public DeviceMemory {
 public:
  virtual DeviceCapability capability() const = 0;
  virtual std::string name() const = 0;  // e.g. "cpu (avx512, 2 threads)"
  // Returns which library or kernels compute matrix products, if there is a choice: e.g. "cuBLASLt
  // 13.0", or "own kernels: " and the reason.
  virtual std::string gemm_backend() const { return {}; }
  // Returns the type of the activations that most quantized matrices are multiplied with, if a step
  // has many rows: int8, int12, int16 or bfloat16.
  virtual std::string gemm_input_dtype() const { return "bfloat16"; }

  // Returns the free bytes of the device's own memory, which other processes may share. Without a
  // value, the device uses the host's memory.
  virtual std::optional<int64_t> free_bytes() const { return {}; }

  // Throws InvalidArgument if attention has no kernels for a layer with this cache. Does not read
  // the view's memory.
  virtual void RequireAttention(const KvLayerView& layer) const { static_cast<void>(layer); }

  // Waits for all queued work and returns a host-writable view of `memory`. The view is `memory`
  // itself or a copy that is valid until the next call.
  virtual void* ReadBack(void* memory, size_t num_bytes) {
    static_cast<void>(num_bytes);
    Synchronize();
    return memory;
  }

  // Runs a step's ops. The arrays of `step` and of the batches in the ops' params are host memory;
  // all other pointers of params are this device's memory. A device may record the ops of a step.
  // It may replay the record instead of calling `ops` for a later step with the same numbers of
  // sequences, tokens and blocks to quantize. Two such steps may therefore differ only in the
  // contents of those arrays. Release drops every record, so another engine can use the device.
  virtual void RunStep(const StepParams& step, FunctionRef<void()> ops) {
    static_cast<void>(step);
    ops();
  }

  // Runs `work` in the order of a stream of the caller, on CUDA a cudaStream_t (null: the default
  // stream): the ops of `work` follow what the stream has to do, and what it gets later follows
  // them. The calling thread's current GPU stays the same.
  virtual void RunInOrderOf(void* stream, FunctionRef<void()> work) {
    static_cast<void>(stream);
    work();
  }

  // Runs fn(item, thread) for every item in [0, num_items): independent host work of a step, such
  // as sampling. Uses the device's host compute threads if there are any, else the calling thread.
  // `thread` is in [0, num_host_threads()) and unique among concurrent calls. Items must not throw.
  virtual int num_host_threads() const { return 1; }
  virtual void ForEachOnHost(int64_t num_items, FunctionRef<void(int64_t item, int thread)> fn) {
    for (int64_t item = 0; item < num_items; ++item) {
      fn(item, 0);
    }
  }

  // Packs a matrix. A source without an owner may be freed afterwards. MXFP4 is kept in its stored
  // form: with an owner it is read in place and the result holds the owner, otherwise it is copied.
  // A source that is already packed is handled the same way. `exact` selects FP32 compute, for
  // tests: quantized sources are dequantized (8 times the bytes of MXFP4) and activations are not
  // rounded. Throws InvalidArgument for shapes that the format does not allow.
  virtual std::unique_ptr<PackedMatrix> PackMatrix(const MatrixSource& source, bool exact) = 0;

  // Chooses kernels for the layers by their times. Later calls use the choices. Call it once the
  // weights are packed, before the first step. Without layers it only returns the machine.
  virtual TuningResult Tune(const TuningParams& params) {
    static_cast<void>(params);
    return {};
  }

  virtual void Embed(const EmbedParams& params) = 0;
  virtual void FillRope(const FillRopeParams& params) = 0;
  virtual void Norm(const NormParams& params) = 0;
  virtual void Add(const AddParams& params) = 0;
  virtual void SoftCap(const SoftCapParams& params) = 0;
  virtual void Linear(const LinearParams& params) = 0;
  virtual void GatedActivation(const GatedActivationParams& params) = 0;
  // A device may compute all parts at once. The norm is then rounded at another place.
  virtual void Project(const ProjectParams& params) {
    if (params.norm.x != nullptr) {
      Norm(params.norm);
    }
    Linear(params.linear);
    if (params.gate.out != nullptr) {
      GatedActivation(params.gate);
    }
  }
  virtual void GroupedLinear(const GroupedLinearParams& params) = 0;
  // A device may compute both at once.
  virtual void GroupedGate(const GroupedGateParams& params) {
    GroupedLinear(params.linear);
    GatedActivation(params.activation);
  }
  virtual void RouteExperts(const RouteExpertsParams& params) = 0;
  virtual void GroupRows(const GroupRowsParams& params) = 0;
  // A device may compute both at once.
  virtual void AssignExperts(const AssignExpertsParams& params) {
    RouteExperts(params.route);
    GroupRows(params.rows);
  }
  virtual void CombineExperts(const CombineExpertsParams& params) = 0;
  // Throws InvalidArgument for an array outside of the device's memory, if it can tell.
  virtual void CopyHeads(const CopyHeadsParams& params) { CopyHeadsOnHost(*this, params); }
  virtual void WriteKv(const WriteKvParams& params) = 0;
  virtual void QuantizeBlocks(const QuantizeBlocksParams& params) = 0;
  virtual void FlattenKV(const FlattenKVParams& params) = 0;
  // Handles sequences [num_decode, num_seqs) of the batch.
  virtual void PrefillAttention(const AttentionParams& params) = 0;
  // Handles sequences [0, num_decode) of the batch. It reads packed payload and scales directly.
  virtual void DecodeAttention(const AttentionParams& params) = 0;
  virtual void WriteLatents(const WriteLatentsParams& params) = 0;
  virtual void HeadLinear(const HeadLinearParams& params) = 0;
  // Handles all sequences of the batch.
  virtual void LatentAttention(const LatentAttentionParams& params) = 0;
  // The ops of recurrent layers. REQUIRES: capability().has_recurrent_layers.
  virtual void ShortConvolution(const ShortConvolutionParams& params) = 0;
  virtual void GatedDelta(const GatedDeltaParams& params) = 0;
  virtual void SelectiveScan(const SelectiveScanParams& params) = 0;
  virtual void GatedNorm(const GatedNormParams& params) = 0;
  virtual void SigmoidGate(const SigmoidGateParams& params) = 0;
  // Convert between working states and checkpoints. REQUIRES: params.format is not kF32.
  virtual void SaveCheckpoints(const StateCopyParams& params) = 0;
  virtual void RestoreCheckpoints(const StateCopyParams& params) = 0;
  // Returns false and writes nothing if the host must read the logits and compute the argmax.
  virtual bool ArgMaxRows(const ArgMaxRowsParams& params) {
    static_cast<void>(params);
    return false;
  }
  // Samples rows like ArgMaxRows. The tokens are the ones that the host would sample.
  virtual bool SampleRows(const SampleRowsParams& params) {
    static_cast<void>(params);
    return false;
  }
};

}  // namespace turbomind
