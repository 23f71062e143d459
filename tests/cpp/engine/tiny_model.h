#pragma once

// A small random decoder that is the same on every call, and helpers that run requests through an
// engine.

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/core/float_convert.h"
#include "turbomind/engine/engine.h"

namespace turbomind::testing {

inline constexpr int kVocab = 97;
inline constexpr int64_t kFreeBytes = int64_t{64} << 20;

// Returns a config with two layers. One has a sliding window shorter than the tests' prompts.
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
  config.ropes[0].dim = 64;
  config.windows = {0, 40};
  return config;
}

// Returns a config like that of GPT-OSS. Every layer has experts with biases and interleaved gate
// and up. Sliding windows alternate with full attention. TinyWeights adds sinks.
inline ModelConfig TinyGptOss() {
  ModelConfig config = TinyConfig();
  config.num_layers = 4;
  config.intermediate_size = 0;
  config.windows = {16, 0, 16, 0};
  config.activation = Activation::kClampedSwiglu;
  config.swiglu_limit = 1.f;
  config.moe = {.num_experts = 6, .top_k = 2, .intermediate_size = 32, .layers = {1, 1, 1, 1}};
  return config;
}

// Returns a config like that of Qwen2-MoE. One layer is dense, the other has experts and a shared
// expert. The expert weights do not sum to 1.
inline ModelConfig TinyQwenMoe() {
  ModelConfig config = TinyConfig();
  config.moe = {.num_experts = 6,
                .top_k = 3,
                .intermediate_size = 32,
                .shared_intermediate_size = 64,
                .normalize = false,
                .layers = {0, 1}};
  return config;
}

// Returns a config like that of Gemma: norms before and after each branch, soft caps, scaled
// embeddings, and one RoPE for each of two layers and none for the third.
inline ModelConfig TinyGemma() {
  ModelConfig config = TinyConfig();
  config.num_layers = 3;
  config.windows = {40, 0, 0};
  config.norm.outputs = true;
  config.attention_cap = 1.f;
  config.logit_cap = 2.f;
  config.embedding_scale = 8.f;
  config.activation = Activation::kGeluTanh;
  config.ropes.push_back(config.ropes[0]);
  config.ropes[1].theta = 100.f;
  config.ropes[1].dim = 32;
  config.layer_ropes = {1, 0, -1};
  return config;
}

// Returns a config like that of Command R and StarCoder: LayerNorm, parallel branches, norms of Q
// and K over all heads, scaled branches and logits, and a feed-forward without a gate.
inline ModelConfig TinyParallel() {
  ModelConfig config = TinyConfig();
  config.norm.centered = true;
  config.norm.qk_all_heads = true;
  config.parallel = true;
  config.gated = false;
  config.residual_scale = 0.5f;
  config.logit_scale = 0.25f;
  config.activation = Activation::kRelu2;
  return config;
}

// Returns a config like those of OLMo and GLM: norms only after each branch, and experts that are
// selected by sigmoids with a bias, beside a shared expert without a gate.
inline ModelConfig TinySigmoidMoe() {
  ModelConfig config = TinyQwenMoe();
  config.norm = {.inputs = false, .outputs = true, .qk_after_rope = true};
  config.moe.normalize = true;
  config.moe.sigmoid = true;
  config.moe.shared_gate = false;
  config.moe.scale = 1.5f;
  return config;
}

// Returns a config like that of Qwen3-Next: a layer with gated attention between recurrent layers.
inline ModelConfig TinyHybrid() {
  ModelConfig config = TinyConfig();
  config.num_layers = 3;
  config.windows = {0, 0, 0};
  config.attention_gate = true;
  config.recurrent = {.layers = {1, 0, 1},
                      .num_key_heads = 2,
                      .num_value_heads = 4,
                      .key_dim = 16,
                      .value_dim = 32,
                      .kernel = 4,
                      .norm_groups = 4};
  return config;
}

// Returns a config with layers of every kind: Mamba-2 beside attention, as in Falcon-H1, then one
// branch per layer, as in Nemotron-H. The last layer mixes no tokens.
inline ModelConfig TinyBranches() {
  ModelConfig config = TinyConfig();
  config.num_layers = 5;
  config.windows = {0, 0, 0, 0, 0};
  config.attention_layers = {1, 0, 0, 1, 0};
  config.feed_forward_layers = {1, 0, 1, 0, 1};
  config.recurrent = {.rule = RecurrentRule::kSelectiveScan,
                      .layers = {1, 1, 0, 0, 0},
                      .num_key_heads = 2,
                      .num_value_heads = 4,
                      .key_dim = 16,
                      .value_dim = 32,
                      .kernel = 4,
                      .norm_groups = 2,
                      .gate_first = true};
  return config;
}

// Returns a config like that of LFM2: short convolutions around a layer with attention.
inline ModelConfig TinyConvolutions() {
  ModelConfig config = TinyConfig();
  config.num_layers = 3;
  config.windows = {0, 0, 0};
  config.recurrent = {.rule = RecurrentRule::kShortConvolution,
                      .layers = {1, 0, 1},
                      .width = config.hidden_size,
                      .kernel = 3};
  return config;
}

// Returns a config like that of Gemma 4: layers 3 and 4 read the K and V of layers 2 and 1, and
// layers with full attention have other heads. Every layer has inputs of its own and a factor, and
// two have experts beside a dense feed-forward.
inline ModelConfig TinyGemma4() {
  ModelConfig config = TinyConfig();
  config.num_layers = 5;
  config.windows = {40, 0, 40, 40, 0};
  config.layer_sizes = {.head_dims = {64, 128, 64, 64, 128},
                        .kv_heads = {2, 1, 2, 2, 1},
                        .intermediate_sizes = {96, 96, 96, 192, 192},
                        .kv_sources = {0, 1, 2, 2, 1}};
  config.norm.outputs = true;
  config.norm.v_unit = true;
  config.softmax_scale = 0.125f;
  config.logit_cap = 2.f;
  config.embedding_scale = 8.f;  // answers repeat, as drafts need it
  config.activation = Activation::kGeluTanh;
  config.ropes.push_back(config.ropes[0]);
  config.ropes[1].dim = 128;
  config.layer_ropes = {0, 1, 0, 0, 1};
  config.per_layer.size = 32;
  config.layer_scale = true;
  config.moe = {.num_experts = 6,
                .top_k = 2,
                .intermediate_size = 32,
                .beside_dense = true,
                .layers = {1, 0, 0, 0, 1}};
  return config;
}

// Returns the same with full attention as in a real Gemma 4: over heads of 512 values, whose RoPE
// spans them.
inline ModelConfig TinyGemma4LargeHeads() {
  ModelConfig config = TinyGemma4();
  config.layer_sizes.head_dims = {64, 512, 64, 64, 512};
  config.ropes[1].dim = 512;
  return config;
}

// Returns a config like that of DeepSeek-V2: latents, a dense layer and one with experts beside a
// shared one. RoPE rotates neighbors.
inline ModelConfig TinyDeepSeek() {
  ModelConfig config = TinyConfig();
  config.windows = {0, 0};
  config.num_kv_heads = 1;
  config.head_dim = 64;  // of a latent
  config.latent = {.nope_dim = 32, .rope_dim = 16, .value_dim = 32, .interleaved = true};
  config.ropes[0].dim = 16;
  config.softmax_scale = 0.15f;
  config.moe = {.num_experts = 6,
                .top_k = 3,
                .intermediate_size = 32,
                .shared_intermediate_size = 64,
                .normalize = false,
                .layers = {0, 1}};
  config.moe.shared_gate = false;
  return config;
}

// Returns a config like that of GLM-4.7-Flash: queries come from a latent too, there are 20 heads,
// and experts are weighted by sigmoids. All are selected, because the selection of a random model
// depends on roundings.
inline ModelConfig TinyGlm() {
  ModelConfig config = TinyDeepSeek();
  config.num_heads = 20;
  config.head_dim = 96;
  config.latent.q_rank = 32;
  config.latent.interleaved = false;
  config.moe.top_k = config.moe.num_experts;
  config.moe.normalize = true;
  config.moe.sigmoid = true;
  config.moe.scale = 1.5f;
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

// Returns Q8_0 blocks: each has an FP16 scale of 2^-9 and 32 random codes.
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

struct TinyOptions {
  bool quantized = false;  // BF16 and Q8_0 alternate, as in checkpoints; else FP32, exact
  bool alternates = true;  // else every quantized matrix is Q8_0
  bool sinks = true;       // only for TinyGptOss
  float sink_offset = 0.f;
};

// Fills a builder with random values.
class TinyBuilder {
 public:
  TinyBuilder(const ModelConfig& config, Device& device, const TinyOptions& options)
      : config_(config), options_(options), builder_(config, device, !options.quantized) {}

  std::shared_ptr<const Weights> Build() {
    AddMatrix("embedding", config_.vocab_size, config_.hidden_size, 1.f);
    AddVector("final_norm", config_.hidden_size, 0.5f, 1.5f);
    for (int i = 0; i < config_.num_layers; ++i) {
      const std::string prefix = "layers." + std::to_string(i) + ".";
      AddNorms(prefix, i);
      if (config_.recurrent.Has(i)) {
        AddRecurrent(prefix + "recurrent.");
      }
      if (config_.latent.exists()) {
        AddLatents(prefix + "latent.");
        AddMatrix(prefix + "o", config_.hidden_size, config_.AttendedSize(), OutputRange());
      } else if (config_.HasAttention(i)) {
        AddAttention(prefix, i);
      }
      if (config_.moe.HasExperts(i)) {
        AddExperts(prefix);
      }
      if (config_.HasDenseFeedForward(i)) {
        AddFeedForward(prefix, config_.IntermediateSize(i));
      }
      if (config_.layer_scale) {
        AddVector(prefix + "scale", 1, 0.5f, 1.5f);
      }
    }
    if (config_.per_layer.exist()) {
      AddPerLayerInputs();
    }
    return builder_.Build();
  }

 private:
  void AddMatrix(const std::string& name, int64_t rows, int64_t cols, float range) {
    if (options_.quantized) {
      is_bf16_ = options_.alternates && !is_bf16_;
      const std::vector<uint16_t> data =
          is_bf16_ ? RandomBF16(random_, rows * cols, range) : RandomQ8(random_, rows * cols / 32);
      const auto format = is_bf16_ ? MatrixFormat::kBF16 : MatrixFormat::kQ8_0;
      builder_.AddMatrix(name, {format, data.data(), rows, cols});
      return;
    }
    const std::vector<float> values = random_.Uniform(rows * cols, -range, range);
    builder_.AddMatrix(name, {MatrixFormat::kF32, values.data(), rows, cols});
  }

  void AddVector(const std::string& name, int64_t size, float low, float high) {
    builder_.AddVector(name, random_.Uniform(size, low, high).data(), size);
  }

  // Returns the range of the matrices before a residual. With recurrent layers it is so small that
  // answers repeat, as drafts need it.
  float OutputRange() const { return config_.recurrent.HasAny() ? 0.01f : 0.3f; }

  void AddNorms(const std::string& prefix, int layer) {
    const int64_t hidden = config_.hidden_size;
    const NormConfig& norm = config_.norm;
    if (norm.inputs && config_.HasMixer(layer)) {
      AddVector(prefix + "attention_norm", hidden, 0.5f, 1.5f);
    }
    if (norm.inputs && config_.HasFeedForward(layer) && !config_.parallel) {
      AddVector(prefix + "ffn_norm", hidden, 0.5f, 1.5f);
    }
    if (norm.outputs) {
      AddVector(prefix + "attention_output_norm", hidden, 0.5f, 1.5f);
      AddVector(prefix + "ffn_output_norm", hidden, 0.5f, 1.5f);
    }
  }

  void AddRecurrent(const std::string& prefix) {
    const RecurrentConfig& shape = config_.recurrent;
    const int64_t hidden = config_.hidden_size;
    AddVector(prefix + "convolution", shape.kernel * shape.Channels(), -0.5f, 0.5f);
    AddMatrix(prefix + "o", hidden, shape.ValueSize(), OutputRange());
    AddMatrix(prefix + "v", shape.ValueSize(), hidden, 0.3f);
    if (shape.rule == RecurrentRule::kShortConvolution) {
      AddVector(prefix + "convolution.bias", shape.Channels(), -0.5f, 0.5f);
      AddMatrix(prefix + "in_gate", shape.ValueSize(), hidden, 0.3f);
      AddMatrix(prefix + "out_gate", shape.ValueSize(), hidden, 0.3f);
      return;
    }
    for (const char* name : {"q", "k"}) {
      AddMatrix(prefix + name, shape.KeySize(), hidden, 0.3f);
    }
    AddMatrix(prefix + "z", shape.ValueSize(), hidden, 0.3f);
    AddMatrix(prefix + "a", shape.num_value_heads, hidden, 0.3f);
    AddVector(prefix + "decay", shape.num_value_heads, 0.01f, 0.5f);
    AddVector(prefix + "dt_bias", shape.num_value_heads, -1.f, 1.f);
    const bool is_delta = shape.rule == RecurrentRule::kGatedDelta;
    AddVector(prefix + "norm", is_delta ? shape.value_dim : shape.ValueSize(), 0.5f, 1.5f);
    if (is_delta) {
      AddMatrix(prefix + "b", shape.num_value_heads, hidden, 0.3f);
    } else {
      AddVector(prefix + "skip", shape.num_value_heads, 0.5f, 1.5f);
    }
  }

  void AddPerLayerInputs() {
    const int64_t size = config_.per_layer.size;
    const int64_t width = size * config_.num_layers;
    AddMatrix("per_layer_embedding", config_.vocab_size, width, 1.f);
    AddMatrix("per_layer_projection", width, config_.hidden_size, 0.3f);
    AddVector("per_layer_norm", size, 0.5f, 1.5f);
    for (int i = 0; i < config_.num_layers; ++i) {
      const std::string prefix = "layers." + std::to_string(i) + ".per_layer_";
      AddMatrix(prefix + "gate", size, config_.hidden_size, 0.3f);
      AddMatrix(prefix + "up", config_.hidden_size, size, 0.3f);
      AddVector(prefix + "output_norm", config_.hidden_size, 0.5f, 1.5f);
    }
  }

  void AddLatents(const std::string& prefix) {
    const LatentConfig& latent = config_.latent;
    const int64_t hidden = config_.hidden_size;
    const int64_t rank = config_.head_dim;
    if (latent.q_rank > 0) {
      AddMatrix(prefix + "q_a", latent.q_rank, hidden, 0.3f);
      AddVector(prefix + "q_a_norm", latent.q_rank, 0.5f, 1.5f);
    }
    AddMatrix(prefix + "q", config_.QuerySize(), latent.q_rank > 0 ? latent.q_rank : hidden, 0.3f);
    AddMatrix(prefix + "kv_a", rank + latent.rope_dim, hidden, 0.3f);
    AddVector(prefix + "kv_a_norm", rank, 0.5f, 1.5f);
    // The matrices of the heads share one format.
    for (const auto& [name, rows, cols] :
         {std::tuple<std::string, int64_t, int64_t>{"k_b.", rank, latent.nope_dim},
          {"v_b.", latent.value_dim, rank}}) {
      const bool is_bf16 = is_bf16_;
      for (int head = 0; head < config_.num_heads; ++head) {
        is_bf16_ = is_bf16;
        AddMatrix(prefix + name + std::to_string(head), rows, cols, 0.3f);
      }
    }
  }

  void AddAttention(const std::string& prefix, int layer) {
    const int64_t hidden = config_.hidden_size;
    const int64_t q = config_.QSize(layer);
    const int64_t kv = config_.KvSize(layer);
    const int64_t head_dim = config_.HeadDim(layer);
    const NormConfig& norm = config_.norm;
    if (config_.attention_gate) {
      AddMatrix(prefix + "attention_gate", q, hidden, 0.3f);
    }
    if (norm.qk_all_heads || norm.qk_after_rope) {
      AddVector(prefix + "q_norm", norm.qk_all_heads ? q : head_dim, 0.5f, 1.5f);
      AddVector(prefix + "k_norm", norm.qk_all_heads ? kv : head_dim, 0.5f, 1.5f);
    }
    if (norm.centered) {
      AddVector(prefix + "attention_norm.bias", hidden, -0.5f, 0.5f);
    }
    AddMatrix(prefix + "q", q, hidden, 0.3f);
    if (config_.OwnsKv(layer)) {
      AddMatrix(prefix + "k", kv, hidden, 0.3f);
      AddMatrix(prefix + "v", kv, hidden, 0.3f);
      AddVector(prefix + "v.bias", kv, -0.1f, 0.1f);
    }
    AddMatrix(prefix + "o", hidden, q, OutputRange());
    if (is_gpt_oss() && options_.sinks) {
      // Sinks have a generator of their own, so that the other weights are the same without them.
      const auto sinks =
          sink_values_.Uniform(config_.num_heads, options_.sink_offset, options_.sink_offset + 2.f);
      builder_.AddVector(prefix + "sinks", sinks.data(), config_.num_heads);
    }
  }

  void AddFeedForward(const std::string& prefix, int64_t inner) {
    if (config_.gated) {
      AddMatrix(prefix + "gate", inner, config_.hidden_size, 0.3f);
    }
    AddMatrix(prefix + "up", inner, config_.hidden_size, 0.3f);
    AddMatrix(prefix + "down", config_.hidden_size, inner, OutputRange());
  }

  void AddExperts(const std::string& prefix) {
    const MoeConfig& moe = config_.moe;
    const int64_t hidden = config_.hidden_size;
    if (moe.beside_dense) {
      AddVector(prefix + "router.expert_scale", moe.num_experts, 0.5f, 1.5f);
      for (const char* name :
           {"router.norm", "expert_norm", "expert_output_norm", "dense_output_norm"}) {
        AddVector(prefix + name, hidden, 0.5f, 1.5f);
      }
    }
    AddMatrix(prefix + "router", moe.num_experts, hidden, 1.f);
    const bool is_bf16 = is_bf16_;
    for (int e = 0; e < moe.num_experts; ++e) {
      const std::string expert = prefix + "experts." + std::to_string(e) + ".";
      is_bf16_ = is_gpt_oss() ? is_bf16_ : is_bf16;  // the experts of a layer share their formats
      if (!is_gpt_oss()) {
        AddFeedForward(expert, moe.intermediate_size);
        continue;
      }
      AddMatrix(expert + "gate_up", 2 * moe.intermediate_size, hidden, 0.3f);
      AddVector(expert + "gate_up.bias", 2 * moe.intermediate_size, -0.3f, 0.3f);
      AddMatrix(expert + "down", hidden, moe.intermediate_size, 0.3f);
      AddVector(expert + "down.bias", hidden, -0.3f, 0.3f);
    }
    if (is_gpt_oss()) {
      AddVector(prefix + "router.bias", moe.num_experts, -0.5f, 0.5f);
    }
    if (moe.shared_intermediate_size > 0) {
      AddFeedForward(prefix + "shared.", moe.shared_intermediate_size);
      if (moe.shared_gate) {
        AddMatrix(prefix + "shared.router", 1, hidden, 1.f);
      }
    }
    if (moe.sigmoid) {
      AddVector(prefix + "router.score_bias", moe.num_experts, -0.5f, 0.5f);
    }
  }

  bool is_gpt_oss() const { return config_.activation == Activation::kClampedSwiglu; }

  ModelConfig config_;
  TinyOptions options_;
  WeightsBuilder builder_;
  RandomValues random_{7};
  RandomValues sink_values_{11};
  bool is_bf16_ = false;
};

inline std::shared_ptr<const Weights> TinyWeights(const ModelConfig& config, Device& device,
                                                  const TinyOptions& options = {}) {
  return TinyBuilder(config, device, options).Build();
}

inline EngineConfig TinyEngineConfig(KvCacheMode format) {
  EngineConfig config;
  config.kv_format = format;
  config.max_batch_size = 8;
  config.session_len = 512;
  config.max_prefill_token_num = 2048;
  config.cache_block_seq_len = 16;
  config.check_integrity = true;
  return config;
}

inline std::unique_ptr<Engine> TinyEngine(const EngineConfig& config, int num_threads = 1,
                                          bool quantized = false) {
  const ModelConfig model = TinyConfig();
  std::shared_ptr<Device> device = MakeCpuDevice(num_threads);
  auto weights = TinyWeights(model, *device, {.quantized = quantized});
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

// Waits until `num_requests` requests have ended and returns their outputs, joined by request.
inline std::map<uint64_t, RequestOutput> Collect(Engine& engine, size_t num_requests) {
  std::map<uint64_t, RequestOutput> joined;
  size_t num_finished = 0;
  while (num_finished < num_requests) {
    // The stand-in for a GPU takes seconds for a long prompt, and more on a busy machine.
    const std::vector<RequestOutput> pieces = engine.WaitOutputs(120'000);
    if (pieces.empty()) {
      break;  // stopped or stuck; the caller's checks fail
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
      append(all.pooled, piece.pooled);
      all.logits_rows += piece.logits_rows;
      all.finish_reason = piece.finish_reason;
      all.stop_tokens = piece.stop_tokens;
      all.cached_tokens = piece.cached_tokens;
      all.error = piece.error;
      all.is_request_fault = piece.is_request_fault;
      all.error_field = piece.error_field;
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
