// Binds the engine.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "turbomind/bindings/bindings.h"

namespace py = pybind11;

namespace turbomind {
namespace {

// Returns memory that loading a model has freed to the system. A C library would keep megabytes of
// it.
void ReturnFreedMemory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

// close() may be called while other threads wait. Their calls return and find the engine stopped.
class PyEngine {
 public:
  PyEngine(const ModelConfig& model, const EngineConfig& config, std::shared_ptr<Weights> weights,
           std::shared_ptr<Device> device, int64_t free_bytes)
      : engine_(std::make_unique<Engine>(model, config, std::move(weights), std::move(device),
                                         free_bytes)) {
    ReturnFreedMemory();
  }
  ~PyEngine() {
    py::gil_scoped_release released;
    engine_.reset();
  }
  PyEngine(const PyEngine&) = delete;
  PyEngine& operator=(const PyEngine&) = delete;

  Engine& operator*() { return *engine_; }

 private:
  std::unique_ptr<Engine> engine_;
};

std::vector<std::vector<py::bytes>> ExportPrefix(PyEngine& self, const std::vector<int32_t>& tokens,
                                                 int64_t first, const py::bytes& salt) {
  std::vector<BlockCopies> copies;
  const CacheSalt cache_salt = ToCacheSalt(salt);
  {
    const py::gil_scoped_release unlocked;
    copies = (*self).ExportPrefix(tokens, first, cache_salt);
  }
  std::vector<std::vector<py::bytes>> blocks;
  std::vector<std::span<char>> places;
  for (const BlockCopies& block : copies) {
    std::vector<py::bytes>& pools = blocks.emplace_back();
    for (const BlockCopy& bytes : block) {
      // Filled below, without the GIL: nobody else has the object yet.
      pools.emplace_back(nullptr, bytes.size());
      places.emplace_back(PyBytes_AS_STRING(pools.back().ptr()), bytes.size());
    }
  }
  {
    const py::gil_scoped_release unlocked;
    auto place = places.begin();
    for (const BlockCopies& block : copies) {
      for (const BlockCopy& bytes : block) {
        std::ranges::copy(bytes, std::as_writable_bytes(*place++).begin());
      }
    }
    copies.clear();
  }
  return blocks;
}

int64_t ImportPrefix(PyEngine& self, const std::vector<int32_t>& tokens, int64_t first,
                     const std::vector<std::vector<py::bytes>>& blocks, const py::bytes& salt) {
  std::vector<BlockViews> copies;
  for (const std::vector<py::bytes>& pools : blocks) {
    BlockViews& block = copies.emplace_back();
    for (const py::bytes& bytes : pools) {
      const auto view = static_cast<std::string_view>(bytes);
      block.emplace_back(reinterpret_cast<const std::byte*>(view.data()), view.size());
    }
  }
  const CacheSalt cache_salt = ToCacheSalt(salt);
  const py::gil_scoped_release unlocked;
  return (*self).ImportPrefix(tokens, first, copies, cache_salt);
}

}  // namespace

void DefEngine(py::module_& m) {
  using release = py::call_guard<py::gil_scoped_release>;
  py::class_<PyEngine>(m, "Engine")
      .def(py::init<const ModelConfig&, const EngineConfig&, std::shared_ptr<Weights>,
                    std::shared_ptr<Device>, int64_t>(),
           py::arg("model"), py::arg("config"), py::arg("weights").none(false),
           py::arg("device").none(false), py::arg("free_bytes"))
      .def(
          "submit",
          [](PyEngine& self, const std::shared_ptr<Request>& request) { (*self).Submit(request); },
          py::arg("request").none(false), release())
      .def(
          "cancel", [](PyEngine& self, uint64_t id) { (*self).Cancel(id); }, py::arg("request_id"),
          release())
      .def(
          "wait_outputs", [](PyEngine& self, int ms) { return (*self).WaitOutputs(ms); },
          py::arg("timeout_ms"), release())
      .def(
          "stats", [](PyEngine& self) { return (*self).stats(); }, release())
      .def(
          "memory_plan", [](PyEngine& self) { return (*self).memory_plan(); }, release())
      .def_property_readonly(
          "healthy", py::cpp_function([](PyEngine& self) { return (*self).healthy(); }, release()))
      .def_property_readonly(
          "failure", py::cpp_function([](PyEngine& self) { return (*self).failure(); }, release()))
      .def(
          "clear_prefix_cache", [](PyEngine& self) { (*self).ClearPrefixCache(); }, release())
      .def(
          "cached_tokens",
          [](PyEngine& self, const std::vector<int32_t>& prompt, const py::bytes& salt) {
            const CacheSalt cache_salt = ToCacheSalt(salt);
            const py::gil_scoped_release unlocked;
            return (*self).CachedTokens(prompt, cache_salt);
          },
          py::arg("prompt"), py::arg("salt"))
      .def("export_prefix", &ExportPrefix, py::arg("tokens"), py::arg("first"), py::arg("salt"))
      .def("import_prefix", &ImportPrefix, py::arg("tokens"), py::arg("first"), py::arg("blocks"),
           py::arg("salt"))
      .def("kv_statistics",
           [](PyEngine& self) {
             const auto collected = [&self] {
               const py::gil_scoped_release unlocked;
               return (*self).kv_statistics();
             };
             return ToDict(collected());
           })
      .def(
          "check_integrity", [](PyEngine& self) { (*self).CheckIntegrity(); }, release())
      .def(
          "close", [](PyEngine& self) { (*self).Stop(); }, release());
  m.def("plan_memory", &PlanMemory, py::arg("model"), py::arg("config"), py::arg("free_bytes"),
        py::arg("capability") = DeviceCapability());
  m.def(
      "require_kernels",
      [](const ModelConfig& model, const EngineConfig& config, const Device& device) {
        model.Validate();
        RequireKernels(model, config, device);
      },
      py::arg("model"), py::arg("config"), py::arg("device"));
}

}  // namespace turbomind
