// Which rows a step computes, and that leaving out the others changes no result.

#include "turbomind/model/decoder.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "engine/tiny_model.h"
#include "turbomind/engine/batch.h"
#include "turbomind/kv/kv_cache.h"

namespace turbomind {
namespace {

constexpr int kBlock = 16;
constexpr int kBlocksEach = 4;
constexpr int kMaxSequences = 4;

// A tiny model and sequences that share no blocks.
class Steps {
 public:
  Steps()
      : cache_(*device_, Config(), {kMaxSequences * kBlocksEach}),
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

 private:
  KvCacheConfig Config() const {
    return MakeKvCacheConfig(model_.windows, KvCacheMode::kFp4Nv, model_.num_kv_heads,
                             model_.head_dim, kBlock, DataType::kBFloat16);
  }
  std::vector<LayerCache> Layers() const {
    std::vector<LayerCache> layers;
    for (int i = 0; i < model_.num_layers; ++i) {
      layers.push_back(
          {.kv = cache_.LayerView(i), .window16 = {}, .rule = cache_.rule(i), .group = 0});
    }
    return layers;
  }

  static ModelConfig Model() {
    ModelConfig model = testing::TinyConfig();
    model.windows = {0, 0};  // one group of layers
    return model;
  }

  const ModelConfig model_ = Model();
  const std::shared_ptr<Device> device_ = MakeCpuDevice(1);
  KvCache cache_;
  Decoder decoder_;
  Sequence sequences_[kMaxSequences];
};

void CheckRows(const std::vector<int>& counts, const std::vector<std::vector<int32_t>>& subsets) {
  std::vector<int32_t> all(static_cast<size_t>(std::accumulate(counts.begin(), counts.end(), 0)));
  std::iota(all.begin(), all.end(), 0);
  const std::vector<int> next(counts.size(), 1);
  const std::vector<int32_t> next_rows(all.begin(), all.begin() + static_cast<int>(counts.size()));
  Steps whole;
  const std::vector<float> want = whole.Run(counts, all);
  const std::vector<float> want_next = whole.Run(next, next_rows);
  for (const std::vector<int32_t>& rows : subsets) {
    CAPTURE(rows.size());
    Steps steps;
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

TEST_CASE("the logits of a prompt do not depend on which rows are requested") {
  CheckRows({30}, {{}, {0}, {29}, {3, 4, 5, 6, 20, 29}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}});
}

TEST_CASE("the logits of a mixed step do not depend on which rows are requested") {
  CheckRows({1, 1, 20, 9}, {{}, {0}, {1}, {0, 1}, {0, 1, 21}, {1, 5, 6, 30}, {22, 23, 24, 25}});
}

TEST_CASE("the logits of a decode step do not depend on which rows are requested") {
  CheckRows({1, 1, 1, 1}, {{}, {0}, {3}, {1, 2}, {0, 2, 3}, {0, 1, 2, 3}});
}

}  // namespace
}  // namespace turbomind
