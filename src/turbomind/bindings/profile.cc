// Binds the profiling device.

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "turbomind/bindings/bindings.h"
#include "turbomind/bindings/enums.h"
#include "turbomind/profile/profiling_device.h"

namespace py = pybind11;

namespace turbomind {
namespace {

constexpr EnumName<OpKind> kOpKinds[] = {{OpKind::kEmbed, "embed"},
                                         {OpKind::kNorm, "norm"},
                                         {OpKind::kLinear, "linear"},
                                         {OpKind::kGroupedLinear, "grouped_linear"},
                                         {OpKind::kActivation, "activation"},
                                         {OpKind::kRouteExperts, "route_experts"},
                                         {OpKind::kCombineExperts, "combine_experts"},
                                         {OpKind::kWriteKv, "process_kv"},
                                         {OpKind::kQuantizeBlocks, "quantize_blocks"},
                                         {OpKind::kFlattenKv, "flatten_kv"},
                                         {OpKind::kPrefillAttention, "prefill_attention"},
                                         {OpKind::kDecodeAttention, "decode_attention"},
                                         {OpKind::kShortConvolution, "short_convolution"},
                                         {OpKind::kGatedDelta, "gated_delta"},
                                         {OpKind::kSelectiveScan, "selective_scan"},
                                         {OpKind::kCopy, "copy"},
                                         {OpKind::kEngine, "engine"},
                                         {OpKind::kBetweenSteps, "between_steps"}};
constexpr EnumName<StepPhase> kPhases[] = {{StepPhase::kOther, "other"},
                                           {StepPhase::kPrefill, "prefill"},
                                           {StepPhase::kDecode, "decode"},
                                           {StepPhase::kMixed, "mixed"}};

std::vector<KvCacheMode> KvFormats(const OpKey& key) {
  return TouchesCache(key.kind) ? std::vector{key.k_format, key.v_format}
                                : std::vector<KvCacheMode>();
}

void DefRecords(py::module_& m) {
  py::class_<OpRecord>(m, "OpRecord")
      .def_property_readonly("kind",
                             [](const OpRecord& self) { return Name(kOpKinds, self.key.kind); })
      .def_property_readonly("rows", [](const OpRecord& self) { return self.key.rows; })
      .def_property_readonly("cols", [](const OpRecord& self) { return self.key.cols; })
      .def_property_readonly("format",
                             [](const OpRecord& self) {
                               return self.key.rows > 0 ? Name(kMatrixFormats, self.key.format)
                                                        : std::string();
                             })
      .def_property_readonly("kv_formats", [](const OpRecord& self) { return KvFormats(self.key); })
      .def_readonly("calls", &OpRecord::calls)
      .def_readonly("nanoseconds", &OpRecord::nanoseconds)
      .def_property_readonly("weight_bytes",
                             [](const OpRecord& self) { return self.cost.weight_bytes; })
      .def_property_readonly("kv_bytes", [](const OpRecord& self) { return self.cost.kv_bytes; })
      .def_property_readonly("activation_bytes",
                             [](const OpRecord& self) { return self.cost.activation_bytes; });
  py::class_<PhaseProfile>(m, "PhaseProfile")
      .def_property_readonly("phase",
                             [](const PhaseProfile& self) { return Name(kPhases, self.phase); })
      .def_readonly("num_steps", &PhaseProfile::num_steps)
      .def_readonly("num_tokens", &PhaseProfile::num_tokens)
      .def_readonly("nanoseconds", &PhaseProfile::nanoseconds)
      .def_readonly("records", &PhaseProfile::records);
}

}  // namespace

void DefProfile(py::module_& m) {
  using release = py::call_guard<py::gil_scoped_release>;
  DefRecords(m);
  py::class_<ProfilingDevice, Device, std::shared_ptr<ProfilingDevice>>(m, "ProfilingDevice")
      .def("profile", &ProfilingDevice::profile, release())
      .def("clear", &ProfilingDevice::Clear, release());
  m.def(
      "make_profiling_device",
      [](std::shared_ptr<Device> device) {
        return std::make_shared<ProfilingDevice>(std::move(device));
      },
      py::arg("device"));
}

}  // namespace turbomind
