#include "turbomind/ops/sampling.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "turbomind/core/check.h"
#include "turbomind/ops/row_math.h"
#include "turbomind/ops/sampling_math.h"

namespace turbomind {
namespace {

constexpr float kGreedyTemperature = 1e-6f;  // at or below this, sampling is greedy

// Returns a random number in [0, 1). The generator is counter-based: SplitMix64's finalizer over
// (seed, step), applied twice.
double Uniform(uint64_t seed, uint64_t step) {
  const auto mix = [](uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
  };
  constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;
  const uint64_t bits = mix(mix(seed + kGolden) + (step + 1) * kGolden);
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

// Masks the last token of each sequence whose other tokens are the end of `tokens`.
void MaskCompletions(const std::vector<std::vector<int32_t>>& sequences, const int32_t* tokens,
                     int64_t num_tokens, int vocab_size, float* logits) {
  for (const std::vector<int32_t>& sequence : sequences) {
    if (sequence.empty() || sequence.back() < 0 || sequence.back() >= vocab_size) {
      continue;  // can never be sampled
    }
    const auto prefix = static_cast<int64_t>(sequence.size()) - 1;
    if (prefix <= num_tokens &&
        std::equal(sequence.begin(), sequence.end() - 1, tokens + num_tokens - prefix)) {
      logits[sequence.back()] = kMasked;
    }
  }
}

void MaskEarlyStop(const SampleInput& input, int vocab_size) {
  const SamplingRequest& request = *input.request;
  if (input.num_generated >= request.min_new_tokens) {
    return;
  }
  for (int32_t id : request.eos_ids) {
    if (id >= 0 && id < vocab_size) {
      input.logits[id] = kMasked;
    }
  }
  MaskCompletions(request.stop_sequences, input.tokens + input.num_tokens - input.num_generated,
                  input.num_generated, vocab_size, input.logits);
}

void ApplyTokenMask(const uint32_t* mask, int vocab_size, float* logits) {
  for (int begin = 0; begin < vocab_size; begin += 32) {
    const uint32_t word = mask[begin / 32];
    const int size = std::min(32, vocab_size - begin);
    for (int i = 0; word != ~0u && i < size; ++i) {
      logits[begin + i] = (word >> i & 1u) != 0 ? logits[begin + i] : kMasked;
    }
  }
}

// Sets weights below min_p to 0 and returns the sum of the others. Several lanes hide the latency
// of additions.
double SumKept(float* weights, int size, float min_p) {
  for (int i = 0; i < size && min_p > 0.f; ++i) {
    weights[i] = weights[i] >= min_p ? weights[i] : 0.f;
  }
  std::array<double, kSumLanes> sums{};
  for (int i = 0; i + kSumLanes <= size; i += kSumLanes) {
    for (int j = 0; j < kSumLanes; ++j) {
      sums[static_cast<size_t>(j)] += weights[i + j];
    }
  }
  return SumOfBlock(
      size, [&](int lane) { return sums[static_cast<size_t>(lane)]; },
      [&](int i) { return weights[i]; });
}

// Returns whether logits change before a token is sampled, not counting a token mask.
bool ChangesLogits(const SamplingRequest& request, int64_t num_generated) {
  const SamplingParams& params = request.sampling;
  return !params.logit_bias.empty() || params.repetition_penalty != 1.f ||
         params.presence_penalty != 0.f || params.frequency_penalty != 0.f ||
         !request.bad_sequences.empty() || num_generated < request.min_new_tokens;
}

bool IsGreedy(const SamplingParams& params) {
  return !params.do_sample || params.top_k == 1 || params.temperature <= kGreedyTemperature;
}

RowSampling MakeRowSampling(const SamplingParams& params, int64_t num_generated) {
  return {.uniform = Uniform(params.seed, static_cast<uint64_t>(num_generated)),
          .top_k = params.top_k,
          .inverse_temperature = 1.f / params.temperature,
          .top_p = params.top_p,
          .min_p = params.min_p};
}

// Returns the error of the first parameter out of range.
std::optional<InvalidArgument> CheckParams(const SamplingParams& p) {
  const auto wrong = [](const char* name, float got, const char* want) {
    return InvalidArgument(name, "is " + std::to_string(got) + ". It must be " + want);
  };
  if (!(p.temperature >= 0.f) || std::isinf(p.temperature)) {
    return wrong("temperature", p.temperature, "finite and at least 0.");
  }
  if (!(p.top_p >= 0.f && p.top_p <= 1.f)) {
    return wrong("top_p", p.top_p, "0 to 1.");
  }
  if (!(p.min_p >= 0.f && p.min_p <= 1.f)) {
    return wrong("min_p", p.min_p, "0 to 1.");
  }
  if (!(p.repetition_penalty > 0.f) || std::isinf(p.repetition_penalty)) {
    return wrong("repetition_penalty", p.repetition_penalty, "finite and above 0.");
  }
  if (!std::isfinite(p.presence_penalty)) {
    return wrong("presence_penalty", p.presence_penalty, "finite.");
  }
  if (!std::isfinite(p.frequency_penalty)) {
    return wrong("frequency_penalty", p.frequency_penalty, "finite.");
  }
  return std::nullopt;
}

// Returns whether the row is needed only to sample a token, and its logits do not change first.
bool NeedsOnlyToken(const SamplingRequest& request, int64_t num_generated) {
  return request.sampling.num_logprobs < 0 && request.token_mask == nullptr &&
         !ChangesLogits(request, num_generated) && !CheckParams(request.sampling);
}

}  // namespace

bool IsPlainArgMax(const SamplingRequest& request, int64_t num_generated) {
  return IsGreedy(request.sampling) && NeedsOnlyToken(request, num_generated);
}

std::optional<RowSampling> RowSamplingOf(const SamplingRequest& request, int64_t num_generated) {
  if (IsGreedy(request.sampling) || !NeedsOnlyToken(request, num_generated)) {
    return std::nullopt;
  }
  return MakeRowSampling(request.sampling, num_generated);
}

Sampler::Sampler(int vocab_size) : vocab_size_(vocab_size) {
  Check(vocab_size > 0, "the vocabulary size must be positive");
  const auto size = static_cast<size_t>(vocab_size);
  // Memory is reserved here so that no step allocates. Vectors are resized on first use, so a
  // greedy sampler never touches their pages.
  weights_.reserve(size);
  counts_.reserve(size);
  candidates_.reserve(size);
  block_sums_.resize((size + kSumBlock - 1) / kSumBlock);
}

// Applies logit bias and penalties.
void Sampler::ApplyPenalties(const SampleInput& input) {
  const SamplingParams& params = input.request->sampling;
  for (const auto& [id, bias] : params.logit_bias) {
    if (id < 0 || id >= vocab_size_) {
      throw InvalidArgument("logit_bias", "contains token id " + std::to_string(id) +
                                              ". It must be 0 to " +
                                              std::to_string(vocab_size_ - 1));
    }
    input.logits[id] += bias;
  }
  const bool repetition = params.repetition_penalty != 1.f;
  const bool additive = params.presence_penalty != 0.f || params.frequency_penalty != 0.f;
  if (!repetition && !additive) {
    return;
  }
  counts_.resize(static_cast<size_t>(vocab_size_));
  // counts_[id] is 1 + the number of times generated, or 0 for a token not seen. The loop below
  // resets it.
  const int64_t num_prompt = input.num_tokens - input.num_generated;
  int64_t counted = repetition ? 0 : num_prompt;
  const int64_t first = counted;
  std::string error;
  for (; counted < input.num_tokens; ++counted) {
    const int32_t id = input.tokens[counted];
    if (id < 0 || id >= vocab_size_) {
      error = "The sequence contains token id " + std::to_string(id) + ". It must be 0 to " +
              std::to_string(vocab_size_ - 1);
      break;
    }
    int32_t& count = counts_[static_cast<size_t>(id)];
    count = std::max(count, 1) + (counted >= num_prompt ? 1 : 0);
  }
  for (int64_t i = first; i < counted; ++i) {
    const int32_t id = input.tokens[i];
    int32_t& count = counts_[static_cast<size_t>(id)];
    if (count == 0) {
      continue;  // handled at an earlier occurrence
    }
    float& logit = input.logits[id];
    if (repetition) {
      logit = logit > 0.f ? logit / params.repetition_penalty : logit * params.repetition_penalty;
    }
    if (count > 1) {
      logit -= params.presence_penalty + params.frequency_penalty * static_cast<float>(count - 1);
    }
    count = 0;
  }
  if (!error.empty()) {
    throw InvalidArgument(error);
  }
}

// Samples from softmax(logits / temperature) after filtering.
int32_t Sampler::SampleRow(const float* logits, float max_logit, const RowSampling& sampling) {
  weights_.resize(static_cast<size_t>(vocab_size_));
  FillWeights(logits, max_logit, sampling.inverse_temperature);
  if (SamplesFromAll(sampling, vocab_size_)) {
    return SampleFromAll(sampling.min_p, sampling.uniform);
  }
  const double total = SelectLargest(sampling);
  const auto weight = [this](int i) { return candidates_[static_cast<size_t>(i)].weight; };
  const Kept kept = KeepByMass(static_cast<int>(candidates_.size()), total, sampling, weight);
  return candidates_[static_cast<size_t>(SampleKept(kept, sampling.uniform, weight))].id;
}

// Computes weights_ = exp((logits - max_logit) * inverse).
void Sampler::FillWeights(const float* logits, float max_logit, float inverse) {
  float* const weights = weights_.data();
  int i = 0;
  for (; i + 4 <= vocab_size_; i += 4) {
    const Float4 weight = ExpNegative((LoadFloat4(logits + i) - Splat(max_logit)) * Splat(inverse));
    std::memcpy(weights + i, &weight, sizeof(weight));
  }
  for (; i < vocab_size_; ++i) {
    weights[i] = ExpNegative((logits[i] - max_logit) * inverse);
  }
}

// Sets weights_ below min_p to 0, fills block_sums_ and returns the total.
double Sampler::SumBlocks(float min_p) {
  double total = 0;
  for (size_t block = 0; block < block_sums_.size(); ++block) {
    const size_t begin = block * kSumBlock;
    const size_t size = std::min<size_t>(kSumBlock, weights_.size() - begin);
    block_sums_[block] = SumKept(weights_.data() + begin, static_cast<int>(size), min_p);
    total += block_sums_[block];
  }
  return total;
}

// Samples from the weights_ of at least min_p. The sums of blocks locate the block first.
int32_t Sampler::SampleFromAll(float min_p, double uniform) {
  double left = uniform * SumBlocks(min_p);
  int32_t last = -1;
  for (size_t block = 0; block < block_sums_.size(); ++block) {
    if (left >= block_sums_[block] && block + 1 < block_sums_.size()) {
      left -= block_sums_[block];
      continue;
    }
    const size_t begin = block * kSumBlock;
    const size_t end = std::min(begin + kSumBlock, weights_.size());
    for (size_t i = begin; i < end; ++i) {
      const double weight = weights_[i];
      if (left < weight) {
        return static_cast<int32_t>(i);
      }
      left -= weight;
      last = weight > 0 ? static_cast<int32_t>(i) : last;
    }
    if (last >= 0) {
      return last;  // rounding skipped the last candidate
    }
  }
  return FirstOf(weights_.data(), vocab_size_, 1.f);
}

// Fills candidates_, by decreasing weight (ties by id), and returns the sum that top-p is a share
// of. The candidates are the top-k, or without top-k those that top-p may keep. Only weights that
// can be candidates are sorted: a histogram over the leading bits gives the smallest one.
double Sampler::SelectLargest(const RowSampling& sampling) {
  constexpr int kShift = 19;  // 16 bins per power of two
  constexpr uint32_t kOne = 0x3f800000u;
  constexpr size_t kBins = (kOne >> kShift) + 1;
  const auto bin_of = [kOne](float weight) {  // weight in (0, 1]: the largest weights come first
    uint32_t bits;
    std::memcpy(&bits, &weight, sizeof(bits));
    return static_cast<size_t>((kOne - std::min(bits, kOne)) >> kShift);
  };
  std::array<int32_t, kBins> counts{};
  std::array<double, kBins> masses{};
  for (float weight : weights_) {
    if (weight > 0.f) {
      ++counts[bin_of(weight)];
      masses[bin_of(weight)] += weight;
    }
  }
  // Sums in a different order differ by less than this.
  constexpr double kAnyOrder = 1 + 1e-9;
  const bool by_mass =
      !LimitsCount(sampling, vocab_size_);  // otherwise top-p is a share of the top-k
  const int64_t keep = by_mass ? vocab_size_ : sampling.top_k;
  double total = by_mass ? SumBlocks(0.f) : 0;
  const double wanted = sampling.top_p * total * kAnyOrder;
  size_t last_bin = 0;
  int64_t count = counts[0];
  double mass = masses[0];
  while (last_bin + 1 < kBins && count < keep && !(by_mass && mass >= wanted)) {
    ++last_bin;
    count += counts[last_bin];
    mass += masses[last_bin];
  }
  candidates_.clear();
  for (int i = 0; i < vocab_size_; ++i) {
    const float weight = weights_[static_cast<size_t>(i)];
    if (weight > 0.f && bin_of(weight) <= last_bin) {
      candidates_.push_back({i, weight});
    }
  }
  std::sort(candidates_.begin(), candidates_.end(), [](const Candidate& a, const Candidate& b) {
    return a.weight > b.weight || (a.weight == b.weight && a.id < b.id);
  });
  if (static_cast<int64_t>(candidates_.size()) > keep) {
    candidates_.resize(static_cast<size_t>(keep));
  }
  for (size_t i = 0; i < candidates_.size() && !by_mass; ++i) {
    total += candidates_[i].weight;
  }
  return total;
}

void Sampler::ApplyMasks(const SampleInput& input) const {
  MaskCompletions(input.request->bad_sequences, input.tokens, input.num_tokens, vocab_size_,
                  input.logits);
  MaskEarlyStop(input, vocab_size_);
  if (input.token_mask != nullptr) {
    ApplyTokenMask(input.token_mask, vocab_size_, input.logits);
  }
}

SampleResult Sampler::Sample(const SampleInput& input) {
  SampleResult result;
  const SamplingParams& params = input.request->sampling;
  if (const auto fault = CheckParams(params)) {
    throw *fault;
  }
  RowMax max = MaxLogit(input.logits, vocab_size_);
  if (!max.valid || max.value == kMasked) {
    throw std::runtime_error("The model computed NaN or infinite logits.");
  }
  const bool wants_logprobs = params.num_logprobs >= 0;
  if (wants_logprobs) {
    raw_.assign(input.logits, input.logits + vocab_size_);
  }
  if (ChangesLogits(*input.request, input.num_generated) || input.token_mask != nullptr) {
    ApplyPenalties(input);
    ApplyMasks(input);
    max = MaxLogit(input.logits, vocab_size_);
  }
  if (!max.valid || max.value == kMasked) {
    throw InvalidArgument(
        max.valid
            ? "No token is allowed. Bad words, min_new_tokens and the grammar together exclude the "
              "whole vocabulary."
            : "The penalties or logit_bias made the logits NaN or infinite. Use smaller values.");
  }
  result.token = IsGreedy(params) ? FirstOf(input.logits, vocab_size_, max.value)
                                  : SampleRow(input.logits, max.value,
                                              MakeRowSampling(params, input.num_generated));
  if (wants_logprobs) {
    result.logprobs = ComputeLogprobs(raw_.data(), vocab_size_, result.token, params.num_logprobs);
  }
  return result;
}

}  // namespace turbomind
