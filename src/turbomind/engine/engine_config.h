#pragma once

#include <vector>

#include "turbomind/kv/kv_cache_mode.h"
#include "turbomind/kv/layout.h"
#include "turbomind/kv/precision_window.h"

namespace turbomind {

// Constants of the cache, from `lmdeploy lite calibrate`, by model layer. Each may be empty.
struct KvCalibration {
  std::vector<std::vector<float>> k_mean;    // [kv_heads * head_dim], after RoPE
  std::vector<std::vector<float>> k_scales;  // [kv_heads] g of FP8 and NVFP4
  std::vector<std::vector<float>> v_scales;
};

// What is done beside the format (docs/kv_cache.md, "Quality"). All off: `raw`.
struct KvQuality {
  bool rotate_k = false;
  bool search_scales = false;  // FP4
  PrecisionWindowTokens window16;
  KvCalibration calibration = {};
};

struct EngineConfig {
  KvCacheMode kv_format = KvCacheMode::kNone;
  // K and V of each layer in formats of their own; empty: kv_format for all.
  std::vector<block::Config::LayerFormats> kv_layers;
  KvQuality kv_quality;
  int max_batch_size = 32;
  int session_len = 2048;
  int max_prefill_token_num = 8192;  // new tokens of one step, decode included
  int cache_block_seq_len = 64;
  // In (0, 1): share of the memory free after the weights; >= 1: number of blocks.
  double cache_max_entry_count = 0.8;
  bool enable_prefix_caching = true;
  // CheckIntegrity, scale bytes included, after every step (tests). Debug builds run it without
  // these bytes when they become idle.
  bool check_integrity = false;
  bool collect_kv_statistics = false;  // for calibration; costs about as much as writing K and V
};

}  // namespace turbomind
