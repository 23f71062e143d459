#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
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

TEST_CASE("a wrong config is refused by the field's name") {
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
        continue;  // positions may be that many
      }
      ModelConfig config = good;
      config.*field = bad;
      CHECK(ErrorOf(config).find(name + ": got " + std::to_string(bad)) == 0);
    }
  }
  ModelConfig config = good;
  config.num_kv_heads = 3;
  CHECK(ErrorOf(config).find("multiple of num_kv_heads") != std::string::npos);
  config = good;
  config.windows = {0};
  CHECK(ErrorOf(config).find("windows: got 1 entries") == 0);
  config.windows = {0, -4};
  CHECK(ErrorOf(config).find("windows: got -4") == 0);
  config = good;
  config.rope.dim = 128;
  CHECK(ErrorOf(config).find("rope.dim: got 128") == 0);
}

TEST_CASE("a linear layer has its parts in order, and zeros where a part has no bias") {
  const ModelConfig config = testing::TinyConfig();
  const auto device = MakeCpuDevice(1);
  const auto weights = testing::TinyWeights(config, *device);
  const LayerWeights& layer = weights->layers[1];
  REQUIRE(layer.qkv.parts.size() == 3);
  CHECK(layer.qkv.parts[0]->rows == 256);
  CHECK(layer.qkv.parts[2]->rows == 128);
  CHECK(layer.qkv.rows() == 512);
  CHECK(layer.qkv.cols() == 64);
  REQUIRE(layer.qkv.bias.size() == 512);  // only v has one
  for (size_t i = 0; i < 384; ++i) {
    CHECK(layer.qkv.bias[i] == 0.f);
  }
  CHECK(layer.qkv.bias[384] != 0.f);
  CHECK(layer.output.bias.empty());
  CHECK(&weights->output_head() == weights->embedding.get());
  CHECK(weights->num_bytes() > 97 * 64 * 4);
}

TEST_CASE("names are known, given once, of the right shape, and complete") {
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
  builder.AddVector("layers.0.q.bias", data.data(), 256);
  CHECK_THROWS_AS(builder.AddVector("layers.0.q.bias", data.data(), 256), InvalidArgument);
  CHECK_THROWS_WITH_AS(builder.Build(), doctest::Contains("missing 19: embedding, final_norm"),
                       InvalidArgument);
}

}  // namespace
}  // namespace turbomind
