#pragma once

#include <cstdlib>
#include <cstring>
#include <new>

#include "turbomind/core/check.h"
#include "turbomind/core/device.h"

namespace turbomind {

// Memory without ops, filled with a sentinel instead of zeros so that stale slots are seen.
class MemoryDevice : public Device {
 public:
  static constexpr unsigned char kSentinel = 0xAB;

  ~MemoryDevice() override { Check(reserved_bytes == 0, "everything reserved was released"); }

  DeviceCapability capability() const override { return {}; }
  std::string name() const override { return "memory"; }
  void* Reserve(size_t num_bytes) override {
    if (reserved_bytes + num_bytes > limit_bytes) {
      throw std::bad_alloc();
    }
    void* memory = ::operator new(num_bytes, std::align_val_t(64));
    std::memset(memory, kSentinel, num_bytes);
    reserved_bytes += num_bytes;
    return memory;
  }
  void Release(void* memory, size_t num_bytes) override {
    ::operator delete(memory, std::align_val_t(64));
    reserved_bytes -= num_bytes;
  }
  void Copy(void* to, const void* from, size_t num_bytes) override {
    std::memcpy(to, from, num_bytes);
  }

  std::unique_ptr<PackedMatrix> PackMatrix(const MatrixSource&, bool) override { return Refuse(); }
  void Embed(const EmbedParams&) override { Refuse(); }
  void FillRope(const FillRopeParams&) override { Refuse(); }
  void RmsNorm(const RmsNormParams&) override { Refuse(); }
  void Linear(const LinearParams&) override { Refuse(); }
  void GatedActivation(const GatedActivationParams&) override { Refuse(); }
  void GroupedLinear(const GroupedLinearParams&) override { Refuse(); }
  void RouteExperts(const RouteExpertsParams&) override { Refuse(); }
  void GroupRows(const GroupRowsParams&) override { Refuse(); }
  void CombineExperts(const CombineExpertsParams&) override { Refuse(); }
  void ProcessKV(const ProcessKVParams&) override { Refuse(); }
  void QuantiseBlocks(const QuantiseBlocksParams&) override { Refuse(); }
  void FlattenKV(const FlattenKVParams&) override { Refuse(); }
  void PrefillAttention(const AttentionParams&) override { Refuse(); }
  void DecodeAttention(const AttentionParams&) override { Refuse(); }

  size_t reserved_bytes = 0;
  size_t limit_bytes = size_t{1} << 40;

 private:
  static std::unique_ptr<PackedMatrix> Refuse() {
    Check(false, "the memory device has no ops");
    return nullptr;
  }
};

}  // namespace turbomind
