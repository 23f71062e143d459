#pragma once

// A device that times the ops of another device. An engine without it pays nothing.

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "turbomind/ops/forwarding_device.h"
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
  kWriteKv,
  kQuantizeBlocks,
  kFlattenKv,
  kPrefillAttention,
  kDecodeAttention,
  kShortConvolution,
  kGatedDelta,
  kSelectiveScan,
  kCopy,
  kEngine,        // between two ops of a step: RoPE tables, grouping of experts, sampling, ...
  kBetweenSteps,  // from the last op of a step to the next step: outputs, planning, waiting
};

// Returns whether the op reads or writes the KV cache.
constexpr bool TouchesCache(OpKind kind) {
  return kind >= OpKind::kWriteKv && kind <= OpKind::kDecodeAttention;
}

// Ops with equal keys share one record. Embed, Linear and GroupedLinear have the shape of their
// matrix, and ops that touch the KV cache have its formats.
struct OpKey {
  OpKind kind = OpKind::kEngine;
  MatrixFormat format = MatrixFormat::kF32;
  int64_t rows = 0;  // outputs; 0 for an op without a matrix
  int64_t cols = 0;
  KvCacheMode k_format = KvCacheMode::kNone;
  KvCacheMode v_format = KvCacheMode::kNone;

  bool operator==(const OpKey&) const = default;
};

struct OpRecord {
  OpKey key;
  int64_t calls = 0;
  int64_t nanoseconds = 0;
  OpCost cost;
};

// The attention ops of a step decide its phase: of prompts, of decoding sequences, both, or none.
enum class StepPhase : uint8_t { kOther, kPrefill, kDecode, kMixed };

struct PhaseProfile {
  StepPhase phase = StepPhase::kOther;
  int64_t num_steps = 0;
  int64_t num_tokens = 0;   // embedded tokens, of prompts and of decoding sequences
  int64_t nanoseconds = 0;  // from the first op of each step to its last op
  std::vector<OpRecord> records;
};

// Times each op until its work is done (Synchronize). A step begins with Embed; copies before the
// first step (weights, tables) are not recorded.
//
// Invariants:
//  1. In each phase, the nanoseconds of all records except kBetweenSteps sum to those of the phase.
//  2. An op that throws is not counted.
// One thread at a time calls the device. Any thread may call profile() and Clear().
class ProfilingDevice final : public ForwardingDevice {
 public:
  explicit ProfilingDevice(std::shared_ptr<Device> device);

  // Returns the phases that had steps since Clear(), in the order of StepPhase. A step that is
  // running counts with the ops that have ended.
  std::vector<PhaseProfile> profile() const;
  // Forgets all records and ignores the rest of a running step.
  void Clear();

  void Copy(void* to, const void* from, size_t num_bytes) override;
  // Runs every op instead of replaying a recorded step, so that every op is timed.
  void RunStep(const StepParams& step, FunctionRef<void()> ops) override;
  void Embed(const EmbedParams& params) override;
  void Norm(const NormParams& params) override;
  void Add(const AddParams& params) override;
  void SoftCap(const SoftCapParams& params) override;
  void Linear(const LinearParams& params) override;
  void GatedActivation(const GatedActivationParams& params) override;
  void GroupedLinear(const GroupedLinearParams& params) override;
  void RouteExperts(const RouteExpertsParams& params) override;
  void GroupRows(const GroupRowsParams& params) override;
  void CombineExperts(const CombineExpertsParams& params) override;
  void WriteKv(const WriteKvParams& params) override;
  void QuantizeBlocks(const QuantizeBlocksParams& params) override;
  void FlattenKV(const FlattenKVParams& params) override;
  void PrefillAttention(const AttentionParams& params) override;
  void DecodeAttention(const AttentionParams& params) override;
  void ShortConvolution(const ShortConvolutionParams& params) override;
  void GatedDelta(const GatedDeltaParams& params) override;
  void SelectiveScan(const SelectiveScanParams& params) override;
  void GatedNorm(const GatedNormParams& params) override;
  void SigmoidGate(const SigmoidGateParams& params) override;

 private:
  struct Span {
    int64_t begin_ns;
    int64_t end_ns;
  };
  // The running step. Its phase is known after its attention ops.
  struct Step {
    int64_t num_tokens = 0;
    int64_t nanoseconds = 0;
    bool prefills = false;
    bool decodes = false;
    std::optional<int64_t> last_end_ns;  // empty before the first op
    std::vector<OpRecord> records;
  };

  bool InStep() const;
  template <class Fn>
  Span Time(const Fn& op);
  template <class Fn>
  void Run(const OpKey& key, const OpCost& cost, const Fn& op);
  // REQUIRES: mutex_ is held.
  void Add(const OpKey& key, const OpCost& cost, const Span& span);
  void BeginStep(int64_t now_ns);
  static void AddTo(std::vector<OpRecord>& records, const OpRecord& record);
  static void AddStep(const Step& step, std::vector<PhaseProfile>& phases);

  std::vector<int32_t> offsets_;  // host copy of the offsets of a grouped layer

  mutable std::mutex mutex_;
  Step step_;
  bool is_cut_ = false;               // Clear() was called in the running step
  std::vector<PhaseProfile> phases_;  // one for each StepPhase
};

}  // namespace turbomind
