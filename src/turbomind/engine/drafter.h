#pragma once

// ⑤ Proposes the next tokens of a sequence (speculative decoding).

#include <cstdint>
#include <span>
#include <vector>

namespace turbomind {

// Proposes what may follow the tokens of one sequence. Every candidate is compared with the tokens
// that came, whether or not it was computed as a draft. Only one thread at a time may use it.
class Drafter {
 public:
  virtual ~Drafter() = default;

  // Takes the tokens that came since the last call. REQUIRES: `tokens` extends those of that call.
  virtual void Update(std::span<const int32_t> tokens) = 0;
  // Returns what may follow the tokens of the last Update.
  virtual std::span<const int32_t> candidate() const = 0;
  // Returns the estimated probability that a token of the candidate is right if those before it
  // are.
  virtual double acceptance() const = 0;
};

// Copies candidates from earlier places of the sequence that end alike (n-gram speculation). Finds
// the longest earlier match of the last tokens; the tokens after that match are the candidate.
// Places are found through chains of equal hashes of kMinMatch tokens, the newest first, of which
// at most kMaxPlaces are compared.
//
// The estimate of `acceptance` follows the text and depends on the length of the match. A sequence
// whose drafts stopped paying starts again by itself. All memory is allocated by the constructor.
class NgramDrafter : public Drafter {
 public:
  static constexpr int kMinMatch = 3;
  static constexpr int kMaxMatch = 32;
  static constexpr int kMaxPlaces = 16;

  // `max_tokens` bounds the length of the sequence, `max_draft` that of a candidate.
  NgramDrafter(int64_t max_tokens, int max_draft);

  // REQUIRES: at most max_tokens tokens.
  void Update(std::span<const int32_t> tokens) override;
  std::span<const int32_t> candidate() const override { return candidate_; }
  double acceptance() const override { return acceptance_[match_class_]; }

 private:
  static constexpr int kNumClasses = 3;  // of matches shorter than 5, shorter than 9, longer

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

// Holds the candidate that a draft model computes (DraftDecoder).
class ModelDrafter : public Drafter {
 public:
  explicit ModelDrafter(int max_draft);  // allocates all memory

  // Drops the candidate if tokens came.
  void Update(std::span<const int32_t> tokens) override;
  std::span<const int32_t> candidate() const override { return candidate_; }
  double acceptance() const override { return acceptance_; }

  // Appends a token to the candidate. REQUIRES: less than max_draft tokens.
  void Propose(int32_t token);
  // Returns how many tokens are worth computing: at least one, so that the estimate of `acceptance`
  // follows the text, and as many as are likely to be used.
  int WantedLength() const;

 private:
  int max_draft_;
  size_t num_seen_ = 0;
  std::vector<int32_t> candidate_;
  double acceptance_ = 0.7;
};

}  // namespace turbomind
