#pragma once

// ④⑤ The state of a running engine: model, KV cache, block management and steps.

#include <cstdint>
#include <memory>

#include "turbomind/engine/draft_decoder.h"
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

// The thread that constructs the engine constructs this; afterwards only the engine thread uses it.
// Destroying it frees all memory of the model and the cache.
struct EngineState {
  // `plan` must be made from the same arguments. Throws InvalidArgument for a wrong calibration,
  // for a cache that the device has no kernels for, and for statistics that it cannot collect.
  // Throws std::bad_alloc if memory is short.
  EngineState(const ModelConfig& model, const EngineConfig& config, const MemoryPlan& plan,
              int64_t free_bytes, std::shared_ptr<const Weights> model_weights,
              std::shared_ptr<Device> target);
  EngineState(const EngineState&) = delete;
  EngineState& operator=(const EngineState&) = delete;

  const std::shared_ptr<Device> device;
  const std::shared_ptr<const Weights> weights;
  const KvCacheConfig cache_config;
  KvCache cache;
  SequenceManager manager;
  Scheduler scheduler;
  const std::unique_ptr<KvStatistics> statistics;  // null if not collected
  Decoder decoder;
  OutputProcessor output_processor;
  const std::unique_ptr<DraftDecoder> drafts;  // null without a draft model
};

}  // namespace turbomind
