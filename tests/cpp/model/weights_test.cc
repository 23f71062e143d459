#include "turbomind/model/weights.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "engine/tiny_model.h"
#include "turbomind/core/check.h"

namespace turbomind {
namespace {

std::string ErrorOf(const ModelConfig& config) {
  try {
    config.Validate();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("an invalid model config is rejected with the field's name") {
  const ModelConfig good = testing::TinyConfig();
  CHECK(ErrorOf(good).empty());
  for (const auto& [field, name] : std::vector<std::pair<int ModelConfig::*, std::string>>{
           {&ModelConfig::num_layers, "num_layers"},
           {&ModelConfig::hidden_size, "hidden_size"},
           {&ModelConfig::intermediate_size, "intermediate_size"},
           {&ModelConfig::num_heads, "num_heads"},
           {&ModelConfig::num_kv_heads, "num_kv_heads"},
           {&ModelConfig::head_dim, "head_dim"},
           {&ModelConfig::vocab_size, "vocab_size"},
           {&ModelConfig::max_position, "max_position"}}) {
    for (int bad : {0, -1, 1 << 30}) {
      if (bad > 0 && field == &ModelConfig::max_position) {
        continue;  // max_position may be that large
      }
      ModelConfig config = good;
      config.*field = bad;
      CHECK(ErrorOf(config).find(name + " is " + std::to_string(bad)) == 0);
    }
  }
  ModelConfig config = good;
  config.num_kv_heads = 3;
  CHECK(ErrorOf(config).find("multiple of num_kv_heads") != std::string::npos);
  config = good;
  config.windows = {0};
  CHECK(ErrorOf(config).find("windows has 1 entries") == 0);
  config.windows = {0, -(1 << 30) - 1};
  CHECK(ErrorOf(config).find("windows contains -1073741825") == 0);
  config.windows = {0, -4};
  CHECK(ErrorOf(config).empty());
  config = good;
  config.query_scaling.length = 0;
  CHECK(ErrorOf(config).find("query_scaling.length is 0") == 0);
  config = good;
  config.ropes[0].dim = 128;
  CHECK(ErrorOf(config).find("rope.dim is 128") == 0);
}

TEST_CASE("a linear layer keeps its parts in order and fills missing biases with zeros") {
  const ModelConfig config = testing::TinyConfig();
  const auto device = MakeCpuDevice(1);
  const auto weights = testing::TinyWeights(config, *device);
  const LayerWeights& layer = weights->layers[1];
  REQUIRE(layer.qkv.parts.size() == 3);
  CHECK(layer.qkv.parts[0]->rows == 256);
  CHECK(layer.qkv.parts[2]->rows == 128);
  CHECK(layer.qkv.rows() == 512);
  CHECK(layer.qkv.cols() == 64);
  REQUIRE(layer.qkv.bias.size == 512);  // only v has one
  for (size_t i = 0; i < 384; ++i) {
    CHECK(layer.qkv.bias.data[i] == 0.f);
  }
  CHECK(layer.qkv.bias.data[384] != 0.f);
  CHECK(layer.output.bias.empty());
  CHECK(&weights->output_head() == weights->embedding.get());
  CHECK(weights->num_bytes() > 97 * 64 * 4);
}

TEST_CASE("weights must have known names, be unique and complete, and have the right shape") {
  const ModelConfig config = testing::TinyConfig();
  const auto device = MakeCpuDevice(1);
  WeightsBuilder builder(config, *device, false);
  const std::vector<float> data(512 * 512);
  const MatrixSource right{MatrixFormat::kF32, data.data(), 256, 64};
  CHECK_THROWS_AS(builder.AddMatrix("layers.2.q", right), InvalidArgument);
  CHECK_THROWS_AS(builder.AddMatrix("layers.0.k", right), InvalidArgument);
  builder.AddMatrix("layers.0.q", right);
  CHECK_THROWS_AS(builder.AddMatrix("layers.0.q", right), InvalidArgument);
  CHECK_THROWS_AS(builder.AddVector("layers.0.q.bias", data.data(), 255), InvalidArgument);
  const auto matrices = builder.Matrices();
  REQUIRE(matrices.size() == 1);
  CHECK(matrices[0].first == "layers.0.q");
  CHECK(matrices[0].second == builder.weights()->layers[0].qkv.parts[0].get());
  builder.AddVector("layers.0.q.bias", data.data(), 256);
  CHECK_THROWS_AS(builder.AddVector("layers.0.q.bias", data.data(), 256), InvalidArgument);
  CHECK_THROWS_WITH_AS(builder.Build(),
                       doctest::Contains("lack tensors (19): embedding, final_norm"),
                       InvalidArgument);
}

TEST_CASE("an invalid config of experts is rejected with the field's name") {
  const auto error_of = [](auto change) {
    ModelConfig config = testing::TinyGptOss();
    change(config);
    return ErrorOf(config);
  };
  CHECK(error_of([](ModelConfig&) {}).empty());
  CHECK(error_of([](ModelConfig& c) { c.moe.num_experts = -1; }).find("moe.num_experts is -1") ==
        0);
  CHECK(error_of([](ModelConfig& c) { c.moe.num_experts = 1 << 20; }).find("moe.num_experts") == 0);
  CHECK(error_of([](ModelConfig& c) {
          c.moe.top_k = 7;
        }).find("moe.top_k is 7. It must be 1 to 6") == 0);
  CHECK(error_of([](ModelConfig& c) { c.moe.layers = {1}; }).find("moe.layers has 1 entries") == 0);
  CHECK(error_of([](ModelConfig& c) { c.moe.layers[2] = 2; }).find("moe.layers contains 2") == 0);
  CHECK(error_of([](ModelConfig& c) { c.moe.layers[2] = 0; }).find("intermediate_size is 0") == 0);
  CHECK(error_of([](ModelConfig& c) { c.moe.num_experts = 0; }).find("moe.layers has layers") == 0);
  CHECK(error_of([](ModelConfig& c) { c.swiglu_limit = 0.f; }).find("swiglu_limit is 0") == 0);
  CHECK(error_of([](ModelConfig& c) {
          c.num_layers = 4096;
          c.windows.assign(4096, 0);
          c.moe.layers.assign(4096, 1);
          c.moe.num_experts = 1024;
        }).find("moe.num_experts gives 4194304 experts in all layers") == 0);
}

// Adds all weights of TinyGptOss except the experts' gates. All values are zero.
void AddAllButGates(WeightsBuilder& builder, const ModelConfig& config, bool sinks_everywhere) {
  const std::vector<float> data(512 * 512);
  const auto matrix = [&](const std::string& name, int64_t rows, int64_t cols) {
    builder.AddMatrix(name, {MatrixFormat::kF32, data.data(), rows, cols});
  };
  matrix("embedding", config.vocab_size, 64);
  builder.AddVector("final_norm", data.data(), 64);
  for (int i = 0; i < config.num_layers; ++i) {
    const std::string prefix = "layers." + std::to_string(i) + ".";
    builder.AddVector(prefix + "attention_norm", data.data(), 64);
    builder.AddVector(prefix + "ffn_norm", data.data(), 64);
    if (sinks_everywhere || i % 2 == 1) {
      builder.AddVector(prefix + "sinks", data.data(), config.num_heads);
    }
    matrix(prefix + "q", 256, 64);
    matrix(prefix + "k", 128, 64);
    matrix(prefix + "v", 128, 64);
    matrix(prefix + "o", 64, 256);
    matrix(prefix + "router", config.moe.num_experts, 64);
    for (int e = 0; e < config.moe.num_experts; ++e) {
      matrix(prefix + "experts." + std::to_string(e) + ".down", 64, 32);
    }
  }
}

struct Missing {
  bool sinks_everywhere = true;
  std::string other = "";  // this expert has gate and up instead of gate_up
  std::string bf16 = "";   // this matrix has another format
  std::string bias = "";   // this bias has no matrix
};

std::string BuildErrorOf(const Missing& missing) {
  const ModelConfig config = testing::TinyGptOss();
  const auto device = MakeCpuDevice(1);
  WeightsBuilder builder(config, *device, false);
  AddAllButGates(builder, config, missing.sinks_everywhere);
  const std::vector<float> data(64 * 64);
  for (int i = 0; i < config.num_layers; ++i) {
    for (int e = 0; e < config.moe.num_experts; ++e) {
      const std::string name =
          "layers." + std::to_string(i) + ".experts." + std::to_string(e) + ".";
      if (name == missing.other) {
        builder.AddMatrix(name + "gate", {MatrixFormat::kF32, data.data(), 32, 64});
        builder.AddMatrix(name + "up", {MatrixFormat::kF32, data.data(), 32, 64});
      } else {
        const bool bf16 = name + "gate_up" == missing.bf16;
        builder.AddMatrix(name + "gate_up",
                          {bf16 ? MatrixFormat::kBF16 : MatrixFormat::kF32, data.data(), 64, 64});
      }
    }
  }
  if (!missing.bias.empty()) {
    builder.AddVector(missing.bias, data.data(), 32);
  }
  try {
    builder.Build();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("experts must be complete and alike in form and format, and every layer needs sinks") {
  CHECK(BuildErrorOf({}) == "");
  CHECK(BuildErrorOf({.sinks_everywhere = false}) ==
        "The weights lack tensors (2): layers.0.sinks, layers.2.sinks");
  CHECK(BuildErrorOf({.other = "layers.1.experts.3."})
            .find("contain layers.1.experts.3.gate, but other experts have gate_up") !=
        std::string::npos);
  CHECK(BuildErrorOf({.bias = "layers.2.experts.0.up.bias"})
            .find("contain layers.2.experts.0.up.bias, but other experts have gate_up") !=
        std::string::npos);
  CHECK(BuildErrorOf({.bf16 = "layers.0.experts.5.gate_up"}) ==
        "Weights layers.0.experts.5.gate_up and layers.0.experts.0.gate_up have different "
        "formats. Use one format for the experts of a layer.");
}

TEST_CASE("the error for thousands of missing experts is short and names some of them") {
  ModelConfig config = testing::TinyGptOss();
  config.moe.num_experts = 1000;
  const auto device = MakeCpuDevice(1);
  WeightsBuilder builder(config, *device, false);
  try {
    builder.Build();
    FAIL("Build succeeded without weights");
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    CHECK(text.find(
              "The weights lack tensors (12030): embedding, final_norm, layers.0.attention_norm") ==
          0);
    CHECK(text.size() < 400);
  }
}

TEST_CASE("experts have the parts that the ops require, and routers stay FP32") {
  const auto device = MakeCpuDevice(1);
  const testing::TinyOptions quantized = {.quantized = true};
  const auto gpt_oss = testing::TinyWeights(testing::TinyGptOss(), *device, quantized);
  const MoeWeights& moe = gpt_oss->layers[2].moe;
  REQUIRE(moe.experts.size() == 6);
  CHECK(moe.router.parts[0]->format == MatrixFormat::kF32);
  CHECK(moe.router.bias.size == 6);
  CHECK(moe.experts[5].interleaved());
  CHECK(moe.experts[5].gate_up.rows() == 64);
  CHECK(moe.experts[5].gate_up.bias.size == 64);
  CHECK(moe.experts[5].down.cols() == 32);
  CHECK(gpt_oss->layers[2].gate_up.empty());
  const auto qwen = testing::TinyWeights(testing::TinyQwenMoe(), *device);
  CHECK(qwen->layers[0].moe.experts.empty());
  CHECK(qwen->layers[0].gate_up.rows() == 192);
  const MoeWeights& mixed = qwen->layers[1].moe;
  CHECK_FALSE(mixed.experts[0].interleaved());
  CHECK(mixed.experts[0].gate_up.parts.size() == 2);
  CHECK(mixed.shared_gate_up.rows() == 128);
  CHECK(mixed.shared_router.rows() == 1);
  // Six experts have 3 x 64 x 32 values each, the shared expert 3 x 64 x 64 and the dense layer
  // 3 x 64 x 96.
  CHECK(qwen->num_bytes() > (6 * 3 * 64 * 32 + 3 * 64 * 64 + 3 * 64 * 96) * 4);
}

}  // namespace
}  // namespace turbomind
