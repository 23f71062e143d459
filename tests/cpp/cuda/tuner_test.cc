// Tests the tuner with injected times and an injected clock.

#include "turbomind/backend/cuda/tuner/tuner.h"

#include <doctest/doctest.h>

#include <map>
#include <utility>
#include <vector>

namespace turbomind::cuda {
namespace {

// Times of kernels, a sequence for each. The last time of a sequence repeats. A measurement lets
// the clock advance by one second.
struct Script {
  std::map<std::pair<size_t, int>, std::vector<double>> times;  // (question, kernel)
  std::map<std::pair<size_t, int>, int> calls = {};
  double now = 1000;

  std::vector<std::optional<TunerAnswer>> Run(const std::vector<TunerQuestion>& questions,
                                              double max_seconds = 1e9) {
    const auto time = [this](size_t question, int kernel) -> std::optional<double> {
      ++now;
      const std::pair key(question, kernel);
      const auto call = static_cast<size_t>(calls[key]++);
      const auto found = times.find(key);
      if (found == times.end()) {
        return std::nullopt;
      }
      return found->second[std::min(call, found->second.size() - 1)];
    };
    return ChooseByTime(questions, {time, [this] { return now; }}, max_seconds);
  }
};

TEST_CASE("the tuner chooses the fastest kernel of each question") {
  Script script = {{{{0, 7}, {10}}, {{0, 8}, {9}}, {{0, 9}, {12}}, {{1, 7}, {4}}, {{1, 8}, {5}}}};
  const auto answers = script.Run({{7, 8, 9}, {7, 8}});
  REQUIRE((answers[0].has_value() && answers[1].has_value()));
  CHECK(answers[0]->kernel == 8);
  CHECK(answers[0]->us == 9);
  CHECK(answers[0]->table_us == 10);
  CHECK(answers[1]->kernel == 7);
  CHECK(answers[1]->us == 4);
  CHECK(answers[1]->table_us == 4);
}

TEST_CASE("the table's kernel stays unless another takes less than kMaxTimeRatio of its time") {
  for (const auto& [us, kernel] : {std::pair(100., 1), {98., 1}, {97., 1}, {96.9, 2}}) {
    CAPTURE(us);
    Script script = {{{{0, 1}, {100}}, {{0, 2}, {us}}}};
    CHECK(script.Run({{1, 2}})[0]->kernel == kernel);
  }
}

TEST_CASE("medians ignore single rounds that are too slow or too fast") {
  Script script = {{{{0, 1}, {10, 10, 90, 10, 10}}, {{0, 2}, {11, 1, 11, 11, 1}}}};
  const auto answer = script.Run({{1, 2}})[0];
  CHECK(answer->kernel == 1);
  CHECK(answer->us == 10);
}

TEST_CASE("a kernel that is far slower is timed once") {
  Script script = {{{{0, 1}, {10}}, {{0, 2}, {15}}, {{0, 3}, {15.1}}}};
  CHECK(script.Run({{1, 2, 3}})[0]->kernel == 1);
  CHECK(script.calls[{0, 1}] == kTunerRounds);
  CHECK(script.calls[{0, 2}] == kTunerRounds);
  CHECK(script.calls[{0, 3}] == 1);
}

TEST_CASE("no question begins after the time is over") {
  Script script = {{{{0, 1}, {10}}, {{0, 2}, {5}}, {{1, 1}, {10}}, {{1, 2}, {5}}}};
  // Question 0 takes 1 s for kernel 1, which is slow, and kTunerRounds for kernel 2.
  const double seconds = 1 + kTunerRounds;
  auto answers = script.Run({{1, 2}, {1, 2}}, seconds);
  CHECK(answers[0].has_value());
  CHECK(!answers[1].has_value());
  CHECK(script.calls[{1, 1}] == 0);
  answers = script.Run({{1, 2}, {1, 2}}, seconds + 0.5);
  CHECK(answers[1].has_value());
  CHECK(!script.Run({{1, 2}}, 0)[0].has_value());
}

TEST_CASE("kernels that cannot run are left out") {
  Script script = {{{{0, 1}, {10}}, {{0, 3}, {5}}, {{1, 2}, {5}}}};
  const auto answers = script.Run({{1, 2, 3}, {1, 2}});
  CHECK(answers[0]->kernel == 3);
  CHECK(!answers[1].has_value());  // it has no time of the table's kernel
  CHECK(script.calls[{1, 2}] == 0);
}

}  // namespace
}  // namespace turbomind::cuda
