#pragma once

#include <cstring>
#include <memory>

#include "turbomind/core/check.h"
#include "turbomind/ops/device.h"

namespace turbomind::testing {

// A device that copies host memory and whose ops all throw.
class OpsRefusingDevice : public Device {
 public:
  DeviceCapability capability() const override { return {}; }
  void Copy(void* to, const void* from, size_t num_bytes) override {
    std::memcpy(to, from, num_bytes);
  }
  std::unique_ptr<PackedMatrix> PackMatrix(const MatrixSource&, bool) override { return Refuse(); }
  void Embed(const EmbedParams&) override { Refuse(); }
  void FillRope(const FillRopeParams&) override { Refuse(); }
  void Norm(const NormParams&) override { Refuse(); }
  void Add(const AddParams&) override { Refuse(); }
  void SoftCap(const SoftCapParams&) override { Refuse(); }
  void Linear(const LinearParams&) override { Refuse(); }
  void GatedActivation(const GatedActivationParams&) override { Refuse(); }
  void GroupedLinear(const GroupedLinearParams&) override { Refuse(); }
  void RouteExperts(const RouteExpertsParams&) override { Refuse(); }
  void GroupRows(const GroupRowsParams&) override { Refuse(); }
  void CombineExperts(const CombineExpertsParams&) override { Refuse(); }
  void WriteKv(const WriteKvParams&) override { Refuse(); }
  void QuantizeBlocks(const QuantizeBlocksParams&) override { Refuse(); }
  void FlattenKV(const FlattenKVParams&) override { Refuse(); }
  void PrefillAttention(const AttentionParams&) override { Refuse(); }
  void DecodeAttention(const AttentionParams&) override { Refuse(); }
  void WriteLatents(const WriteLatentsParams&) override { Refuse(); }
  void HeadLinear(const HeadLinearParams&) override { Refuse(); }
  void LatentAttention(const LatentAttentionParams&) override { Refuse(); }
  void ShortConvolution(const ShortConvolutionParams&) override { Refuse(); }
  void GatedDelta(const GatedDeltaParams&) override { Refuse(); }
  void SelectiveScan(const SelectiveScanParams&) override { Refuse(); }
  void GatedNorm(const GatedNormParams&) override { Refuse(); }
  void SigmoidGate(const SigmoidGateParams&) override { Refuse(); }
  void SaveCheckpoints(const StateCopyParams&) override { Refuse(); }
  void RestoreCheckpoints(const StateCopyParams&) override { Refuse(); }

 private:
  static std::unique_ptr<PackedMatrix> Refuse() {
    throw InternalError("this test device has no ops");
  }
};

}  // namespace turbomind::testing
