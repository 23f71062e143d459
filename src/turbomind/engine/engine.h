#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "turbomind/engine/engine_config.h"
#include "turbomind/engine/engine_stats.h"
#include "turbomind/engine/memory_plan.h"
#include "turbomind/engine/request.h"
#include "turbomind/model/kv_statistics.h"
#include "turbomind/model/model_config.h"
#include "turbomind/model/weights.h"
#include "turbomind/ops/device.h"

namespace turbomind {

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
