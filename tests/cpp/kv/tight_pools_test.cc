// A sequence that fits alone must run for any pool contents, because the scheduler then has no
// other sequence to preempt.

#include <doctest/doctest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <random>
#include <vector>

#include "kv/fits.h"
#include "kv/test_pools.h"

namespace turbomind {
namespace {

using testing::kLength;
using testing::PoolConfig;
using testing::Pools;

// A case whose pools are as small as sequences of `longest` tokens, `chunk` at a time, allow.
struct Tight {
  std::vector<int> windows;
  PrecisionWindowTokens window16;
  int longest = 0;
  int chunk = 0;
};

std::vector<int64_t> MinBlocks(const Tight& tight) {
  std::vector<int64_t> quantized;
  std::vector<int64_t> window16;
  for (const LayerGroup& group :
       MakeLayerGroups(PoolConfig(tight.windows, kLength, tight.window16))) {
    quantized.push_back(std::max<int64_t>(group.BlocksPerSequence(tight.longest, tight.chunk), 1));
    if (group.rule.enabled()) {
      window16.push_back(group.Window16BlocksPerSequence(tight.longest, tight.chunk));
    }
  }
  quantized.insert(quantized.end(), window16.begin(), window16.end());
  return quantized;
}

// Sequences that share parts of one text. Usually several run at once, and sometimes one runs
// alone.
class Crowd {
 public:
  Crowd(const Tight& tight, unsigned seed)
      : tight_(tight),
        random_(seed),
        pools_(PoolConfig(tight.windows, kLength, tight.window16), MinBlocks(tight)) {
    REQUIRE(testing::Fits(pools_.cache, tight.longest, tight.chunk));
    for (int i = 0; i < tight.longest; ++i) {
      text_.push_back(Below(3));
    }
  }

  void Step() {
    const int kind = Below(10);
    if (live_.size() < 4 && (live_.empty() || kind < 2)) {
      Start();
    } else if (kind < 8) {
      GrowAny();
    } else if (kind == 8) {
      FreeAny();
    } else {
      RunAlone();
    }
    pools_.manager.CheckIntegrity();
  }

  int64_t num_hits = 0;
  int64_t num_refused = 0;

 private:
  using Live = std::map<uint64_t, std::vector<int32_t>>;  // tokens by sequence

  int Below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }

  Live::iterator Any() { return std::next(live_.begin(), Below(static_cast<int>(live_.size()))); }

  Live::iterator Start() {
    std::vector<int32_t> prompt(text_.begin(), text_.begin() + Below(tight_.longest));
    prompt.push_back(Below(3));
    const uint64_t id = next_id_++;
    num_hits += pools_.manager.Create(id, prompt) > 0;
    return live_.emplace(id, std::move(prompt)).first;
  }

  // Computes up to a chunk of a sequence that is shorter than `longest`.
  bool Grow(Live::iterator sequence) {
    auto& [id, tokens] = *sequence;
    const int64_t end =
        std::min<int64_t>(pools_.manager.num_written(id) + 1 + Below(tight_.chunk), tight_.longest);
    while (static_cast<int64_t>(tokens.size()) < end) {
      tokens.push_back(text_[tokens.size()]);
    }
    if (!pools_.manager.AllocateDataAndScaleBlocks(id, end)) {
      return false;
    }
    pools_.manager.Commit(id, std::span(tokens).first(static_cast<size_t>(end)));
    return true;
  }

  bool IsLongest(uint64_t id) const { return pools_.manager.num_written(id) == tight_.longest; }

  void GrowAny() {
    const auto sequence = Any();
    if (!IsLongest(sequence->first) && !Grow(sequence)) {
      ++num_refused;
      FreeAny();
    }
  }

  void FreeAny() {
    const auto sequence = Any();
    pools_.manager.FreeDataAndScaleBlocks(sequence->first);
    live_.erase(sequence);
  }

  void RunAlone() {
    while (!live_.empty()) {
      FreeAny();
    }
    const auto sequence = Start();
    while (!IsLongest(sequence->first)) {
      REQUIRE(Grow(sequence));
    }
    FreeAny();
  }

  Tight tight_;
  std::mt19937 random_;
  Pools pools_;
  std::vector<int32_t> text_;
  Live live_;
  uint64_t next_id_ = 1;
};

TEST_CASE("a sequence that fits alone runs with any cached blocks") {
  const std::vector<PrecisionWindowTokens> window16s = {{},      {0, 0},   {64, 0},
                                                        {0, 64}, {64, 64}, {0, 128}};
  const std::vector<std::vector<int>> windows = {{0}, {40}, {100}, {200}, {0, 40}, {0, 200}};
  int64_t num_hits = 0;
  int64_t num_refused = 0;
  unsigned seed = 0;
  for (const PrecisionWindowTokens& window16 : window16s) {
    for (const std::vector<int>& of_layers : windows) {
      for (const int chunk : {7, 11, 26, 38, 150}) {
        for (const int longest : {100, 160, 310}) {
          CAPTURE(window16.sink_tokens);
          CAPTURE(window16.recent_tokens);
          CAPTURE(of_layers.back());
          CAPTURE(chunk);
          CAPTURE(longest);
          Crowd crowd({of_layers, window16, longest, chunk}, seed++);
          for (int i = 0; i < 200; ++i) {
            crowd.Step();
          }
          num_hits += crowd.num_hits;
          num_refused += crowd.num_refused;
        }
      }
    }
  }
  CHECK(num_hits > 5000);
  CHECK(num_refused > 5000);
}

}  // namespace
}  // namespace turbomind
