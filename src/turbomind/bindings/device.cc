// Binds the devices.

#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/backend/cuda_loader.h"
#include "turbomind/bindings/bindings.h"
#include "turbomind/bindings/enums.h"
#include "turbomind/core/check.h"
#include "turbomind/engine/memory_plan.h"
#include "turbomind/model/layers_to_tune.h"

namespace py = pybind11;

namespace turbomind {
namespace {

// The devices that need no other options than these, by their names in --device. A CUDA device
// needs more options, so make_cuda_device makes it.
struct DeviceType {
  const char* name;
  std::unique_ptr<Device> (*make)(int num_threads, const CpuOptions& options);
};
constexpr DeviceType kDeviceTypes[] = {
    {"cpu", [](int num_threads,
               const CpuOptions& options) { return MakeCpuDevice(num_threads, "", options); }},
};

std::shared_ptr<Device> MakeDevice(const std::string& name, int num_threads,
                                   const CpuOptions& options) {
  for (const DeviceType& type : kDeviceTypes) {
    if (name == type.name) {
      return type.make(num_threads, options);
    }
  }
  throw InvalidArgument("device_type", "is \"" + name.substr(0, 64) +
                                           "\", which this build does not have. Change --device.");
}

TuningResult Tune(Device& device, const std::vector<std::shared_ptr<Weights>>& models,
                  std::vector<TunedChoice> saved, int max_rows, double max_seconds,
                  std::vector<AttentionToTune> attention) {
  TuningParams params = {.layers = {},
                         .attention = std::move(attention),
                         .saved = std::move(saved),
                         .max_seconds = max_seconds};
  for (const auto& weights : models) {
    std::vector<LayerToTune> layers =
        LayersToTune(*weights, max_rows, device.capability().max_logit_rows);
    std::ranges::move(layers, std::back_inserter(params.layers));
  }
  return device.Tune(params);
}

void DefTuning(py::module_& m) {
  py::class_<AttentionToTune>(m, "AttentionToTune");
  m.def("attention_to_tune", &AttentionToTuneOf, py::arg("model"), py::arg("engine"));
  py::class_<TunedChoice>(m, "TunedChoice")
      .def(py::init([](std::string question, std::string kernel, std::string table_kernel,
                       double us, double table_us) {
             return TunedChoice{std::move(question), std::move(kernel), std::move(table_kernel), us,
                                table_us};
           }),
           py::kw_only(), py::arg("question"), py::arg("kernel"), py::arg("table_kernel"),
           py::arg("us"), py::arg("table_us"))
      .def_readonly("question", &TunedChoice::question)
      .def_readonly("kernel", &TunedChoice::kernel)
      .def_readonly("table_kernel", &TunedChoice::table_kernel)
      .def_readonly("us", &TunedChoice::us)
      .def_readonly("table_us", &TunedChoice::table_us);
  py::class_<TuningResult>(m, "TuningResult")
      .def_readonly("machine", &TuningResult::machine)
      .def_readonly("choices", &TuningResult::choices)
      .def_readonly("num_measured", &TuningResult::num_measured)
      .def_readonly("num_left", &TuningResult::num_left)
      .def_readonly("wrong", &TuningResult::wrong);
}

}  // namespace

void DefDevices(py::module_& m) {
  DefTuning(m);
  using release = py::call_guard<py::gil_scoped_release>;
  py::class_<DeviceCapability>(m, "DeviceCapability")
      .def(py::init<>())
      .def_readonly("generation", &DeviceCapability::generation)
      .def_readonly("default_batch_size", &DeviceCapability::default_batch_size)
      .def_readonly("default_step_tokens", &DeviceCapability::default_step_tokens)
      .def_readonly("reserves_lazily", &DeviceCapability::reserves_lazily)
      .def_readonly("reads_mapped_files", &DeviceCapability::reads_mapped_files)
      .def_readonly("has_fp32", &DeviceCapability::has_fp32)
      .def_readonly("drafts_by_default", &DeviceCapability::drafts_by_default)
      .def_readonly("has_all_formats", &DeviceCapability::has_all_formats)
      .def_readonly("has_fp8_weights", &DeviceCapability::has_fp8_weights);
  m.def("cuda_capability", &CudaCapability, py::arg("compute_capability"));
  py::class_<Device, std::shared_ptr<Device>>(m, "Device")
      .def_property_readonly("name", &Device::name)
      .def_property_readonly("gemm_backend", &Device::gemm_backend)
      .def_property_readonly("gemm_input_dtype", &Device::gemm_input_dtype)
      .def_property_readonly("free_bytes", &Device::free_bytes)
      .def_property_readonly("capability", &Device::capability)
      .def("tune", &Tune, py::arg("models"), py::kw_only(), py::arg("saved"), py::arg("max_rows"),
           py::arg("max_seconds"), py::arg("attention") = std::vector<AttentionToTune>(),
           release());
  m.def(
      "make_cpu_device",
      [](int num_threads, const std::string& isa, bool int8_activations, bool deterministic) {
        return std::shared_ptr<Device>(
            MakeCpuDevice(num_threads, isa,
                          {.int8_activations = int8_activations, .deterministic = deterministic}));
      },
      py::arg("num_threads"), py::arg("isa") = "", py::kw_only(),
      py::arg("int8_activations") = false, py::arg("deterministic") = true);
  m.def(
      "make_device",
      [](const std::string& name, int num_threads, bool int8_activations, bool deterministic) {
        return MakeDevice(name, num_threads,
                          {.int8_activations = int8_activations, .deterministic = deterministic});
      },
      py::arg("name"), py::arg("num_threads"), py::kw_only(), py::arg("int8_activations") = false,
      py::arg("deterministic") = true);
  m.def("available_cpu_isas", &AvailableCpuIsas);

  py::class_<CudaDeviceInfo>(m, "CudaDeviceInfo")
      .def_readonly("name", &CudaDeviceInfo::name)
      .def_readonly("capability", &CudaDeviceInfo::capability)
      .def_readonly("memory_bytes", &CudaDeviceInfo::memory_bytes);
  m.attr("cuda_stamp") = CudaStamp();
  m.def(
      "cuda_devices",
      [] {
        std::string why;
        std::vector<CudaDeviceInfo> gpus = CudaDevices(&why);
        return std::pair(std::move(gpus), std::move(why));
      },
      release());
  m.def(
      "make_cuda_device",
      [](int ordinal, bool deterministic, int num_threads, std::vector<std::string> cublas_lt,
         bool fp8_activations) {
        return MakeCudaDevice(ordinal, {.deterministic = deterministic,
                                        .fp8_activations = fp8_activations,
                                        .num_threads = num_threads,
                                        .cublas_lt = std::move(cublas_lt)});
      },
      py::arg("ordinal"), py::arg("deterministic") = false, py::arg("num_threads") = 1,
      py::arg("cublas_lt") = std::vector<std::string>(), py::arg("fp8_activations") = false,
      release());
  m.def(
      "kv_cache_conversion",
      [](const py::object& format, const DeviceCapability& device) {
        return std::string(KvCacheConversion(ToKvFormat("format", format), device));
      },
      py::arg("format"), py::arg("capability") = DeviceCapability());
}

}  // namespace turbomind
