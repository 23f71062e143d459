// Binds the options and statistics of the KV cache.

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "turbomind/bindings/bindings.h"
#include "turbomind/bindings/enums.h"
#include "turbomind/bindings/fields.h"

namespace py = pybind11;

template <>
struct py::detail::type_caster<turbomind::EngineStats::Clipped>
    : PairCaster<turbomind::EngineStats::Clipped, &turbomind::EngineStats::Clipped::window,
                 &turbomind::EngineStats::Clipped::num_values> {};

namespace turbomind {
namespace {

constexpr EnumName<StateFormat> kStateFormats[] = {
    {StateFormat::kF32, "f32"}, {StateFormat::kBf16, "bf16"}, {StateFormat::kInt8, "int8"}};

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Pairs = std::vector<std::pair<KvCacheMode, KvCacheMode>>;

Pairs GetLayers(const EngineConfig& config) {
  Pairs pairs;
  for (const auto& layer : config.kv_layers) {
    pairs.emplace_back(layer.k, layer.v);
  }
  return pairs;
}

void SetLayers(EngineConfig& config, const std::vector<std::pair<py::object, py::object>>& pairs) {
  std::vector<block::Config::LayerFormats> layers;
  for (const auto& [k, v] : pairs) {
    layers.push_back({ToKvFormat("kv_layers", k), ToKvFormat("kv_layers", v)});
  }
  config.kv_layers = std::move(layers);
}

// Splits an array with `ndim` dimensions by its first one, the layer.
std::vector<std::vector<float>> Layers(const char* name, const py::object& object, int ndim) {
  std::vector<std::vector<float>> layers;
  if (object.is_none()) {
    return layers;
  }
  const Floats array = Floats::ensure(object);
  if (!array) {
    PyErr_Clear();
    throw InvalidArgument(name, "must be an array of numbers.");
  }
  if (array.ndim() != ndim) {
    throw InvalidArgument(name, "has " + std::to_string(array.ndim()) +
                                    " dimensions, but must have " + std::to_string(ndim));
  }
  const py::ssize_t num_layers = array.shape(0);
  const py::ssize_t row = num_layers > 0 ? array.size() / num_layers : 0;
  for (py::ssize_t i = 0; i < num_layers; ++i) {
    layers.emplace_back(array.data() + i * row, array.data() + (i + 1) * row);
  }
  return layers;
}

template <class T>
py::array_t<T> ToArray(const std::vector<T>& values, const std::vector<py::ssize_t>& shape) {
  return py::array_t<T>(shape, values.data());
}

}  // namespace

void DefKvOptions(py::class_<EngineConfig>& config) {
  DefEnum(config, "state_checkpoint_format", &EngineConfig::state_checkpoint_format, kStateFormats);
  DefMembers<KvQuality, 3>(
      config, [](EngineConfig& self) -> KvQuality& { return self.kv_quality; },
      MemberList<&KvQuality::rotate_k, &KvQuality::search_scales, &KvQuality::k_offset>(), "kv_");
  DefMembers<PrecisionWindowTokens>(
      config, [](EngineConfig& self) -> PrecisionWindowTokens& { return self.kv_quality.window16; },
      MemberList<&PrecisionWindowTokens::sink_tokens, &PrecisionWindowTokens::recent_tokens>(),
      "kv_");
  config
      .def_property(
          "kv_format", [](const EngineConfig& self) { return self.kv_format; },
          [](EngineConfig& self, const py::object& value) {
            self.kv_format = ToKvFormat("kv_format", value);
          })
      .def_property("kv_layers", &GetLayers, &SetLayers)
      .def_property(
          "kv_window_format",
          [](const EngineConfig& self) { return self.kv_quality.window_format; },
          [](EngineConfig& self, const py::object& value) {
            self.kv_quality.window_format = ToKvFormat("kv_window_format", value);
          })
      .def(
          "set_kv_calibration",
          [](EngineConfig& self, const py::object& k_mean, const py::object& k_scales,
             const py::object& v_scales) {
            self.kv_quality.calibration = {.k_mean = Layers("k_mean", k_mean, 3),
                                           .k_scales = Layers("k_scales", k_scales, 2),
                                           .v_scales = Layers("v_scales", v_scales, 2)};
          },
          py::arg("k_mean"), py::arg("k_scales"), py::arg("v_scales"));
}

void DefKv(py::module_& m) {
  py::class_<MemoryPlan> plan(m, "MemoryPlan");
  DefMembers<MemoryPlan, 1>(
      plan, MemberList<&MemoryPlan::num_blocks, &MemoryPlan::reserved_bytes,
                       &MemoryPlan::draft_cache_bytes, &MemoryPlan::draft_scratch_bytes,
                       &MemoryPlan::touched_bytes, &MemoryPlan::scratch_bytes,
                       &MemoryPlan::bytes_per_token, &MemoryPlan::bytes_per_token_none,
                       &MemoryPlan::window16_bytes_per_sequence, &MemoryPlan::session_bytes,
                       &MemoryPlan::session_bytes_none, &MemoryPlan::max_tokens,
                       &MemoryPlan::max_sequence_tokens, &MemoryPlan::state_bytes_per_sequence,
                       &MemoryPlan::num_checkpoints, &MemoryPlan::checkpoint_bytes,
                       &MemoryPlan::checkpoint_interval>());
  DefEnum(plan, "checkpoint_format", &MemoryPlan::checkpoint_format, kStateFormats);
  DefFields(plan);
  py::class_<EngineStats> stats(m, "EngineStats");
  DefMembers<EngineStats>(stats, EngineStats::Members());
  DefFields(stats);
  m.def("sequence_bytes", &SequenceBytes, py::arg("model"), py::arg("config"),
        py::arg("num_tokens"));
}

py::dict ToDict(const KvStatistics& statistics) {
  const py::ssize_t layers = statistics.num_layers();
  const py::ssize_t heads = statistics.kv_heads();
  const py::ssize_t channels = statistics.head_dim();
  py::dict result;
  result["tokens"] = statistics.num_tokens();
  result["k_sum"] = ToArray(statistics.k_sum(), {layers, heads, channels});
  result["k_square_sum"] = ToArray(statistics.k_square_sum(), {layers, heads, channels});
  result["k_amax"] = ToArray(statistics.k().amax, {layers, heads});
  result["v_amax"] = ToArray(statistics.v().amax, {layers, heads});
  result["k_histogram"] = ToArray(statistics.k().histogram, {layers, heads, KvStatistics::kBins});
  result["v_histogram"] = ToArray(statistics.v().histogram, {layers, heads, KvStatistics::kBins});
  return result;
}

}  // namespace turbomind
