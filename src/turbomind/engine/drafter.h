#pragma once

// ⑤ Proposes the next tokens of a sequence from earlier places that end alike (n-gram speculation).

#include <cstdint>
#include <span>
#include <vector>

namespace turbomind {

// Finds the longest earlier match of a sequence's last tokens; the tokens after that match are the
// candidate for what comes next. Places are found through chains of equal hashes of kMinMatch
// tokens, the newest first, of which at most kMaxPlaces are compared.
//
// Every candidate is compared with the tokens that came, whether or not it was computed as a draft.
// So the estimate of `acceptance` follows the text, and a sequence whose drafts stopped paying
// starts again by itself.
//
// All memory is allocated by the constructor. Only one thread at a time may use it.
class NgramDrafter {
 public:
  static constexpr int kMinMatch = 3;
  static constexpr int kMaxMatch = 32;
  static constexpr int kMaxPlaces = 16;

  // `max_tokens` bounds the length of the sequence, `max_draft` that of a candidate.
  NgramDrafter(int64_t max_tokens, int max_draft);

  // Takes the tokens that came since the last call and finds the candidate that follows `tokens`.
  // REQUIRES: `tokens` extends those of the last call and has at most max_tokens.
  void Update(std::span<const int32_t> tokens);

  // Returns what may follow the tokens of the last Update: max_draft tokens, or none.
  std::span<const int32_t> candidate() const { return candidate_; }
  // Returns the estimated probability that a token of the candidate is right if those before it
  // are. It depends on the length of the match.
  double acceptance() const { return acceptance_[match_class_]; }

 private:
  static constexpr int kNumClasses = 3;  // of matches shorter than 5, shorter than 9, longer

  void Learn(std::span<const int32_t> tokens);
  void AddPlaces(std::span<const int32_t> tokens);
  void Find(std::span<const int32_t> tokens);

  int max_draft_;
  std::vector<int32_t> newest_;    // by hash: the position after the newest place, 0 if none
  std::vector<int32_t> previous_;  // by position: the position of the next older place
  int64_t num_seen_ = 0;           // tokens of the last Update
  std::vector<int32_t> candidate_;
  int match_class_ = 0;
  // The first values are low: a text shows soon enough that it repeats itself.
  double acceptance_[kNumClasses] = {0.3, 0.5, 0.7};
};

}  // namespace turbomind
