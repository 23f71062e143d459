// A step allocates no memory, on the engine thread or on the device's workers. A step lasts from
// one forward pass to the next and includes sampling, planning and handing over outputs.

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "engine/null_device.h"
#include "engine/tiny_model.h"

namespace {

thread_local bool is_counted = true;
std::atomic<int64_t> num_allocations = 0;

void* Allocate(size_t size, size_t alignment) {
  num_allocations.fetch_add(is_counted ? 1 : 0, std::memory_order_relaxed);
  const size_t rounded = (size + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}

void Free(void* memory) {
  num_allocations.fetch_add(is_counted && memory != nullptr ? 1 : 0, std::memory_order_relaxed);
  std::free(memory);
}

}  // namespace

void* operator new(size_t size) { return Allocate(size, alignof(std::max_align_t)); }
void* operator new(size_t size, std::align_val_t alignment) {
  return Allocate(size, static_cast<size_t>(alignment));
}
void operator delete(void* memory) noexcept { Free(memory); }
void operator delete(void* memory, size_t) noexcept { Free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { Free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { Free(memory); }

namespace turbomind {
namespace {

using testing::MakeRequest;
using testing::RandomPrompt;

constexpr int kBlock = 128;
constexpr int kChunk = 12;
constexpr int kPrompt = 100;
constexpr int kGenerated = 90;

// What happened from the beginning of one step to the beginning of the next.
struct StepRecord {
  int num_tokens = 0;
  int64_t num_allocations = 0;  // and deallocations
  int num_quantized = 0;        // blocks that left the 16-bit window, over all layers
  bool is_special = false;      // a sequence fills a block, frees one or ends
};

// Records where steps begin, which is at their first op. No step begins before the client has all
// tokens, because the engine must allocate for a client that falls behind.
class RecordingDevice : public testing::WaitingDevice {
 public:
  // `last_length` is the context length of a sequence's last step.
  RecordingDevice(std::shared_ptr<Device> device, std::vector<int> windows, int last_length)
      : WaitingDevice(std::move(device)),
        windows_(std::move(windows)),
        last_length_(last_length),
        steps_(kLimit) {}

  void Embed(const EmbedParams& params) override {
    const int64_t now = num_allocations.load();
    if (num_steps_ > 0) {
      steps_[num_steps_ - 1].num_allocations = now - last_;
    }
    while (num_received_.load() < num_sampled_) {
      std::this_thread::yield();
    }
    WaitingDevice::Embed(params);
    if (num_steps_ < kLimit) {
      steps_[num_steps_++].num_tokens = params.num_tokens;
    }
    last_ = num_allocations.load();
  }

  void WriteKv(const WriteKvParams& params) override {
    for (int seq = 0; seq < params.batch.num_seqs; ++seq) {
      const int length = params.batch.context_lens[seq];
      const int new_tokens = params.batch.cu_seqlens[seq + 1] - params.batch.cu_seqlens[seq];
      bool is_special = length == last_length_;
      for (const int window : windows_) {
        // A block leaves the window in this step or in the plan of the next one, which is as long.
        is_special = is_special || (length - window + new_tokens) % kBlock < 2 * new_tokens;
      }
      steps_[num_steps_ - 1].is_special |= is_special;
    }
    steps_[num_steps_ - 1].is_special |= params.batch.num_to_quantize > 0;  // frees a 16-bit block
    WaitingDevice::WriteKv(params);
  }

  void QuantizeBlocks(const QuantizeBlocksParams& params) override {
    steps_[num_steps_ - 1].num_quantized += params.num_to_quantize;
    WaitingDevice::QuantizeBlocks(params);
  }

  void Linear(const LinearParams& params) override {
    num_sampled_ += params.parts[0].weight->rows == testing::kVocab ? params.num_rows : 0;
    WaitingDevice::Linear(params);
  }

  void ClientHas(int64_t num_tokens) { num_received_ += num_tokens; }

  // Returns all steps except the last, which has no end. REQUIRES: the engine has stopped.
  std::vector<StepRecord> Steps() const {
    return {steps_.begin(), steps_.begin() + static_cast<std::ptrdiff_t>(num_steps_ - 1)};
  }

 private:
  static constexpr size_t kLimit = 1000;
  const std::vector<int> windows_;  // by layer; 0: full attention
  const int last_length_;
  std::vector<StepRecord> steps_;
  size_t num_steps_ = 0;
  int64_t last_ = 0;
  int64_t num_sampled_ = 0;
  std::atomic<int64_t> num_received_ = 0;
};

struct Case {
  std::string name;
  ModelConfig model = testing::TinyConfig();
  EngineConfig config = testing::TinyEngineConfig(KvCacheMode::kFp4Nv);
  bool quantized = true;
  int prompt = kPrompt;
  int generated = kGenerated;
};

Case MakeCase(std::string name, KvCacheMode format) {
  Case made{.name = std::move(name)};
  made.config = testing::TinyEngineConfig(format);
  made.config.check_integrity = false;
  made.config.cache_block_seq_len = kBlock;
  made.config.max_prefill_token_num = kChunk;
  return made;
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const KvCacheMode format : {KvCacheMode::kNone, KvCacheMode::kInt4, KvCacheMode::kFp4Nv}) {
    cases.push_back(MakeCase(ToString(format), format));
  }
  cases.push_back(MakeCase("FP32 weights", KvCacheMode::kFp4Mx));
  cases.back().quantized = false;
  cases.push_back(MakeCase("16-bit window", KvCacheMode::kFp4Nv));
  cases.back().config.kv_quality.window16 = {64, 64};
  cases.back().prompt = 300;  // the second block leaves the window when the fourth begins, at 384
  cases.back().generated = 160;
  cases.back().config.max_prefill_token_num = 16;
  cases.push_back(MakeCase("experts", KvCacheMode::kFp4Nv));
  cases.back().model = testing::TinyGptOss();
  cases.push_back(MakeCase("shared expert", KvCacheMode::kFp4Nv));
  cases.back().model = testing::TinyQwenMoe();
  cases.back().quantized = false;  // quantized experts would differ in format
  return cases;
}

// Runs requests, all at once, and returns the records of their steps.
std::vector<StepRecord> Run(const Case& how, uint64_t num_requests, bool logprobs = false) {
  is_counted = false;  // this is the client's thread
  auto device = std::make_shared<RecordingDevice>(MakeCpuDevice(2), how.model.windows,
                                                  how.prompt + how.generated - 1);
  auto weights = testing::TinyWeights(how.model, *device, {.quantized = how.quantized});
  Engine engine(how.model, how.config, std::move(weights), device, testing::kFreeBytes);
  for (uint64_t id = 0; id < num_requests; ++id) {
    auto request =
        MakeRequest(id, RandomPrompt(static_cast<uint32_t>(id), how.prompt), how.generated);
    request->sampling.do_sample = id % 2 == 1;
    request->sampling.num_logprobs = logprobs ? 2 : -1;
    engine.Submit(std::move(request));
  }
  device->LetStart();
  for (uint64_t num_finished = 0; num_finished < num_requests;) {
    for (const RequestOutput& output : engine.WaitOutputs(10'000)) {
      device->ClientHas(static_cast<int64_t>(output.tokens.size()));
      num_finished += output.finish_reason != FinishReason::kNone ? 1 : 0;
    }
  }
  engine.Stop();
  return device->Steps();
}

constexpr size_t kWarmUp = 4;  // first steps of a size, in which buffers still grow

// Returns the steps of `num_tokens` tokens that are not special and not among the first kWarmUp.
std::vector<StepRecord> Steady(const std::vector<StepRecord>& steps, int num_tokens) {
  std::vector<StepRecord> steady;
  size_t num_seen = 0;
  for (const StepRecord& step : steps) {
    if (step.num_tokens == num_tokens && ++num_seen > kWarmUp && !step.is_special) {
      steady.push_back(step);
    }
  }
  return steady;
}

int NumQuantized(const std::vector<StepRecord>& steps) {
  return std::accumulate(steps.begin(), steps.end(), 0,
                         [](int sum, const StepRecord& step) { return sum + step.num_quantized; });
}

int NumAllocating(const std::vector<StepRecord>& steps) {
  return static_cast<int>(std::count_if(
      steps.begin(), steps.end(), [](const auto& step) { return step.num_allocations != 0; }));
}

TEST_CASE("a decode step allocates nothing, unless a block is filled or freed, or a request ends") {
  for (const Case& how : Cases()) {
    CAPTURE(how.name);
    const auto all = Run(how, 4);
    const auto steps = Steady(all, 4);
    CHECK(steps.size() >= 35);
    CHECK(NumAllocating(steps) == 0);
    CHECK((NumQuantized(all) > 0) == (how.config.kv_quality.window16.recent_tokens >= 0));
  }
}

TEST_CASE("a prefill step allocates nothing, unless a block is filled or freed") {
  for (const Case& how : Cases()) {
    CAPTURE(how.name);
    const auto all = Run(how, 1);  // 8 steps of 12 tokens, then 4
    const auto steps = Steady(all, how.config.max_prefill_token_num);
    CHECK(steps.size() >= 4);
    CHECK(NumAllocating(steps) == 0);
  }
}

TEST_CASE("the counter detects the allocations of a step") {
  const auto steps = Steady(Run(Cases().front(), 2, true), 2);  // log-probabilities allocate
  CHECK(steps.size() >= 35);
  CHECK(NumAllocating(steps) == static_cast<int>(steps.size()));
}

}  // namespace
}  // namespace turbomind
