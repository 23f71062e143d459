// ④ The boundary: everything before and after token ids is Python, everything between is C++.
// Mirrors lmdeploy/_turbomind.pyi. The GIL is released around every call that may take long or
// that needs the engine thread. A thread of the engine's takes it to call token masks, one that
// waits for outputs (or the engine's, as it ends) to destroy them.

#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "turbomind/backend/cpu/packed_layout.h"
#include "turbomind/bindings_codec.h"
#include "turbomind/bindings_device.h"
#include "turbomind/bindings_enum.h"
#include "turbomind/bindings_kv.h"
#include "turbomind/bindings_profile.h"
#include "turbomind/core/check.h"
#include "turbomind/engine/engine.h"

namespace py = pybind11;

namespace turbomind {
namespace {

constexpr EnumName<Activation> kActivations[] = {{Activation::kSilu, "silu"},
                                                 {Activation::kGeluTanh, "gelu_tanh"},
                                                 {Activation::kClampedSwiglu, "clamped_swiglu"}};
constexpr EnumName<RopeKind> kRopeKinds[] = {
    {RopeKind::kNone, "none"},       {RopeKind::kDefault, "default"}, {RopeKind::kLinear, "linear"},
    {RopeKind::kDynamic, "dynamic"}, {RopeKind::kLlama3, "llama3"},   {RopeKind::kYarn, "yarn"}};
constexpr EnumName<LogitsOutput> kLogitsOutputs[] = {{LogitsOutput::kNone, "none"},
                                                     {LogitsOutput::kGeneration, "generation"},
                                                     {LogitsOutput::kAll, "all"}};
constexpr EnumName<FinishReason> kFinishReasons[] = {{FinishReason::kNone, "none"},
                                                     {FinishReason::kStop, "stop"},
                                                     {FinishReason::kLength, "length"},
                                                     {FinishReason::kCancelled, "cancelled"},
                                                     {FinishReason::kError, "error"}};
// --- Weights ----------------------------------------------------------------------------------

bool IsInBlocks(MatrixFormat format) { return IsQuantized(format) || IsMxfp4(format); }

// Without scales that are an array of their own. Formats in blocks have whole ones.
int64_t SourceBytes(MatrixFormat format, int64_t values) {
  const int64_t block_bytes = SourceBlockBytes(format);
  return IsInBlocks(format) ? values / kQuantBlock * block_bytes
                            : values * (block_bytes / kQuantBlock);
}

void RequireShape(const std::string& what, MatrixFormat format, int64_t rows, int64_t cols) {
  constexpr int64_t kMost = int64_t{1} << 30;
  if (rows < 1 || cols < 1 || rows > kMost || cols > kMost) {
    throw InvalidArgument(what + ": got shape [" + std::to_string(rows) + ", " +
                          std::to_string(cols) + "], want positive sizes");
  }
  if (IsInBlocks(format) && cols % 32 != 0) {
    throw InvalidArgument(what + ": got " + std::to_string(cols) + " columns, " +
                          Name(kMatrixFormats, format) + " wants a multiple of 32");
  }
}

void RequireArray(const std::string& what, const py::array& data, char kind, int item_bytes) {
  if (data.dtype().kind() != kind || data.itemsize() != item_bytes) {
    throw InvalidArgument(what + ": got values of dtype " +
                          py::str(data.dtype()).cast<std::string>() + ", want " + kind +
                          std::to_string(item_bytes));
  }
  if ((data.flags() & py::array::c_style) == 0) {
    throw InvalidArgument(what + ": got a strided array, want a C-contiguous one");
  }
}

void RequireBytes(const std::string& what, const py::array& data, int64_t want) {
  if (data.nbytes() != want) {
    throw InvalidArgument(what + ": got " + std::to_string(data.nbytes()) + " bytes, want " +
                          std::to_string(want));
  }
}

// Holds the arrays' memory, from any thread; lets them go with the GIL held.
std::shared_ptr<const void> KeepArrays(const py::array& data,
                                       const std::optional<py::array>& scales) {
  using Arrays = std::pair<py::array, std::optional<py::array>>;
  return {new Arrays(data, scales), [](const Arrays* arrays) {
            if (Py_IsInitialized() == 0) {
              return;  // the interpreter has taken its objects with it
            }
            py::gil_scoped_acquire gil;
            delete arrays;
          }};
}

// A device outlives what packs on it.
struct PyWeightsBuilder {
  std::shared_ptr<Device> device;
  WeightsBuilder builder;

  PyWeightsBuilder(const ModelConfig& config, std::shared_ptr<Device> target, bool exact)
      : device(std::move(target)), builder(config, *device, exact) {}

  // The weights, and the device as long as they are there.
  std::shared_ptr<const Weights> WithDevice(std::shared_ptr<const Weights> weights) const {
    struct Both {
      std::shared_ptr<Device> device;
      std::shared_ptr<const Weights> weights;
    };
    const Weights* address = weights.get();
    return {std::make_shared<Both>(device, std::move(weights)), address};
  }

  void AddMatrix(const std::string& name, const std::string& format_name, const py::array& data,
                 int64_t rows, int64_t cols, const std::optional<py::array>& scales) {
    const MatrixFormat format = Parse("format", kMatrixFormats, format_name);
    const std::string what = "matrix " + name;
    RequireShape(what, format, rows, cols);
    const bool in_blocks = IsInBlocks(format);
    const bool is_f32 = format == MatrixFormat::kF32;
    RequireArray(what, data, is_f32 ? 'f' : 'u', is_f32 ? 4 : in_blocks ? 1 : 2);
    RequireBytes(what + " (" + format_name + ")", data, SourceBytes(format, rows * cols));
    MatrixSource source{format, data.data(), rows, cols};
    const bool is_split = format == MatrixFormat::kMxfp4Split;
    if (is_split != scales.has_value()) {
      throw InvalidArgument(what + ": got " + (is_split ? "no scales, " : "scales, ") +
                            format_name + (is_split ? " has them apart" : " has none apart"));
    }
    if (scales) {
      RequireArray(what + ", scales", *scales, 'u', 1);
      RequireBytes(what + ", scales", *scales, rows * cols / 32);
      source.scales = scales->data();
    }
    if (IsMxfp4(format)) {
      source.owner = KeepArrays(data, scales);
    }
    py::gil_scoped_release released;
    builder.AddMatrix(name, source);
  }

  // `in_place`: the array is read where it lies, and held.
  void AddPacked(const std::string& name, const std::string& format_name, const py::array& data,
                 int64_t rows, int64_t cols, bool in_place) {
    const MatrixFormat format = Parse("format", kMatrixFormats, format_name);
    const std::string what = "packed matrix " + name;
    RequireShape(what, format, rows, cols);
    if (IsMxfp4(format)) {
      throw InvalidArgument(what + ": got " + format_name + ", which is never packed");
    }
    RequireArray(what, data, 'u', 1);
    RequireBytes(what + " (" + format_name + ")", data, PackedBytes(format, rows, cols));
    MatrixSource source{format, data.data(), rows, cols};
    source.packed = true;
    if (in_place) {
      source.owner = KeepArrays(data, std::nullopt);
    }
    py::gil_scoped_release released;
    builder.AddMatrix(name, source);
  }

  // The tiles of every matrix that has some, by name; an array holds the weights.
  py::dict Packed() const {
    py::dict result;
    for (const auto& [name, matrix] : builder.Matrices()) {
      if (matrix->packed_data() == nullptr) {
        continue;
      }
      auto* weights = new std::shared_ptr<const Weights>(WithDevice(builder.weights()));
      const py::capsule owner(
          weights, [](void* p) { delete static_cast<std::shared_ptr<const Weights>*>(p); });
      py::array_t<uint8_t> bytes(matrix->num_bytes(), matrix->packed_data(), owner);
      bytes.attr("setflags")(py::arg("write") = false);
      result[py::str(name)] =
          py::make_tuple(Name(kMatrixFormats, matrix->format), matrix->rows, matrix->cols, bytes);
    }
    return result;
  }

  void AddVector(const std::string& name,
                 const py::array_t<float, py::array::c_style | py::array::forcecast>& data) {
    builder.AddVector(name, data.data(), data.size());
  }
};

// --- Requests and outputs -----------------------------------------------------------------------

// Calls and destroys a Python callable with the GIL held, from any thread.
class PyTokenMask {
 public:
  explicit PyTokenMask(py::object fn)
      : fn_(new py::object(std::move(fn)), [](py::object* object) {
          py::gil_scoped_acquire gil;
          delete object;
        }) {}

  bool operator()(const std::vector<int32_t>& new_tokens, std::vector<uint32_t>& mask) const {
    py::gil_scoped_acquire gil;
    try {
      // The array belongs to Python: a callback may keep it without reaching our memory.
      py::array_t<int32_t> words(static_cast<py::ssize_t>(mask.size()));
      std::memcpy(words.mutable_data(), mask.data(), mask.size() * sizeof(uint32_t));
      const bool go_on = (*fn_)(new_tokens, words).cast<bool>();
      std::memcpy(mask.data(), words.data(), mask.size() * sizeof(uint32_t));
      return go_on;
    } catch (const py::error_already_set& error) {
      // OptionError of checks.py: what the request asked for cannot be.
      if (error.matches(PyExc_ValueError) && py::hasattr(error.value(), "field")) {
        throw InvalidArgument(py::str(error.value()).cast<std::string>());
      }
      throw std::runtime_error(py::str(error.type().attr("__name__")).cast<std::string>() + ": " +
                               py::str(error.value()).cast<std::string>());
    } catch (const py::cast_error&) {
      throw std::runtime_error("want a bool from the callback");
    }
  }

  py::object object() const { return *fn_; }

 private:
  std::shared_ptr<py::object> fn_;
};

py::object GetTokenMask(const Request& request) {
  const auto* mask = request.token_mask.target<PyTokenMask>();
  return mask == nullptr ? py::object(py::none()) : mask->object();
}

void SetTokenMask(Request& request, const py::object& fn) {
  if (fn.is_none()) {
    request.token_mask = nullptr;
    return;
  }
  if (PyCallable_Check(fn.ptr()) == 0) {
    throw InvalidArgument("token_mask: got " + py::str(py::type::of(fn)).cast<std::string>() +
                          ", want a callable or None");
  }
  request.token_mask = PyTokenMask(fn);
}

// [n, vocab] over the output's own memory; the array keeps the output alive.
py::object GetLogits(const py::object& self) {
  auto& output = self.cast<RequestOutput&>();
  if (output.logits.empty()) {
    return py::none();
  }
  const auto rows = static_cast<py::ssize_t>(output.logits_rows);
  const auto cols = static_cast<py::ssize_t>(output.logits.size()) / rows;
  return py::array_t<float>({rows, cols}, output.logits.data(), self);
}

// --- Engine -------------------------------------------------------------------------------------

// What loading a model freed, back to the system: a C library keeps megabytes of it otherwise.
void ReturnFreedMemory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

// close() may come while other threads wait: their calls return, and find the engine stopped.
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

void DefConfigs(py::module_& m) {
  py::class_<RopeConfig> rope(m, "RopeConfig");
  rope.def(py::init<>());
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
      .def_readwrite("freq_factors", &RopeConfig::freq_factors);

  py::class_<MoeConfig>(m, "MoeConfig")
      .def(py::init<>())
      .def_readwrite("num_experts", &MoeConfig::num_experts)
      .def_readwrite("top_k", &MoeConfig::top_k)
      .def_readwrite("intermediate_size", &MoeConfig::intermediate_size)
      .def_readwrite("shared_intermediate_size", &MoeConfig::shared_intermediate_size)
      .def_readwrite("normalise", &MoeConfig::normalise)
      .def_readwrite("layers", &MoeConfig::layers);

  py::class_<ModelConfig> model(m, "ModelConfig");
  model.def(py::init<>())
      .def_readwrite("num_layers", &ModelConfig::num_layers)
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
      .def_readwrite("rope", &ModelConfig::rope)
      .def_readwrite("windows", &ModelConfig::windows)
      .def("validate", &ModelConfig::Validate);
  DefEnum(model, "activation", &ModelConfig::activation, kActivations);
  DefEnum(model, "dtype", &ModelConfig::dtype, kDataTypes);

  py::class_<EngineConfig> config(m, "EngineConfig");
  config.def(py::init<>())
      .def_readwrite("max_batch_size", &EngineConfig::max_batch_size)
      .def_readwrite("session_len", &EngineConfig::session_len)
      .def_readwrite("max_prefill_token_num", &EngineConfig::max_prefill_token_num)
      .def_readwrite("cache_block_seq_len", &EngineConfig::cache_block_seq_len)
      .def_readwrite("cache_max_entry_count", &EngineConfig::cache_max_entry_count)
      .def_readwrite("enable_prefix_caching", &EngineConfig::enable_prefix_caching)
      .def_readwrite("check_integrity", &EngineConfig::check_integrity);
  DefKvOptions(config);
}

void DefWeights(py::module_& m) {
  py::class_<Weights, std::shared_ptr<Weights>>(m, "Weights")
      .def_property_readonly("num_bytes", &Weights::num_bytes);
  py::class_<PyWeightsBuilder>(m, "WeightsBuilder")
      .def(py::init<const ModelConfig&, std::shared_ptr<Device>, bool>(), py::arg("config"),
           py::arg("device").none(false), py::arg("exact"))
      .def("add_matrix", &PyWeightsBuilder::AddMatrix, py::arg("name"), py::arg("format"),
           py::arg("data"), py::arg("rows"), py::arg("cols"), py::arg("scales") = py::none())
      .def("add_packed", &PyWeightsBuilder::AddPacked, py::arg("name"), py::arg("format"),
           py::arg("data"), py::arg("rows"), py::arg("cols"), py::kw_only(), py::arg("in_place"))
      .def("add_vector", &PyWeightsBuilder::AddVector, py::arg("name"), py::arg("data"))
      .def("packed", &PyWeightsBuilder::Packed)
      .def("build", [](PyWeightsBuilder& self) {
        // Python sees nothing that could change them.
        return std::const_pointer_cast<Weights>(self.WithDevice(self.builder.Build()));
      });
}

// A member of Request::sampling as a property of Request.
template <class T>
void DefSampling(py::class_<Request, std::shared_ptr<Request>>& target, const char* name,
                 T SamplingParams::*member) {
  target.def_property(
      name, [member](const Request& self) { return self.sampling.*member; },
      [member](Request& self, T value) { self.sampling.*member = std::move(value); });
}

void DefRequest(py::module_& m) {
  py::class_<Request, std::shared_ptr<Request>> request(m, "Request");
  request.def(py::init<>())
      .def_readwrite("id", &Request::id)
      .def_readwrite("prompt", &Request::prompt)
      .def_readwrite("max_new_tokens", &Request::max_new_tokens)
      .def_readwrite("min_new_tokens", &Request::min_new_tokens)
      .def_readwrite("ignore_eos", &Request::ignore_eos)
      .def_readwrite("eos_ids", &Request::eos_ids)
      .def_readwrite("stop_sequences", &Request::stop_sequences)
      .def_readwrite("bad_sequences", &Request::bad_sequences)
      .def_readwrite("num_prompt_logprobs", &Request::num_prompt_logprobs)
      .def_property("token_mask", &GetTokenMask, &SetTokenMask);
  DefEnum(request, "logits_output", &Request::logits_output, kLogitsOutputs);
  DefSampling(request, "do_sample", &SamplingParams::do_sample);
  DefSampling(request, "temperature", &SamplingParams::temperature);
  DefSampling(request, "top_k", &SamplingParams::top_k);
  DefSampling(request, "top_p", &SamplingParams::top_p);
  DefSampling(request, "min_p", &SamplingParams::min_p);
  DefSampling(request, "repetition_penalty", &SamplingParams::repetition_penalty);
  DefSampling(request, "presence_penalty", &SamplingParams::presence_penalty);
  DefSampling(request, "frequency_penalty", &SamplingParams::frequency_penalty);
  DefSampling(request, "seed", &SamplingParams::seed);
  DefSampling(request, "num_logprobs", &SamplingParams::num_logprobs);
  DefSampling(request, "logit_bias", &SamplingParams::logit_bias);

  py::class_<TokenLogprobs>(m, "TokenLogprobs")
      .def_readonly("chosen", &TokenLogprobs::chosen)
      .def_readonly("top", &TokenLogprobs::top);
  py::class_<RequestOutput>(m, "RequestOutput")
      .def_readonly("request_id", &RequestOutput::request_id)
      .def_readonly("tokens", &RequestOutput::tokens)
      .def_readonly("logprobs", &RequestOutput::logprobs)
      .def_readonly("prompt_logprobs", &RequestOutput::prompt_logprobs)
      .def_property_readonly("logits", &GetLogits)
      .def_property_readonly(
          "finish_reason",
          [](const RequestOutput& self) { return Name(kFinishReasons, self.finish_reason); })
      .def_readonly("stop_tokens", &RequestOutput::stop_tokens)
      .def_readonly("cached_tokens", &RequestOutput::cached_tokens)
      .def_readonly("error", &RequestOutput::error)
      .def_readonly("is_request_fault", &RequestOutput::is_request_fault);
}

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
}

void DefFunctions(py::module_& m) {
  m.def(
      "packed_bytes",
      [](const std::string& format, int64_t rows, int64_t cols) {
        const MatrixFormat parsed = Parse("format", kMatrixFormats, format);
        RequireShape("packed matrix", parsed, rows, cols);
        return PackedBytes(parsed, rows, cols);
      },
      py::arg("format"), py::arg("rows"), py::arg("cols"));
  m.def(
      "plan_memory",
      [](const ModelConfig& model, const EngineConfig& config, int64_t free_bytes, bool is_cuda) {
        return PlanMemory(model, config, free_bytes, !is_cuda);
      },
      py::arg("model"), py::arg("config"), py::arg("free_bytes"), py::kw_only(),
      py::arg("is_cuda") = false);
  m.def(
      "require_kernels",
      [](const ModelConfig& model, const EngineConfig& config, const Device& device) {
        model.Validate();
        RequireKernels(model, config, device);
      },
      py::arg("model"), py::arg("config"), py::arg("device"));
  m.def("kv_cache_mode_names", &KvCacheModeNames);
  m.def(
      "get_kv_cache_mode",
      [](const py::object& policy, int sm, bool strict_arch) {
        const DeviceCapability device{sm != 0, sm};
        if (py::isinstance<py::str>(policy)) {
          return std::string(
              ToString(GetKvCacheMode(policy.cast<std::string>(), device, strict_arch)));
        }
        if (py::isinstance<py::bool_>(policy) || !py::isinstance<py::int_>(policy)) {
          throw InvalidArgument("quant_policy: got " + py::repr(policy).cast<std::string>() +
                                ", want an integer or a format name");
        }
        int overflow = 0;
        const int64_t value = PyLong_AsLongLongAndOverflow(policy.ptr(), &overflow);
        const bool fits = overflow == 0 && value >= INT32_MIN && value <= INT32_MAX;
        if (!fits) {
          throw InvalidArgument("quant_policy: got " + py::str(policy).cast<std::string>() +
                                ", want 0, 4, 8 or 16");
        }
        return std::string(ToString(GetKvCacheMode(static_cast<int>(value), device)));
      },
      py::arg("quant_policy"), py::arg("sm") = 0, py::arg("strict_arch") = false);
}

}  // namespace
}  // namespace turbomind

PYBIND11_MODULE(_turbomind, m) {
  using namespace turbomind;
  m.doc() = "The C++ engine of lmdeploy.";
  m.attr("packed_layout_id") = kPackedLayoutId;
  py::register_exception<InvalidArgument>(m, "InvalidArgument", PyExc_ValueError);
  py::register_exception<InternalError>(m, "InternalError", PyExc_RuntimeError);
  DefConfigs(m);
  DefDevices(m);
  DefWeights(m);
  DefRequest(m);
  DefKv(m);
  DefEngine(m);
  DefFunctions(m);
  DefCodecs(m);
  DefProfile(m);
}
