#pragma once

#include <memory>
#include <vector>

#include "turbomind/core/members.h"
#include "turbomind/kv/kv_format.h"
#include "turbomind/kv/layout.h"
#include "turbomind/kv/precision_window.h"
#include "turbomind/kv/prefix_events.h"
#include "turbomind/kv/state_format.h"
#include "turbomind/model/model_config.h"
#include "turbomind/model/weights.h"

namespace turbomind {

// Per-layer constants of the cache from `lmdeploy lite calibrate`, by model layer. Each list may be
// empty.
struct KvCalibration {
  std::vector<std::vector<float>> k_mean;    // [kv_heads * head_dim], after RoPE
  std::vector<std::vector<float>> k_scales;  // [kv_heads] scale of FP8 and NVFP4
  std::vector<std::vector<float>> v_scales;
};

// Quality options in addition to the KV format (docs/kv_cache.md, "Presets"). All off: `raw`.
struct KvQuality {
  bool rotate_k = false;       // or the latents, in a model that has them
  bool search_scales = false;  // FP4
  PrecisionWindowTokens window16;
  KvCacheMode window_format = KvCacheMode::kNone;  // as KvCacheConfig
  bool k_offset = false;
  KvCalibration calibration = {};
};

inline constexpr int kMaxDraftTokens = 32;

// A smaller model with the same vocabulary, whose tokens the engine verifies.
struct DraftModel {
  ModelConfig model;
  std::shared_ptr<const Weights> weights;  // null for a memory plan; does not outlive its device
};

struct EngineConfig {
  KvCacheMode kv_format = KvCacheMode::kNone;
  // KV formats of K and V by layer; empty means kv_format for all layers.
  std::vector<block::Config::LayerFormats> kv_layers;
  KvQuality kv_quality;
  int max_batch_size = 32;
  int session_len = 2048;
  int max_prefill_token_num = 8192;  // new tokens of one step, decode included
  int cache_block_seq_len = 64;
  // In (0, 1): share of the memory that is free after the weights are loaded. >= 1: number of
  // blocks.
  double cache_max_entry_count = 0.8;
  bool enable_prefix_caching = true;
  // Checkpoints of recurrent layers in the prefix cache. The share is that of the cache's bytes
  // without working states. The interval is in blocks of a prompt; 0: as many as a quarter of the
  // checkpoints allows for a prompt of session_len; -1: none.
  double state_checkpoint_share = 0.5;
  int state_checkpoint_interval = 0;
  StateFormat state_checkpoint_format = StateFormat::kF32;
  // Runs CheckIntegrity, scale bytes included, after every step (tests). Debug builds run it
  // without scale bytes when the engine becomes idle.
  bool check_integrity = false;
  // Longest draft of a sequence in a step; 0: no speculation.
  int num_draft_tokens = 0;
  // Computes drafts. Null: they are copied from earlier places of the tokens (NgramDrafter).
  std::shared_ptr<const DraftModel> draft_model = nullptr;
  // Receives the changes of the prefix cache, unless it is null.
  std::shared_ptr<PrefixEvents> prefix_events = nullptr;
  bool collect_kv_statistics = false;  // for calibration; costs about as much as writing K and V

  // Those that Python sees under their names. The bindings define the other five.
  using Members =
      MemberList<&EngineConfig::max_batch_size, &EngineConfig::session_len,
                 &EngineConfig::max_prefill_token_num, &EngineConfig::cache_block_seq_len,
                 &EngineConfig::cache_max_entry_count, &EngineConfig::enable_prefix_caching,
                 &EngineConfig::state_checkpoint_share, &EngineConfig::state_checkpoint_interval,
                 &EngineConfig::num_draft_tokens, &EngineConfig::prefix_events,
                 &EngineConfig::check_integrity, &EngineConfig::collect_kv_statistics>;
};

// Returns the config without the weights of the draft model, which only the engine's state holds.
inline EngineConfig WithoutDraftWeights(EngineConfig config) {
  if (config.draft_model != nullptr) {
    config.draft_model = std::make_shared<DraftModel>(config.draft_model->model, nullptr);
  }
  return config;
}

}  // namespace turbomind
