// Compares the policy for checkpoints of recurrent layers with a plain one, on simulated
// conversations: which part of their prompts is read again if the pool of checkpoints is too small.
//
//   checkpoint_policy [SYSTEM-PROMPTS [CONVERSATIONS-PER-PROMPT [TURNS]]]
//
// The plain policy keeps a checkpoint every N blocks and evicts the least recently used one. KV is
// never evicted. "Again" is the share of prompt tokens that are computed although an earlier
// request computed them after the same beginning, the rounding to blocks included.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <memory>
#include <random>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "turbomind/core/device_memory.h"
#include "turbomind/kv/sequence_manager.h"

namespace turbomind {
namespace {

constexpr int kLength = 64;  // of a block
using Tokens = std::vector<int32_t>;

struct Request {
  Tokens prompt;
  Tokens all;  // with the answer
};

struct Scenario {
  const char* name = "";
  bool keeps_answers = true;  // otherwise, later prompts have another text (no reasoning)
  double edits = 0;           // probability that a turn replaces an earlier one
};

struct Shape {
  int num_system_prompts = 64;
  int num_conversations = 4;  // per system prompt
  int num_turns = 20;
};

class Conversations {
 public:
  Conversations(const Shape& shape, const Scenario& scenario) : scenario_(scenario) {
    std::vector<Tokens> systems;
    for (int i = 0; i < shape.num_system_prompts; ++i) {
      systems.push_back(Text(500, 3000));
    }
    // One turn at a time, of any conversation that has not ended. All of a system prompt's
    // conversations are alike.
    std::vector<std::pair<std::vector<Tokens>, int>> open;
    for (int i = 0; i < shape.num_conversations * shape.num_system_prompts; ++i) {
      open.push_back(
          {{systems[static_cast<size_t>(i % shape.num_system_prompts)]}, shape.num_turns});
    }
    while (!open.empty()) {
      const auto i = static_cast<size_t>(Below(static_cast<int>(open.size())));
      auto& [turns, left] = open[i];
      requests.push_back(Turn(turns));
      if (--left == 0) {
        std::swap(open[i], open.back());
        open.pop_back();
      }
    }
  }

  std::vector<Request> requests;

 private:
  int Below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }

  Tokens Text(int low, int high) {
    Tokens text(static_cast<size_t>(low + Below(high - low)));
    for (int32_t& token : text) {
      token = Below(50000);
    }
    return text;
  }

  // `turns` are the system prompt, then a question and an answer per turn.
  Request Turn(std::vector<Tokens>& turns) {
    if (turns.size() > 2 && Below(1000) < 1000 * scenario_.edits) {
      turns.resize(1 + 2 * static_cast<size_t>(Below(static_cast<int>(turns.size() / 2))));
    }
    turns.push_back(Text(20, 200));
    Request request;
    for (const Tokens& part : turns) {
      request.prompt.insert(request.prompt.end(), part.begin(), part.end());
    }
    const Tokens answer = Text(50, 400);
    request.all = request.prompt;
    request.all.insert(request.all.end(), answer.begin(), answer.end());
    turns.push_back(scenario_.keeps_answers ? answer : Text(50, 150));
    return request;
  }

  Scenario scenario_;
  std::mt19937 random_{1};
};

std::vector<uint64_t> Hashes(const Tokens& tokens, size_t step) {
  std::vector<uint64_t> hashes;
  uint64_t hash = 1;
  for (size_t i = 0; i < tokens.size(); ++i) {
    hash = (hash ^ static_cast<uint64_t>(tokens[i])) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
    if ((i + 1) % step == 0) {
      hashes.push_back(hash);
    }
  }
  return hashes;
}

// A policy answers how many tokens of a prompt it need not compute, and then sees the answer.
class Policy {
 public:
  virtual ~Policy() = default;
  virtual int64_t Run(const Request& request) = 0;
};

class PlainPolicy : public Policy {
 public:
  PlainPolicy(size_t capacity, size_t interval) : capacity_(capacity), interval_(interval) {}

  int64_t Run(const Request& request) override {
    const std::vector<uint64_t> hashes = Hashes(request.all, kLength);
    size_t hit = (request.prompt.size() - 1) / kLength / interval_ * interval_;
    while (hit > 0 && !places_.contains(hashes[hit - 1])) {
      hit -= interval_;
    }
    if (hit > 0) {
      Touch(hashes[hit - 1]);
    }
    for (size_t n = hit + interval_; n <= hashes.size(); n += interval_) {
      Touch(hashes[n - 1]);
    }
    return static_cast<int64_t>(hit * kLength);
  }

 private:
  void Touch(uint64_t hash) {
    if (const auto found = places_.find(hash); found != places_.end()) {
      order_.erase(found->second);
    } else if (places_.size() == capacity_) {
      places_.erase(order_.front());
      order_.pop_front();
    }
    places_[hash] = order_.insert(order_.end(), hash);
  }

  size_t capacity_;
  size_t interval_;
  std::list<uint64_t> order_;  // least recently used first
  std::unordered_map<uint64_t, std::list<uint64_t>::iterator> places_;
};

// Reserves addresses that nothing writes.
class Addresses : public DeviceMemory {
 public:
  void* Reserve(size_t num_bytes) override { return std::malloc(num_bytes); }
  void Release(void* memory, size_t) override { std::free(memory); }
  void Copy(void*, const void*, size_t) override {}
};

class OurPolicy : public Policy {
 public:
  OurPolicy(size_t capacity, int64_t interval)
      : cache_(device_, Config(), {int64_t{1} << 20, 1, static_cast<int64_t>(capacity)}),
        manager_(cache_, true, nullptr, interval) {}

  int64_t Run(const Request& request) override {
    const uint64_t id = next_id_++;
    const int64_t hit = manager_.Create(id, request.prompt);
    Compute(id, request.all, static_cast<int64_t>(request.prompt.size()), 4096);
    Compute(id, request.all, static_cast<int64_t>(request.all.size()), kLength);
    manager_.FreeDataAndScaleBlocks(id);
    return hit;
  }

 private:
  static KvCacheConfig Config() {
    KvCacheConfig config =
        MakeKvCacheConfig({0}, KvCacheMode::kNone, 1, 16, kLength, DataType::kBFloat16);
    config.state_bytes = config.checkpoint_bytes = 64;
    return config;
  }

  void Compute(uint64_t id, const Tokens& tokens, int64_t end, int64_t chunk) {
    while (manager_.num_written(id) < end) {
      const int64_t next = std::min(end, manager_.num_written(id) + chunk);
      if (!manager_.AllocateDataAndScaleBlocks(id, next)) {
        std::fprintf(stderr, "KV does not fit\n");
        std::exit(1);
      }
      manager_.Commit(id, std::span(tokens).first(static_cast<size_t>(next)));
    }
  }

  Addresses device_;
  KvCache cache_;
  SequenceManager manager_;
  uint64_t next_id_ = 1;
};

// Prints the share of prompt tokens that are found, and that are read again.
void Print(const char* name, size_t capacity, const std::vector<Request>& requests,
           Policy& policy) {
  std::unordered_set<uint64_t> seen;  // beginnings, token by token
  int64_t prompt_tokens = 0;
  int64_t hit_tokens = 0;
  int64_t again = 0;
  for (const Request& request : requests) {
    const auto length = static_cast<int64_t>(request.prompt.size());
    const std::vector<uint64_t> hashes = Hashes(request.all, 1);
    int64_t known = 0;
    while (known < length && seen.contains(hashes[static_cast<size_t>(known)])) {
      ++known;
    }
    seen.insert(hashes.begin(), hashes.end());
    const int64_t hit = policy.Run(request);
    prompt_tokens += length;
    hit_tokens += hit;
    again += std::max<int64_t>(known - hit, 0);
  }
  const auto percent = [&](int64_t tokens) {
    return 100. * static_cast<double>(tokens) / static_cast<double>(prompt_tokens);
  };
  std::printf("%8zu  %-24s %6.2f %% found  %6.2f %% again\n", capacity, name, percent(hit_tokens),
              percent(again));
}

void Compare(const Shape& shape, const Scenario& scenario) {
  const std::vector<Request> requests = Conversations(shape, scenario).requests;
  const size_t num_open =
      static_cast<size_t>(shape.num_system_prompts) * static_cast<size_t>(shape.num_conversations);
  std::printf("%s: %zu requests of %zu conversations\n", scenario.name, requests.size(), num_open);
  for (const size_t eighths : {4, 8, 12, 16, 32}) {
    const size_t capacity = num_open * eighths / 8;
    for (const size_t interval : {4, 16, 64}) {
      PlainPolicy plain(capacity, interval);
      const std::string name = "plain, every " + std::to_string(interval);
      Print(name.c_str(), capacity, requests, plain);
    }
    OurPolicy none(capacity, 0);
    Print("ours, no interval", capacity, requests, none);
    OurPolicy ours(capacity, 16);
    Print("ours, every 16 of prompts", capacity, requests, ours);
  }
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using turbomind::Compare;
  const auto number = [&](int i, int otherwise) {
    return argc > i ? std::max(std::atoi(argv[i]), 1) : otherwise;
  };
  const turbomind::Shape shape = {number(1, 64), number(2, 1), number(3, 20)};
  Compare(shape, {.name = "answers stay"});
  Compare(shape, {.name = "answers lose their reasoning", .keeps_answers = false});
  Compare(shape, {.name = "one turn in ten replaces an earlier one", .edits = 0.1});
  return 0;
}
