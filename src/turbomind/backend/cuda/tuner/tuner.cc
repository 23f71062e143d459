#include "turbomind/backend/cuda/tuner/tuner.h"

#include <algorithm>

namespace turbomind::cuda {
namespace {

// The times of one kernel, one for each round in which it ran.
struct Timed {
  int kernel;
  std::vector<double> rounds;

  double Median() const {
    std::vector<double> sorted = rounds;
    const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
    std::nth_element(sorted.begin(), middle, sorted.end());
    return *middle;
  }
};

std::optional<TunerAnswer> Answer(size_t index, const TunerQuestion& question,
                                  const TunerClock& clock) {
  std::vector<Timed> all;
  double fastest = 0;
  for (const int kernel : question) {
    const std::optional<double> us = clock.time(index, kernel);
    if (us.has_value()) {
      fastest = all.empty() ? *us : std::min(fastest, *us);
      all.push_back({kernel, {*us}});
    } else if (all.empty()) {
      return std::nullopt;
    }
  }
  // Rounds alternate between the kernels, so that a change of the GPU's clock affects all of them.
  for (int round = 1; round < kTunerRounds; ++round) {
    for (Timed& timed : all) {
      if (timed.rounds[0] <= kHopelessRatio * fastest) {
        timed.rounds.push_back(clock.time(index, timed.kernel).value_or(timed.rounds[0]));
      }
    }
  }
  const double table_us = all[0].Median();
  const auto best = std::min_element(all.begin(), all.end(), [](const Timed& a, const Timed& b) {
    return a.Median() < b.Median();
  });
  if (best->Median() < kMaxTimeRatio * table_us) {
    return TunerAnswer{best->kernel, best->Median(), table_us};
  }
  return TunerAnswer{all[0].kernel, table_us, table_us};
}

}  // namespace

std::vector<std::optional<TunerAnswer>> ChooseByTime(const std::vector<TunerQuestion>& questions,
                                                     const TunerClock& clock, double max_seconds) {
  std::vector<std::optional<TunerAnswer>> answers(questions.size());
  const double begin = clock.seconds();
  for (size_t i = 0; i < questions.size() && clock.seconds() - begin < max_seconds; ++i) {
    answers[i] = Answer(i, questions[i], clock);
  }
  return answers;
}

bool AreRowsClose(std::span<const float> got, std::span<const float> want, int size,
                  double max_difference) {
  for (size_t row = 0; row < want.size(); row += static_cast<size_t>(size)) {
    double difference = 0;
    double norm = 0;
    for (size_t i = row; i < row + static_cast<size_t>(size); ++i) {
      const double distance = double{got[i]} - want[i];
      difference += distance * distance;
      norm += double{want[i]} * want[i];
    }
    if (!(difference <= max_difference * max_difference * norm)) {  // also for NaN
      return false;
    }
  }
  return true;
}

}  // namespace turbomind::cuda
