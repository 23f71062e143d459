#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "turbomind/engine/engine_config.h"
#include "turbomind/engine/engine_stats.h"
#include "turbomind/engine/memory_plan.h"
#include "turbomind/engine/request.h"
#include "turbomind/kv/block_copies.h"
#include "turbomind/model/kv_statistics.h"
#include "turbomind/model/model_config.h"
#include "turbomind/model/weights.h"
#include "turbomind/ops/device.h"

namespace turbomind {

// The engine: one thread that owns the scheduler, kv/ and the device.
// Any thread may call Submit, Cancel, WaitOutputs and stats.
class Engine {
 public:
  // Starts the engine thread. From then on only that thread may use `device`. Other threads may
  // read `weights`.
  Engine(ModelConfig model, const EngineConfig& config, std::shared_ptr<const Weights> weights,
         std::shared_ptr<Device> device, int64_t free_bytes);
  ~Engine();  // calls Stop()
  // Cancels running requests, joins the engine thread and frees the memory of model and cache. Last
  // outputs can still be collected, and weights that the caller holds stay valid. Afterwards Submit
  // throws; stats and plan stay readable. May be called twice, and while other threads wait for
  // outputs.
  void Stop();

  // Submits a request. Throws InvalidArgument for a request that can never fit (with the numbers),
  // for token ids outside the vocabulary, and for an empty prompt. Throws InternalError if the
  // engine has failed.
  void Submit(const std::shared_ptr<Request>& request);
  // Cancels a request. The request still gets a last output. An unknown or finished id has no
  // effect.
  void Cancel(uint64_t request_id);
  // Waits until there are outputs, the timeout expires (empty result) or the engine stops. Releases
  // requests that have ended: if the caller does not hold one, it is destroyed here.
  std::vector<RequestOutput> WaitOutputs(int timeout_ms);

  EngineStats stats() const;
  MemoryPlan memory_plan() const;
  bool healthy() const;         // false once the engine loop has failed
  std::string failure() const;  // the reason; empty while healthy
  // Drops all cached prefixes. Running sequences are not affected.
  void ClearPrefixCache();
  // Returns how many tokens of a prompt the prefix cache has.
  int64_t CachedTokens(std::span<const int32_t> prompt, const CacheSalt& salt);
  // Returns copies of the blocks of `tokens` from block `first` on, as far as they are cached. They
  // are copied in pieces between steps (prefix_exchange.h). Throws InternalError if the engine is
  // closed.
  std::vector<BlockCopies> ExportPrefix(std::span<const int32_t> tokens, int64_t first,
                                        const CacheSalt& salt);
  // Enters copies into the prefix cache in the same way. SequenceManager::ImportBlocks documents
  // the result and the errors.
  int64_t ImportPrefix(std::span<const int32_t> tokens, int64_t first,
                       std::span<const BlockViews> copies, const CacheSalt& salt);
  // Returns the statistics of everything stored so far. Throws InvalidArgument unless
  // collect_kv_statistics is set.
  KvStatistics kv_statistics();
  // Throws InternalError that names the broken invariant of the pools. For tests and debug builds.
  void CheckIntegrity();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace turbomind
