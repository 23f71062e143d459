#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "turbomind/core/device.h"
#include "turbomind/engine/request.h"
#include "turbomind/kv/kv_cache_mode.h"
#include "turbomind/model/model_config.h"
#include "turbomind/model/weights.h"

namespace turbomind {

struct EngineConfig {
  KvCacheMode kv_mode = KvCacheMode::kNone;
  int max_batch_size = 32;
  int session_len = 2048;
  int max_prefill_token_num = 8192;  // new tokens of one step, decode included
  int cache_block_seq_len = 64;
  // In (0, 1): share of the memory free after the weights; >= 1: number of blocks.
  double cache_max_entry_count = 0.8;
  bool enable_prefix_caching = true;
  // Results are bit-equal whatever the batch, chunking, prefix hits, preemption and threads. The
  // arithmetic of the CPU backend always is; a backend that cannot be refuses the flag.
  bool deterministic = false;
  bool check_integrity = false;  // CheckIntegrity after every step (tests)
};

// What the pools take. All layer groups together.
struct MemoryPlan {
  int64_t num_blocks = 0;      // of the full-attention group, or the largest group
  int64_t reserved_bytes = 0;  // address space of data and scale pools
  // Of blocks ever used: those never used are handed out last (kv/block_manager.h), so that this
  // is what the pools add to the resident set, up to pages.
  int64_t touched_bytes = 0;
  double bytes_per_token = 0;       // metadata and scales included
  double bytes_per_token_none = 0;  // the same model with mode none
  int64_t max_tokens = 0;           // tokens that fit
};

// Computed before anything is allocated. `free_bytes` is the memory that weights leave.
// Throws InvalidArgument when not even one sequence of one block fits.
MemoryPlan PlanMemory(const ModelConfig& model, const EngineConfig& config, int64_t free_bytes,
                      bool is_cpu);

struct EngineStats {
  int num_waiting = 0;
  int num_running = 0;
  int64_t blocks_total = 0;
  int64_t blocks_free = 0;
  int64_t blocks_cached = 0;
  int64_t blocks_active = 0;
  int64_t prefix_queried_tokens = 0;
  int64_t prefix_hit_tokens = 0;
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
  // Starts the engine thread. `weights` and `device` are used by that thread alone from then on.
  Engine(ModelConfig model, EngineConfig config, std::shared_ptr<const Weights> weights,
         std::shared_ptr<Device> device, int64_t free_bytes);
  ~Engine();  // Stop()
  // Cancels what runs, lets its last outputs be collected, joins the engine thread. Submit throws
  // from then on. May be called twice, and while others wait for outputs.
  void Stop();

  // Throws InvalidArgument for a request that can never fit (with the numbers), token ids outside
  // the vocabulary, or an empty prompt; InternalError when the engine has failed.
  void Submit(std::shared_ptr<Request> request);
  // No effect on an unknown or finished id. The request still gets a last output.
  void Cancel(uint64_t request_id);
  // Blocks until there are outputs, the timeout passes (empty result) or the engine stops.
  std::vector<RequestOutput> WaitOutputs(int timeout_ms);

  EngineStats stats() const;
  MemoryPlan memory_plan() const;
  bool healthy() const;         // false from the moment the engine loop fails
  std::string failure() const;  // why
  // Drops all cached prefixes. Sequences that run are not touched.
  void ClearPrefixCache();
  // Throws InternalError naming a broken invariant of the pools. For tests and debug builds.
  void CheckIntegrity();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace turbomind
