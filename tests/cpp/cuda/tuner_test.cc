// Tests the tuner with injected times and an injected clock.

#include "turbomind/backend/cuda/tuner/tuner.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

// Times of kernels, a sequence for each. The last time of a sequence repeats.
struct Script {
  std::map<size_t, std::vector<double>> times;  // by the kernel
  std::map<size_t, int> calls = {};

  std::optional<TunerAnswer> Choose(const std::vector<size_t>& kernels) {
    return ChooseByTime(kernels, [this](size_t kernel) -> std::optional<double> {
      const auto call = static_cast<size_t>(calls[kernel]++);
      const auto found = times.find(kernel);
      if (found == times.end()) {
        return std::nullopt;
      }
      return found->second[std::min(call, found->second.size() - 1)];
    });
  }
};

TEST_CASE("the tuner chooses the fastest kernel") {
  Script script = {{{7, {10}}, {8, {9}}, {9, {12}}}};
  const auto answer = script.Choose({7, 8, 9});
  REQUIRE(answer.has_value());
  CHECK(answer->kernel == 8);
  CHECK(answer->us == 9);
  CHECK(answer->table_us == 10);
  const auto other = script.Choose({8, 9});
  CHECK(other->kernel == 8);
  CHECK(other->us == 9);
  CHECK(other->table_us == 9);
}

TEST_CASE("the table's kernel stays unless another takes less than kMaxTimeRatio of its time") {
  for (const auto& [us, kernel] : {std::pair(100., 1u), {98., 1u}, {97., 1u}, {96.9, 2u}}) {
    CAPTURE(us);
    Script script = {{{1, {100}}, {2, {us}}}};
    CHECK(script.Choose({1, 2})->kernel == kernel);
  }
}

TEST_CASE("medians ignore single rounds that are too slow or too fast") {
  Script script = {{{1, {10, 10, 90, 10, 10}}, {2, {11, 1, 11, 11, 1}}}};
  const auto answer = script.Choose({1, 2});
  CHECK(answer->kernel == 1);
  CHECK(answer->us == 10);
}

TEST_CASE("a kernel that is far slower is timed once") {
  Script script = {{{1, {10}}, {2, {15}}, {3, {15.1}}}};
  CHECK(script.Choose({1, 2, 3})->kernel == 1);
  CHECK(script.calls[1] == kTunerRounds);
  CHECK(script.calls[2] == kTunerRounds);
  CHECK(script.calls[3] == 1);
}

TEST_CASE("kernels that cannot run are left out") {
  Script script = {{{1, {10}}, {3, {5}}}};
  CHECK(script.Choose({1, 2, 3})->kernel == 3);
  const int calls = script.calls[1];
  CHECK(!script.Choose({2, 1}).has_value());  // there is no time of the table's kernel
  CHECK(script.calls[1] == calls);
}

// Answers questions with kernel 1. A measurement takes a second.
struct Answers {
  std::vector<TunedChoice> saved = {};
  double deadline = 10;
  double now = 0;
  TuningResult result = {};
  int num_measured = 0;

  std::optional<size_t> Ask(const TunerQuestion& question, bool is_full = false) {
    const auto time = [](const std::string&, const std::string&, FunctionRef<void()>) {
      return 1.;
    };
    const auto seconds = [this] { return now; };
    const TunerClock clock = {time, seconds, deadline};
    return Tuner(saved, clock, &result).Answer(question, [&]() -> std::optional<TunerAnswer> {
      ++now;
      ++num_measured;
      if (is_full) {
        throw OutOfMemory("full");
      }
      return TunerAnswer{1, 2, 3};
    });
  }
};

const TunerQuestion kQuestion = {"what", {"table", "fast"}};

TEST_CASE("a measured answer becomes a choice") {
  Answers answers;
  CHECK(answers.Ask(kQuestion) == 1);
  CHECK(answers.result.num_measured == 1);
  CHECK(answers.result.num_left == 0);
  REQUIRE(answers.result.choices.size() == 1);
  const TunedChoice& choice = answers.result.choices[0];
  CHECK(choice.question == "what");
  CHECK(choice.kernel == "fast");
  CHECK(choice.table_kernel == "table");
  CHECK(choice.us == 2);
  CHECK(choice.table_us == 3);
}

TEST_CASE("a saved choice answers unless the table or the kernels have changed") {
  Answers answers = {.saved = {{"other", "fast", "table"}, {"what", "table", "table", 5, 5}}};
  CHECK(answers.Ask(kQuestion) == 0);
  CHECK(answers.num_measured == 0);
  CHECK(answers.result.choices[0].us == 5);
  answers.saved[1].kernel = "unknown";
  CHECK(answers.Ask(kQuestion) == 1);
  answers.saved[1] = {"what", "fast", "old table"};
  CHECK(answers.Ask(kQuestion) == 1);
  CHECK(answers.num_measured == 2);
}

TEST_CASE("no question begins after the deadline, but saved choices still answer") {
  Answers answers = {.deadline = 2};
  CHECK(answers.Ask({"a", {"table", "fast"}}) == 1);
  CHECK(answers.Ask({"b", {"table", "fast"}}) == 1);
  CHECK(!answers.Ask(kQuestion).has_value());
  CHECK(answers.result.num_left == 1);
  answers.saved = answers.result.choices;
  CHECK(answers.Ask({"a", {"table", "fast"}}) == 1);
  CHECK(answers.num_measured == 2);
}

TEST_CASE("a question without memory is left") {
  Answers answers;
  CHECK(!answers.Ask(kQuestion, true).has_value());
  CHECK(answers.result.num_left == 1);
  CHECK(answers.result.choices.empty());
}

}  // namespace
}  // namespace turbomind::cuda
