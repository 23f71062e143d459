#include "turbomind/engine/memory_plan.h"

#include <doctest/doctest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "engine/null_device.h"
#include "engine/tiny_model.h"
#include "turbomind/backend/cuda_library.h"
#include "turbomind/core/check.h"
#include "turbomind/engine/engine_state.h"
#include "turbomind/model/decoder.h"

namespace turbomind {
namespace {

constexpr int64_t kFreeBytes = int64_t{1} << 32;
const DeviceCapability kCpu;
const DeviceCapability kGpu = CudaCapability(90);

// Returns the sizes of SmolLM2-135M: 30 layers by default, 3 KV heads of 64 values.
ModelConfig Model(std::vector<int> windows = std::vector<int>(30, 0)) {
  ModelConfig model;
  model.num_layers = static_cast<int>(windows.size());
  model.hidden_size = 576;
  model.intermediate_size = 1536;
  model.num_heads = 9;
  model.num_kv_heads = 3;
  model.head_dim = 64;
  model.vocab_size = 49152;
  model.max_position = 8192;
  model.ropes[0].dim = 64;
  model.windows = std::move(windows);
  return model;
}

EngineConfig Config(KvCacheMode format, PrecisionWindowTokens window16 = {}) {
  EngineConfig config;
  config.kv_format = format;
  config.session_len = 8192;
  config.kv_quality.window16 = window16;
  return config;
}

TEST_CASE("a sequence takes whole blocks of every pool") {
  const ModelConfig model = Model();
  // Rows of a block: 64 tokens, K and V, 3 heads, 30 layers.
  constexpr int64_t kRows = 64 * 2 * 3 * 30;
  const EngineConfig balanced = Config(KvCacheMode::kFp4Nv, {64, 64});
  CHECK(SequenceBytes(model, balanced, 8192) == kRows * (125 * 36 + 3 * 128));
  CHECK(SequenceBytes(model, balanced, 1) == kRows * 128);
  CHECK(SequenceBytes(model, balanced, 192) == kRows * 3 * 128);
  CHECK(SequenceBytes(model, balanced, 193) == kRows * (36 + 3 * 128));
  CHECK(SequenceBytes(model, Config(KvCacheMode::kFp4Nv), 8192) == kRows * 128 * 36);
  CHECK(SequenceBytes(model, Config(KvCacheMode::kNone), 8192) == kRows * 128 * 128);
  // The limit for balanced at this length is 4.8 bits per value.
  const double bits =
      static_cast<double>(SequenceBytes(model, balanced, 8192)) * 8 / (8192. * 64 * 2 * 3 * 30);
  CHECK(bits < 4.8);
  CHECK(bits > 4.7);
}

TEST_CASE("layers in 16 bit take no 16-bit blocks") {
  const ModelConfig model = Model();
  constexpr int64_t kRows = 64 * 2 * 3 * 30;
  EngineConfig mixed = Config(KvCacheMode::kFp4Nv, {64, 64});
  mixed.kv_layers.assign(30, {KvCacheMode::kFp4Nv, KvCacheMode::kFp4Nv});
  for (size_t layer = 0; layer < 30; layer += 2) {
    mixed.kv_layers[layer] = {};
  }
  const int64_t none = kRows / 2 * 128 * 128;
  CHECK(SequenceBytes(model, mixed, 8192) == kRows / 2 * (125 * 36 + 3 * 128) + none);
  mixed.max_batch_size = 1;
  const MemoryPlan plan = PlanMemory(model, mixed, kFreeBytes, kCpu);
  CHECK(plan.window16_bytes_per_sequence == kRows / 2 * 3 * 128);
  // A pool of 16-bit layers holds a sequence of session_len and nothing more.
  const std::vector<LayerGroup> groups = MakeLayerGroups(CacheConfig(model, mixed));
  const std::vector<int64_t> blocks = PlanBlocks(model, mixed, kFreeBytes, kCpu);
  REQUIRE(groups.size() == 2);
  REQUIRE(blocks.size() == 4);
  CHECK(blocks[1] * groups[1].bytes_per_block() == none);
  CHECK(blocks[3] == 0);
}

TEST_CASE("a sequence takes only the blocks that its sliding windows keep") {
  const ModelConfig model = Model({0, 128, 300});
  constexpr int64_t kRows = 64 * 2 * 3;
  // The next query, at 8192, sees blocks 126 and 127 through the window of 128, and 123 to 127
  // through that of 300.
  CHECK(SequenceBytes(model, Config(KvCacheMode::kFp4Nv, {64, 64}), 8192) ==
        kRows * ((125 * 36 + 3 * 128) + 2 * 128 + (3 * 36 + 2 * 128)));
  CHECK(SequenceBytes(model, Config(KvCacheMode::kFp4Nv), 8192) == kRows * (128 + 2 + 5) * 36);
}

TEST_CASE("the plan counts all pools") {
  const ModelConfig model = Model();
  const EngineConfig config = Config(KvCacheMode::kFp4Nv, {64, 64});
  constexpr int64_t kRows = 64 * 2 * 3 * 30;
  const MemoryPlan plan = PlanMemory(model, config, kFreeBytes, kCpu);
  const auto groups = MakeLayerGroups(CacheConfig(model, config));
  const std::vector<int64_t> blocks = PlanBlocks(model, config, kFreeBytes, kCpu);
  REQUIRE(blocks.size() == 2);
  CHECK(plan.num_blocks == blocks[0]);
  CHECK(plan.reserved_bytes == kRows * (blocks[0] * 36 + blocks[1] * 128));
  CHECK(plan.reserved_bytes <= static_cast<int64_t>(0.8 * static_cast<double>(kFreeBytes)));
  CHECK(plan.window16_bytes_per_sequence == kRows * 3 * 128);
  CHECK(plan.session_bytes == kRows * (125 * 36 + 3 * 128));
  CHECK(plan.session_bytes_none == kRows * 128 * 128);
  CHECK(plan.bytes_per_token == 2 * 3 * 30 * 36);
  CHECK(blocks[1] >= 32 * 4 + 127);  // max_batch_size short sequences and a step's 8192 tokens

  const MemoryPlan raw = PlanMemory(model, Config(KvCacheMode::kFp4Nv), kFreeBytes, kCpu);
  CHECK(raw.window16_bytes_per_sequence == 0);
  CHECK(raw.session_bytes == kRows * 128 * 36);
}

// Returns the bytes that a GPU keeps for its steps. With no more free bytes, the pools get nothing.
int64_t GpuStepBytes(const ModelConfig& model, const EngineConfig& config) {
  constexpr int64_t kWorkspaceBytes = int64_t{512} << 20;
  return PlanMemory(model, config, int64_t{1} << 40, kGpu).scratch_bytes + kWorkspaceBytes;
}

TEST_CASE("the device decides how many rows a step computes at once") {
  const StepLimits cpu = PlanStep(Config(KvCacheMode::kNone), kCpu);
  CHECK(cpu.max_logit_rows == 32);
  CHECK(cpu.ffn_rows == 128);
  const StepLimits gpu = PlanStep(Config(KvCacheMode::kNone), kGpu);
  CHECK(gpu.max_logit_rows == 128);
  CHECK(gpu.ffn_rows == 2048);
}

TEST_CASE("a GPU's pools get the memory that a step's scratch and workspace leave") {
  const ModelConfig model = Model();
  EngineConfig config = Config(KvCacheMode::kFp4Nv);
  config.cache_max_entry_count = 0.99;
  const int64_t step = GpuStepBytes(model, config);
  constexpr int64_t kLeft = int64_t{1} << 30;
  const MemoryPlan plan = PlanMemory(model, config, step + kLeft, kGpu);
  CHECK(plan.reserved_bytes <= kLeft * 99 / 100);
  CHECK(plan.reserved_bytes > kLeft * 98 / 100);
  try {
    PlanMemory(model, config, step, kGpu);
    FAIL("pools without memory were accepted");
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    CHECK(text.find("a step needs " + std::to_string(step)) != std::string::npos);
    CHECK(text.find("--max-prefill-token-num") != std::string::npos);
  }
}

TEST_CASE("for any budget, one sequence of the length that fits runs in full chunks") {
  const ModelConfig model = Model({0, 300, 300});
  for (const PrecisionWindowTokens& window16 :
       {PrecisionWindowTokens{0, 0}, {64, 64}, {128, 256}}) {
    EngineConfig config = Config(KvCacheMode::kFp4Nv, window16);
    config.max_batch_size = 7;
    const auto groups = MakeLayerGroups(CacheConfig(model, config));
    for (const DeviceCapability& device : {kCpu, kGpu}) {
      for (int64_t free_bytes = 1 << 18; free_bytes < (int64_t{1} << 34); free_bytes *= 3) {
        const int64_t given =
            free_bytes + (device.reserves_lazily ? 0 : GpuStepBytes(model, config));
        const std::vector<int64_t> blocks = PlanBlocks(model, config, given, device);
        const MemoryPlan plan = PlanMemory(model, config, given, device);
        CHECK(plan.reserved_bytes <= static_cast<int64_t>(0.8 * static_cast<double>(free_bytes)));
        // The longest sequence that fits the first pool also fits the others.
        int64_t longest = 8192;
        while (groups[0].BlocksPerSequence(longest, 8192) > blocks[0]) {
          --longest;
        }
        const bool is_cut = longest < 8192;
        for (size_t g = 0; g < groups.size(); ++g) {
          CHECK(blocks[g] >= 1);
          if (!is_cut) {
            CHECK(blocks[g] >= groups[g].BlocksPerSequence(longest, 8192));
            CHECK(blocks[groups.size() + g] >= groups[g].Window16BlocksPerSequence(longest, 8192));
          }
        }
      }
    }
    for (const double count : {1., 2., 5., 100., 4096.}) {
      config.cache_max_entry_count = count;
      CHECK_NOTHROW(PlanMemory(model, config, kFreeBytes, kCpu));
    }
  }
}

TEST_CASE("max_tokens and max_sequence_tokens include the 16-bit window") {
  const ModelConfig model = Model();
  for (const PrecisionWindowTokens& window16 : {PrecisionWindowTokens{}, {64, 64}, {128, 256}}) {
    for (const int session_len : {128, 192, 1024, 8192}) {
      for (const int batch : {1, 3}) {
        EngineConfig config = Config(KvCacheMode::kFp4Nv, window16);
        config.session_len = session_len;
        config.max_batch_size = batch;
        const MemoryPlan plan = PlanMemory(model, config, kFreeBytes, kCpu);
        CHECK(plan.max_sequence_tokens == session_len);
        CHECK(plan.max_tokens == batch * session_len);
      }
    }
  }
  // Three blocks are in the 16-bit window, and five are quantized.
  EngineConfig config = Config(KvCacheMode::kFp4Nv, {64, 64});
  config.cache_max_entry_count = 5;
  CHECK(PlanMemory(model, config, kFreeBytes, kCpu).max_sequence_tokens == 8 * 64);
}

TEST_CASE("the planned scratch is what the decoder reserves") {
  for (const ModelConfig& model :
       {testing::TinyConfig(), testing::TinyGptOss(), testing::TinyQwenMoe()}) {
    for (const int tokens : {1, 40, 700}) {
      for (const bool has_mean : {false, true}) {
        EngineConfig config = testing::TinyEngineConfig(KvCacheMode::kNone);
        config.max_prefill_token_num = tokens;
        const auto device = MakeCpuDevice(1);
        const std::vector<float> mean(1);
        LayerCache cache = {.kv = {}, .window16 = {}, .rule = {}, .group = 0};
        if (has_mean) {
          config.kv_quality.calibration.k_mean.assign(static_cast<size_t>(model.num_layers), mean);
          cache.k_mean = mean.data();
        }
        const std::vector<LayerCache> layers(static_cast<size_t>(model.num_layers), cache);
        const Decoder decoder({.model = model, .layers = layers, .limits = PlanStep(config, kCpu)},
                              testing::TinyWeights(model, *device), *device);
        const int64_t planned = PlanMemory(model, config, kFreeBytes, kCpu).scratch_bytes;
        CHECK(planned == decoder.scratch_bytes());
        CHECK(planned > int64_t{tokens} * model.hidden_size * 4);
      }
    }
  }
}

TEST_CASE("a cache that does not fit is rejected with the bytes that it needs") {
  EngineConfig config = Config(KvCacheMode::kFp4Nv, {64, 64});
  try {
    PlanMemory(Model(), config, 100'000, kCpu);
    FAIL("100 kB were accepted");
  } catch (const InvalidArgument& error) {
    // The minimum is a quantized block, which is unused, and a 16-bit block.
    const std::string bytes = std::to_string(64 * 2 * 3 * 30 * (36 + 128));
    CHECK(std::string(error.what()).find(bytes) != std::string::npos);
  }
  config.kv_quality.window16 = {64, 65};
  CHECK_THROWS_AS(PlanMemory(Model(), config, kFreeBytes, kCpu), InvalidArgument);
}

// A device without attention kernels for 16-bit blocks.
class No16Bit : public testing::NullDevice {
 public:
  void RequireAttention(const KvLayerView& layer) const override {
    if (layer.format[0] == KvCacheMode::kNone) {
      throw InvalidArgument("no kernels");
    }
  }
};

TEST_CASE("a cache is rejected if its format or its 16-bit window has no kernels") {
  const auto cpu = MakeCpuDevice(1);
  const auto device = std::make_shared<No16Bit>();
  const ModelConfig model = testing::TinyConfig();
  const auto refuses = [&](const EngineConfig& config) {
    CHECK_THROWS_AS(RequireKernels(model, config, *device), InvalidArgument);
    const MemoryPlan plan = PlanMemory(model, config, testing::kFreeBytes, kCpu);
    CHECK_THROWS_AS(EngineState(model, config, plan, testing::kFreeBytes,
                                testing::TinyWeights(model, *cpu), device),
                    InvalidArgument);
  };
  EngineConfig config = testing::TinyEngineConfig(KvCacheMode::kInt8);
  config.kv_quality.window16 = {};
  CHECK_NOTHROW(RequireKernels(model, config, *device));
  config.kv_quality.window16 = {.sink_tokens = 64, .recent_tokens = 64};
  refuses(config);
  refuses(testing::TinyEngineConfig(KvCacheMode::kNone));
}

TEST_CASE("an unsupported head_dim is rejected before weights are loaded") {
  const auto device = MakeCpuDevice(1);
  ModelConfig model = Model();
  const EngineConfig config = Config(KvCacheMode::kNone);
  CHECK_NOTHROW(RequireKernels(model, config, *device));
  model.head_dim = 512;
  CHECK_NOTHROW(RequireKernels(model, config, *device));
  for (const int head_dim : {520, 528, 1024}) {
    model.head_dim = head_dim;
    CHECK_THROWS_AS(RequireKernels(model, config, *device), InvalidArgument);
  }
}

TEST_CASE("a model with latents is planned, and refused by the name of a wrong field") {
  ModelConfig model = Model();
  model.latent = {.nope_dim = 32, .rope_dim = 64, .value_dim = 32};
  model.head_dim = 512;
  model.num_kv_heads = 1;
  model.softmax_scale = 0.1f;
  model.ropes[0].dim = 64;
  std::ranges::fill(model.windows, 0);
  model.Validate();
  const EngineConfig config = Config(KvCacheMode::kFp4Nv);
  CHECK_NOTHROW(RequireKernels(model, config, *MakeCpuDevice(1)));
  const MemoryPlan plan = PlanMemory(model, config, kFreeBytes, kCpu);
  CHECK(plan.bytes_per_token == model.num_layers * (512 / 2 + 512 / 16 + 2 * 64));
  model.windows.back() = 64;
  CHECK_THROWS_WITH_AS(model.Validate(), doctest::Contains("windows"), InvalidArgument);
  model.windows.back() = 0;
  model.latent.nope_dim = 40;
  CHECK_THROWS_WITH_AS(model.Validate(), doctest::Contains("latent.nope_dim"), InvalidArgument);
  model.latent.nope_dim = 32;
  model.latent.rope_dim = model.ropes[0].dim = 144;
  CHECK_THROWS_WITH_AS(model.Validate(), doctest::Contains("latent.rope_dim"), InvalidArgument);
  model.latent.rope_dim = model.ropes[0].dim = 64;
  model.num_heads = 65536;
  model.num_layers = 2;
  model.windows.assign(2, 0);
  CHECK_THROWS_WITH_AS(model.Validate(), doctest::Contains("heads in all layers"), InvalidArgument);
}

// Returns a model like Gemma 4 E2B cut to 15 layers: every fifth has full attention and heads of
// 512 values, and with `shared` the last ten read the K and V of layers 3 and 4.
ModelConfig SharedModel(bool shared) {
  ModelConfig model = Model(std::vector<int>(15, 512));
  model.num_heads = 8;
  model.num_kv_heads = 1;
  model.head_dim = 256;
  model.layer_sizes.head_dims.assign(15, 256);
  model.layer_sizes.kv_heads.assign(15, 1);
  for (int i = 0; i < 15; ++i) {
    const bool is_full = i % 5 == 4;
    model.windows[static_cast<size_t>(i)] = is_full ? 0 : 512;
    model.layer_sizes.head_dims[static_cast<size_t>(i)] = is_full ? 512 : 256;
    model.layer_sizes.kv_sources.push_back(!shared || i < 5 ? i : is_full ? 4 : 3);
  }
  return model;
}

TEST_CASE("layers that read the K and V of others take no bytes") {
  for (const PrecisionWindowTokens window16 : {PrecisionWindowTokens{}, {64, 64}}) {
    const EngineConfig config = Config(KvCacheMode::kFp4Nv, window16);
    ModelConfig five = SharedModel(false);
    five.num_layers = 5;
    five.windows.resize(5);
    five.layer_sizes.head_dims.resize(5);
    five.layer_sizes.kv_heads.resize(5);
    five.layer_sizes.kv_sources.clear();
    const ModelConfig shared = SharedModel(true);
    const int64_t bytes = SequenceBytes(five, config, 8192);
    CHECK(SequenceBytes(shared, config, 8192) == bytes);
    CHECK(SequenceBytes(SharedModel(false), config, 8192) == 3 * bytes);
    const MemoryPlan plan = PlanMemory(shared, config, kFreeBytes, kCpu);
    CHECK(plan.bytes_per_token == PlanMemory(five, config, kFreeBytes, kCpu).bytes_per_token);
    CHECK(plan.session_bytes == bytes);
    // The cache reserves what the plan says.
    const auto device = MakeCpuDevice(1);
    const KvCache cache(*device, CacheConfig(shared, config),
                        PlanBlocks(shared, config, kFreeBytes, kCpu));
    CHECK(cache.reserved_bytes() == plan.reserved_bytes);
    CHECK(cache.GroupOf(14) < 0);
    CHECK(cache.GroupOf(4) == 0);
  }
  // One row of a layer with full attention and four with windows, in 16 bits.
  const MemoryPlan none =
      PlanMemory(SharedModel(true), Config(KvCacheMode::kNone), kFreeBytes, kCpu);
  CHECK(none.bytes_per_token == 2 * 2 * (512 + 4 * 256));
}

TEST_CASE("sources of K and V must be earlier layers with the same heads and window") {
  const auto refuses = [](std::vector<int> sources, const char* message) {
    ModelConfig model = SharedModel(true);
    sources.resize(15, 0);
    for (int i = 5; i < 15; ++i) {
      sources[static_cast<size_t>(i)] = i;
    }
    model.layer_sizes.kv_sources = std::move(sources);
    CHECK_THROWS_WITH_AS(model.Validate(), doctest::Contains(message), InvalidArgument);
  };
  refuses({1, 1, 2, 3, 4}, "It must be an earlier layer");
  refuses({0, 0, 1, 3, 4}, "that layer K and V of its own");
  refuses({0, 1, 2, 3, 0}, "the same window and the same KV heads");
  refuses({0, -1, 2, 3, 4}, "It must be an earlier layer");
}

// Returns a model of which three of four layers are recurrent, with states of almost 2 MB.
ModelConfig RecurrentModel() {
  ModelConfig model = Model(std::vector<int>(8, 0));
  model.recurrent = {.layers = {1, 1, 1, 0, 1, 1, 1, 0},
                     .num_key_heads = 4,
                     .num_value_heads = 8,
                     .key_dim = 96,
                     .value_dim = 96,
                     .kernel = 4,
                     .tiled = false};
  return model;
}

// Returns the bytes of all pools.
int64_t AllBytes(const ModelConfig& model, const EngineConfig& config,
                 const std::vector<int64_t>& blocks) {
  const std::vector<LayerGroup> groups = MakeLayerGroups(CacheConfig(model, config));
  REQUIRE(blocks.size() == groups.size() + 2);
  const KvCacheConfig cache = CacheConfig(model, config);
  int64_t bytes =
      blocks[groups.size()] * cache.state_bytes + blocks.back() * cache.checkpoint_bytes;
  for (size_t g = 0; g < groups.size(); ++g) {
    bytes += blocks[g] * groups[g].bytes_per_block();
  }
  return bytes;
}

TEST_CASE("recurrent layers have working states, and checkpoints share the cache with KV") {
  const ModelConfig model = RecurrentModel();
  const int64_t state = model.recurrent.StateBytes();
  EngineConfig config = Config(KvCacheMode::kFp4Nv);
  const KvCacheConfig cache = CacheConfig(model, config);
  CHECK(cache.state_bytes == state);
  CHECK(state % 64 == 0);
  CHECK(cache.windows == std::vector{kNoAttention, kNoAttention, kNoAttention, 0, kNoAttention,
                                     kNoAttention, kNoAttention, 0});
  const auto budget = static_cast<int64_t>(0.8 * static_cast<double>(kFreeBytes));
  const int64_t slots = config.max_batch_size + 4;  // and the saves of a step
  const int64_t rest = budget - slots * state;
  for (const double share : {0.5, 0.25, 0., 0.9}) {
    CAPTURE(share);
    config.state_checkpoint_share = share;
    const std::vector<int64_t> blocks = PlanBlocks(model, config, kFreeBytes, kCpu);
    REQUIRE(blocks.size() == 3);
    CHECK(blocks[1] == slots);
    CHECK(blocks[2] == static_cast<int64_t>(share * static_cast<double>(rest)) / state);
    CHECK(AllBytes(model, config, blocks) <= budget);
    const MemoryPlan plan = PlanMemory(model, config, kFreeBytes, kCpu);
    CHECK(plan.reserved_bytes == AllBytes(model, config, blocks));
    CHECK(plan.state_bytes_per_sequence == state);
    CHECK(plan.num_checkpoints == blocks[2]);
    CHECK(plan.checkpoint_bytes == blocks[2] * state);
    CHECK(plan.session_bytes == SequenceBytes(model, config, config.session_len));
    CHECK(plan.max_sequence_tokens == config.session_len);
    CHECK(plan.bytes_per_token == 2 * 2 * 3 * 36);  // of the layers with attention
  }
  CHECK(SequenceBytes(model, config, 64) == 64 * 2 * 2 * 3 * 36 + state);
  CHECK(PlanMemory(Model(), config, kFreeBytes, kCpu).num_checkpoints == 0);
}

TEST_CASE("there are no more checkpoints than blocks that they could follow") {
  EngineConfig config = Config(KvCacheMode::kFp4Nv);
  config.max_batch_size = 1;
  config.session_len = 4 * config.cache_block_seq_len;
  const std::vector<int64_t> blocks = PlanBlocks(RecurrentModel(), config, kFreeBytes, kCpu);
  CHECK(blocks == std::vector<int64_t>{4, 5, 4});
}

TEST_CASE("a full batch has working states for a draft") {
  const ModelConfig model = RecurrentModel();
  EngineConfig config = Config(KvCacheMode::kFp4Nv);
  config.enable_prefix_caching = false;
  CHECK(PlanBlocks(model, config, kFreeBytes, kCpu).back() == 0);
  config.num_draft_tokens = 8;
  const std::vector<int64_t> blocks = PlanBlocks(model, config, kFreeBytes, kCpu);
  CHECK(blocks[1] == config.max_batch_size + 8);
  CHECK(blocks[2] == 0);
  config.enable_prefix_caching = true;
  config.state_checkpoint_share = 0;
  CHECK(PlanBlocks(model, config, kFreeBytes, kCpu) == blocks);
}

TEST_CASE("checkpoints with fewer bits are more checkpoints in the same memory") {
  const ModelConfig model = RecurrentModel();
  EngineConfig config = Config(KvCacheMode::kFp4Nv);
  const StateShape shape = model.recurrent.State();
  const MemoryPlan exact = PlanMemory(model, config, kFreeBytes, kCpu);
  for (const StateFormat format : {StateFormat::kBf16, StateFormat::kInt8}) {
    config.state_checkpoint_format = format;
    const MemoryPlan plan = PlanMemory(model, config, kFreeBytes, kCpu);
    CHECK(plan.state_bytes_per_sequence == exact.state_bytes_per_sequence);
    const auto budget = static_cast<int64_t>(0.8 * static_cast<double>(kFreeBytes));
    const int64_t rest = budget - (config.max_batch_size + 4) * shape.Bytes(StateFormat::kF32);
    CHECK(plan.num_checkpoints == rest / 2 / shape.Bytes(format));
    CHECK(plan.num_checkpoints > exact.num_checkpoints * 3 / 2);
    CHECK(plan.checkpoint_bytes == plan.num_checkpoints * shape.Bytes(format));
    CHECK(plan.reserved_bytes ==
          AllBytes(model, config, PlanBlocks(model, config, kFreeBytes, kCpu)));
  }
  // The inputs of convolutions stay FP32. int8 has a scale for each row.
  const int64_t matrices = shape.rows * shape.cols;
  CHECK(shape.LayerBytes(StateFormat::kF32) == shape.exact_bytes + 4 * matrices);
  CHECK(shape.LayerBytes(StateFormat::kBf16) == shape.exact_bytes + 2 * matrices);
  CHECK(shape.LayerBytes(StateFormat::kInt8) ==
        shape.exact_bytes + (matrices + 4 * shape.rows + 63) / 64 * 64);
}

TEST_CASE("states come on top of a number of blocks, in the same proportion") {
  const ModelConfig model = RecurrentModel();
  const int64_t state = model.recurrent.StateBytes();
  EngineConfig config = Config(KvCacheMode::kFp4Nv);
  config.cache_max_entry_count = 4096;
  const int64_t block = MakeLayerGroups(CacheConfig(model, config))[0].bytes_per_block();
  for (const double share : {0., 0.5, 0.75}) {
    config.state_checkpoint_share = share;
    const std::vector<int64_t> blocks = PlanBlocks(model, config, 1, kCpu);
    CHECK(blocks[0] == 4096);
    CHECK(blocks[1] == config.max_batch_size + 4);
    const auto bytes =
        static_cast<int64_t>(4096. * static_cast<double>(block) * share / (1 - share));
    CHECK(blocks[2] == bytes / state);
  }
}

TEST_CASE("the interval gives a long prompt a quarter of the checkpoints") {
  EngineConfig config = Config(KvCacheMode::kFp4Nv);
  config.session_len = 64 * 1000;
  CHECK(CheckpointInterval(config, 0) == 0);
  CHECK(CheckpointInterval(config, 3) == 0);
  CHECK(CheckpointInterval(config, 4) == 1000);
  CHECK(CheckpointInterval(config, 40) == 100);
  CHECK(CheckpointInterval(config, 4 * 999) == 8);
  config.state_checkpoint_interval = 3;
  CHECK(CheckpointInterval(config, 4) == 3);
  config.state_checkpoint_interval = -1;
  CHECK(CheckpointInterval(config, 400) == 0);
}

TEST_CASE("impossible states are refused with the option to change") {
  const ModelConfig model = RecurrentModel();
  EngineConfig config = Config(KvCacheMode::kFp4Nv);
  for (const double share : {-0.1, 0.91, std::nan("")}) {
    config.state_checkpoint_share = share;
    CHECK_THROWS_AS(PlanMemory(model, config, kFreeBytes, kCpu), InvalidArgument);
  }
  config.state_checkpoint_share = 0.5;
  config.state_checkpoint_interval = -2;
  CHECK_THROWS_AS(PlanMemory(model, config, kFreeBytes, kCpu), InvalidArgument);
  config.state_checkpoint_interval = 0;
  CHECK_THROWS_WITH_AS(
      PlanMemory(model, config, config.max_batch_size * model.recurrent.StateBytes(), kCpu),
      doctest::Contains("--max-batch-size"), InvalidArgument);
  ModelConfig huge = model;
  huge.recurrent.num_key_heads = huge.recurrent.num_value_heads = 65536;
  huge.recurrent.key_dim = huge.recurrent.value_dim = 1024;
  config.max_batch_size = 1 << 24;
  config.cache_max_entry_count = 4096;
  CHECK_THROWS_AS(PlanMemory(huge, config, kFreeBytes, kCpu), InvalidArgument);
}

TEST_CASE("a draft model must not have recurrent layers") {
  EngineConfig config = Config(KvCacheMode::kFp4Nv);
  config.draft_model = std::make_shared<DraftModel>(RecurrentModel(), nullptr);
  config.num_draft_tokens = 4;
  CHECK_THROWS_WITH_AS(PlanMemory(Model(), config, kFreeBytes, kCpu),
                       doctest::Contains("recurrent layers"), InvalidArgument);
}

}  // namespace
}  // namespace turbomind
