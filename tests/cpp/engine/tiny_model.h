#pragma once

// A small random decoder, the same on every call, and the means to run requests through an engine.

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/core/float_convert.h"
#include "turbomind/engine/engine.h"

namespace turbomind::testing {

inline constexpr int kVocab = 97;
inline constexpr int64_t kFreeBytes = int64_t{64} << 20;

// Two layers, one with a sliding window shorter than the prompts of the tests.
inline ModelConfig TinyConfig() {
  ModelConfig config;
  config.num_layers = 2;
  config.hidden_size = 64;
  config.intermediate_size = 96;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 64;
  config.vocab_size = kVocab;
  config.max_position = 4096;
  config.rope.dim = 64;
  config.windows = {0, 40};
  return config;
}

class RandomValues {
 public:
  explicit RandomValues(uint32_t seed) : generator_(seed) {}
  std::vector<float> Uniform(int64_t size, float low, float high) {
    std::vector<float> values(static_cast<size_t>(size));
    for (float& value : values) {
      const auto bits = static_cast<float>(generator_() >> 8) * 0x1p-24f;
      value = low + (high - low) * bits;
    }
    return values;
  }

 private:
  std::mt19937 generator_;
};

inline std::vector<uint16_t> RandomBF16(RandomValues& random, int64_t size, float range) {
  std::vector<uint16_t> data;
  for (const float value : random.Uniform(size, -range, range)) {
    data.push_back(FloatToBFloat16(value));
  }
  return data;
}

// Blocks of an FP16 scale, 2^-9, and 32 codes.
inline std::vector<uint16_t> RandomQ8(RandomValues& random, int64_t num_blocks) {
  std::vector<uint16_t> data;
  for (int64_t block = 0; block < num_blocks; ++block) {
    data.push_back(0x1800);
    for (const float pair : random.Uniform(16, 0.f, 65536.f)) {
      data.push_back(static_cast<uint16_t>(pair));
    }
  }
  return data;
}

// FP32 and exact; `quantised`: BF16 and Q8_0 in turn, as a checkpoint has them.
inline std::shared_ptr<const Weights> TinyWeights(const ModelConfig& config, Device& device,
                                                  bool quantised = false) {
  RandomValues random(7);
  WeightsBuilder builder(config, device, !quantised);
  bool is_bf16 = false;
  const auto matrix = [&](const std::string& name, int64_t rows, int64_t cols, float range) {
    if (quantised) {
      is_bf16 = !is_bf16;
      const std::vector<uint16_t> data =
          is_bf16 ? RandomBF16(random, rows * cols, range) : RandomQ8(random, rows * cols / 32);
      const auto format = is_bf16 ? MatrixFormat::kBF16 : MatrixFormat::kQ8_0;
      builder.AddMatrix(name, {format, data.data(), rows, cols});
      return;
    }
    const std::vector<float> values = random.Uniform(rows * cols, -range, range);
    builder.AddMatrix(name, {MatrixFormat::kF32, values.data(), rows, cols});
  };
  const auto vector = [&](const std::string& name, int64_t size, float low, float high) {
    builder.AddVector(name, random.Uniform(size, low, high).data(), size);
  };
  const int64_t hidden = config.hidden_size;
  const int64_t q = int64_t{config.num_heads} * config.head_dim;
  const int64_t kv = int64_t{config.num_kv_heads} * config.head_dim;
  matrix("embedding", config.vocab_size, hidden, 1.f);
  vector("final_norm", hidden, 0.5f, 1.5f);
  for (int i = 0; i < config.num_layers; ++i) {
    const std::string prefix = "layers." + std::to_string(i) + ".";
    vector(prefix + "attention_norm", hidden, 0.5f, 1.5f);
    vector(prefix + "ffn_norm", hidden, 0.5f, 1.5f);
    matrix(prefix + "q", q, hidden, 0.3f);
    matrix(prefix + "k", kv, hidden, 0.3f);
    matrix(prefix + "v", kv, hidden, 0.3f);
    vector(prefix + "v.bias", kv, -0.1f, 0.1f);
    matrix(prefix + "o", hidden, q, 0.3f);
    matrix(prefix + "gate", config.intermediate_size, hidden, 0.3f);
    matrix(prefix + "up", config.intermediate_size, hidden, 0.3f);
    matrix(prefix + "down", hidden, config.intermediate_size, 0.3f);
  }
  return builder.Build();
}

inline EngineConfig TinyEngineConfig(KvCacheMode mode) {
  EngineConfig config;
  config.kv_mode = mode;
  config.max_batch_size = 8;
  config.session_len = 512;
  config.max_prefill_token_num = 2048;
  config.cache_block_seq_len = 16;
  config.check_integrity = true;
  return config;
}

inline std::unique_ptr<Engine> TinyEngine(const EngineConfig& config, int num_threads = 1,
                                          bool quantised = false) {
  const ModelConfig model = TinyConfig();
  std::shared_ptr<Device> device = MakeCpuDevice(num_threads);
  auto weights = TinyWeights(model, *device, quantised);
  return std::make_unique<Engine>(model, config, std::move(weights), std::move(device), kFreeBytes);
}

inline std::vector<int32_t> RandomPrompt(uint32_t seed, int length) {
  std::mt19937 generator(seed);
  std::vector<int32_t> prompt;
  for (int i = 0; i < length; ++i) {
    prompt.push_back(static_cast<int32_t>(generator() % kVocab));
  }
  return prompt;
}

inline std::shared_ptr<Request> MakeRequest(uint64_t id, std::vector<int32_t> prompt,
                                            int max_new_tokens) {
  auto request = std::make_shared<Request>();
  request->id = id;
  request->prompt = std::move(prompt);
  request->max_new_tokens = max_new_tokens;
  return request;
}

// Outputs of `num_requests` requests until each has its last one, joined by request.
inline std::map<uint64_t, RequestOutput> Collect(Engine& engine, size_t num_requests) {
  std::map<uint64_t, RequestOutput> joined;
  size_t num_finished = 0;
  while (num_finished < num_requests) {
    const std::vector<RequestOutput> pieces = engine.WaitOutputs(10'000);
    if (pieces.empty()) {
      break;  // stopped, or stuck: the caller's checks fail
    }
    for (const RequestOutput& piece : pieces) {
      RequestOutput& all = joined[piece.request_id];
      const auto append = [](auto& to, const auto& from) {
        to.insert(to.end(), from.begin(), from.end());
      };
      append(all.tokens, piece.tokens);
      append(all.logprobs, piece.logprobs);
      append(all.prompt_logprobs, piece.prompt_logprobs);
      append(all.logits, piece.logits);
      all.logits_rows += piece.logits_rows;
      all.finish_reason = piece.finish_reason;
      all.stop_tokens = piece.stop_tokens;
      all.cached_tokens = piece.cached_tokens;
      all.error = piece.error;
      num_finished += piece.finish_reason != FinishReason::kNone ? 1 : 0;
    }
  }
  return joined;
}

inline RequestOutput RunOne(Engine& engine, std::shared_ptr<Request> request) {
  const uint64_t id = request->id;
  engine.Submit(std::move(request));
  return Collect(engine, 1)[id];
}

}  // namespace turbomind::testing
