#include "turbomind/backend/cuda/tuner/tuner.h"

#include <algorithm>

#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

// The times of one kernel, one for each round in which it ran.
struct Timed {
  size_t kernel;
  std::vector<double> rounds;

  double Median() const {
    std::vector<double> sorted = rounds;
    const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
    std::nth_element(sorted.begin(), middle, sorted.end());
    return *middle;
  }
};

}  // namespace

std::optional<TunerAnswer> ChooseByTime(const std::vector<size_t>& kernels,
                                        FunctionRef<std::optional<double>(size_t kernel)> time) {
  std::vector<Timed> all;
  double fastest = 0;
  for (const size_t kernel : kernels) {
    const std::optional<double> us = time(kernel);
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
        timed.rounds.push_back(time(timed.kernel).value_or(timed.rounds[0]));
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

std::optional<size_t> Tuner::Answer(const TunerQuestion& question,
                                    FunctionRef<std::optional<TunerAnswer>()> measure) {
  const std::vector<std::string>& kernels = question.kernels;
  const auto saved = std::ranges::find(saved_, question.name, &TunedChoice::question);
  if (saved != saved_.end() && saved->table_kernel == kernels[0]) {
    const auto kernel = std::ranges::find(kernels, saved->kernel);
    if (kernel != kernels.end()) {
      result_.choices.push_back(*saved);
      return static_cast<size_t>(kernel - kernels.begin());
    }
  }
  std::optional<TunerAnswer> answer;
  if (clock_.seconds() < clock_.deadline) {
    try {
      answer = measure();
    } catch (const OutOfMemory&) {
    }
  }
  if (!answer.has_value()) {
    ++result_.num_left;
    return std::nullopt;
  }
  ++result_.num_measured;
  result_.choices.push_back(
      {question.name, kernels[answer->kernel], kernels[0], answer->us, answer->table_us});
  return answer->kernel;
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
