// Which rows a step computes, and that leaving out the others changes no result.

#include "turbomind/model/decoder.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "engine/tiny_model.h"
#include "turbomind/engine/batch.h"
#include "turbomind/kv/kv_cache.h"
#include "turbomind/ops/forwarding_device.h"

namespace turbomind {
namespace {

constexpr int kBlock = 16;
constexpr int kBlocksEach = 4;
constexpr int kMaxSequences = 4;

// Counts the layers whose attention a prefill step computes.
class CountingDevice : public ForwardingDevice {
 public:
  CountingDevice() : ForwardingDevice(MakeCpuDevice(1)) {}
  void PrefillAttention(const AttentionParams& params) override {
    ++num_attentions;
    ForwardingDevice::PrefillAttention(params);
  }
  int num_attentions = 0;
};

ModelConfig OneGroup() {
  ModelConfig model = testing::TinyConfig();
  model.windows = {0, 0};  // one group of layers
  return model;
}

// Returns a model whose last two layers read the K and V of layers 2 and 1.
ModelConfig SharedKv() {
  ModelConfig model = testing::TinyGemma4();
  model.windows.assign(5, 0);
  model.layer_sizes.head_dims.clear();
  model.layer_sizes.kv_heads.clear();
  model.layer_ropes.clear();
  return model;
}

// A tiny model and sequences that share no blocks.
class Steps {
 public:
  explicit Steps(ModelConfig model = OneGroup())
      : model_(std::move(model)),
        cache_(*device_, Config(), {kMaxSequences * kBlocksEach}),
        decoder_({.model = model_,
                  .layers = Layers(),
                  .limits = {.max_tokens = 64, .max_logit_rows = 64, .ffn_rows = 8}},
                 testing::TinyWeights(model_, *device_), *device_) {}

  // Runs the next `counts[i]` tokens of each sequence i and returns the logits of `rows`. Counts of
  // 1 must come first.
  std::vector<float> Run(const std::vector<int>& counts, const std::vector<int32_t>& rows) {
    Batch batch(1);
    for (size_t i = 0; i < counts.size(); ++i) {
      sequences_[i].request = std::make_shared<Request>();
      sequences_[i].tokens = testing::RandomPrompt(static_cast<uint32_t>(i), 64);
      sequences_[i].num_planned = counts[i];
      batch.Add(sequences_[i]);
      sequences_[i].num_computed += counts[i];
    }
    Batch::BlockTables& tables = batch.ResetTables(0, kBlocksEach, false);
    std::vector<int32_t> blocks(kBlocksEach);
    for (size_t i = 0; i < counts.size(); ++i) {
      std::iota(blocks.begin(), blocks.end(), static_cast<int32_t>(i) * kBlocksEach);
      tables.SetRow(i, blocks, {});
    }
    batch.Finish();
    decoder_.Forward({.tokens = batch.tokens.data(), .batch = batch.Views(), .rows = rows});
    if (rows.empty()) {
      return {};
    }
    decoder_.ComputeLogits(0, static_cast<int>(rows.size()));
    std::vector<int32_t> all(rows.size());
    std::iota(all.begin(), all.end(), 0);
    const float* logits = decoder_.ReadLogits(all);
    return {logits, logits + rows.size() * testing::kVocab};
  }

  // Returns the layers whose attention was computed for prompts so far.
  int num_attentions() const { return device_->num_attentions; }

 private:
  KvCacheConfig Config() const {
    KvCacheConfig config =
        MakeKvCacheConfig(model_.windows, KvCacheMode::kFp4Nv, model_.num_kv_heads, model_.head_dim,
                          kBlock, DataType::kBFloat16);
    config.kv_sources = model_.layer_sizes.kv_sources;
    return config;
  }
  std::vector<LayerCache> Layers() const {
    std::vector<LayerCache> layers;
    for (int i = 0; i < model_.num_layers; ++i) {
      const int source = model_.KvSource(i);
      layers.push_back({.kv = cache_.LayerView(source),
                        .window16 = {},
                        .rule = cache_.rule(source),
                        .group = 0});
    }
    return layers;
  }

  const ModelConfig model_;
  const std::shared_ptr<CountingDevice> device_ = std::make_shared<CountingDevice>();
  KvCache cache_;
  Decoder decoder_;
  Sequence sequences_[kMaxSequences];
};

void CheckRowsOf(const ModelConfig& model, const std::vector<int>& counts,
                 const std::vector<std::vector<int32_t>>& subsets) {
  std::vector<int32_t> all(static_cast<size_t>(std::accumulate(counts.begin(), counts.end(), 0)));
  std::iota(all.begin(), all.end(), 0);
  const std::vector<int> next(counts.size(), 1);
  const std::vector<int32_t> next_rows(all.begin(), all.begin() + static_cast<int>(counts.size()));
  Steps whole(model);
  const std::vector<float> want = whole.Run(counts, all);
  const std::vector<float> want_next = whole.Run(next, next_rows);
  for (const std::vector<int32_t>& rows : subsets) {
    CAPTURE(rows.size());
    Steps steps(model);
    const std::vector<float> got = steps.Run(counts, rows);
    REQUIRE(got.size() == rows.size() * testing::kVocab);
    for (size_t i = 0; i < rows.size(); ++i) {
      CAPTURE(rows[i]);
      const auto first = want.begin() + int64_t{rows[i]} * testing::kVocab;
      CHECK(std::equal(first, first + testing::kVocab,
                       got.begin() + static_cast<int64_t>(i) * testing::kVocab));
    }
    CHECK(steps.Run(next, next_rows) == want_next);  // K and V of all tokens were stored
  }
}

void CheckRows(const std::vector<int>& counts, const std::vector<std::vector<int32_t>>& subsets) {
  CheckRowsOf(OneGroup(), counts, subsets);
  CheckRowsOf(SharedKv(), counts, subsets);
}

TEST_CASE("the logits of a prompt do not depend on which rows are requested") {
  CheckRows({30}, {{}, {0}, {29}, {3, 4, 5, 6, 20, 29}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}});
}

TEST_CASE("the logits of a mixed step do not depend on which rows are requested") {
  CheckRows({1, 1, 20, 9}, {{}, {0}, {1}, {0, 1}, {0, 1, 21}, {1, 5, 6, 30}, {22, 23, 24, 25}});
}

TEST_CASE("a prompt without rows stops after the last layer that stores K and V") {
  Steps whole(SharedKv());
  whole.Run({20}, {19});
  CHECK(whole.num_attentions() == 5);
  const std::vector<float> want = whole.Run({1}, {0});
  Steps steps(SharedKv());
  steps.Run({20}, {});
  CHECK(steps.num_attentions() == 2);  // layer 2 only stores K and V
  CHECK(steps.Run({1}, {0}) == want);
}

TEST_CASE("the logits of a decode step do not depend on which rows are requested") {
  CheckRows({1, 1, 1, 1}, {{}, {0}, {3}, {1, 2}, {0, 2, 3}, {0, 1, 2, 3}});
}

}  // namespace
}  // namespace turbomind
