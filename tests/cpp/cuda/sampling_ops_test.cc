// Tokens sampled on the GPU must equal those of the sampler on the host.

#include "turbomind/backend/cuda/sampling/sampling_ops.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/gpu_array.h"
#include "turbomind/ops/sampling.h"
#include "turbomind/ops/sampling_math.h"

namespace turbomind::cuda {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Rows of logits with one sample per row, sampled on the GPU and by the sampler.
class Samples {
 public:
  explicit Samples(int vocab_size) : vocab_size_(vocab_size) {}

  void Add(std::vector<float> row, SamplingParams params) {
    REQUIRE(static_cast<int>(row.size()) == vocab_size_);
    params.do_sample = true;
    SamplingRequest request;
    request.sampling = params;
    const int64_t num_generated = static_cast<int64_t>(samplings_.size()) % 7;
    auto sampling = RowSamplingOf(request, num_generated);
    REQUIRE(sampling.has_value());
    // Rows are in another order than samplings.
    sampling->row = static_cast<int32_t>(samplings_.size());
    samplings_.insert(samplings_.begin(), *sampling);
    logits_.insert(logits_.end(), row.begin(), row.end());
    std::vector<int32_t> tokens(8);
    SampleInput input;
    input.logits = row.data();
    input.request = &request;
    input.tokens = tokens.data();
    input.num_tokens = static_cast<int64_t>(tokens.size());
    input.num_generated = num_generated;
    int32_t want = -1;  // of a row that the sampler refuses
    try {
      want = Sampler(vocab_size_).Sample(input).token;
    } catch (const std::runtime_error&) {
    }
    want_.insert(want_.begin(), want);
  }

  // Return the number of rows left to the host. All others must equal the sampler's.
  int Check() const {
    int num_left = 0;
    const std::vector<int32_t> got = RunOnGpu();
    for (size_t i = 0; i < got.size(); ++i) {
      CAPTURE(vocab_size_);
      CAPTURE(samplings_[i].row);
      CAPTURE(samplings_[i].top_k);
      CAPTURE(samplings_[i].top_p);
      CAPTURE(samplings_[i].min_p);
      num_left += got[i] < 0 ? 1 : 0;
      CHECK((got[i] == want_[i] || got[i] == -1));
    }
    return num_left;
  }
  int size() const { return static_cast<int>(samplings_.size()); }

 private:
  std::vector<int32_t> RunOnGpu() const {
    const Stream stream = CreateStream();
    std::vector<int32_t> ids(samplings_.size(), -7);
    {
      Workspace workspace(stream);
      const Context ctx = {.stream = stream, .gpu = PropertiesOf(0), .workspace = &workspace};
      const GpuArray<float> logits(stream, logits_);
      const GpuArray<RowSampling> samplings(stream, samplings_);
      const GpuArray<int32_t> out(stream, ids);
      CudaSampleRows(ctx,
                     {.logits = logits.data(),
                      .samplings = samplings_.data(),
                      .ids = out.data(),
                      .num_samplings = size(),
                      .vocab_size = vocab_size_},
                     samplings.data());
      ids = out.Read();
    }
    DestroyStream(stream);
    return ids;
  }

  int vocab_size_;
  std::vector<RowSampling> samplings_;
  std::vector<float> logits_;
  std::vector<int32_t> want_;
};

class Rows {
 public:
  Rows(int vocab_size, uint32_t seed) : vocab_size_(vocab_size), random_(seed) {}

  std::vector<float> Normal(float deviation) {
    std::normal_distribution<float> normal(0.f, deviation);
    std::vector<float> row(static_cast<size_t>(vocab_size_));
    std::generate(row.begin(), row.end(), [&] { return normal(random_); });
    return row;
  }
  // Like a model's logits: a few tokens far above the rest, in one run of ids or scattered.
  std::vector<float> Peaked() {
    std::vector<float> row = Normal(1.f);
    for (int i = 0; i < 12; ++i) {
      row[random_() % row.size()] = 8.f + static_cast<float>(i % 5);
    }
    return row;
  }
  // Rows with few distinct values.
  std::vector<float> Tied() {
    std::vector<float> row = Normal(3.f);
    for (float& x : row) {
      x = std::floor(x);
    }
    return row;
  }

 private:
  int vocab_size_;
  std::mt19937 random_;
};

std::vector<SamplingParams> AllParams() {
  std::vector<SamplingParams> all;
  for (const float temperature : {0.7f, 1.f, 1.9f}) {
    for (const int top_k : {0, 2, 40, 200, 100000}) {
      for (const float top_p : {0.f, 0.5f, 0.95f, 1.f}) {
        for (const float min_p : {0.f, 0.05f}) {
          SamplingParams params;
          params.temperature = temperature;
          params.top_k = top_k;
          params.top_p = top_p;
          params.min_p = min_p;
          params.seed = all.size();
          all.push_back(params);
        }
      }
    }
  }
  return all;
}

TEST_CASE("the GPU samples the sampler's tokens for any vocabulary and parameters") {
  for (const int vocab : {1, 3, 300, 1024, 1025, 5003, 8196}) {
    Samples samplings(vocab);
    Rows rows(vocab, static_cast<uint32_t>(vocab));
    size_t which = 0;
    for (const SamplingParams& params : AllParams()) {
      const bool few = vocab > 1025;  // use a quarter of the combinations
      if (few && ++which % 4 != 0) {
        continue;
      }
      switch (samplings.size() % 3) {
        case 0:
          samplings.Add(rows.Peaked(), params);
          break;
        case 1:
          samplings.Add(rows.Normal(3.f), params);
          break;
        default:
          samplings.Add(rows.Tied(), params);
      }
    }
    const int num_left = samplings.Check();
    CAPTURE(vocab);
    CHECK(num_left <= (vocab <= 1024 ? 0 : samplings.size() / 2));
  }
}

TEST_CASE("common sampling parameters are handled on the GPU" * doctest::test_suite("small")) {
  constexpr int kVocab = 40004;
  Samples samplings(kVocab);
  Rows rows(kVocab, 7);
  for (uint64_t seed = 0; seed < 4; ++seed) {
    SamplingParams params;
    params.seed = seed;
    params.temperature = 0.7f;
    params.top_k = 40;
    samplings.Add(rows.Normal(3.f), params);
    params.top_k = 0;
    samplings.Add(rows.Normal(3.f), params);  // from all tokens
    params.top_p = 0.9f;
    samplings.Add(rows.Peaked(), params);
    params.top_p = 1.f;
    params.min_p = 0.05f;
    samplings.Add(rows.Normal(3.f), params);
  }
  CHECK(samplings.Check() == 0);
}

TEST_CASE("rejected rows and samples from too many tokens are left to the host") {
  for (const int vocab : {900, 5003}) {
    for (const int top_k : {0, 40}) {
      SamplingParams params;
      params.top_k = top_k;
      Samples refused(vocab);
      const auto size = static_cast<size_t>(vocab);
      refused.Add(std::vector<float>(size, -kInf), params);
      refused.Add(std::vector<float>(size, kNaN), params);
      for (const float bad : {kNaN, kInf}) {
        for (const size_t at : {size_t{0}, size / 2, size - 1}) {
          std::vector<float> row(size, 1.f);
          row[at] = bad;
          refused.Add(row, params);
        }
      }
      CHECK(refused.Check() == refused.size());
    }
  }
  SamplingParams nucleus;
  nucleus.top_p = 0.9f;
  Samples flat(5003);
  flat.Add(std::vector<float>(5003, 0.5f), nucleus);
  flat.Add(Rows(5003, 3).Normal(0.1f), nucleus);
  CHECK(flat.Check() == 2);
}

// Equal weights rank the lower id first, even if its logit is lower.
TEST_CASE("logits too close for distinct weights are sampled as on the host") {
  constexpr int kVocab = 5003;
  Samples samplings(kVocab);
  Rows rows(kVocab, 11);
  for (uint64_t seed = 0; seed < 6; ++seed) {
    for (const float deviation : {1e-8f, 1e-6f, 1e-4f}) {
      SamplingParams params;
      params.seed = seed;
      params.top_k = 3;
      samplings.Add(rows.Normal(deviation), params);
    }
  }
  CHECK(samplings.Check() >= 6);
}

TEST_CASE("extreme logits are sampled as on the host") {
  for (const int vocab : {700, 3001}) {
    Samples samplings(vocab);
    const auto size = static_cast<size_t>(vocab);
    for (const int top_k : {0, 3}) {
      for (const float top_p : {0.9f, 1.f}) {
        SamplingParams params;
        params.top_k = top_k;
        params.top_p = top_p;
        std::vector<float> row(size, -kInf);
        row[size - 2] = -3e38f;
        samplings.Add(row, params);  // one token
        row[5] = 3e38f;
        samplings.Add(row, params);
        row.assign(size, -0.f);
        row[7] = 0.f;
        row[300] = 1e-40f;
        samplings.Add(row, params);
        row.assign(size, -200.f);
        row[1] = row[600] = -150.f;
        samplings.Add(row, params);
      }
    }
    CHECK(samplings.Check() == (vocab <= 1024 ? 0 : 6));  // if nearly all tokens are equal
  }
}

TEST_CASE("CudaSampleRows without samples does nothing") {
  const Stream stream = CreateStream();
  {
    Workspace workspace(stream);
    CudaSampleRows({.stream = stream, .gpu = PropertiesOf(0), .workspace = &workspace},
                   {.vocab_size = 4}, nullptr);
    CHECK(workspace.generation() == 0);
  }
  DestroyStream(stream);
}

}  // namespace
}  // namespace turbomind::cuda
