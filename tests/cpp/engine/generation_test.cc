// Which rows get logits, and that rows are sampled side by side with the same result.

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <thread>
#include <vector>

#include "engine/null_device.h"
#include "engine/tiny_model.h"

namespace turbomind {
namespace {

using testing::MakeRequest;
using testing::RandomPrompt;

// Rows of the output head, whose number of outputs no other matrix has; and what sampling hands
// out.
class CountingDevice : public testing::WaitingDevice {
 public:
  using WaitingDevice::WaitingDevice;

  void Linear(const LinearParams& params) override {
    head_rows += params.parts[0].weight->rows == vocab_size ? params.num_rows : 0;
    WaitingDevice::Linear(params);
  }
  // Three threads, and the last item first.
  int num_host_threads() const override { return 3; }
  void ForEachOnHost(int64_t num_items, FunctionRef<void(int64_t item, int thread)> fn) override {
    num_items_on_host += num_items;
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 3; ++thread) {
      threads.emplace_back([=] {
        for (int64_t item = num_items - 1 - thread; item >= 0; item -= 3) {
          fn(item, thread);
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }

  int64_t vocab_size = testing::kVocab;
  int64_t head_rows = 0;
  int64_t num_items_on_host = 0;
};

struct Answer {
  int64_t head_rows = 0;
  int64_t num_items_on_host = 0;
  std::map<uint64_t, RequestOutput> outputs;
};

Answer Run(const std::vector<std::shared_ptr<Request>>& requests, int vocab_size,
           bool on_cpu_threads = false) {
  ModelConfig model = testing::TinyConfig();
  model.vocab_size = vocab_size;
  EngineConfig config = testing::TinyEngineConfig(KvCacheMode::kFp4Nv);
  config.max_prefill_token_num = 32;
  const std::shared_ptr<Device> cpu = MakeCpuDevice(2);
  auto device = std::make_shared<CountingDevice>(cpu);
  device->vocab_size = vocab_size;
  std::shared_ptr<Device> used = on_cpu_threads ? cpu : device;
  auto weights = testing::TinyWeights(model, *used);
  Engine engine(model, config, std::move(weights), used, testing::kFreeBytes);
  for (const auto& request : requests) {
    auto copy = MakeRequest(request->id, request->prompt, request->max_new_tokens);
    copy->sampling = request->sampling;
    copy->num_prompt_logprobs = request->num_prompt_logprobs;
    copy->token_mask = request->token_mask;
    engine.Submit(std::move(copy));
  }
  device->LetStart();
  Answer answer;
  answer.outputs = testing::Collect(engine, requests.size());
  engine.Stop();
  answer.head_rows = device->head_rows;
  answer.num_items_on_host = device->num_items_on_host;
  return answer;
}

TEST_CASE("only rows that somebody asked for have logits") {
  // In chunks of 32 tokens, some beside others that decode.
  std::vector<std::shared_ptr<Request>> requests;
  for (uint64_t id = 0; id < 3; ++id) {
    requests.push_back(MakeRequest(id, RandomPrompt(static_cast<uint32_t>(id), 130), 7));
  }
  CHECK(Run(requests, testing::kVocab).head_rows == 3 * 7);
  requests[1]->num_prompt_logprobs = 0;  // asks for the rows of its prompt, the last one aside
  CHECK(Run(requests, testing::kVocab).head_rows == 3 * 7 + 129);
  requests[2]->max_new_tokens = 0;  // one row, which tells that the prompt has run
  CHECK(Run(requests, testing::kVocab).head_rows == 2 * 7 + 129 + 1);
}

// Large enough that rows are handed out.
constexpr int kLargeVocab = 9000;

std::vector<std::shared_ptr<Request>> SampledRequests() {
  std::vector<std::shared_ptr<Request>> requests;
  for (uint64_t id = 0; id < 7; ++id) {
    auto request = MakeRequest(id, RandomPrompt(static_cast<uint32_t>(id), 4), 12);
    request->sampling.do_sample = id != 0;
    request->sampling.seed = id;
    request->sampling.temperature = 2.f;
    request->sampling.top_k = id % 3 == 1 ? 50 : 0;
    request->sampling.min_p = id == 2 ? 0.01f : 0.f;
    request->sampling.repetition_penalty = id == 3 ? 1.3f : 1.f;
    request->sampling.num_logprobs = id == 4 ? 3 : -1;
    requests.push_back(std::move(request));
  }
  return requests;
}

TEST_CASE("rows sampled side by side give the tokens of each on its own") {
  const auto requests = SampledRequests();
  const Answer together = Run(requests, kLargeVocab);
  const Answer on_workers = Run(requests, kLargeVocab, true);
  CHECK(together.num_items_on_host >= 7 * 11);
  for (const auto& request : requests) {
    CAPTURE(request->id);
    const Answer alone = Run({request}, kLargeVocab);
    CHECK(alone.num_items_on_host == 0);
    const RequestOutput& want = alone.outputs.at(request->id);
    REQUIRE(want.tokens.size() == 12);
    for (const Answer* answer : {&together, &on_workers}) {
      const RequestOutput& got = answer->outputs.at(request->id);
      CHECK(got.tokens == want.tokens);
      REQUIRE(got.logprobs.size() == want.logprobs.size());
      for (size_t i = 0; i < got.logprobs.size(); ++i) {
        CHECK(got.logprobs[i].top == want.logprobs[i].top);
      }
    }
  }
}

TEST_CASE("token masks are asked for on one thread") {
  auto requests = SampledRequests();
  std::vector<std::thread::id> callers;
  for (const size_t masked : {1, 5}) {
    requests[masked]->token_mask = [&callers](const auto&, auto& mask) {
      callers.push_back(std::this_thread::get_id());
      std::fill(mask.begin(), mask.end(), 0xffffffffu);
      return true;
    };
  }
  const Answer answer = Run(requests, kLargeVocab);
  CHECK(answer.num_items_on_host >= 5 * 11);
  CHECK(answer.num_items_on_host <= 5 * 12);
  REQUIRE(callers.size() == 2 * 12);
  CHECK(std::count(callers.begin(), callers.end(), callers.front()) == 2 * 12);
  CHECK(answer.outputs.at(1).tokens ==
        Run({SampledRequests()[1]}, kLargeVocab).outputs.at(1).tokens);
}

}  // namespace
}  // namespace turbomind
