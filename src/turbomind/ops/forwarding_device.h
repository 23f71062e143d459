#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "turbomind/core/check.h"
#include "turbomind/ops/device.h"

namespace turbomind {

// Forwards every call to another device. Matrices stay those of the other device. Subclasses
// override the calls that they observe or change.
class ForwardingDevice : public Device {
 public:
  explicit ForwardingDevice(std::shared_ptr<Device> device) : device_(std::move(device)) {
    if (device_ == nullptr) {
      throw InvalidArgument(
          "The device of a ForwardingDevice is null. Pass the device that receives its calls.");
    }
  }
  Device& inner() { return *device_; }

  DeviceCapability capability() const override { return device_->capability(); }
  std::string name() const override { return device_->name(); }
  std::string gemm_backend() const override { return device_->gemm_backend(); }
  std::string gemm_input_dtype() const override { return device_->gemm_input_dtype(); }
  std::optional<int64_t> free_bytes() const override { return device_->free_bytes(); }
  void RequireAttention(const KvLayerView& layer) const override {
    device_->RequireAttention(layer);
  }
  void* Reserve(size_t num_bytes) override { return device_->Reserve(num_bytes); }
  void Release(void* memory, size_t n) override { device_->Release(memory, n); }
  void Copy(void* to, const void* from, size_t n) override { device_->Copy(to, from, n); }
  void Synchronize() override { device_->Synchronize(); }
  void* ReadBack(void* memory, size_t n) override { return device_->ReadBack(memory, n); }
  void RunStep(const StepParams& step, FunctionRef<void()> ops) override {
    device_->RunStep(step, ops);
  }
  void RunInOrderOf(void* stream, FunctionRef<void()> work) override {
    device_->RunInOrderOf(stream, work);
  }
  void CopyHeads(const CopyHeadsParams& params) override { device_->CopyHeads(params); }
  int num_host_threads() const override { return device_->num_host_threads(); }
  void ForEachOnHost(int64_t num_items, FunctionRef<void(int64_t item, int thread)> fn) override {
    device_->ForEachOnHost(num_items, fn);
  }
  std::unique_ptr<PackedMatrix> PackMatrix(const MatrixSource& source, bool exact) override {
    return device_->PackMatrix(source, exact);
  }
  TuningResult Tune(const TuningParams& params) override { return device_->Tune(params); }
  void Embed(const EmbedParams& params) override { device_->Embed(params); }
  void FillRope(const FillRopeParams& params) override { device_->FillRope(params); }
  void Norm(const NormParams& params) override { device_->Norm(params); }
  void Add(const AddParams& params) override { device_->Add(params); }
  void SoftCap(const SoftCapParams& params) override { device_->SoftCap(params); }
  void Linear(const LinearParams& params) override { device_->Linear(params); }
  void GatedActivation(const GatedActivationParams& params) override {
    device_->GatedActivation(params);
  }
  void GroupedLinear(const GroupedLinearParams& params) override { device_->GroupedLinear(params); }
  void RouteExperts(const RouteExpertsParams& params) override { device_->RouteExperts(params); }
  void GroupRows(const GroupRowsParams& params) override { device_->GroupRows(params); }
  void CombineExperts(const CombineExpertsParams& params) override {
    device_->CombineExperts(params);
  }
  void WriteKv(const WriteKvParams& params) override { device_->WriteKv(params); }
  void QuantizeBlocks(const QuantizeBlocksParams& params) override {
    device_->QuantizeBlocks(params);
  }
  void FlattenKV(const FlattenKVParams& params) override { device_->FlattenKV(params); }
  void PrefillAttention(const AttentionParams& params) override {
    device_->PrefillAttention(params);
  }
  void DecodeAttention(const AttentionParams& params) override { device_->DecodeAttention(params); }
  void WriteLatents(const WriteLatentsParams& params) override { device_->WriteLatents(params); }
  void HeadLinear(const HeadLinearParams& params) override { device_->HeadLinear(params); }
  void LatentAttention(const LatentAttentionParams& params) override {
    device_->LatentAttention(params);
  }
  void ShortConvolution(const ShortConvolutionParams& params) override {
    device_->ShortConvolution(params);
  }
  void GatedDelta(const GatedDeltaParams& params) override { device_->GatedDelta(params); }
  void SelectiveScan(const SelectiveScanParams& params) override { device_->SelectiveScan(params); }
  void GatedNorm(const GatedNormParams& params) override { device_->GatedNorm(params); }
  void SaveCheckpoints(const StateCopyParams& params) override { device_->SaveCheckpoints(params); }
  void RestoreCheckpoints(const StateCopyParams& params) override {
    device_->RestoreCheckpoints(params);
  }
  void SigmoidGate(const SigmoidGateParams& params) override { device_->SigmoidGate(params); }
  bool ArgMaxRows(const ArgMaxRowsParams& params) override { return device_->ArgMaxRows(params); }
  bool SampleRows(const SampleRowsParams& params) override { return device_->SampleRows(params); }

 private:
  const std::shared_ptr<Device> device_;
};

}  // namespace turbomind
