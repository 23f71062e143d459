// Computes the sizes of the pools before anything is allocated.

#include "turbomind/engine/memory_plan.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <string>

#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"
#include "turbomind/kv/block_seq_len.h"
#include "turbomind/kv/kv_cache.h"
#include "turbomind/kv/pool_budget.h"
#include "turbomind/model/decoder_scratch.h"

namespace turbomind {
namespace {

void RequirePositive(const char* field, int got, const char* flag) {
  constexpr int kLimit = 1 << 24;
  if (got < 1 || got > kLimit) {
    throw InvalidArgument(field, "is " + std::to_string(got) + ". It must be 1 to " +
                                     std::to_string(kLimit) + " (" + flag + ")");
  }
}

double BytesPerToken(const std::vector<LayerGroup>& groups) {
  double bytes = 0;
  for (const LayerGroup& group : groups) {
    bytes += group.layout.bytes_per_token();
  }
  return bytes;
}

// Compares the KV pools.
bool HasRoom(const std::vector<int64_t>& blocks, const std::vector<int64_t>& needed) {
  return std::equal(needed.begin(), needed.end(), blocks.begin(), std::less_equal<>());
}

// Returns the bytes of the given blocks of each KV pool. Others that follow do not count.
int64_t PoolBytes(const std::vector<LayerGroup>& groups, const std::vector<int64_t>& blocks) {
  const std::vector<int64_t> bytes = BlockBytes(groups);
  return std::inner_product(bytes.begin(), bytes.end(), blocks.begin(), int64_t{0});
}

// Returns the bytes of the 16-bit blocks of a sequence longer than every window, between steps,
// with its last block full.
int64_t LongSequenceWindow16Bytes(const std::vector<LayerGroup>& groups) {
  constexpr int64_t kLong = int64_t{1} << 40;
  int64_t bytes = 0;
  for (const LayerGroup& group : groups) {
    bytes += group.Window16BlocksHeld(kLong) * group.window16_bytes_per_block();
  }
  return bytes;
}

// Returns the tokens that the pools of one group hold in sequences of session_len, with
// max_batch_size sequences running.
int64_t TokensThatFit(const LayerGroup& group, int64_t quantized, int64_t window16,
                      const EngineConfig& config) {
  if (group.rule.enabled()) {
    const bool uses_quantized = group.QuantizedBlocksHeld(config.session_len) > 0;
    const int64_t held = group.Window16BlocksHeld(config.session_len) * config.max_batch_size;
    quantized = (uses_quantized ? quantized : 0) + std::min(window16, held);
  }
  return quantized * config.cache_block_seq_len;
}

// Returns the length, up to session_len, of the longest sequence that these pools hold.
int64_t LongestSequence(const std::vector<LayerGroup>& groups, const std::vector<int64_t>& blocks,
                        const EngineConfig& config) {
  int64_t fits = 0;
  int64_t too_long = int64_t{config.session_len} + 1;
  while (too_long - fits > 1) {
    const int64_t middle = (fits + too_long) / 2;
    (HoldSequence(groups, blocks, middle, StepTokens(config)) ? fits : too_long) = middle;
  }
  return fits;
}

int64_t ScratchBytes(const ModelConfig& model, const EngineConfig& config,
                     const DeviceCapability& device) {
  return DecoderScratch().Place(model, PlanStep(config, device), nullptr);
}

// Returns the most that the waves of a bias of K take (KBiasArrays).
int64_t WaveBytes(const ModelConfig& model, const EngineConfig& config) {
  int64_t floats = 0;
  for (const RopeConfig& rope : model.ropes) {
    floats += model.k_bias ? int64_t{rope.dim} * config.session_len : 0;
  }
  return floats * static_cast<int64_t>(sizeof(float));
}

// Returns the bytes that are subtracted before the pools get their share.
int64_t StepBytes(const ModelConfig& model, const EngineConfig& config,
                  const DeviceCapability& device) {
  const int64_t reserved =
      device.reserves_lazily ? 0 : ScratchBytes(model, config, device) + WaveBytes(model, config);
  return reserved + device.workspace_bytes;
}

// Returns the part of the free bytes that belongs to the draft model.
double DraftShare(const ModelConfig& model, const EngineConfig& config) {
  if (config.draft_model == nullptr) {
    return 0.;
  }
  const KvCacheConfig own = CacheConfig(config.draft_model->model, DraftConfig(config));
  const double draft = BytesPerToken(MakeLayerGroups(own));
  return draft / (draft + BytesPerToken(MakeLayerGroups(CacheConfig(model, config))));
}

int64_t PartOf(int64_t bytes, double share) {
  return static_cast<int64_t>(static_cast<double>(bytes) * share);
}

// Returns the working states: one for each sequence, and some that a full batch can save. Drafts
// need one for each of their tokens.
int64_t WorkingStates(const EngineConfig& config) {
  constexpr int kMinSaves = 4;
  return int64_t{config.max_batch_size} + std::max(kMinSaves, config.num_draft_tokens);
}

int64_t CheckpointBytes(const ModelConfig& model, const EngineConfig& config) {
  return model.recurrent.State().Bytes(config.state_checkpoint_format);
}

// Returns the number of checkpoints for their share of `bytes`, which are those of checkpoints and
// KV together.
int64_t CheckpointsOf(int64_t bytes, int64_t checkpoint_bytes, const EngineConfig& config) {
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();  // ids are int32
  const double share = config.enable_prefix_caching ? config.state_checkpoint_share : 0.;
  return std::min(PartOf(bytes, share) / checkpoint_bytes, kLimit);
}

// Returns the part of an error that names the working states, if there are any.
std::string StateNeeds(const ModelConfig& model, const EngineConfig& config) {
  const int64_t state = model.recurrent.StateBytes();
  return state == 0
             ? ""
             : " and " + std::to_string(WorkingStates(config)) + " states of recurrent layers " +
                   std::to_string(state) + " bytes each (--max-batch-size)";
}

// Checks the limits of attention. A KV format may be stricter (kv/layout.cc).
void RequireHeadDim(const ModelConfig& model) {
  constexpr int kMultiple = 16;
  if (model.latent.exists()) {
    return;  // ModelConfig::Validate checks latents
  }
  for (int layer = 0; layer < model.num_layers; ++layer) {
    const int head_dim = model.HeadDim(layer);
    if (model.HasAttention(layer) && (head_dim % kMultiple != 0 || head_dim > kMaxHeadDim)) {
      throw InvalidArgument("head_dim", std::to_string(head_dim) +
                                            " is not supported. It must be a multiple of " +
                                            std::to_string(kMultiple) + " and at most " +
                                            std::to_string(kMaxHeadDim) + ". Use another model.");
    }
  }
}

}  // namespace

void ValidateEngineConfig(const EngineConfig& config) {
  RequirePositive("max_batch_size", config.max_batch_size, "--max-batch-size");
  RequirePositive("session_len", config.session_len, "--session-len");
  RequirePositive("max_prefill_token_num", config.max_prefill_token_num, "--max-prefill-token-num");
  if (config.num_draft_tokens < 0 || config.num_draft_tokens > kMaxDraftTokens) {
    throw InvalidArgument("num_draft_tokens", "is " + std::to_string(config.num_draft_tokens) +
                                                  ". It must be 0 to " +
                                                  std::to_string(kMaxDraftTokens) +
                                                  " (--speculative-num-draft-tokens).");
  }
  const int length = config.cache_block_seq_len;
  if (!block::IsPagedBlockSeqLen(length)) {
    throw InvalidArgument(
        "cache_block_seq_len",
        "is " + std::to_string(length) + ". It must be 16, 32, 64 or 128 (--cache-block-seq-len).");
  }
  const double share = config.state_checkpoint_share;
  constexpr double kMaxShare = 0.9;
  if (!(share >= 0 && share <= kMaxShare)) {
    throw InvalidArgument("state_checkpoint_share", "is " + std::to_string(share) +
                                                        ". It must be 0 to 0.9 "
                                                        "(--state-checkpoint-share).");
  }
  if (config.state_checkpoint_interval < -1) {
    throw InvalidArgument("state_checkpoint_interval",
                          "is " + std::to_string(config.state_checkpoint_interval) +
                              ". It must be a number of blocks, 0 (automatic) or -1 (none) "
                              "(--state-checkpoint-interval).");
  }
  const double count = config.cache_max_entry_count;
  constexpr double kMaxBlocks = 1 << 30;
  if (!std::isfinite(count) || count <= 0 || count > kMaxBlocks ||
      (count > 1 && count != std::floor(count))) {
    throw InvalidArgument(
        "cache_max_entry_count",
        "is " + std::to_string(count) +
            ". It must be a share of the free memory in (0, 1) or a whole number of "
            "blocks (--cache-max-entry-count).");
  }
}

KvCacheConfig CacheConfig(const ModelConfig& model, const EngineConfig& config) {
  KvCacheConfig cache = MakeKvCacheConfig(model.windows, config.kv_format, model.num_kv_heads,
                                          model.head_dim, config.cache_block_seq_len, model.dtype);
  if (!config.kv_layers.empty()) {
    if (config.kv_layers.size() != cache.layers.size()) {
      throw InvalidArgument("kv_cache_format", "has formats for " +
                                                   std::to_string(config.kv_layers.size()) +
                                                   " layers, but the model has " +
                                                   std::to_string(cache.layers.size()));
    }
    cache.layers = config.kv_layers;
  }
  cache.window16 = config.kv_quality.window16;
  cache.window_format = config.kv_quality.window_format;
  cache.k_offset = config.kv_quality.k_offset;
  cache.k_bias = model.k_bias;
  cache.state_bytes = model.recurrent.StateBytes();
  cache.checkpoint_bytes = CheckpointBytes(model, config);
  cache.rotary_dim = model.latent.rope_dim;
  // One format for K and V is that of the latents. The rotary part keeps 16 bits.
  for (block::Config::LayerFormats& formats : cache.layers) {
    formats.k = model.latent.exists() && formats.k == formats.v ? KvCacheMode::kNone : formats.k;
  }
  cache.layer_head_dims = model.layer_sizes.head_dims;
  cache.layer_kv_heads = model.layer_sizes.kv_heads;
  cache.kv_sources = model.layer_sizes.kv_sources;
  for (int layer = 0; layer < model.num_layers; ++layer) {
    if (!model.HasAttention(layer)) {
      cache.windows[static_cast<size_t>(layer)] = kNoAttention;
    }
  }
  return cache;
}

std::vector<AttentionToTune> AttentionToTuneOf(const ModelConfig& model,
                                               const EngineConfig& config) {
  std::vector<AttentionToTune> attention;
  for (LayerGroup& layers : MakeLayerGroups(CacheConfig(model, config))) {
    attention.push_back({std::move(layers), model.num_heads, config.max_batch_size});
  }
  return attention;
}

void RequireKernels(const ModelConfig& model, const EngineConfig& config, const Device& device) {
  RequireHeadDim(model);
  for (const LayerGroup& group : MakeLayerGroups(CacheConfig(model, config))) {
    for (int layer = 0; layer < static_cast<int>(group.layers.size()); ++layer) {
      device.RequireAttention(group.layout.LayerView(layer, nullptr, nullptr));
    }
    if (group.window16_layout) {
      device.RequireAttention(group.window16_layout->LayerView(0, nullptr, nullptr));
    }
  }
  if (config.draft_model != nullptr) {
    RequireKernels(config.draft_model->model, DraftConfig(config), device);
  }
}

EngineConfig DraftConfig(const EngineConfig& config) {
  EngineConfig draft = config;
  draft.kv_format = KvCacheMode::kNone;
  draft.kv_layers.clear();
  draft.kv_quality = {};
  draft.enable_prefix_caching = false;
  draft.num_draft_tokens = 0;
  draft.draft_model = nullptr;
  draft.prefix_events = nullptr;
  draft.collect_kv_statistics = false;
  return draft;
}

std::vector<int64_t> PlanDraftBlocks(const ModelConfig& model, const EngineConfig& config,
                                     int64_t free_bytes, const DeviceCapability& device) {
  Check(config.draft_model != nullptr, "a draft model must be configured");
  return PlanBlocks(config.draft_model->model, DraftConfig(config),
                    PartOf(free_bytes, DraftShare(model, config)), device);
}

int StepTokens(const EngineConfig& config) {
  const int64_t max_tokens = int64_t{config.max_batch_size} * config.session_len;
  return static_cast<int>(std::min<int64_t>(config.max_prefill_token_num, max_tokens));
}

StepLimits PlanStep(const EngineConfig& config, const DeviceCapability& device) {
  return {.max_tokens = StepTokens(config),
          .max_logit_rows = device.max_logit_rows,
          .ffn_rows = device.ffn_rows,
          .removes_mean = !config.kv_quality.calibration.k_mean.empty()};
}

namespace {

// Returns the blocks of the KV pools for a budget, or for cache_max_entry_count as a number.
std::vector<int64_t> PlanKvBlocks(const std::vector<LayerGroup>& groups, const EngineConfig& config,
                                  int64_t budget, const DeviceCapability& device) {
  const double count = config.cache_max_entry_count;
  KvDemand demand{.session_len = config.session_len,
                  .chunk = StepTokens(config),
                  .max_sequences = device.limits_pools_to_batch ? config.max_batch_size : 0,
                  .num_running = config.max_batch_size};
  const auto blocks = [&] {
    return count >= 1 ? BlocksForCount(groups, static_cast<int64_t>(count), demand)
                      : BlocksForBudget(groups, budget, demand);
  };
  const auto holds_one = [&] { return HasRoom(blocks(), BlocksForSequences(groups, 1, demand)); };
  if (holds_one()) {
    return blocks();
  }
  // The pools hold less than one sequence of session_len. They are sized for the longest sequence
  // that fits into every pool.
  int64_t fits = 0;
  int64_t too_long = demand.session_len;
  while (too_long - fits > 1) {
    demand.session_len = (fits + too_long) / 2;
    (holds_one() ? fits : too_long) = demand.session_len;
  }
  demand.session_len = std::max<int64_t>(fits, 1);
  return blocks();
}

}  // namespace

std::vector<int64_t> PlanBlocks(const ModelConfig& model, const EngineConfig& config,
                                int64_t free_bytes, const DeviceCapability& device) {
  free_bytes -= PartOf(free_bytes, DraftShare(model, config));
  const std::vector<LayerGroup> groups = MakeLayerGroups(CacheConfig(model, config));
  constexpr double kMaxBytes = int64_t{1} << 62;
  const bool is_count = config.cache_max_entry_count >= 1;
  const int64_t for_pools = std::max<int64_t>(free_bytes - StepBytes(model, config, device), 0);
  const int64_t budget = is_count ? 0 : PartOf(for_pools, config.cache_max_entry_count);
  const int64_t state = model.recurrent.StateBytes();
  if (state == 0) {
    return PlanKvBlocks(groups, config, budget, device);
  }
  const int64_t slots = WorkingStates(config);
  if (slots > std::numeric_limits<int64_t>::max() / 4 / state) {
    throw InvalidArgument("max_batch_size", "is " + std::to_string(config.max_batch_size) +
                                                StateNeeds(model, config) +
                                                ". No memory has so many. Lower it.");
  }
  const int64_t cached = std::max<int64_t>(budget - slots * state, 0);
  const int64_t checkpoint = CheckpointBytes(model, config);
  int64_t checkpoints = CheckpointsOf(cached, checkpoint, config);
  std::vector<int64_t> blocks =
      PlanKvBlocks(groups, config, std::max<int64_t>(cached - checkpoints * checkpoint, 0), device);
  if (is_count) {
    const auto kv = static_cast<double>(PoolBytes(groups, blocks));
    const double both = std::min(kv / (1. - config.state_checkpoint_share), kMaxBytes);
    checkpoints = CheckpointsOf(static_cast<int64_t>(both), checkpoint, config);
  }
  // A checkpoint belongs to a block of the full-attention group, in either of its pools.
  const int64_t useful = blocks[0] + (HasWindow16(groups) ? blocks[groups.size()] : 0);
  blocks.insert(blocks.end(), {slots, std::min(checkpoints, useful)});
  return blocks;
}

int64_t CheckpointInterval(const EngineConfig& config, int64_t num_checkpoints) {
  // A hit reads up to so many blocks again, which takes one short step.
  constexpr int64_t kMinInterval = 8;
  if (config.state_checkpoint_interval != 0) {
    return std::max<int64_t>(config.state_checkpoint_interval, 0);
  }
  const int64_t per_prompt = num_checkpoints / 4;
  if (per_prompt == 0) {
    return 0;
  }
  const int64_t blocks = CeilDiv(config.session_len, config.cache_block_seq_len);
  return std::max(CeilDiv(blocks, per_prompt), kMinInterval);
}

int64_t SequenceBytes(const ModelConfig& model, const EngineConfig& config, int64_t num_tokens) {
  int64_t bytes = 0;
  for (const LayerGroup& group : MakeLayerGroups(CacheConfig(model, config))) {
    bytes += group.QuantizedBlocksHeld(num_tokens) * group.bytes_per_block() +
             group.Window16BlocksHeld(num_tokens) * group.window16_bytes_per_block();
  }
  return bytes + model.recurrent.StateBytes();
}

namespace {

// Adds the states of recurrent layers, which are the last two pools, to the plan.
void PlanStateMemory(const ModelConfig& model, const EngineConfig& config,
                     const std::vector<int64_t>& blocks, MemoryPlan& plan) {
  plan.state_bytes_per_sequence = model.recurrent.StateBytes();
  if (plan.state_bytes_per_sequence == 0) {
    return;
  }
  plan.num_checkpoints = blocks.back();
  plan.checkpoint_format = config.state_checkpoint_format;
  plan.checkpoint_bytes = plan.num_checkpoints * CheckpointBytes(model, config);
  plan.checkpoint_interval = CheckpointInterval(config, plan.num_checkpoints);
  plan.reserved_bytes +=
      blocks[blocks.size() - 2] * plan.state_bytes_per_sequence + plan.checkpoint_bytes;
}

// Adds the memory of the draft model to the plan.
void PlanDraftMemory(const ModelConfig& model, const EngineConfig& config, int64_t free_bytes,
                     const DeviceCapability& device, MemoryPlan& plan) {
  if (config.draft_model == nullptr) {
    return;
  }
  const ModelConfig& own = config.draft_model->model;
  own.Validate();
  RequireHeadDim(own);
  if (own.recurrent.HasAny()) {
    throw InvalidArgument("draft_model",
                          "has recurrent layers, which cannot go back to an earlier token. Use "
                          "another model (--speculative-draft-model).");
  }
  const auto groups = MakeLayerGroups(CacheConfig(own, DraftConfig(config)));
  const std::vector<int64_t> blocks = PlanDraftBlocks(model, config, free_bytes, device);
  if (std::ranges::find(blocks, 0) != blocks.end()) {
    throw InvalidArgument(
        "The cache of the draft model does not hold one block. Raise --cache-max-entry-count or "
        "remove --speculative-draft-model.");
  }
  plan.draft_cache_bytes = PoolBytes(groups, blocks);
  plan.draft_scratch_bytes = ScratchBytes(own, DraftConfig(config), device);
}

}  // namespace

MemoryPlan PlanMemory(const ModelConfig& model, const EngineConfig& config, int64_t free_bytes,
                      const DeviceCapability& device) {
  model.Validate();
  ValidateEngineConfig(config);
  const auto groups = MakeLayerGroups(CacheConfig(model, config));
  RequireHeadDim(model);
  const std::vector<int64_t> blocks = PlanBlocks(model, config, free_bytes, device);
  const std::vector<int64_t> needed = BlocksForSequences(
      groups, 1, {.session_len = config.cache_block_seq_len, .chunk = StepTokens(config)});
  if (!HasRoom(blocks, needed)) {
    throw InvalidArgument(
        "The KV cache does not hold one sequence of one block. cache_max_entry_count is " +
        std::to_string(config.cache_max_entry_count) + " of " + std::to_string(free_bytes) +
        " free bytes, of which a step needs " + std::to_string(StepBytes(model, config, device)) +
        " bytes (--max-prefill-token-num)" + StateNeeds(model, config) +
        ". Such a sequence needs " + std::to_string(PoolBytes(groups, needed)) +
        " bytes. Raise --cache-max-entry-count.");
  }
  MemoryPlan plan;
  plan.reserved_bytes = PoolBytes(groups, blocks);
  const auto quantized_end = blocks.begin() + static_cast<std::ptrdiff_t>(groups.size());
  const auto largest =
      groups.front().window == 0 ? blocks.begin() : std::max_element(blocks.begin(), quantized_end);
  plan.num_blocks = *largest;
  plan.bytes_per_token = BytesPerToken(groups);
  plan.window16_bytes_per_sequence = LongSequenceWindow16Bytes(groups);
  plan.scratch_bytes = ScratchBytes(model, config, device);
  plan.session_bytes = SequenceBytes(model, config, config.session_len);
  const EngineConfig none = DraftConfig(config);
  plan.bytes_per_token_none = BytesPerToken(MakeLayerGroups(CacheConfig(model, none)));
  plan.session_bytes_none = SequenceBytes(model, none, config.session_len);
  const auto g = static_cast<size_t>(largest - blocks.begin());
  const int64_t window16 = groups[g].rule.enabled() ? blocks[groups.size() + g] : 0;
  plan.max_tokens = TokensThatFit(groups[g], plan.num_blocks, window16, config);
  plan.max_sequence_tokens = LongestSequence(groups, blocks, config);
  PlanStateMemory(model, config, blocks, plan);
  PlanDraftMemory(model, config, free_bytes, device, plan);
  return plan;
}

}  // namespace turbomind
