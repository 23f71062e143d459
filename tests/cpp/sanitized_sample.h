#pragma once

namespace turbomind::testing {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// Runs every `stride`-th case under a sanitizer, where each case takes ten times as long, and all
// cases otherwise. A stride that is coprime to the lengths of the inner loops reaches every value
// of each loop.
class SanitizedSample {
 public:
  explicit SanitizedSample(int stride) : stride_(kSanitized ? stride : 1) {}

  // Returns whether to run the next case.
  bool Next() { return count_++ % stride_ == 0; }

 private:
  int stride_;
  int count_ = 0;
};

}  // namespace turbomind::testing
