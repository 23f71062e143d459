#include "turbomind/ops/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "turbomind/core/check.h"

namespace turbomind {
namespace {

// Returns 1 / theta^(2i / dim), rounded to FP32 where transformers rounds.
float InvFreq(float theta, int i, int dim) {
  const float exponent = static_cast<float>(2 * i) / static_cast<float>(dim);
  return 1.f / static_cast<float>(std::pow(double{theta}, double{exponent}));
}

void Llama3(const RopeConfig& config, std::vector<float>& inv_freq) {
  const float context = static_cast<float>(config.original_max_position);
  const float low = context / config.low_freq_factor;
  const float high = context / config.high_freq_factor;
  for (float& f : inv_freq) {
    const float wavelength = 2.f * std::numbers::pi_v<float> / f;
    if (wavelength > low) {
      f /= config.factor;
    } else if (wavelength >= high) {
      const float smooth = (context / wavelength - config.low_freq_factor) /
                           (config.high_freq_factor - config.low_freq_factor);
      f = (1.f - smooth) * f / config.factor + smooth * f;
    }
  }
}

// Returns the dimension that makes `rotations` turns over the original context.
double CorrectionDim(const RopeConfig& config, double rotations) {
  return config.dim * std::log(config.original_max_position / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(static_cast<double>(config.theta)));
}

void Yarn(const RopeConfig& config, std::vector<float>& inv_freq) {
  double low = CorrectionDim(config, config.beta_fast);
  double high = CorrectionDim(config, config.beta_slow);
  if (config.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, config.dim - 1.0);
  if (low == high) {
    high += 0.001;  // avoids a division by zero, as transformers does
  }
  for (int i = 0; i < config.dim / 2; ++i) {
    const float ramp =
        (static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low);
    const float extrapolation = 1.f - std::clamp(ramp, 0.f, 1.f);
    float& f = inv_freq[static_cast<size_t>(i)];
    const float interpolated = 1.f / (config.factor * (1.f / f));
    f = interpolated * (1.f - extrapolation) + f * extrapolation;
  }
}

void Require(bool ok, const char* field, double got, const char* want) {
  if (!ok) {
    throw InvalidArgument("rope." + std::string(field),
                          "is " + std::to_string(got) + ". It must be " + want);
  }
}

void ValidateLongRope(const RopeConfig& c) {
  for (const auto* factors : {&c.freq_factors, &c.long_factors}) {
    if (factors == &c.long_factors && factors->empty()) {
      continue;
    }
    Require(factors->size() == static_cast<size_t>(c.dim / 2), "factors size",
            static_cast<double>(factors->size()), "dim / 2 for longrope");
    for (const float factor : *factors) {
      Require(std::isfinite(factor) && factor > 0.f, "long_factors", factor, "positive");
    }
  }
  Require(std::isfinite(c.attention_factor) && c.attention_factor > 0.f, "attention_factor",
          c.attention_factor, "positive for longrope");
  Require(c.original_max_position > 0, "original_max_position", c.original_max_position,
          "positive");
}

void Validate(const RopeConfig& c) {
  if (c.kind == RopeKind::kNone) {
    return;
  }
  for (float divisor : c.freq_factors) {
    Require(std::isfinite(divisor) && divisor > 0.f, "freq_factors", divisor, "positive");
  }
  const bool dynamic = c.kind == RopeKind::kDynamic;
  Require(c.dim > 0 && c.dim % 2 == 0, "dim", c.dim, "positive and even");
  Require(std::isfinite(c.theta) && c.theta > 1.f, "theta", c.theta, "finite and above 1");
  if (!c.freq_factors.empty()) {
    Require(c.freq_factors.size() == static_cast<size_t>(c.dim / 2), "freq_factors size",
            static_cast<double>(c.freq_factors.size()), "dim / 2");
    Require(!dynamic, "freq_factors size", static_cast<double>(c.freq_factors.size()),
            "0 for dynamic scaling");
  }
  if (c.kind == RopeKind::kDefault) {
    return;
  }
  if (c.kind == RopeKind::kLongRope) {
    ValidateLongRope(c);
    return;
  }
  Require(std::isfinite(c.factor) && c.factor > 0.f, "factor", c.factor, "positive");
  if (c.kind == RopeKind::kLinear) {
    return;
  }
  Require(c.original_max_position > 0, "original_max_position", c.original_max_position,
          "positive");
  Require(!dynamic || c.dim > 2, "dim", c.dim, "at least 4 for dynamic scaling");
  Require(!dynamic || c.factor >= 1.f, "factor", c.factor, "at least 1 for dynamic scaling");
  if (c.kind == RopeKind::kLlama3) {
    Require(c.low_freq_factor > 0.f, "low_freq_factor", c.low_freq_factor, "positive");
    Require(c.high_freq_factor > c.low_freq_factor, "high_freq_factor", c.high_freq_factor,
            "above low_freq_factor");
  }
  if (c.kind == RopeKind::kYarn) {
    Require(c.beta_fast > 0.f, "beta_fast", c.beta_fast, "positive");
    Require(c.beta_slow > 0.f, "beta_slow", c.beta_slow, "positive");
    Require(std::isfinite(c.attention_factor) && c.attention_factor >= 0.f, "attention_factor",
            c.attention_factor, "positive, or 0 to derive it from factor");
  }
}

}  // namespace

RopeConfig ResolveRope(RopeConfig config, int session_len, bool by_sequence) {
  if (config.kind == RopeKind::kLongRope) {
    const bool may_be_long = session_len > config.original_max_position;
    if (may_be_long && !by_sequence && !config.long_factors.empty()) {
      config.freq_factors = config.long_factors;
    }
    if (!may_be_long || !by_sequence) {
      config.long_factors.clear();
    }
  }
  if (config.kind != RopeKind::kDynamic) {
    return config;
  }
  if (session_len > config.original_max_position) {
    // FP32, because transformers computes it from a tensor of the length.
    const float length = config.factor * static_cast<float>(session_len);
    const float scale =
        length / static_cast<float>(config.original_max_position) - (config.factor - 1.f);
    const float exponent = static_cast<float>(config.dim) / static_cast<float>(config.dim - 2);
    config.theta *= std::pow(scale, exponent);
  }
  config.kind = RopeKind::kDefault;
  return config;
}

RopeTable::RopeTable(const RopeConfig& config) : config_(config) {
  Validate(config);
  if (!enabled()) {
    return;
  }
  for (int i = 0; i < config.dim / 2; ++i) {
    inv_freq_.push_back(InvFreq(config.theta, i, config.dim));
  }
  switch (config.kind) {
    case RopeKind::kLinear:
      for (float& f : inv_freq_) {
        f /= config.factor;
      }
      break;
    case RopeKind::kLongRope:
      attention_factor_ = config.attention_factor;
      break;
    case RopeKind::kLlama3:
      Llama3(config, inv_freq_);
      break;
    case RopeKind::kYarn:
      Yarn(config, inv_freq_);
      attention_factor_ =
          config.attention_factor > 0.f
              ? config.attention_factor
              : static_cast<float>(0.1 * std::log(std::max(1.0, double{config.factor})) + 1.0);
      break;
    case RopeKind::kNone:
    case RopeKind::kDefault:
    case RopeKind::kDynamic:
      break;
  }
  for (size_t i = 0; i < config.long_factors.size(); ++i) {
    inv_freq_.push_back(inv_freq_[i] / config.long_factors[i]);
  }
  for (size_t i = 0; i < config.freq_factors.size(); ++i) {
    inv_freq_[i] /= config.freq_factors[i];
  }
}

void RopeTable::Fill(const int32_t* positions, const int32_t* sets, int num_tokens, float* cos,
                     float* sin) const {
  const int half = enabled() ? dim() / 2 : 0;
  for (int t = 0; t < num_tokens; ++t) {
    const float position = static_cast<float>(positions[t]);
    const float* inv_freq = inv_freq_.data() + int64_t{half} * (sets == nullptr ? 0 : sets[t]);
    for (int i = 0; i < half; ++i) {
      const float angle = inv_freq[i] * position;
      *cos++ = std::cos(angle) * attention_factor_;
      *sin++ = std::sin(angle) * attention_factor_;
    }
  }
}

void RopeTable::FillWave(int frequency, int64_t num_positions, float* cos, float* sin) const {
  const float inv_freq = inv_freq_[static_cast<size_t>(frequency)];
  for (int64_t p = 0; p < num_positions; ++p) {
    const float angle = inv_freq * static_cast<float>(p);
    cos[p] = std::cos(angle) * attention_factor_;
    sin[p] = std::sin(angle) * attention_factor_;
  }
}

}  // namespace turbomind
