#pragma once

// A device that times another one. Who does not profile uses the other one itself: no cost then.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "turbomind/ops/device.h"
#include "turbomind/profile/op_cost.h"

namespace turbomind {

enum class OpKind : uint8_t {
  kEmbed,
  kNorm,
  kLinear,
  kGroupedLinear,
  kActivation,
  kRouteExperts,
  kCombineExperts,
  kProcessKv,
  kQuantiseBlocks,
  kFlattenKv,
  kPrefillAttention,
  kDecodeAttention,
  kCopy,
  kEngine,        // between two ops of a step: RoPE tables, grouping of experts, sampling, ...
  kBetweenSteps,  // from a step's last op to the next step: sampling, outputs, planning, waiting
};

// Whether the op reads or writes the cache.
constexpr bool TouchesCache(OpKind kind) {
  return kind >= OpKind::kProcessKv && kind <= OpKind::kDecodeAttention;
}

// What is summed into one record: the op; for Embed, Linear and GroupedLinear its matrix; for those
// that touch the cache its formats.
struct OpKey {
  OpKind kind = OpKind::kEngine;
  MatrixFormat format = MatrixFormat::kF32;
  int64_t rows = 0;  // outputs; 0: no matrix
  int64_t cols = 0;
  KvCacheMode k_mode = KvCacheMode::kNone;
  KvCacheMode v_mode = KvCacheMode::kNone;

  bool operator==(const OpKey&) const = default;
};

struct OpRecord {
  OpKey key;
  int64_t calls = 0;
  int64_t nanoseconds = 0;
  OpCost cost;
};

// By what the step's attention was: of prompts, of decoding sequences, of both, or none.
enum class StepPhase : uint8_t { kOther, kPrefill, kDecode, kMixed };

struct PhaseProfile {
  StepPhase phase = StepPhase::kOther;
  int64_t num_steps = 0;
  int64_t num_tokens = 0;   // embedded: of prompts and of decoding sequences
  int64_t nanoseconds = 0;  // from each step's first op to its last; what lies between not counted
  std::vector<OpRecord> records;
};

struct OpEvent {
  OpKey key;
  int64_t step = 0;      // counted from Clear()
  int64_t begin_ns = 0;  // of the steady clock
  int64_t end_ns = 0;
};

struct Profile {
  std::vector<PhaseProfile> phases;  // those that had steps, in the order of StepPhase
  std::vector<OpEvent> events;       // in order of time, none overlaps another
  int64_t num_dropped_events = 0;    // that came after max_events
};

// Forwards everything, so the other device's matrices stay its own. Ops are timed until their work
// is done (Synchronize). A step begins with Embed;
// copies before the first one (weights, tables) are part of none.
//
// Invariants:
//  1. In each phase the nanoseconds of the records but kBetweenSteps sum to those of the phase.
//  2. An op that throws is not counted.
// One thread calls the device, as any other; profile() and Clear() may come from any thread.
class ProfilingDevice final : public Device {
 public:
  // Keeps the first max_events ops as events. Throws InvalidArgument for a negative number, and
  // where `device` is null.
  explicit ProfilingDevice(std::shared_ptr<Device> device, int64_t max_events = 0);

  // Since Clear(). A step that still runs counts as far as it has come.
  Profile profile() const;
  // Forgets all, and does not count what is left of a step that runs.
  void Clear();
  Device& inner() { return *device_; }

  DeviceCapability capability() const override { return device_->capability(); }
  std::string name() const override { return device_->name(); }
  std::string products() const override { return device_->products(); }
  void RequireAttention(const KvLayerView& layer) const override {
    device_->RequireAttention(layer);
  }
  void* Reserve(size_t num_bytes) override { return device_->Reserve(num_bytes); }
  void Release(void* memory, size_t num_bytes) override { device_->Release(memory, num_bytes); }
  void Copy(void* to, const void* from, size_t num_bytes) override;
  void Synchronize() override { device_->Synchronize(); }
  void* ReadBack(void* memory, size_t num_bytes) override {
    return device_->ReadBack(memory, num_bytes);
  }
  // Never from a record: every op is timed.
  void RunStep(const StepParams& step, FunctionRef<void()> ops) override;
  int num_host_threads() const override { return device_->num_host_threads(); }
  void ForEachOnHost(int64_t num_items, FunctionRef<void(int64_t item, int thread)> fn) override {
    device_->ForEachOnHost(num_items, fn);
  }
  std::unique_ptr<PackedMatrix> PackMatrix(const MatrixSource& source, bool exact) override {
    return device_->PackMatrix(source, exact);
  }
  void Embed(const EmbedParams& params) override;
  void FillRope(const FillRopeParams& params) override { device_->FillRope(params); }
  void RmsNorm(const RmsNormParams& params) override;
  void Linear(const LinearParams& params) override;
  void GatedActivation(const GatedActivationParams& params) override;
  void GroupedLinear(const GroupedLinearParams& params) override;
  void RouteExperts(const RouteExpertsParams& params) override;
  void GroupRows(const GroupRowsParams& params) override;
  void CombineExperts(const CombineExpertsParams& params) override;
  void ProcessKV(const ProcessKVParams& params) override;
  void QuantiseBlocks(const QuantiseBlocksParams& params) override;
  void FlattenKV(const FlattenKVParams& params) override;
  void PrefillAttention(const AttentionParams& params) override;
  void DecodeAttention(const AttentionParams& params) override;
  bool ArgMaxRows(const ArgMaxRowsParams& params) override { return device_->ArgMaxRows(params); }
  bool DrawRows(const DrawRowsParams& params) override { return device_->DrawRows(params); }

 private:
  struct Span {
    int64_t begin_ns;
    int64_t end_ns;
  };
  // The step that runs; its phase is known when its attention has been.
  struct Step {
    int64_t num_tokens = 0;
    int64_t nanoseconds = 0;
    bool prefills = false;
    bool decodes = false;
    std::optional<int64_t> last_end_ns;  // none: no op yet
    std::vector<OpRecord> records;
  };

  bool InStep() const;
  template <class Fn>
  Span Time(const Fn& op);
  template <class Fn>
  void Run(const OpKey& key, const OpCost& cost, const Fn& op);
  // Under mutex_.
  void Add(const OpKey& key, const OpCost& cost, const Span& span);
  void BeginStep(int64_t now_ns);
  static void AddTo(std::vector<OpRecord>& records, const OpRecord& record);
  static void AddStep(const Step& step, std::vector<PhaseProfile>& phases);

  const std::shared_ptr<Device> device_;
  const size_t max_events_;
  std::vector<int32_t> offsets_;  // of a grouped layer

  mutable std::mutex mutex_;
  Step step_;
  bool is_cut_ = false;  // cleared in the middle: the rest of the step is not counted
  int64_t step_index_ = 0;
  std::vector<PhaseProfile> phases_;  // [all of StepPhase]
  std::vector<OpEvent> events_;
  int64_t num_dropped_events_ = 0;
};

}  // namespace turbomind
