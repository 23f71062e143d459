#pragma once

// ④⑤ What an engine holds while it runs: the model, the cache, who owns its blocks, and the steps
// over them.

#include <cstdint>
#include <memory>

#include "turbomind/engine/engine_config.h"
#include "turbomind/engine/memory_plan.h"
#include "turbomind/engine/output_processor.h"
#include "turbomind/engine/scheduler.h"
#include "turbomind/kv/kv_cache.h"
#include "turbomind/kv/sequence_manager.h"
#include "turbomind/model/decoder.h"
#include "turbomind/model/weights.h"
#include "turbomind/ops/device.h"

namespace turbomind {

// Made by whoever makes the engine, then the engine thread's alone. With it goes all memory of the
// model and the cache.
struct EngineState {
  // `plan`: of the same arguments. Throws InvalidArgument for a wrong calibration, a cache that the
  // device has no kernels for, or statistics that it cannot collect; std::bad_alloc.
  EngineState(const ModelConfig& model, const EngineConfig& config, const MemoryPlan& plan,
              int64_t free_bytes, std::shared_ptr<const Weights> weights,
              std::shared_ptr<Device> target);
  EngineState(const EngineState&) = delete;
  EngineState& operator=(const EngineState&) = delete;

  const std::shared_ptr<Device> device;
  const KvCacheConfig cache_config;
  KvCache cache;
  SequenceManager manager;
  Scheduler scheduler;
  const std::unique_ptr<KvStatistics> statistics;  // null: not collected
  Decoder decoder;
  OutputProcessor generation;
};

}  // namespace turbomind
