#pragma once

// Chooses between kernels by their times. The callers give it the times and the clock, so it needs
// no GPU.

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "turbomind/core/function_ref.h"

namespace turbomind::cuda {

// Another kernel replaces the table's only if it takes less than this part of its time. Smaller
// differences are within the noise of the rounds.
inline constexpr double kMaxTimeRatio = 0.97;
inline constexpr int kTunerRounds = 5;
// A kernel whose first round takes this many times the fastest one's gets no other round.
inline constexpr double kHopelessRatio = 1.5;

// A question: kernels that compute the same, the table's choice first.
using TunerQuestion = std::vector<int>;

struct TunerAnswer {
  int kernel = 0;
  double us = 0;  // medians
  double table_us = 0;
};

struct TunerClock {
  // Returns the microseconds of a call. No value: this kernel cannot run here.
  FunctionRef<std::optional<double>(size_t question, int kernel)> time;
  FunctionRef<double()> seconds;  // since some fixed time
};

// Answers the questions in order. A question has no answer if it would begin after `max_seconds`,
// or if the table's kernel cannot run.
std::vector<std::optional<TunerAnswer>> ChooseByTime(const std::vector<TunerQuestion>& questions,
                                                     const TunerClock& clock, double max_seconds);

// Returns whether each row of `size` values differs from the wanted one by at most `max_difference`
// of its norm. A row that is not finite is not close. REQUIRES: there are as many.
bool AreRowsClose(std::span<const float> got, std::span<const float> want, int size,
                  double max_difference);

}  // namespace turbomind::cuda
