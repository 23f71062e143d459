// Which tokens are proposed, and how the estimate of their acceptance follows the text.

#include "turbomind/engine/drafter.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include "engine/tiny_model.h"

namespace turbomind {
namespace {

using Tokens = std::vector<int32_t>;

Tokens CandidateOf(const Tokens& tokens, int max_draft = 4) {
  NgramDrafter drafter(static_cast<int64_t>(tokens.size()), max_draft);
  drafter.Update(tokens);
  return {drafter.candidate().begin(), drafter.candidate().end()};
}

TEST_CASE("the candidate is what followed the last equal tokens") {
  CHECK(CandidateOf({1, 2, 3, 7, 8, 9, 10, 11, 1, 2, 3}) == Tokens{7, 8, 9, 10});
  CHECK(CandidateOf({1, 2, 3, 7, 5, 1, 2, 3, 9, 5, 1, 2, 3}, 1) == Tokens{9});
}

TEST_CASE("a longer match is preferred to a newer one") {
  CHECK(CandidateOf({4, 1, 2, 3, 7, 5, 1, 2, 3, 9, 4, 1, 2, 3}, 1) == Tokens{7});
}

TEST_CASE("text without a match of kMinMatch tokens has no candidate") {
  CHECK(CandidateOf({1}).empty());
  CHECK(CandidateOf({1, 2, 3}).empty());
  CHECK(CandidateOf({9, 2, 3, 7, 1, 2, 3}).empty());
}

TEST_CASE("a match that overlaps the end repeats") {
  CHECK(CandidateOf({5, 5, 5, 5}) == Tokens{5, 5, 5, 5});
  CHECK(CandidateOf({1, 2, 1, 2, 1}, 6) == Tokens{2, 1, 2, 1, 2, 1});
}

TEST_CASE("tokens that come one by one give the same candidates as all at once") {
  testing::RandomValues random(1);
  Tokens tokens;
  NgramDrafter drafter(400, 8);
  size_t num_found = 0;
  for (const float value : random.Uniform(400, 0.f, 3.f)) {
    tokens.push_back(static_cast<int32_t>(value));
    drafter.Update(tokens);
    const auto got = drafter.candidate();
    CHECK(Tokens(got.begin(), got.end()) == CandidateOf(tokens, 8));
    num_found += got.empty() ? 0 : 1;
  }
  CHECK(num_found > 200);
}

TEST_CASE("acceptance rises while candidates are right and falls while they are wrong") {
  NgramDrafter drafter(1000, 2);
  Tokens tokens;
  for (int i = 0; i < 400; ++i) {
    tokens.push_back(i % 10);
    drafter.Update(tokens);
  }
  CHECK(drafter.acceptance() > 0.99);
  for (int i = 0; i < 50; ++i) {
    for (const int32_t token : {0, 1, 2, 100 + i}) {
      tokens.push_back(token);
      drafter.Update(tokens);
    }
    tokens.push_back(200 + i);
    drafter.Update(tokens);
  }
  for (const int32_t token : {0, 1, 2}) {
    tokens.push_back(token);
  }
  drafter.Update(tokens);
  CHECK(drafter.acceptance() < 0.1);
}

TEST_CASE("a model's candidate is dropped when tokens come, and its length follows acceptance") {
  ModelDrafter drafter(8);
  Tokens tokens = {1, 2, 3};
  drafter.Update(tokens);
  CHECK(drafter.WantedLength() > 1);
  drafter.Propose(4);
  drafter.Update(tokens);
  CHECK(Tokens(drafter.candidate().begin(), drafter.candidate().end()) == Tokens{4});
  for (int i = 0; i < 100; ++i) {
    tokens.push_back(5);
    drafter.Update(tokens);
    CHECK(drafter.candidate().empty());
    drafter.Propose(4);
  }
  CHECK(drafter.WantedLength() == 1);
  CHECK(drafter.acceptance() < 0.1);
  for (int i = 0; i < 100; ++i) {
    tokens.push_back(4);
    drafter.Update(tokens);
    drafter.Propose(4);
  }
  CHECK(drafter.WantedLength() == 8);
}

}  // namespace
}  // namespace turbomind
