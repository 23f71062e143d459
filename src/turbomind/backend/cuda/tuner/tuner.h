#pragma once

// Chooses between kernels by their times. The callers give it the times and the clock, so it needs
// no GPU.

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "turbomind/core/function_ref.h"
#include "turbomind/ops/tuning.h"

namespace turbomind::cuda {

// Another kernel replaces the table's only if it takes less than this part of its time. Smaller
// differences are within the noise of the rounds.
inline constexpr double kMaxTimeRatio = 0.97;
inline constexpr int kTunerRounds = 5;
// A kernel whose first round takes this many times the fastest one's gets no other round.
inline constexpr double kHopelessRatio = 1.5;

// A question by the names in TunedChoice. Its kernels compute the same; the table's choice is the
// first. Elsewhere, a kernel is its index here.
struct TunerQuestion {
  std::string name;
  std::vector<std::string> kernels;
};

struct TunerAnswer {
  size_t kernel = 0;
  double us = 0;  // medians
  double table_us = 0;
};

// How tuners measure.
struct TunerClock {
  // Returns the microseconds that `work` takes on the stream of the device.
  FunctionRef<double(const std::string& question, const std::string& kernel,
                     FunctionRef<void()> work)>
      time;
  FunctionRef<double()> seconds;  // since some fixed time
  double deadline = 0;            // no question begins later
};

// Returns the fastest of the kernels, of which the first is the table's. `time` returns the
// microseconds of a call, or nothing if a kernel cannot run here. There is no answer if that is the
// table's.
std::optional<TunerAnswer> ChooseByTime(const std::vector<size_t>& kernels,
                                        FunctionRef<std::optional<double>(size_t kernel)> time);

// Answers questions with saved choices or by measuring, and adds what it finds to a result.
class Tuner {
 public:
  // All of these must outlive the tuner.
  Tuner(const std::vector<TunedChoice>& saved, const TunerClock& clock, TuningResult* result)
      : saved_(saved), clock_(clock), result_(*result) {}

  // Returns the saved kernel, if the question still has it and the table has not changed, or else
  // that of `measure`. Returns nothing, so that the table's kernel stays and the next start asks
  // again, after the deadline, and if `measure` has no answer or throws OutOfMemory.
  std::optional<size_t> Answer(const TunerQuestion& question,
                               FunctionRef<std::optional<TunerAnswer>()> measure);

  // Times a kernel's work.
  double Time(const TunerQuestion& question, size_t kernel, FunctionRef<void()> work) const {
    return clock_.time(question.name, question.kernels[kernel], work);
  }
  // Notes that a kernel's results differ from those of the table's: TuningResult::wrong.
  void AddWrong(const TunerQuestion& question, size_t kernel) {
    result_.wrong.push_back(question.kernels[kernel] + " for " + question.name);
  }

 private:
  const std::vector<TunedChoice>& saved_;
  const TunerClock& clock_;
  TuningResult& result_;
};

// Returns whether each row of `size` values differs from the wanted one by at most `max_difference`
// of its norm. A row that is not finite is not close. REQUIRES: there are as many.
bool AreRowsClose(std::span<const float> got, std::span<const float> want, int size,
                  double max_difference);

}  // namespace turbomind::cuda
