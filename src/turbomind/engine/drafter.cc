#include "turbomind/engine/drafter.h"

#include <algorithm>
#include <bit>

#include "turbomind/core/check.h"

namespace turbomind {
namespace {

constexpr double kLearningRate = 1. / 16;

// The draft model computes no token that is used with a lower probability.
constexpr double kMinUsed = 0.25;

// Moves the estimate of acceptance towards what became of the candidate.
void LearnFrom(std::span<const int32_t> came, std::span<const int32_t> candidate,
               double& acceptance) {
  for (size_t i = 0; i < std::min(came.size(), candidate.size()); ++i) {
    const bool is_right = came[i] == candidate[i];
    acceptance += ((is_right ? 1. : 0.) - acceptance) * kLearningRate;
    if (!is_right) {
      return;
    }
  }
}

// Returns a hash of the kMinMatch tokens before `end`.
uint32_t HashBefore(std::span<const int32_t> tokens, int64_t end) {
  uint64_t hash = 0;
  for (int64_t i = end - NgramDrafter::kMinMatch; i < end; ++i) {
    hash = (hash ^ static_cast<uint32_t>(tokens[static_cast<size_t>(i)])) * 0x9e3779b97f4a7c15;
    hash ^= hash >> 29;
  }
  return static_cast<uint32_t>(hash >> 32);
}

}  // namespace

NgramDrafter::NgramDrafter(int64_t max_tokens, int max_draft)
    : max_draft_(max_draft),
      newest_(std::bit_ceil(static_cast<size_t>(max_tokens) + 1)),
      previous_(static_cast<size_t>(max_tokens) + 1) {
  Check(max_tokens > 0 && max_draft > 0, "a drafter needs room for tokens and a draft");
  candidate_.reserve(static_cast<size_t>(max_draft));
}

void NgramDrafter::Update(std::span<const int32_t> tokens) {
  Check(static_cast<int64_t>(tokens.size()) >= num_seen_ && tokens.size() < previous_.size(),
        "the tokens must extend those of the last call and fit");
  LearnFrom(tokens.subspan(static_cast<size_t>(num_seen_)), candidate_, acceptance_[match_class_]);
  AddPlaces(tokens);
  num_seen_ = static_cast<int64_t>(tokens.size());
  Find(tokens);
}

// A place is the position of the token that followed the match, so the end of the tokens is none.
void NgramDrafter::AddPlaces(std::span<const int32_t> tokens) {
  const auto size = static_cast<int64_t>(tokens.size());
  for (int64_t end = std::max<int64_t>(num_seen_, kMinMatch); end < size; ++end) {
    int32_t& newest = newest_[HashBefore(tokens, end) & (newest_.size() - 1)];
    previous_[static_cast<size_t>(end)] = newest;
    newest = static_cast<int32_t>(end);
  }
}

void NgramDrafter::Find(std::span<const int32_t> tokens) {
  candidate_.clear();
  const auto size = static_cast<int64_t>(tokens.size());
  if (size < kMinMatch) {
    return;
  }
  int64_t best_place = 0;
  int64_t best_match = kMinMatch - 1;
  int64_t place = newest_[HashBefore(tokens, size) & (newest_.size() - 1)];
  for (int i = 0; i < kMaxPlaces && place > 0; ++i) {
    const int64_t limit = std::min<int64_t>(place, kMaxMatch);
    int64_t match = 0;
    while (match < limit && tokens[static_cast<size_t>(place - 1 - match)] ==
                                tokens[static_cast<size_t>(size - 1 - match)]) {
      ++match;
    }
    if (match > best_match) {
      best_match = match;
      best_place = place;
    }
    place = previous_[static_cast<size_t>(place)];
  }
  if (best_place == 0) {
    return;
  }
  match_class_ = best_match < 5 ? 0 : best_match < 9 ? 1 : 2;
  // A match that overlaps the end repeats with the distance of the two places.
  for (int64_t i = 0; i < max_draft_; ++i) {
    const int64_t from = best_place + i;
    candidate_.push_back(from < size ? tokens[static_cast<size_t>(from)]
                                     : candidate_[static_cast<size_t>(from - size)]);
  }
}

ModelDrafter::ModelDrafter(int max_draft) : max_draft_(max_draft) {
  Check(max_draft > 0, "a drafter needs room for a draft");
  candidate_.reserve(static_cast<size_t>(max_draft));
}

void ModelDrafter::Update(std::span<const int32_t> tokens) {
  Check(tokens.size() >= num_seen_, "the tokens must extend those of the last call");
  if (tokens.size() > num_seen_) {
    LearnFrom(tokens.subspan(num_seen_), candidate_, acceptance_);
    candidate_.clear();
    num_seen_ = tokens.size();
  }
}

void ModelDrafter::Propose(int32_t token) {
  Check(candidate_.size() < static_cast<size_t>(max_draft_), "a candidate must not be too long");
  candidate_.push_back(token);
}

int ModelDrafter::WantedLength() const {
  int length = 1;
  for (double used = acceptance_ * acceptance_; length < max_draft_ && used > kMinUsed; ++length) {
    used *= acceptance_;
  }
  return length;
}

}  // namespace turbomind
