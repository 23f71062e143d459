#include "turbomind/engine/engine_state.h"

#include <string>
#include <utility>
#include <vector>

#include "turbomind/core/check.h"

namespace turbomind {
namespace {

void SetCalibration(const KvCalibration& calibration, int num_layers, KvCache& cache) {
  const auto per_layer = [num_layers](const char* what, const auto& values) {
    if (!values.empty() && values.size() != static_cast<size_t>(num_layers)) {
      throw InvalidArgument(std::string("The KV calibration has ") + what + " of " +
                            std::to_string(values.size()) + " layers, but the model has " +
                            std::to_string(num_layers));
    }
    return !values.empty();
  };
  const bool has_mean = per_layer("K means", calibration.k_mean);
  const bool has_scales[] = {per_layer("K scales", calibration.k_scales),
                             per_layer("V scales", calibration.v_scales)};
  for (int i = 0; i < num_layers; ++i) {
    if (cache.GroupOf(i) < 0) {
      continue;  // no attention
    }
    const auto layer = static_cast<size_t>(i);
    if (has_mean) {
      cache.SetKMean(i, calibration.k_mean[layer]);
    }
    for (const KvSide side : {KvSide::kK, KvSide::kV}) {
      const auto& scales = side == KvSide::kK ? calibration.k_scales : calibration.v_scales;
      const int s = static_cast<int>(side);
      if (has_scales[s] && HasGlobalScale(cache.LayerView(i).format[s])) {
        cache.SetGlobalScales(i, side, scales[layer]);
      }
    }
  }
}

KvCacheConfig SupportedCacheConfig(const ModelConfig& model, const EngineConfig& config,
                                   const Device& device) {
  if (model.attention_cap > 0.f && !config.kv_quality.calibration.k_mean.empty()) {
    throw InvalidArgument(
        "The KV calibration subtracts means of K, but the model caps its attention scores. "
        "Calibrate again; such a calibration has no means.");
  }
  RequireKernels(model, config, device);
  return CacheConfig(model, config);
}

std::vector<LayerCache> LayerCaches(const ModelConfig& model, const EngineConfig& config,
                                    KvCache& cache) {
  SetCalibration(config.kv_quality.calibration, model.num_layers, cache);
  return MakeLayerCaches(model, cache);
}

std::unique_ptr<DraftDecoder> MakeDrafts(const ModelConfig& model, const EngineConfig& config,
                                         int64_t free_bytes, Device& device) {
  if (config.draft_model == nullptr || config.num_draft_tokens == 0) {
    return nullptr;
  }
  return std::make_unique<DraftDecoder>(
      config, model.vocab_size, PlanDraftBlocks(model, config, free_bytes, device.capability()),
      device);
}

std::unique_ptr<KvStatistics> MakeStatistics(const ModelConfig& model, const EngineConfig& config,
                                             const Device& device) {
  if (!config.collect_kv_statistics) {
    return nullptr;
  }
  if (model.latent.exists()) {
    throw InvalidArgument("collect_kv_statistics",
                          "is not supported for models with latents. Set it to False.");
  }
  if (!device.capability().collects_kv_statistics) {
    throw InvalidArgument("collect_kv_statistics",
                          "is not supported on this device. Set it to False.");
  }
  if (!model.HasOneKvShape()) {
    throw InvalidArgument("collect_kv_statistics",
                          "is not supported for a model whose layers differ in head_dim or KV "
                          "heads. Set it to False.");
  }
  return std::make_unique<KvStatistics>(model.num_layers, model.num_kv_heads, model.head_dim);
}

}  // namespace

EngineState::EngineState(const ModelConfig& model, const EngineConfig& config,
                         const MemoryPlan& plan, int64_t free_bytes,
                         std::shared_ptr<const Weights> model_weights,
                         std::shared_ptr<Device> target)
    : device(std::move(target)),
      weights(std::move(model_weights)),
      cache_config(SupportedCacheConfig(model, config, *device)),
      cache(*device, cache_config, PlanBlocks(model, config, free_bytes, device->capability())),
      manager(cache, config.enable_prefix_caching, config.prefix_events.get(),
              plan.checkpoint_interval),
      scheduler({config.max_batch_size, StepTokens(config),
                 EstimateStepCost(model, device->capability()), plan.max_sequence_tokens},
                manager, cache.groups()),
      statistics(MakeStatistics(model, config, *device)),
      decoder({.model = model,
               .layers = LayerCaches(model, config, cache),
               .states = cache.states(),
               .checkpoints = cache.checkpoints(),
               .checkpoint_format = config.state_checkpoint_format,
               .rotate_k = config.kv_quality.rotate_k,
               .search_scales = config.kv_quality.search_scales,
               .max_positions = config.session_len + config.num_draft_tokens,
               .limits = PlanStep(config, device->capability()),
               .statistics = statistics.get()},
              weights, *device),
      output_processor(model.vocab_size, plan.max_sequence_tokens,
                       config.max_batch_size * (1 + config.num_draft_tokens), *device),
      drafts(MakeDrafts(model, config, free_bytes, *device)) {}

}  // namespace turbomind
