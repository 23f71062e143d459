#pragma once

namespace turbomind::testing {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// Thins a product of cases under a sanitizer, where each takes ten times as long: every `stride`-th
// is run there, all of them otherwise. A stride that is prime to the lengths of the inner loops
// reaches every value of each.
class SanitizedSample {
 public:
  explicit SanitizedSample(int stride) : stride_(kSanitized ? stride : 1) {}

  // Whether to run the next case.
  bool Next() { return count_++ % stride_ == 0; }

 private:
  int stride_;
  int count_ = 0;
};

}  // namespace turbomind::testing
