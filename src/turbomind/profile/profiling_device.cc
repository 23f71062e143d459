#include "turbomind/profile/profiling_device.h"

#include <chrono>
#include <utility>

namespace turbomind {
namespace {

constexpr int kNumPhases = 4;

int64_t NowNs() {
  using std::chrono::nanoseconds;
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<nanoseconds>(now).count();
}

OpKey Key(OpKind kind) { return {.kind = kind}; }

OpKey Key(OpKind kind, const PackedMatrix& matrix) {
  return {.kind = kind, .format = matrix.format, .rows = matrix.rows, .cols = matrix.cols};
}

OpKey Key(OpKind kind, const KvLayerView& kv) {
  return {.kind = kind, .k_format = kv.format[0], .v_format = kv.format[1]};
}

// Returns the key for the outputs of all parts, with the format of the first part.
OpKey Key(const LinearParams& params) {
  OpKey key = Key(OpKind::kLinear);
  for (int i = 0; i < params.num_parts; ++i) {
    const PackedMatrix& weight = *params.parts[i].weight;
    key.format = i == 0 ? weight.format : key.format;
    key.cols = weight.cols;
    key.rows += weight.rows;
  }
  return key;
}

// All experts have the same shape and format.
OpKey Key(const GroupedLinearParams& params) {
  return params.num_experts == 0 ? Key(OpKind::kGroupedLinear)
                                 : Key(OpKind::kGroupedLinear, *params.experts[0].weight);
}

std::vector<PhaseProfile> EmptyPhases() {
  std::vector<PhaseProfile> phases(kNumPhases);
  for (int i = 0; i < kNumPhases; ++i) {
    phases[static_cast<size_t>(i)].phase = static_cast<StepPhase>(i);
  }
  return phases;
}

}  // namespace

ProfilingDevice::ProfilingDevice(std::shared_ptr<Device> device)
    : ForwardingDevice(std::move(device)), phases_(EmptyPhases()) {}

std::vector<PhaseProfile> ProfilingDevice::profile() const {
  const std::lock_guard lock(mutex_);
  std::vector<PhaseProfile> phases = phases_;
  AddStep(step_, phases);
  std::erase_if(phases, [](const PhaseProfile& phase) { return phase.num_steps == 0; });
  return phases;
}

void ProfilingDevice::Clear() {
  const std::lock_guard lock(mutex_);
  phases_ = EmptyPhases();
  is_cut_ = is_cut_ || step_.last_end_ns.has_value();
  step_ = {};
}

template <class Fn>
ProfilingDevice::Span ProfilingDevice::Time(const Fn& op) {
  const int64_t begin = NowNs();
  op();
  inner().Synchronize();
  return {begin, NowNs()};
}

template <class Fn>
void ProfilingDevice::Run(const OpKey& key, const OpCost& cost, const Fn& op) {
  const Span span = Time(op);
  const std::lock_guard lock(mutex_);
  Add(key, cost, span);
}

void ProfilingDevice::Add(const OpKey& key, const OpCost& cost, const Span& span) {
  if (is_cut_) {
    return;
  }
  if (step_.last_end_ns) {
    const int64_t gap = span.begin_ns - *step_.last_end_ns;
    AddTo(step_.records, {Key(OpKind::kEngine), 1, gap, {}});
    step_.nanoseconds += gap;
  }
  const int64_t spent = span.end_ns - span.begin_ns;
  AddTo(step_.records, {key, 1, spent, cost});
  step_.nanoseconds += spent;
  step_.last_end_ns = span.end_ns;
}

// Ends the previous step and the time after its last op.
void ProfilingDevice::BeginStep(int64_t now_ns) {
  is_cut_ = false;
  if (!step_.last_end_ns) {
    step_ = {};  // the previous step was cleared or threw
    return;
  }
  AddTo(step_.records, {Key(OpKind::kBetweenSteps), 1, now_ns - *step_.last_end_ns, {}});
  AddStep(step_, phases_);
  Step next;
  next.records.swap(step_.records);  // reuse the memory
  next.records.clear();
  step_ = std::move(next);
}

void ProfilingDevice::AddTo(std::vector<OpRecord>& records, const OpRecord& record) {
  for (OpRecord& sum : records) {
    if (sum.key == record.key) {
      sum.calls += record.calls;
      sum.nanoseconds += record.nanoseconds;
      sum.cost.Add(record.cost);
      return;
    }
  }
  records.push_back(record);
}

void ProfilingDevice::AddStep(const Step& step, std::vector<PhaseProfile>& phases) {
  if (!step.last_end_ns) {
    return;
  }
  StepPhase phase = StepPhase::kOther;
  if (step.prefills) {
    phase = step.decodes ? StepPhase::kMixed : StepPhase::kPrefill;
  } else if (step.decodes) {
    phase = StepPhase::kDecode;
  }
  PhaseProfile& sum = phases[static_cast<size_t>(phase)];
  ++sum.num_steps;
  sum.num_tokens += step.num_tokens;
  sum.nanoseconds += step.nanoseconds;
  for (const OpRecord& record : step.records) {
    AddTo(sum.records, record);
  }
}

bool ProfilingDevice::InStep() const {
  const std::lock_guard lock(mutex_);
  return step_.last_end_ns.has_value();
}

void ProfilingDevice::Copy(void* to, const void* from, size_t num_bytes) {
  if (!InStep()) {
    inner().Copy(to, from, num_bytes);
    return;
  }
  Run(Key(OpKind::kCopy), CopyCost(num_bytes), [&] { inner().Copy(to, from, num_bytes); });
}

void ProfilingDevice::RunStep(const StepParams& step, FunctionRef<void()> ops) {
  StepParams each = step;
  each.op_by_op = true;
  inner().RunStep(each, ops);
}

void ProfilingDevice::Embed(const EmbedParams& params) {
  const Span span = Time([&] { inner().Embed(params); });
  const std::lock_guard lock(mutex_);
  BeginStep(span.begin_ns);
  step_.num_tokens += params.num_tokens;
  Add(Key(OpKind::kEmbed, *params.table), CostOf(params), span);
}

void ProfilingDevice::Norm(const NormParams& params) {
  Run(Key(OpKind::kNorm), CostOf(params), [&] { inner().Norm(params); });
}

void ProfilingDevice::Add(const AddParams& params) {
  Run(Key(OpKind::kNorm), CostOf(params), [&] { inner().Add(params); });
}

void ProfilingDevice::SoftCap(const SoftCapParams& params) {
  Run(Key(OpKind::kActivation), CostOf(params), [&] { inner().SoftCap(params); });
}

void ProfilingDevice::Linear(const LinearParams& params) {
  Run(Key(params), CostOf(params), [&] { inner().Linear(params); });
}

void ProfilingDevice::GatedActivation(const GatedActivationParams& params) {
  Run(Key(OpKind::kActivation), CostOf(params), [&] { inner().GatedActivation(params); });
}

void ProfilingDevice::GroupedLinear(const GroupedLinearParams& params) {
  const auto num_experts = static_cast<size_t>(params.num_experts);
  offsets_.resize(num_experts + 1);
  if (num_experts > 0) {
    inner().Copy(offsets_.data(), params.offsets, offsets_.size() * sizeof(int32_t));
    inner().Synchronize();
  }
  Run(Key(params), CostOf(params, offsets_.data()), [&] { inner().GroupedLinear(params); });
}

void ProfilingDevice::RouteExperts(const RouteExpertsParams& params) {
  Run(Key(OpKind::kRouteExperts), CostOf(params), [&] { inner().RouteExperts(params); });
}

void ProfilingDevice::GroupRows(const GroupRowsParams& params) {
  Run(Key(OpKind::kRouteExperts), {}, [&] { inner().GroupRows(params); });
}

void ProfilingDevice::CombineExperts(const CombineExpertsParams& params) {
  Run(Key(OpKind::kCombineExperts), CostOf(params), [&] { inner().CombineExperts(params); });
}

void ProfilingDevice::WriteKv(const WriteKvParams& params) {
  Run(Key(OpKind::kWriteKv, params.kv), CostOf(params), [&] { inner().WriteKv(params); });
}

void ProfilingDevice::QuantizeBlocks(const QuantizeBlocksParams& params) {
  Run(Key(OpKind::kQuantizeBlocks, params.kv), CostOf(params),
      [&] { inner().QuantizeBlocks(params); });
}

void ProfilingDevice::FlattenKV(const FlattenKVParams& params) {
  Run(Key(OpKind::kFlattenKv, params.kv), CostOf(params), [&] { inner().FlattenKV(params); });
}

void ProfilingDevice::PrefillAttention(const AttentionParams& params) {
  const Span span = Time([&] { inner().PrefillAttention(params); });
  const std::lock_guard lock(mutex_);
  step_.prefills = true;
  Add(Key(OpKind::kPrefillAttention, params.kv), PrefillCost(params), span);
}

void ProfilingDevice::DecodeAttention(const AttentionParams& params) {
  const Span span = Time([&] { inner().DecodeAttention(params); });
  const std::lock_guard lock(mutex_);
  step_.decodes = true;
  Add(Key(OpKind::kDecodeAttention, params.kv), DecodeCost(params), span);
}

void ProfilingDevice::ShortConvolution(const ShortConvolutionParams& params) {
  Run(Key(OpKind::kShortConvolution), CostOf(params), [&] { inner().ShortConvolution(params); });
}

void ProfilingDevice::GatedDelta(const GatedDeltaParams& params) {
  Run(Key(OpKind::kGatedDelta), CostOf(params), [&] { inner().GatedDelta(params); });
}

void ProfilingDevice::SelectiveScan(const SelectiveScanParams& params) {
  Run(Key(OpKind::kSelectiveScan), CostOf(params), [&] { inner().SelectiveScan(params); });
}

void ProfilingDevice::GatedNorm(const GatedNormParams& params) {
  Run(Key(OpKind::kNorm), CostOf(params), [&] { inner().GatedNorm(params); });
}

void ProfilingDevice::SigmoidGate(const SigmoidGateParams& params) {
  Run(Key(OpKind::kActivation), CostOf(params), [&] { inner().SigmoidGate(params); });
}

}  // namespace turbomind
