// When token masks are computed, in which order, and what happens to masks that are not taken.

#include "turbomind/engine/token_masks.h"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/null_device.h"
#include "engine/tiny_model.h"
#include "turbomind/core/check.h"

namespace turbomind {
namespace {

using testing::MakeRequest;
using testing::RandomPrompt;
using testing::RunOne;

// Delays each step until as many masks have been requested as steps have begun.
class PatientDevice : public testing::ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;

  void Embed(const EmbedParams& params) override {
    ++num_steps;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (num_requested < num_steps && std::chrono::steady_clock::now() < end) {
      std::this_thread::yield();
    }
    num_late += num_requested < num_steps ? 1 : 0;
    ForwardingDevice::Embed(params);
  }

  int num_steps = 0;
  std::atomic<int> num_requested = 0;
  int num_late = 0;
};

TEST_CASE("masks are requested while the step runs") {
  auto device = std::make_shared<PatientDevice>(MakeCpuDevice(2));
  const ModelConfig model = testing::TinyConfig();
  Engine engine(model, testing::TinyEngineConfig(KvCacheMode::kFp4Nv),
                testing::TinyWeights(model, *device), device, testing::kFreeBytes);
  auto request = MakeRequest(1, RandomPrompt(1, 20), 5);
  request->token_mask = [&](const auto&, auto& mask) {
    ++device->num_requested;
    mask.assign(mask.size(), 0xffffffffu);
    return true;
  };
  const RequestOutput output = RunOne(engine, request);
  CHECK(output.tokens.size() == 5);
  CHECK(device->num_steps == 5);
  CHECK(device->num_requested == 5);
  CHECK(device->num_late == 0);
}

TEST_CASE("each token of a draft has a mask of its own") {
  constexpr int kMasks = 40;
  const auto next = [](size_t num_received) { return 10 + static_cast<int32_t>(num_received % 5); };
  int64_t num_steps = 0;
  for (const int num_draft_tokens : {0, 4}) {
    std::shared_ptr<Device> device = MakeCpuDevice(2);
    const ModelConfig model = testing::TinyConfig();
    EngineConfig config = testing::TinyEngineConfig(KvCacheMode::kFp4Nv);
    config.num_draft_tokens = num_draft_tokens;
    Engine engine(model, config, testing::TinyWeights(model, *device), device, testing::kFreeBytes);
    auto request = MakeRequest(1, RandomPrompt(1, 20), 100);
    std::vector<int32_t> received;
    request->token_mask = [&](const auto& tokens, auto& mask) {
      received.insert(received.end(), tokens.begin(), tokens.end());
      const auto allowed = static_cast<size_t>(next(received.size()));
      mask.assign(mask.size(), 0);
      mask[allowed / 32] = 1u << allowed % 32;
      return received.size() < kMasks;
    };
    const RequestOutput output = RunOne(engine, request);
    CHECK(output.finish_reason == FinishReason::kStop);
    CHECK(output.tokens.size() == kMasks);
    CHECK(received == output.tokens);
    for (size_t i = 0; i < output.tokens.size(); ++i) {
      CHECK(output.tokens[i] == next(i));
    }
    const EngineStats stats = engine.stats();
    CHECK((stats.accepted_tokens > kMasks / 2) == (num_draft_tokens > 0));
    CHECK((num_draft_tokens == 0 || stats.num_steps < num_steps / 2));
    num_steps = stats.num_steps;
  }
}

// The sequences of a planned batch and their token masks.
struct Planned {
  Sequence* Add(TokenMaskFn mask, int64_t num_prompt, int64_t num_planned) {
    auto sequence = std::make_unique<Sequence>();
    sequence->request = std::make_shared<Request>();
    sequence->request->max_new_tokens = 8;
    sequence->request->token_mask = std::move(mask);
    sequence->tokens.assign(static_cast<size_t>(num_prompt), 3);
    sequence->num_prompt = num_prompt;
    sequence->num_planned = num_planned;
    batch.sequences.push_back(sequence.get());
    sequences.push_back(std::move(sequence));
    return sequences.back().get();
  }

  Batch batch{1};
  std::vector<std::unique_ptr<Sequence>> sequences;
};

TEST_CASE("only sequences that reach their next token get a mask, with their new tokens") {
  Planned planned;
  std::vector<std::string> asked;
  const auto note = [&](const std::string& name) {
    return [&asked, name](const std::vector<int32_t>& fresh, std::vector<uint32_t>& mask) {
      asked.push_back(name + ":" + std::to_string(fresh.size()));
      mask[0] = 6;
      return true;
    };
  };
  planned.Add(note("in its prompt"), 20, 19);
  Sequence* first = planned.Add(note("first token"), 20, 20);
  planned.Add(nullptr, 20, 20);
  planned.Add(note("prompt alone"), 20, 20)->request->max_new_tokens = 0;
  Sequence* later = planned.Add(note("later"), 20, 1);
  later->tokens = std::vector<int32_t>(22, 3);
  later->num_computed = 21;
  TokenMasks masks(40);
  masks.Begin(planned.batch);
  CHECK(masks.Wait(*later).size() == 2);  // out of order
  CHECK(masks.Wait(*first)[0] == 6);
  CHECK_THROWS_AS(masks.Wait(*planned.sequences[0]), InternalError);
  masks.End();
  CHECK(asked == std::vector<std::string>{"first token:0", "later:2"});
  CHECK(later->num_tokens_sent == 2);
  CHECK_THROWS_AS(masks.Wait(*later), InternalError);
}

TEST_CASE("Wait throws the error of its own sequence's callback") {
  Planned planned;
  Sequence* wrong =
      planned.Add([](const auto&, auto&) -> bool { throw InvalidArgument("no such word"); }, 4, 4);
  Sequence* broken = planned.Add([](const auto&, auto&) -> bool { throw 7; }, 4, 4);
  Sequence* ended = planned.Add([](const auto&, auto&) { return false; }, 4, 4);
  TokenMasks masks(40);
  masks.Begin(planned.batch);
  CHECK_THROWS_WITH_AS(masks.Wait(*wrong), "no such word", InvalidArgument);
  CHECK_THROWS_AS(masks.Wait(*broken), std::runtime_error);
  CHECK(masks.Wait(*ended).empty());
  masks.End();
}

TEST_CASE("End waits for masks that were not taken and releases their requests") {
  Planned planned;
  std::atomic<int> num_requested = 0;
  Sequence* slow = planned.Add(
      [&](const auto&, auto&) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        return ++num_requested > 0;
      },
      4, 4);
  const std::weak_ptr<Request> request = slow->request;
  TokenMasks masks(40);
  for (int step = 1; step < 4; ++step) {
    masks.Begin(planned.batch);
    masks.End();
    CHECK(num_requested == step);
  }
  masks.Begin(planned.batch);
  planned.sequences.clear();  // as if its step had failed
  CHECK_FALSE(request.expired());
  masks.End();
  CHECK(request.expired());
}

// The first callback runs until `may_end` is set. The second must never run.
struct Interrupted {
  Interrupted() {
    planned.Add(
        [this](const auto&, auto&) {
          has_begun = true;
          while (!may_end) {
            std::this_thread::yield();
          }
          return true;
        },
        4, 4);
    planned.Add([this](const auto&, auto&) { return second_was_asked = true; }, 4, 4);
  }

  // Ends the first callback while `end` waits for it.
  void EndDuring(const std::function<void()>& end) {
    while (!has_begun) {
      std::this_thread::yield();
    }
    std::thread ending(end);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    may_end = true;
    ending.join();
  }

  Planned planned;
  std::atomic<bool> has_begun = false;
  std::atomic<bool> may_end = false;
  std::atomic<bool> second_was_asked = false;
};

TEST_CASE("TokenMasks can be destroyed in a step that never ends") {
  Interrupted step;
  auto masks = std::make_unique<TokenMasks>(40);
  masks->Begin(step.planned.batch);
  step.EndDuring([&] { masks.reset(); });
  CHECK_FALSE(step.second_was_asked);
}

TEST_CASE("Drop requests no more masks of a failed step and releases its requests") {
  Interrupted step;
  TokenMasks masks(40);
  masks.Begin(step.planned.batch);
  const std::weak_ptr<Request> second = step.planned.sequences[1]->request;
  step.EndDuring([&] { masks.Drop(); });
  CHECK_FALSE(step.second_was_asked);
  step.planned.sequences.clear();
  CHECK(second.expired());
  Planned next;
  Sequence* sequence = next.Add([](const auto&, auto&) { return true; }, 4, 4);
  masks.Begin(next.batch);
  CHECK(masks.Wait(*sequence).size() == 2);
  masks.End();
  masks.Drop();
}

}  // namespace
}  // namespace turbomind
