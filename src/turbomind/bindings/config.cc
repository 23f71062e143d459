// Binds the configurations of a model and of an engine.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "turbomind/bindings/bindings.h"
#include "turbomind/bindings/enums.h"
#include "turbomind/bindings/fields.h"

namespace py = pybind11;

namespace turbomind {
namespace {

constexpr EnumName<Activation> kActivations[] = {{Activation::kSilu, "silu"},
                                                 {Activation::kGeluTanh, "gelu_tanh"},
                                                 {Activation::kClampedSwiglu, "clamped_swiglu"},
                                                 {Activation::kGelu, "gelu"},
                                                 {Activation::kRelu2, "relu2"}};
constexpr EnumName<RopeKind> kRopeKinds[] = {
    {RopeKind::kNone, "none"},        {RopeKind::kDefault, "default"},
    {RopeKind::kLinear, "linear"},    {RopeKind::kDynamic, "dynamic"},
    {RopeKind::kLlama3, "llama3"},    {RopeKind::kYarn, "yarn"},
    {RopeKind::kLongRope, "longrope"}};

constexpr EnumName<PrefixEventKind> kPrefixEventKinds[] = {{PrefixEventKind::kStored, "stored"},
                                                           {PrefixEventKind::kRemoved, "removed"},
                                                           {PrefixEventKind::kCleared, "cleared"}};

void DefPrefixEvents(py::module_& m) {
  py::class_<PrefixEvent> event(m, "PrefixEvent");
  event.def_readonly("blocks", &PrefixEvent::blocks)
      .def_readonly("parent", &PrefixEvent::parent)
      .def_readonly("tokens", &PrefixEvent::tokens)
      .def_property_readonly("salt", [](const PrefixEvent& self) {
        return py::bytes(reinterpret_cast<const char*>(self.salt.data()), sizeof(CacheSalt));
      });
  DefEnum(event, "kind", &PrefixEvent::kind, kPrefixEventKinds);
  py::class_<PrefixEvents, std::shared_ptr<PrefixEvents>>(m, "PrefixEvents")
      .def(py::init<>())
      .def("take", &PrefixEvents::Take, py::arg("timeout_ms"),
           py::call_guard<py::gil_scoped_release>());
}

void DefModelParts(py::module_& m) {
  py::class_<RopeConfig> rope(m, "RopeConfig");
  DefEnum(rope, "kind", &RopeConfig::kind, kRopeKinds);
  rope.def_readwrite("theta", &RopeConfig::theta)
      .def_readwrite("dim", &RopeConfig::dim)
      .def_readwrite("factor", &RopeConfig::factor)
      .def_readwrite("original_max_position", &RopeConfig::original_max_position)
      .def_readwrite("low_freq_factor", &RopeConfig::low_freq_factor)
      .def_readwrite("high_freq_factor", &RopeConfig::high_freq_factor)
      .def_readwrite("beta_fast", &RopeConfig::beta_fast)
      .def_readwrite("beta_slow", &RopeConfig::beta_slow)
      .def_readwrite("attention_factor", &RopeConfig::attention_factor)
      .def_readwrite("truncate", &RopeConfig::truncate)
      .def_readwrite("freq_factors", &RopeConfig::freq_factors)
      .def_readwrite("long_factors", &RopeConfig::long_factors);
  DefFields(rope);

  py::class_<MoeConfig> moe(m, "MoeConfig");
  moe.def_readwrite("num_experts", &MoeConfig::num_experts)
      .def_readwrite("top_k", &MoeConfig::top_k)
      .def_readwrite("intermediate_size", &MoeConfig::intermediate_size)
      .def_readwrite("shared_intermediate_size", &MoeConfig::shared_intermediate_size)
      .def_readwrite("normalize", &MoeConfig::normalize)
      .def_readwrite("sigmoid", &MoeConfig::sigmoid)
      .def_readwrite("shared_gate", &MoeConfig::shared_gate)
      .def_readwrite("weigh_inputs", &MoeConfig::weigh_inputs)
      .def_readwrite("num_groups", &MoeConfig::num_groups)
      .def_readwrite("top_groups", &MoeConfig::top_groups)
      .def_readwrite("scale", &MoeConfig::scale)
      .def_readwrite("layers", &MoeConfig::layers);
  DefFields(moe);

  py::class_<NormConfig> norm(m, "NormConfig");
  norm.def_readwrite("centered", &NormConfig::centered)
      .def_readwrite("inputs", &NormConfig::inputs)
      .def_readwrite("outputs", &NormConfig::outputs)
      .def_readwrite("qk_all_heads", &NormConfig::qk_all_heads)
      .def_readwrite("qk_after_rope", &NormConfig::qk_after_rope)
      .def_readwrite("qk_unit", &NormConfig::qk_unit);
  DefFields(norm);

  py::class_<QueryScaling> scaling(m, "QueryScaling");
  scaling.def_readwrite("beta", &QueryScaling::beta)
      .def_readwrite("length", &QueryScaling::length)
      .def_readwrite("offset", &QueryScaling::offset);
  DefFields(scaling);
}

}  // namespace

void DefConfigs(py::module_& m) {
  DefPrefixEvents(m);
  DefModelParts(m);
  py::class_<ModelConfig> model(m, "ModelConfig");
  model.def_readwrite("num_layers", &ModelConfig::num_layers)
      .def_readwrite("hidden_size", &ModelConfig::hidden_size)
      .def_readwrite("intermediate_size", &ModelConfig::intermediate_size)
      .def_readwrite("num_heads", &ModelConfig::num_heads)
      .def_readwrite("num_kv_heads", &ModelConfig::num_kv_heads)
      .def_readwrite("head_dim", &ModelConfig::head_dim)
      .def_readwrite("vocab_size", &ModelConfig::vocab_size)
      .def_readwrite("max_position", &ModelConfig::max_position)
      .def_readwrite("norm_eps", &ModelConfig::norm_eps)
      .def_readwrite("softmax_scale", &ModelConfig::softmax_scale)
      .def_readwrite("swiglu_limit", &ModelConfig::swiglu_limit)
      .def_readwrite("moe", &ModelConfig::moe)
      .def_readwrite("attention_cap", &ModelConfig::attention_cap)
      .def_readwrite("embedding_scale", &ModelConfig::embedding_scale)
      .def_readwrite("residual_scale", &ModelConfig::residual_scale)
      .def_readwrite("logit_scale", &ModelConfig::logit_scale)
      .def_readwrite("logit_cap", &ModelConfig::logit_cap)
      .def_readwrite("parallel", &ModelConfig::parallel)
      .def_readwrite("gated", &ModelConfig::gated)
      .def_readwrite("norm", &ModelConfig::norm)
      .def_readwrite("query_scaling", &ModelConfig::query_scaling)
      .def_readwrite("query_scaling_without_rope", &ModelConfig::query_scaling_without_rope)
      .def_readwrite("ropes", &ModelConfig::ropes)
      .def_readwrite("layer_ropes", &ModelConfig::layer_ropes)
      .def_readwrite("k_bias", &ModelConfig::k_bias)
      .def_readwrite("windows", &ModelConfig::windows)
      .def("validate", &ModelConfig::Validate);
  m.def("short_rope_length", &ShortRopeLength, py::arg("model"), py::arg("session_len"));
  DefEnum(model, "activation", &ModelConfig::activation, kActivations);
  DefEnum(model, "dtype", &ModelConfig::dtype, kDataTypes);
  DefFields(model);

  py::class_<EngineConfig> config(m, "EngineConfig");
  config.def(py::init<>())
      .def_readwrite("max_batch_size", &EngineConfig::max_batch_size)
      .def_readwrite("session_len", &EngineConfig::session_len)
      .def_readwrite("max_prefill_token_num", &EngineConfig::max_prefill_token_num)
      .def_readwrite("cache_block_seq_len", &EngineConfig::cache_block_seq_len)
      .def_readwrite("cache_max_entry_count", &EngineConfig::cache_max_entry_count)
      .def_readwrite("enable_prefix_caching", &EngineConfig::enable_prefix_caching)
      .def_readwrite("num_draft_tokens", &EngineConfig::num_draft_tokens)
      .def(
          "set_draft_model",
          [](EngineConfig& self, const ModelConfig& draft, std::shared_ptr<Weights> weights) {
            self.draft_model = std::make_shared<DraftModel>(draft, std::move(weights));
          },
          py::arg("model"), py::arg("weights"))
      .def_readwrite("prefix_events", &EngineConfig::prefix_events)
      .def_readwrite("check_integrity", &EngineConfig::check_integrity);
  DefKvOptions(config);
}

}  // namespace turbomind
