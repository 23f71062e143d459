#pragma once

#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "engine/ops_refusing_device.h"
#include "turbomind/core/check.h"
#include "turbomind/ops/forwarding_device.h"

namespace turbomind::testing {

// A device that has memory but no ops.
class NullDevice : public OpsRefusingDevice {
 public:
  std::string name() const override { return "null"; }
  void* Reserve(size_t num_bytes) override { return std::calloc(num_bytes + 1, 1); }
  void Release(void* memory, size_t) override { std::free(memory); }
};

using turbomind::ForwardingDevice;

// A latch that opens once and stays open.
class Gate {
 public:
  void Open() {
    is_open_ = true;
    is_open_.notify_all();
  }
  void Wait() { is_open_.wait(false); }

 private:
  std::atomic<bool> is_open_ = false;
};

// Makes the engine fail: Embed call number `fails_at` waits for LetFail() and then throws.
class FailingDevice : public ForwardingDevice {
 public:
  FailingDevice(std::shared_ptr<Device> device, int fails_at)
      : ForwardingDevice(std::move(device)), left_(fails_at) {}
  void LetFail() { may_fail_.Open(); }
  void Embed(const EmbedParams& params) override {
    if (--left_ == 0) {
      may_fail_.Wait();
      throw InternalError("the device is gone");
    }
    ForwardingDevice::Embed(params);
  }

 private:
  int left_;
  Gate may_fail_;
};

// Computes nothing until LetStart(). Requests submitted before it therefore run together, however
// long the calls of Submit take.
class WaitingDevice : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  void LetStart() { may_start_.Open(); }
  void Embed(const EmbedParams& params) override {
    may_start_.Wait();
    ForwardingDevice::Embed(params);
  }

 private:
  Gate may_start_;
};

// Claims that steps cost so much that the scheduler limits no prompt because others decode. So many
// sequences decode at once.
class SlowStepDevice : public WaitingDevice {
 public:
  using WaitingDevice::WaitingDevice;
  DeviceCapability capability() const override {
    DeviceCapability slow = WaitingDevice::capability();
    slow.step_cost_tokens = 1 << 20;
    return slow;
  }
};

}  // namespace turbomind::testing
