#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "turbomind/core/device_memory.h"
#include "turbomind/core/function_ref.h"
#include "turbomind/kv/kv_cache_mode.h"
#include "turbomind/ops/params.h"

namespace turbomind {

// Everything the engine asks of a device. Two backends: CPU (backend/cpu) and CUDA.
// The checks of an op's arguments are in ops/*.cc, before the call comes here.
// One thread, the engine's, calls a device; work is done when a call returns (CPU) or when
// Synchronize() does.
class Device : public DeviceMemory {
 public:
  virtual DeviceCapability capability() const = 0;
  virtual std::string name() const = 0;  // e.g. "cpu (avx512, 2 threads)"
  // What computes products of matrices, where it can be one or the other: e.g. "cuBLASLt 13.0" or
  // "own kernels: " and why.
  virtual std::string gemm_backend() const { return {}; }

  // Throws InvalidArgument where attention has no kernels for a layer with such a cache. Reads no
  // address.
  virtual void RequireAttention(const KvLayerView& layer) const { static_cast<void>(layer); }

  // What lies at `memory` of this device, when all work so far is done, where the host can read and
  // overwrite it: there, or in a copy that stays until the next call.
  virtual void* ReadBack(void* memory, size_t num_bytes) {
    static_cast<void>(num_bytes);
    Synchronize();
    return memory;
  }

  // Runs a step's ops. The arrays of `step` and of the batches in the ops' params are the host's;
  // all other pointers of params are this device's memory. A device may record the ops of a step
  // and run the record instead of `ops` when a step with the same numbers of sequences, tokens and
  // moves comes again: ops may differ between two such steps in those arrays' contents alone.
  // Release ends every record, so that an engine may follow another on one device.
  virtual void RunStep(const StepParams& step, FunctionRef<void()> ops) {
    static_cast<void>(step);
    ops();
  }

  // Host work of a step that does not depend on itself (sampling): runs fn(item, thread) for every
  // item in [0, num_items) on the threads that compute, where the device has any on the host; else
  // here. `thread` is in [0, num_host_threads()) and unique among concurrent calls. Items do not
  // throw.
  virtual int num_host_threads() const { return 1; }
  virtual void ForEachOnHost(int64_t num_items, FunctionRef<void(int64_t item, int thread)> fn) {
    for (int64_t item = 0; item < num_items; ++item) {
      fn(item, 0);
    }
  }

  // Packs a matrix; a source without an owner may be freed afterwards. MXFP4 is kept as it is
  // stored: with an owner where it lies, which the result then holds, else as a copy. `exact` asks
  // for FP32 compute, for tests: quantized sources are dequantized (8 times the bytes of MXFP4) and
  // activations are not rounded. A source that is packed already is read in place with an owner,
  // else copied. Throws InvalidArgument for shapes that the format cannot have.
  virtual std::unique_ptr<PackedMatrix> PackMatrix(const MatrixSource& source, bool exact) = 0;

  virtual void Embed(const EmbedParams& params) = 0;
  virtual void FillRope(const FillRopeParams& params) = 0;
  virtual void RmsNorm(const RmsNormParams& params) = 0;
  virtual void Linear(const LinearParams& params) = 0;
  virtual void GatedActivation(const GatedActivationParams& params) = 0;
  virtual void GroupedLinear(const GroupedLinearParams& params) = 0;
  virtual void RouteExperts(const RouteExpertsParams& params) = 0;
  virtual void GroupRows(const GroupRowsParams& params) = 0;
  virtual void CombineExperts(const CombineExpertsParams& params) = 0;
  virtual void WriteKv(const WriteKvParams& params) = 0;
  virtual void QuantizeBlocks(const QuantizeBlocksParams& params) = 0;
  virtual void FlattenKV(const FlattenKVParams& params) = 0;
  // Sequences [num_decode, num_seqs) of the batch.
  virtual void PrefillAttention(const AttentionParams& params) = 0;
  // Sequences [0, num_decode) of the batch: reads packed payload and scales, no flatten.
  virtual void DecodeAttention(const AttentionParams& params) = 0;
  // False, and nothing is written: the host reads the logits and finds it.
  virtual bool ArgMaxRows(const ArgMaxRowsParams& params) {
    static_cast<void>(params);
    return false;
  }
  // The same of rows that are sampled: the tokens are those that the host would sample.
  virtual bool SampleRows(const SampleRowsParams& params) {
    static_cast<void>(params);
    return false;
  }
};

}  // namespace turbomind
