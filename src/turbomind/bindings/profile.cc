// What Python sees of a profile.

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "turbomind/backend/cpu/cpu_device.h"
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
                                         {OpKind::kProcessKv, "process_kv"},
                                         {OpKind::kQuantiseBlocks, "quantise_blocks"},
                                         {OpKind::kFlattenKv, "flatten_kv"},
                                         {OpKind::kPrefillAttention, "prefill_attention"},
                                         {OpKind::kDecodeAttention, "decode_attention"},
                                         {OpKind::kCopy, "copy"},
                                         {OpKind::kEngine, "engine"},
                                         {OpKind::kBetweenSteps, "between_steps"}};
constexpr EnumName<StepPhase> kPhases[] = {{StepPhase::kOther, "other"},
                                           {StepPhase::kPrefill, "prefill"},
                                           {StepPhase::kDecode, "decode"},
                                           {StepPhase::kMixed, "mixed"}};

// The members of OpKey as properties of what has one.
template <class T>
void DefKey(py::class_<T>& target) {
  target.def_property_readonly("kind", [](const T& self) { return Name(kOpKinds, self.key.kind); })
      .def_property_readonly("rows", [](const T& self) { return self.key.rows; })
      .def_property_readonly("cols", [](const T& self) { return self.key.cols; })
      .def_property_readonly("format",
                             [](const T& self) {
                               return self.key.rows > 0 ? Name(kMatrixFormats, self.key.format)
                                                        : std::string();
                             })
      .def_property_readonly("kv_formats", [](const T& self) {
        return TouchesCache(self.key.kind)
                   ? std::vector{Name(kModes, self.key.k_mode), Name(kModes, self.key.v_mode)}
                   : std::vector<std::string>();
      });
}

void DefRecords(py::module_& m) {
  py::class_<OpRecord> record(m, "OpRecord");
  DefKey(record);
  record.def_readonly("calls", &OpRecord::calls)
      .def_readonly("nanoseconds", &OpRecord::nanoseconds)
      .def_property_readonly("weight_bytes",
                             [](const OpRecord& self) { return self.cost.weight_bytes; })
      .def_property_readonly("kv_bytes", [](const OpRecord& self) { return self.cost.kv_bytes; })
      .def_property_readonly("activation_bytes",
                             [](const OpRecord& self) { return self.cost.activation_bytes; })
      .def_property_readonly("operations",
                             [](const OpRecord& self) { return self.cost.operations; });
  py::class_<OpEvent> event(m, "OpEvent");
  DefKey(event);
  event.def_readonly("step", &OpEvent::step)
      .def_readonly("begin_ns", &OpEvent::begin_ns)
      .def_readonly("end_ns", &OpEvent::end_ns);
  py::class_<PhaseProfile>(m, "PhaseProfile")
      .def_property_readonly("phase",
                             [](const PhaseProfile& self) { return Name(kPhases, self.phase); })
      .def_readonly("num_steps", &PhaseProfile::num_steps)
      .def_readonly("num_tokens", &PhaseProfile::num_tokens)
      .def_readonly("nanoseconds", &PhaseProfile::nanoseconds)
      .def_readonly("records", &PhaseProfile::records);
  py::class_<Profile>(m, "Profile")
      .def_readonly("phases", &Profile::phases)
      .def_readonly("events", &Profile::events)
      .def_readonly("num_dropped_events", &Profile::num_dropped_events);
}

void DefCeilings(py::module_& m) {
  py::class_<ReadCeiling>(m, "ReadCeiling")
      .def_readonly("bytes_per_s", &ReadCeiling::bytes_per_s)
      .def_readonly("working_set", &ReadCeiling::working_set);
  py::class_<CpuCeilings>(m, "CpuCeilings")
      .def_readonly("isa", &CpuCeilings::isa)
      .def_readonly("num_threads", &CpuCeilings::num_threads)
      .def_property_readonly("l2_bytes",
                             [](const CpuCeilings& self) { return self.caches.l2_bytes; })
      .def_property_readonly(
          "l3_bytes",
          [](const CpuCeilings& self) { return self.caches.l3_bytes * self.caches.num_l3; })
      .def_readonly("memory", &CpuCeilings::memory)
      .def_readonly("l3", &CpuCeilings::l3)
      .def_readonly("l2", &CpuCeilings::l2)
      .def_readonly("int8_ops_per_s", &CpuCeilings::int8_ops_per_s)
      .def_readonly("bf16_ops_per_s", &CpuCeilings::bf16_ops_per_s)
      .def_readonly("fp32_ops_per_s", &CpuCeilings::fp32_ops_per_s)
      .def_readonly("tile_int8_ops_per_s", &CpuCeilings::tile_int8_ops_per_s)
      .def_readonly("tile_bf16_ops_per_s", &CpuCeilings::tile_bf16_ops_per_s);
}

CpuCeilings Measure(Device& device, double seconds) {
  auto* const profiling = dynamic_cast<ProfilingDevice*>(&device);
  return MeasureCpuCeilings(profiling != nullptr ? profiling->inner() : device, seconds);
}

}  // namespace

void DefProfile(py::module_& m) {
  using release = py::call_guard<py::gil_scoped_release>;
  DefRecords(m);
  DefCeilings(m);
  py::class_<ProfilingDevice, Device, std::shared_ptr<ProfilingDevice>>(m, "ProfilingDevice")
      .def("profile", &ProfilingDevice::profile, release())
      .def("clear", &ProfilingDevice::Clear, release());
  m.def(
      "make_profiling_device",
      [](std::shared_ptr<Device> device, int64_t max_events) {
        return std::make_shared<ProfilingDevice>(std::move(device), max_events);
      },
      py::arg("device"), py::arg("max_events") = 0);
  m.def("measure_ceilings", &Measure, py::arg("device"), py::arg("seconds"), release());
}

}  // namespace turbomind
