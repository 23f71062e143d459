// Binds the configurations of a model and of an engine.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "turbomind/bindings/bindings.h"
#include "turbomind/bindings/enums.h"
#include "turbomind/bindings/fields.h"

namespace py = pybind11;

namespace turbomind {
namespace {

constexpr EnumName<RecurrentRule> kRecurrentRules[] = {
    {RecurrentRule::kGatedDelta, "gated_delta"},
    {RecurrentRule::kSelectiveScan, "selective_scan"},
    {RecurrentRule::kShortConvolution, "short_convolution"}};
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
  py::class_<PrefixGroup>(m, "PrefixGroup")
      .def_readonly("index", &PrefixGroup::index)
      .def_readonly("is_state", &PrefixGroup::is_state)
      .def_readonly("window", &PrefixGroup::window);
  py::class_<PrefixEvent> event(m, "PrefixEvent");
  event.def_readonly("blocks", &PrefixEvent::blocks)
      .def_readonly("parent", &PrefixEvent::parent)
      .def_readonly("tokens", &PrefixEvent::tokens)
      .def_readonly("group", &PrefixEvent::group)
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
  DefMembers<RopeConfig, 1>(
      rope, MemberList<&RopeConfig::theta, &RopeConfig::dim, &RopeConfig::factor,
                       &RopeConfig::original_max_position, &RopeConfig::low_freq_factor,
                       &RopeConfig::high_freq_factor, &RopeConfig::beta_fast,
                       &RopeConfig::beta_slow, &RopeConfig::attention_factor, &RopeConfig::truncate,
                       &RopeConfig::freq_factors, &RopeConfig::long_factors>());
  DefFields(rope);

  py::class_<MoeConfig> moe(m, "MoeConfig");
  DefMembers<MoeConfig>(
      moe, MemberList<&MoeConfig::num_experts, &MoeConfig::top_k, &MoeConfig::intermediate_size,
                      &MoeConfig::shared_intermediate_size, &MoeConfig::latent_size,
                      &MoeConfig::normalize, &MoeConfig::sigmoid, &MoeConfig::shared_gate,
                      &MoeConfig::best_of_group, &MoeConfig::weigh_inputs, &MoeConfig::beside_dense,
                      &MoeConfig::num_groups, &MoeConfig::top_groups, &MoeConfig::scale,
                      &MoeConfig::layers>());
  DefFields(moe);

  py::class_<RecurrentConfig> recurrent(m, "RecurrentConfig");
  DefMembers<RecurrentConfig, 1>(
      recurrent, MemberList<&RecurrentConfig::layers, &RecurrentConfig::num_key_heads,
                            &RecurrentConfig::num_value_heads, &RecurrentConfig::key_dim,
                            &RecurrentConfig::value_dim, &RecurrentConfig::width,
                            &RecurrentConfig::kernel, &RecurrentConfig::norm_groups,
                            &RecurrentConfig::gate_first, &RecurrentConfig::tiled>());
  DefEnum(recurrent, "rule", &RecurrentConfig::rule, kRecurrentRules);
  DefFields(recurrent);

  py::class_<LatentConfig> latent(m, "LatentConfig");
  DefMembers<LatentConfig>(
      latent,
      MemberList<&LatentConfig::q_rank, &LatentConfig::nope_dim, &LatentConfig::rope_dim,
                 &LatentConfig::value_dim, &LatentConfig::interleaved, &LatentConfig::norm_eps>());
  DefFields(latent);

  py::class_<NormConfig> norm(m, "NormConfig");
  DefMembers<NormConfig>(
      norm, MemberList<&NormConfig::centered, &NormConfig::inputs, &NormConfig::outputs,
                       &NormConfig::qk_all_heads, &NormConfig::qk_after_rope, &NormConfig::qk_unit,
                       &NormConfig::v_unit>());
  DefFields(norm);

  py::class_<LayerSizes> sizes(m, "LayerSizes");
  DefMembers<LayerSizes>(sizes,
                         MemberList<&LayerSizes::head_dims, &LayerSizes::kv_heads,
                                    &LayerSizes::intermediate_sizes, &LayerSizes::kv_sources>());
  DefFields(sizes);

  py::class_<PerLayerInputs> per_layer(m, "PerLayerInputs");
  DefMembers<PerLayerInputs>(per_layer, MemberList<&PerLayerInputs::size>());
  DefFields(per_layer);

  py::class_<QueryScaling> scaling(m, "QueryScaling");
  DefMembers<QueryScaling>(
      scaling, MemberList<&QueryScaling::beta, &QueryScaling::length, &QueryScaling::offset>());
  DefFields(scaling);
}

}  // namespace

void DefConfigs(py::module_& m) {
  DefPrefixEvents(m);
  DefModelParts(m);
  py::class_<ModelConfig> model(m, "ModelConfig");
  DefMembers<ModelConfig, 2>(
      model,
      MemberList<&ModelConfig::num_layers, &ModelConfig::hidden_size,
                 &ModelConfig::intermediate_size, &ModelConfig::num_heads,
                 &ModelConfig::num_kv_heads, &ModelConfig::head_dim, &ModelConfig::vocab_size,
                 &ModelConfig::max_position, &ModelConfig::norm_eps, &ModelConfig::softmax_scale,
                 &ModelConfig::swiglu_limit, &ModelConfig::moe, &ModelConfig::attention_cap,
                 &ModelConfig::embedding_scale, &ModelConfig::residual_scale,
                 &ModelConfig::logit_scale, &ModelConfig::logit_cap, &ModelConfig::parallel,
                 &ModelConfig::gated, &ModelConfig::attention_gate, &ModelConfig::recurrent,
                 &ModelConfig::latent, &ModelConfig::attention_layers,
                 &ModelConfig::feed_forward_layers, &ModelConfig::norm, &ModelConfig::query_scaling,
                 &ModelConfig::query_scaling_without_rope, &ModelConfig::ropes,
                 &ModelConfig::layer_ropes, &ModelConfig::k_bias, &ModelConfig::windows,
                 &ModelConfig::layer_sizes, &ModelConfig::per_layer, &ModelConfig::layer_scale>());
  model.def("validate", &ModelConfig::Validate)
      .def("num_attention_layers", &ModelConfig::NumAttentionLayers)
      .def("has_one_kv_shape", &ModelConfig::HasOneKvShape)
      .def("kv_size",
           [](const ModelConfig& self, int layer) {
             if (layer < 0 || layer >= self.num_layers) {
               throw InvalidArgument("layer", "is " + std::to_string(layer) +
                                                  ". It must be below " +
                                                  std::to_string(self.num_layers) + ".");
             }
             return self.OwnsKv(layer) ? self.KvSize(layer) : 0;
           })
      .def("state_bytes", [](const ModelConfig& self) { return self.recurrent.StateBytes(); });
  m.def("short_rope_length", &ShortRopeLength, py::arg("model"), py::arg("session_len"));
  DefEnum(model, "activation", &ModelConfig::activation, kActivations);
  DefEnum(model, "dtype", &ModelConfig::dtype, kDataTypes);
  DefFields(model);

  py::class_<EngineConfig> config(m, "EngineConfig");
  DefMembers<EngineConfig, 5>(config, EngineConfig::Members());
  config.def(py::init<>())
      .def(
          "set_draft_model",
          [](EngineConfig& self, const ModelConfig& draft, std::shared_ptr<Weights> weights) {
            self.draft_model = std::make_shared<DraftModel>(draft, std::move(weights));
          },
          py::arg("model"), py::arg("weights"));
  DefKvOptions(config);
}

}  // namespace turbomind
