// The statistics of K and V that calibration reads.

#include "turbomind/model/kv_statistics.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace turbomind {
namespace {

TEST_CASE("the limits of formats are bin edges") {
  for (const float limit : {448.f, 2688.f, 3072.f, 57344.f, 1.f, 0.5f}) {
    CHECK(KvStatistics::Bin(limit) == KvStatistics::Bin(std::nextafter(limit, 0.f)) + 1);
    CHECK(KvStatistics::Bin(limit) == KvStatistics::Bin(limit * 1.01f));
    CHECK(KvStatistics::Bin(-limit) == KvStatistics::Bin(limit));
  }
  CHECK(KvStatistics::Bin(0.f) == 0);
  CHECK(KvStatistics::Bin(0x1p-20f) == 0);
  CHECK(KvStatistics::Bin(0x1.2p-20f) == 2);
  CHECK(KvStatistics::Bin(1.f) == 320);
  CHECK(KvStatistics::Bin(std::numeric_limits<float>::infinity()) == KvStatistics::kBins - 1);
  CHECK(KvStatistics::Bin(std::nanf("")) == KvStatistics::kBins - 1);
}

TEST_CASE("sums, largest values and histograms are kept by layer and head") {
  constexpr int kHeads = 2;
  constexpr int kDim = 3;
  KvStatistics statistics(2, kHeads, kDim);
  // Two tokens of [k (2 heads), v (2 heads)], in the order of qkv.
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> rows = {1,  -2, 3,  4, inf, 6, 7, 8, -9, 0,    1, 2,   //
                                   10, 20, 30, 1, 2,   3, 1, 1, 1,  -100, 0, 0};  //
  statistics.Add(1, {.k = rows.data(), .v = rows.data() + 6, .stride = 12, .num_tokens = 2});
  CHECK(statistics.num_tokens() == 0);  // counts tokens of the first layer
  statistics.Add(0, {.k = rows.data(), .v = rows.data() + 6, .stride = 12, .num_tokens = 1});
  statistics.Add(0, {.k = rows.data() + 12, .v = rows.data() + 18, .stride = 12, .num_tokens = 1});
  CHECK(statistics.num_tokens() == 2);
  const std::vector<double> sums = {11, 18, 33, 5, 2, 9};
  const std::vector<double> squares = {101, 404, 909, 17, 4, 45};
  for (size_t layer = 0; layer < 2; ++layer) {
    for (size_t i = 0; i < 6; ++i) {
      CHECK(statistics.k_sum()[layer * 6 + i] == sums[i]);
      CHECK(statistics.k_square_sum()[layer * 6 + i] == squares[i]);
    }
    CHECK(statistics.k().amax[layer * 2] == 30.f);
    CHECK(statistics.k().amax[layer * 2 + 1] == 6.f);
    CHECK(statistics.v().amax[layer * 2] == 9.f);
    CHECK(statistics.v().amax[layer * 2 + 1] == 100.f);
    int64_t counted = 0;
    for (size_t bin = 0; bin < KvStatistics::kBins; ++bin) {
      counted += statistics.k().histogram[(layer * 2 + 1) * KvStatistics::kBins + bin];
    }
    CHECK(counted == 2 * kDim);
    CHECK(statistics.k().histogram[(layer * 2 + 2) * KvStatistics::kBins - 1] == 1);  // infinity
  }
}

}  // namespace
}  // namespace turbomind
