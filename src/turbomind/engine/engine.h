#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "turbomind/engine/request.h"
#include "turbomind/kv/hot_rule.h"
#include "turbomind/kv/kv_cache_mode.h"
#include "turbomind/kv/layout.h"
#include "turbomind/model/kv_statistics.h"
#include "turbomind/model/model_config.h"
#include "turbomind/model/weights.h"
#include "turbomind/ops/device.h"

namespace turbomind {

// Constants of the cache, from `lmdeploy lite calibrate`, by model layer. Each may be empty.
struct KvCalibration {
  std::vector<std::vector<float>> k_mean;     // [kv_heads * head_dim], after RoPE
  std::vector<std::vector<float>> k_factors;  // [kv_heads] g of FP8 and NVFP4
  std::vector<std::vector<float>> v_factors;
};

// What is done beside the format (docs/kv_cache.md, "Quality"). All off: `raw`.
struct KvQuality {
  bool rotate_k = false;
  bool search_scales = false;  // FP4
  HotTokens hot;
  KvCalibration calibration = {};
};

struct EngineConfig {
  KvCacheMode kv_mode = KvCacheMode::kNone;
  // K and V of each layer in formats of their own; empty: kv_mode for all.
  std::vector<block::Config::LayerModes> kv_layers;
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

// What the pools take. All layer groups together.
struct MemoryPlan {
  int64_t num_blocks = 0;      // cold ones of the full-attention group, or the largest group
  int64_t reserved_bytes = 0;  // address space of data and scale pools
  // Of blocks ever used: those never used are handed out last (kv/block_manager.h), so that this
  // is what the pools add to the resident set, up to pages.
  int64_t touched_bytes = 0;
  // The decoder's activations of a full step: beside the pools, touched as far as steps fill them.
  int64_t scratch_bytes = 0;
  double bytes_per_token = 0;          // cold blocks; metadata and scales included
  int64_t hot_bytes_per_sequence = 0;  // of a long sequence, between steps
  double bytes_per_token_none = 0;     // the same model with mode none
  int64_t max_tokens = 0;              // tokens that fit, of sequences of session_len
  int64_t max_sequence_tokens = 0;     // the longest sequence, at most session_len, that fits
  // One sequence of session_len, whole blocks, hot ones included; and with mode none.
  int64_t session_bytes = 0;
  int64_t session_bytes_none = 0;
};

// Bytes of one sequence of `num_tokens` between steps: whole blocks of every pool, without cached
// copies.
int64_t SequenceBytes(const ModelConfig& model, const EngineConfig& config, int64_t num_tokens);

// Computed before anything is allocated. `free_bytes` is the memory that weights leave.
// Throws InvalidArgument when not even one sequence of one block fits.
MemoryPlan PlanMemory(const ModelConfig& model, const EngineConfig& config, int64_t free_bytes,
                      bool is_cpu);

// Throws InvalidArgument where the device has no kernels for the model's cache, as Engine does, but
// before there are weights.
void RequireKernels(const ModelConfig& model, const EngineConfig& config, const Device& device);

struct EngineStats {
  int num_waiting = 0;
  int num_running = 0;
  int64_t blocks_total = 0;  // cold pools
  int64_t blocks_free = 0;
  int64_t blocks_cached = 0;
  int64_t blocks_active = 0;
  int64_t hot_blocks_total = 0;
  int64_t hot_blocks_free = 0;
  int64_t hot_blocks_cached = 0;  // evictable 16-bit copies
  int64_t hot_blocks_active = 0;
  int64_t prefix_queried_tokens = 0;
  int64_t prefix_hit_tokens = 0;
  int64_t prefix_cut_tokens = 0;  // found cold, not used for want of a 16-bit copy
  int64_t num_preemptions = 0;
  int64_t num_steps = 0;
  int64_t prompt_tokens = 0;
  int64_t generated_tokens = 0;
  int64_t num_nonfinite = 0;  // NaN and infinities met when K and V were quantised
};

// The engine: one thread that owns the scheduler, kv/ and the device.
// Submit, Cancel, WaitOutputs and stats may be called from any thread.
class Engine {
 public:
  // Starts the engine thread, which alone uses `device` from then on. Others may read `weights`.
  Engine(ModelConfig model, EngineConfig config, std::shared_ptr<const Weights> weights,
         std::shared_ptr<Device> device, int64_t free_bytes);
  ~Engine();  // Stop()
  // Cancels what runs, lets its last outputs be collected, joins the engine thread and frees the
  // memory of model and cache (weights that others hold stay theirs). Submit throws from then on;
  // stats and plan stay readable. May be called twice, and while others wait for outputs.
  void Stop();

  // Throws InvalidArgument for a request that can never fit (with the numbers), token ids outside
  // the vocabulary, or an empty prompt; InternalError when the engine has failed.
  void Submit(const std::shared_ptr<Request>& request);
  // No effect on an unknown or finished id. The request still gets a last output.
  void Cancel(uint64_t request_id);
  // Blocks until there are outputs, the timeout passes (empty result) or the engine stops. Lets
  // go of requests that have ended: where the caller has not kept one, it is destroyed here.
  std::vector<RequestOutput> WaitOutputs(int timeout_ms);

  EngineStats stats() const;
  MemoryPlan memory_plan() const;
  bool healthy() const;         // false from the moment the engine loop fails
  std::string failure() const;  // why
  // Drops all cached prefixes. Sequences that run are not touched.
  void ClearPrefixCache();
  // What has been stored so far. Throws InvalidArgument unless collect_kv_statistics is set.
  KvStatistics kv_statistics();
  // Throws InternalError naming a broken invariant of the pools. For tests and debug builds.
  void CheckIntegrity();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace turbomind
