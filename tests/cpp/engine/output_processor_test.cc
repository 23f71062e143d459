// Which rows get logits, which of these are copied to the host, and that sampling rows in parallel
// gives the same result.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <thread>
#include <vector>

#include "engine/null_device.h"
#include "engine/tiny_model.h"
#include "turbomind/ops/row_math.h"
#include "turbomind/ops/sampling_math.h"

namespace turbomind {
namespace {

using testing::MakeRequest;
using testing::RandomPrompt;

// Counts the rows of the output head and of the layers' MLPs, and the items that sampling hands to
// host threads. Only the output head has `vocab_size` outputs.
class CountingDevice : public testing::WaitingDevice {
 public:
  using WaitingDevice::WaitingDevice;

  void Linear(const LinearParams& params) override {
    head_rows += params.parts[0].weight->rows == vocab_size ? params.num_rows : 0;
    WaitingDevice::Linear(params);
  }
  void GatedActivation(const GatedActivationParams& params) override {
    mlp_rows += params.num_rows;
    WaitingDevice::GatedActivation(params);
  }
  // Runs on three threads, the last items first.
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
  int64_t mlp_rows = 0;
  int64_t num_items_on_host = 0;
};

struct Answer {
  int64_t head_rows = 0;
  int64_t mlp_rows = 0;
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
    copy->pooling = request->pooling;
    engine.Submit(std::move(copy));
  }
  device->LetStart();
  Answer answer;
  answer.outputs = testing::Collect(engine, requests.size());
  engine.Stop();
  answer.head_rows = device->head_rows;
  answer.mlp_rows = device->mlp_rows;
  answer.num_items_on_host = device->num_items_on_host;
  return answer;
}

TEST_CASE("only requested rows get logits") {
  // The prompts run in chunks of 32 tokens, some in one step with decoding sequences.
  std::vector<std::shared_ptr<Request>> requests;
  for (uint64_t id = 0; id < 3; ++id) {
    requests.push_back(MakeRequest(id, RandomPrompt(static_cast<uint32_t>(id), 130), 7));
  }
  CHECK(Run(requests, testing::kVocab).head_rows == 3 * 7);
  requests[1]->num_prompt_logprobs = 0;  // needs all rows of its prompt but the last
  CHECK(Run(requests, testing::kVocab).head_rows == 3 * 7 + 129);
  requests[2]->max_new_tokens = 0;  // one row, which ends the request
  CHECK(Run(requests, testing::kVocab).head_rows == 2 * 7 + 129 + 1);
}

TEST_CASE("the last layer computes only the requested rows of a prompt") {
  std::vector<std::shared_ptr<Request>> requests;
  for (uint64_t id = 0; id < 3; ++id) {
    requests.push_back(MakeRequest(id, RandomPrompt(static_cast<uint32_t>(id), 130), 7));
  }
  const int64_t other_layers = testing::TinyConfig().num_layers - 1;
  const int64_t tokens = 3 * (130 + 6);  // all but the last token of each response
  const Answer plain = Run(requests, testing::kVocab);
  CHECK(plain.mlp_rows == other_layers * tokens + 3 * 7);
  requests[1]->num_prompt_logprobs = 0;
  const Answer asked = Run(requests, testing::kVocab);
  CHECK(asked.mlp_rows == other_layers * tokens + 3 * 7 + 129);
  for (const auto& [id, output] : plain.outputs) {
    CHECK(asked.outputs.at(id).tokens == output.tokens);
  }
}

std::shared_ptr<Request> PoolRequest(uint64_t id, const std::vector<int32_t>& prompt,
                                     Pooling pooling) {
  auto request = MakeRequest(id, prompt, 0);
  request->pooling = pooling;
  return request;
}

TEST_CASE("the mean of a prompt's hidden states is the mean of the last states of its beginnings") {
  // Prompts run in chunks of 32 tokens beside a sequence that decodes.
  const std::vector<int32_t> prompt = RandomPrompt(1, 40);
  std::vector<std::shared_ptr<Request>> requests = {MakeRequest(0, RandomPrompt(0, 20), 7)};
  for (size_t size = 1; size <= prompt.size(); ++size) {
    const auto end = prompt.begin() + static_cast<std::ptrdiff_t>(size);
    requests.push_back(PoolRequest(size, {prompt.begin(), end}, Pooling::kLast));
  }
  requests.push_back(PoolRequest(100, prompt, Pooling::kMean));
  const Answer answer = Run(requests, testing::kVocab);
  CHECK(answer.head_rows == 7);
  const RequestOutput& mean = answer.outputs.at(100);
  CHECK(mean.finish_reason == FinishReason::kLength);
  const auto width = static_cast<size_t>(testing::TinyConfig().hidden_size);
  REQUIRE(mean.pooled.size() == width);
  for (size_t i = 0; i < width; ++i) {
    double sum = 0.0;
    for (size_t size = 1; size <= prompt.size(); ++size) {
      sum += static_cast<double>(answer.outputs.at(size).pooled.at(i));
    }
    CHECK(mean.pooled[i] == static_cast<float>(sum / static_cast<double>(prompt.size())));
  }
}

// Large enough that rows are handed to host threads.
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

TEST_CASE("rows sampled in parallel give the same tokens as each row alone") {
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

TEST_CASE("log-probabilities of one long prompt are computed in parallel") {
  const auto request = MakeRequest(1, RandomPrompt(1, 130), 2);
  request->num_prompt_logprobs = 2;
  const Answer got = Run({request}, kLargeVocab);
  CHECK(got.num_items_on_host >= 125);  // the last chunk has too few rows for threads
  const auto& logprobs = got.outputs.at(1).prompt_logprobs;
  const Answer want = Run({request}, kLargeVocab, true);
  REQUIRE(logprobs.size() == 129);
  for (size_t i = 0; i < logprobs.size(); ++i) {
    CHECK(logprobs[i].chosen == want.outputs.at(1).prompt_logprobs.at(i).chosen);
    CHECK(logprobs[i].top == want.outputs.at(1).prompt_logprobs.at(i).top);
  }
}

TEST_CASE("token masks are computed on one thread, and their rows are sampled in parallel") {
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
  CHECK(answer.num_items_on_host >= 7 * 11);
  REQUIRE(callers.size() == 2 * 12);
  CHECK(std::count(callers.begin(), callers.end(), callers.front()) == 2 * 12);
  CHECK(answer.outputs.at(1).tokens ==
        Run({SampledRequests()[1]}, kLargeVocab).outputs.at(1).tokens);
}

// Computes argmax and samples itself. The host reads copies of its memory, and each row only once:
// ReadBack overwrites what it has copied.
class ChoosingDevice : public testing::WaitingDevice {
 public:
  using WaitingDevice::WaitingDevice;

  void Linear(const LinearParams& params) override {
    WaitingDevice::Linear(params);
    const bool is_head = params.parts[0].weight->rows == testing::kVocab;
    num_head_calls += is_head ? 1 : 0;
    if (is_head && num_head_calls == nan_at) {
      params.y[1] = NAN;
    }
  }
  bool ArgMaxRows(const ArgMaxRowsParams& params) override {
    for (int row = 0; row < params.num_rows; ++row) {
      const float* logits = params.logits + int64_t{row} * params.vocab_size;
      const RowMax max = MaxLogit(logits, params.vocab_size);
      const bool refused = !max.valid || max.value == kMasked;
      params.ids[row] = refused ? -1 : FirstOf(logits, params.vocab_size, max.value);
    }
    return true;
  }
  // Samples only rows that top_k limits and leaves the others to the host.
  bool SampleRows(const SampleRowsParams& params) override {
    for (int i = 0; i < params.num_samplings; ++i) {
      const RowSampling& sampling = params.samplings[i];
      const float* logits = params.logits + int64_t{sampling.row} * params.vocab_size;
      const RowMax max = MaxLogit(logits, params.vocab_size);
      params.ids[i] = -1;
      if (!LimitsCount(sampling, params.vocab_size) || !max.valid) {
        continue;
      }
      std::vector<std::pair<float, int32_t>> tokens;
      for (int32_t id = 0; id < params.vocab_size; ++id) {
        tokens.emplace_back(-WeightOf((logits[id] - max.value) * sampling.inverse_temperature), id);
      }
      std::sort(tokens.begin(), tokens.end());
      const auto weight = [&](int j) { return -tokens[static_cast<size_t>(j)].first; };
      double total = 0;
      for (int j = 0; j < sampling.top_k; ++j) {
        total += weight(j);
      }
      const Kept kept = KeepByMass(sampling.top_k, total, sampling, weight);
      const int sampled = SampleKept(kept, sampling.uniform, weight);
      params.ids[i] = tokens[static_cast<size_t>(sampled)].second;
    }
    return true;
  }
  void* ReadBack(void* memory, size_t num_bytes) override {
    constexpr size_t kRowBytes = testing::kVocab * sizeof(float);  // more than a step's ids take
    copy_.resize(num_bytes / sizeof(float));
    std::memcpy(copy_.data(), memory, num_bytes);
    std::fill_n(static_cast<float*>(memory), copy_.size(), NAN);
    rows_read += num_bytes / kRowBytes;
    return copy_.data();
  }

  int num_head_calls = 0;
  int nan_at = 0;  // the call of the output head that gives a NaN; 0: none
  size_t rows_read = 0;

 private:
  std::vector<float> copy_;
};

using Change = void (*)(Request&);

// Runs one request per change, all together on one device.
std::vector<RequestOutput> RunChanged(const std::vector<Change>& changes,
                                      const std::shared_ptr<Device>& device,
                                      const std::function<void()>& start) {
  const ModelConfig model = testing::TinyConfig();
  EngineConfig config = testing::TinyEngineConfig(KvCacheMode::kFp4Nv);
  config.max_batch_size = 16;
  Engine engine(model, config, testing::TinyWeights(model, *device), device, testing::kFreeBytes);
  for (size_t id = 0; id < changes.size(); ++id) {
    auto request = MakeRequest(id, RandomPrompt(static_cast<uint32_t>(id), 20), 6);
    changes[id](*request);
    engine.Submit(std::move(request));
  }
  start();
  std::vector<RequestOutput> outputs;
  for (auto& [id, output] : testing::Collect(engine, changes.size())) {
    outputs.push_back(std::move(output));
  }
  engine.Stop();
  return outputs;
}

void CheckSame(const std::vector<Change>& changes, size_t rows_read) {
  auto device = std::make_shared<ChoosingDevice>(MakeCpuDevice(1));
  const auto got = RunChanged(changes, device, [&] { device->LetStart(); });
  const auto want = RunChanged(changes, MakeCpuDevice(1), [] {});
  CHECK(device->rows_read == rows_read);
  REQUIRE(got.size() == want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    CAPTURE(i);
    CHECK(got[i].tokens == want[i].tokens);
    CHECK(got[i].logits == want[i].logits);
    CHECK(got[i].error == want[i].error);
    CHECK(got[i].is_request_fault == want[i].is_request_fault);
    CHECK(got[i].finish_reason == want[i].finish_reason);
    REQUIRE(got[i].logprobs.size() == want[i].logprobs.size());
    for (size_t j = 0; j < got[i].logprobs.size(); ++j) {
      CHECK(got[i].logprobs[j].top == want[i].logprobs[j].top);
    }
    REQUIRE(got[i].prompt_logprobs.size() == want[i].prompt_logprobs.size());
    for (size_t j = 0; j < got[i].prompt_logprobs.size(); ++j) {
      CHECK(got[i].prompt_logprobs[j].chosen == want[i].prompt_logprobs[j].chosen);
    }
  }
}

TEST_CASE("rows that need only the argmax stay on the device") {
  const Change greedy = [](Request&) {};
  const Change top_1 = [](Request& r) {
    r.sampling.do_sample = true;
    r.sampling.top_k = 1;
  };
  const Change prompt_only = [](Request& r) { r.max_new_tokens = 0; };
  CheckSame({greedy, top_1, prompt_only}, 0);
  const Change sampled = [](Request& r) { r.sampling.do_sample = true; };
  const Change late_stop = [](Request& r) { r.min_new_tokens = 2; };
  const Change prompt_logprobs = [](Request& r) { r.num_prompt_logprobs = 0; };
  const Change all_logits = [](Request& r) { r.logits_output = LogitsOutput::kAll; };
  CheckSame({greedy, sampled, top_1, late_stop, greedy}, 6 + 2);
  CheckSame({top_1, prompt_logprobs, greedy}, 19);
  CheckSame({greedy, all_logits, greedy}, 20 + 5);
}

TEST_CASE("sampled rows stay on a device that samples, except those that it leaves to the host") {
  const Change top_k = [](Request& r) {
    r.sampling.do_sample = true;
    r.sampling.top_k = 5;
    r.sampling.temperature = 1.5f;
    r.sampling.seed = r.id;
  };
  const Change left = [](Request& r) { r.sampling.do_sample = true; };
  const Change logprobs = [](Request& r) {
    r.sampling.do_sample = true;
    r.sampling.top_k = 5;
    r.sampling.num_logprobs = 1;
  };
  const Change greedy = [](Request&) {};
  const Change late_stop = [](Request& r) {
    r.sampling.do_sample = true;
    r.sampling.top_k = 5;
    r.sampling.top_p = 0.7f;
    r.min_new_tokens = 2;
  };
  CheckSame({top_k, top_k, greedy, top_k}, 0);
  CheckSame({left, top_k, greedy, top_k}, 6);
  CheckSame({top_k, logprobs, left, greedy, late_stop, top_k}, 6 + 6 + 2);
}

TEST_CASE("rows that need more than a token are copied to the host, each to its sequence") {
  const std::vector<Change> changes = {
      [](Request&) {},
      [](Request& r) { r.logits_output = LogitsOutput::kGeneration; },
      [](Request& r) { r.sampling.num_logprobs = 2; },
      [](Request&) {},
      [](Request& r) { r.sampling.repetition_penalty = 1.5f; },
      [](Request& r) { r.sampling.presence_penalty = 1.f; },
      [](Request& r) { r.sampling.frequency_penalty = 1.f; },
      [](Request& r) {
        r.sampling.logit_bias = {{3, 20.f}};
      },
      [](Request& r) { r.bad_sequences = {{1}}; },
      [](Request& r) {
        r.token_mask = [](const auto&, auto& mask) {
          std::fill(mask.begin(), mask.end(), 0x55555555u);
          return true;
        };
      },
  };
  CheckSame(changes, 6 * 8);
}

TEST_CASE("rows and parameters that sampling rejects give the same errors on a device") {
  CheckSame({[](Request&) {}, [](Request& r) { r.sampling.temperature = NAN; }}, 1);
  auto device = std::make_shared<ChoosingDevice>(MakeCpuDevice(1));
  device->nan_at = 3;
  const auto outputs = RunChanged({[](Request&) {}}, device, [&] { device->LetStart(); });
  REQUIRE(outputs.size() == 1);
  CHECK(outputs[0].tokens.size() == 2);
  CHECK(outputs[0].error == "The model computed NaN or infinite logits.");
  CHECK_FALSE(outputs[0].is_request_fault);
  CHECK(device->rows_read == 1);
}

}  // namespace
}  // namespace turbomind
